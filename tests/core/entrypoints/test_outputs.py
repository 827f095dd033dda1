"""Deltas become what callers see."""

import pytest
from deepinfer.api.plan import Delta, RequestMetrics, TokenLogprob
from deepinfer.entrypoints.outputs import Gathering, OutputToken, failed_output


def test_deltas_add_up():
    gathering = Gathering("r", "Hi", (1, 2), 1)
    gathering.add(0, Delta("r", (5,), "a", logprobs=({5: TokenLogprob(-0.5, 1, "a")},)))
    before = gathering.output()
    gathering.add(0, Delta("r", (6,), "b", ({6: TokenLogprob(-1.0, 2, "b")},), finish="length"))
    after = gathering.output()
    assert (before.text, before.finished, after.text, after.finished) == ("a", False, "ab", True)
    assert after.outputs[0].token_ids == [5, 6]
    assert after.outputs[0].cumulative_logprob == -1.5
    assert list(after) == [OutputToken(5, -0.5, "a"), OutputToken(6, -1.0, "b")]
    assert (after.prompt, after.prompt_token_ids) == ("Hi", [1, 2])


def test_tokens_without_logprobs_still_iterate():
    gathering = Gathering("r", None, (1,), 1)
    gathering.add(0, Delta("r", (5, 6), "ab"))
    assert [token.token_id for token in gathering.output()] == [5, 6]


@pytest.mark.parametrize("kind", ["cumulative", "delta"])
@pytest.mark.parametrize("tokens", [0, 2])
def test_logprobs_that_were_asked_for_are_a_list_as_long_as_the_tokens(kind, tokens):
    """However a sample ends, and before its first token too."""
    for end in ("abort", "error", "stop"):
        gathering = Gathering("r", None, (1,), 2, kind, logprobs=True)
        for i in range(tokens):
            gathering.add(0, Delta("r", (5 + i,), "a", ({5 + i: TokenLogprob(-0.5, 1, "a")},)))
        gathering.add(0, Delta("r", finish=end))
        gathering.fail(ValueError("the engine is gone"))  # ends the second
        for out, count in zip(gathering.output().outputs, (tokens, 0), strict=True):
            assert len(out.logprobs) == count == len(out.token_ids)
            assert out.cumulative_logprob == -0.5 * count
            assert len(out.tokens) == count
    plain = Gathering("r", None, (1,), 1)
    plain.add(0, Delta("r", finish="abort"))
    assert plain.output().outputs[0].logprobs is None


def test_delta_kind_gives_each_piece_once():
    gathering = Gathering("r", None, (1,), 2, "delta")
    gathering.add(0, Delta("r", (5,), "a"))
    gathering.add(1, Delta("r", (7,), "x"))
    assert [(o.index, o.text, o.token_ids) for o in gathering.output().outputs] == [
        (0, "a", [5]),
        (1, "x", [7]),
    ]
    gathering.add(0, Delta("r", (6,), "b", finish="stop", stop_reason="b"))
    news = gathering.output()
    assert [(o.index, o.text, o.token_ids, o.stop_reason) for o in news.outputs] == [
        (0, "b", [6], "b")
    ]
    assert gathering.output().outputs == []


def test_metrics_of_samples_are_joined():
    gathering = Gathering("r", None, (1,), 2)
    one = RequestMetrics(1.0, 2.0, 3.0, 4.0, prompt_tokens=1, output_tokens=2)
    two = RequestMetrics(1.0, 2.5, 2.8, 5.0, prompt_tokens=1, output_tokens=3, preemptions=1)
    gathering.add(0, Delta("a", finish="stop", metrics=one))
    gathering.add(1, Delta("b", finish="stop", metrics=two))
    joined = gathering.output().metrics
    assert joined == RequestMetrics(
        1.0, 2.0, 2.8, 5.0, prompt_tokens=1, output_tokens=5, preemptions=1
    )


def test_failures_and_reprs_are_readable():
    error = ValueError("broken")
    failed = failed_output("r", "x" * 100, (), error)
    assert failed.finished and failed.outputs[0].finish_reason == "error"
    assert failed.error is error
    assert "broken" in repr(failed) and "…" in repr(failed) and len(repr(failed)) < 300
    gathering = Gathering("r", None, (), 1)
    gathering.fail(error)
    assert gathering.finished and gathering.output().error is error
