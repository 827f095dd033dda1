"""Stops, hold-back, text, logprobs."""

import time

import numpy as np
import pytest
from deepinfer.api.plan import Fault, LogprobRows, StepOutput
from deepinfer.engine.output import OutputProcessor, row_fault
from deepinfer.engine.request import RequestState
from deepinfer.engine.stops import StopStrings
from hypothesis import given, settings
from hypothesis import strategies as st

LETTERS = st.text("ab ", max_size=12)
STOPS = st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=3)


def search(text, stops, first_armed=0):
    """(end, stop) of the first stop string that ends behind ``first_armed``, by brute force."""
    for end in range(first_armed + 1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end, stop
    return None


@given(st.lists(LETTERS, max_size=8), STOPS, st.booleans(), st.integers(0, 4))
@settings(max_examples=400, deadline=None)
def test_stops_are_found_whatever_the_pieces(pieces, stops, include, unarmed):
    matcher, shown, hit = StopStrings(stops, include), "", None
    for k, piece in enumerate(pieces):
        held = matcher.push(piece, armed=k >= unarmed)
        shown += held.text
        if held.stop is not None:
            hit = held.stop
            break
    else:
        shown += matcher.flush()
    text = "".join(pieces)
    expected = search(text, stops, len("".join(pieces[:unarmed])))
    if expected is None:
        assert hit is None and shown == text
    else:
        end, stop = expected
        assert hit == stop
        assert shown == (text[:end] if include else text[: end - len(stop)])


@given(st.lists(LETTERS, max_size=8), STOPS)
@settings(max_examples=200, deadline=None)
def test_what_is_held_is_as_short_as_can_be(pieces, stops):
    matcher, shown = StopStrings(stops, False), ""
    for k, piece in enumerate(pieces):
        held = matcher.push(piece)
        if held.stop is not None:
            return
        shown += held.text
        tail = "".join(pieces[: k + 1])[len(shown) :]
        assert not tail or any(s.startswith(tail) and s != tail for s in stops)


def state(lab, **options):
    request = lab.request(**options)
    processor = OutputProcessor(lab.tokenizer)
    return processor, RequestState(request, processor.state(request))


def step(processor, r, *ids, **more):
    """Push one row's ids; returns the delta."""
    tokens = np.array([ids], np.int32)
    out = StepOutput(1, tokens, np.array([len(ids)], np.int32), **more)
    deltas, _ = processor.take([r], out, 1.0)
    return deltas[0]


# ids of the toy tokenizer: 1 a, 2 b, 3 ab, 4 ba, 5 " c", 7 and 8 make é, 11 cab, 12 abc


def test_a_stop_string_across_tokens_cuts_text_and_ids(lab):
    processor, r = state(lab, stop=["bab"], max_tokens=9)
    first = step(processor, r, 2)
    assert (first.token_ids, first.text, first.finish) == ((2,), "", None)
    last = step(processor, r, 1, 2, 1, 1)
    assert (last.token_ids, last.text, last.finish, last.stop_reason) == ((1, 2), "", "stop", "bab")
    assert r.tokens[5:] == [2, 1, 2]


def test_a_stop_string_can_be_included(lab):
    processor, r = state(lab, stop="bc", include_stop_str_in_output=True, max_tokens=9)
    delta = step(processor, r, 12, 1)
    assert (delta.token_ids, delta.text, delta.stop_reason) == ((12,), "abc", "bc")


def test_of_two_stops_the_one_that_ends_first_counts():
    assert StopStrings(["bcd", "abc"], False).push("xabcd") == ("x", "abc")
    assert StopStrings(["c", "abc"], False).push("xabc") == ("x", "abc")


def test_a_stop_id_is_kept_and_its_text_is_not(lab):
    processor, r = state(lab, stop_token_ids=[3], max_tokens=9)
    delta = step(processor, r, 1, 3, 2)
    assert (delta.token_ids, delta.text, delta.stop_reason) == ((1, 3), "a", 3)
    processor, r = state(lab, stop_token_ids=[3], include_stop_str_in_output=True, max_tokens=9)
    assert step(processor, r, 1, 3, 2).text == "aab"


def test_eos_ends_unless_ignored(lab):
    processor, r = state(lab, ignore_eos=False, max_tokens=9)
    delta = step(processor, r, 0)
    assert (delta.finish, delta.stop_reason, delta.token_ids) == ("stop", None, (0,))
    processor, r = state(lab, max_tokens=9)
    assert step(processor, r, 0).finish is None


def test_a_stop_beats_the_limit(lab):
    processor, r = state(lab, stop_token_ids=[3], max_tokens=2)
    assert step(processor, r, 1, 3).finish == "stop"
    processor, r = state(lab, stop=["ab"], max_tokens=2)
    delta = step(processor, r, 1, 2)
    assert (delta.finish, delta.stop_reason, delta.text) == ("stop", "ab", "")
    processor, r = state(lab, max_tokens=2)
    assert step(processor, r, 1, 2).finish == "length"


def test_nothing_stops_before_min_tokens(lab):
    processor, r = state(lab, stop=["b"], stop_token_ids=[3], min_tokens=3, max_tokens=9)
    assert step(processor, r, 2, 3, 2).finish is None
    delta = step(processor, r, 2)
    assert (delta.finish, delta.stop_reason) == ("stop", "b")


def test_text_is_whole_characters(lab):
    processor, r = state(lab, max_tokens=4)
    assert step(processor, r, 7).text == ""
    assert step(processor, r, 8).text == "é"
    assert step(processor, r, 7).text == ""
    assert step(processor, r, 1).text == "\ufffda"


def test_what_is_held_comes_with_the_end(lab):
    processor, r = state(lab, stop=["abc"], max_tokens=2)
    assert step(processor, r, 3).text == ""
    last = step(processor, r, 7)
    assert (last.text, last.finish) == ("ab\ufffd", "length")


def test_no_text_without_detokenize(lab):
    processor, r = state(lab, detokenize=False, max_tokens=2)
    assert step(processor, r, 1).text == ""


def rows(index, ids, values, ranks):
    return LogprobRows(
        np.array(index, np.int32),
        np.array(ids, np.int32),
        np.array(values, np.float32),
        np.array(ranks, np.int32),
    )


def test_logprobs_name_the_token_itself_first(lab):
    processor, r = state(lab, logprobs=2, max_tokens=9)
    found = rows([0, 1], [[3, 1, 2], [1, 1, -1]], [[-4, -1, -2], [-0.5, -0.5, 0]], [7, 1])
    delta = step(processor, r, 3, 1, logprobs=found)
    first, second = delta.logprobs
    assert list(first) == [3, 1, 2]
    assert (first[3].logprob, first[3].rank, first[3].decoded_token) == (-4.0, 7, "ab")
    assert (first[2].rank, second[1].rank, len(second)) == (2, 1, 1)


def test_logprobs_end_with_the_ids(lab):
    processor, r = state(lab, logprobs=0, stop_token_ids=[3], max_tokens=9)
    found = rows([0, 1, 2], [[3], [1], [1]], [[-1], [-1], [-1]], [1, 1, 1])
    delta = step(processor, r, 3, 1, 1, logprobs=found)
    assert len(delta.logprobs) == len(delta.token_ids) == 1


def test_prompt_logprobs_are_collected_over_chunks(lab):
    processor, r = state(lab, prompt_logprobs=0, max_tokens=9)
    empty = np.zeros((1, 1), np.int32), np.zeros(1, np.int32)
    early = rows([1, 2], [[2], [3]], [[-1], [-2]], [1, 2])
    late = rows([3, 4], [[4], [5]], [[-3], [-4]], [3, 4])
    assert processor.take([r], StepOutput(1, *empty, prompt_logprobs=((0, early),)), 0.0)[0] == []
    delta = step(processor, r, 1, prompt_logprobs=((0, late),))
    assert delta.prompt_logprobs[0] is None
    assert [list(table) for table in delta.prompt_logprobs[1:]] == [[2], [3], [4], [5]]
    assert step(processor, r, 1).prompt_logprobs is None


def test_faults_name_position_and_remedy(lab):
    _, r = state(lab, name="mine")
    assert "mine: at position 5" in str(row_fault(r, Fault.NAN))
    assert "checkpoint" in row_fault(r, Fault.NAN).next_step
    assert "allowed_token_ids" in row_fault(r, Fault.NOTHING_ALLOWED).next_step


@pytest.mark.parametrize("options", [{}, {"stop": ["abc", "bb"]}])
def test_a_token_costs_the_same_late_as_early(lab, options):
    length = 6000
    request = lab.request(max_tokens=length, **options)
    processor = OutputProcessor(lab.tokenizer)
    r = RequestState(request, processor.state(request))

    def spend(count):
        begin = time.thread_time()
        for _ in range(count):
            step(processor, r, 5)
        return time.thread_time() - begin

    early = min(spend(500) for _ in range(4))
    spend(1500)
    late = min(spend(500) for _ in range(4))
    assert late < 3 * early


def texts(lab, engine, name):
    """Run to the end: the pieces of text of one request, and its last delta."""
    pieces, last = [], None
    while engine.has_work():
        for delta in engine.step():
            if delta.request_id == name:
                pieces.append(delta.text)
                last = delta
    return pieces, last


@pytest.mark.parametrize("options", [{}, {"ignore_eos": False, "seed": 3}, {"min_tokens": 9}])
def test_a_text_that_nobody_streams_comes_with_the_end(lab, options):
    found = []
    for stream in (True, False):
        engine = lab.engine()
        engine.add(lab.request("r", max_tokens=50, stream=stream, **options))
        found.append(texts(lab, engine, "r"))
    (streamed, one), (whole, other) = found
    assert "".join(streamed) == "".join(whole) != "" and sum(map(bool, streamed)) > 1
    assert not any(whole[:-1]) and one.finish == other.finish
    assert one.stop_reason == other.stop_reason


def test_stop_strings_are_looked_for_all_the_same(lab):
    found = []
    for stream in (True, False):
        engine = lab.engine()
        engine.add(lab.request("r", max_tokens=50, stop=["a"], stream=stream))
        found.append(texts(lab, engine, "r"))
    assert found[0][0] == found[1][0] and found[0][1].finish == found[1][1].finish == "stop"


def test_what_ends_early_has_its_text_so_far(lab):
    """Aborted or failed, the caller gets what a stream would have had."""
    found = []
    for stream in (True, False):
        engine = lab.engine()
        engine.add(lab.request("r", max_tokens=50, stream=stream))
        pieces = [d.text for _ in range(20) for d in engine.step()]
        engine.abort("r")
        rest, last = texts(lab, engine, "r")
        assert last.finish == "abort"
        found.append("".join(pieces + rest))
    assert found[0] == found[1] != ""
