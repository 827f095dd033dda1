"""Masks, drafts, rollback and ends of one matcher, against matching of the whole text."""

from __future__ import annotations

import numpy as np
import pytest
from grammar_rig import (
    PATTERNS,
    RegexOracle,
    ToyVocabulary,
    allowed,
    backend_for,
    random_text,
    spec,
    toy_backend,
)
from hypothesis import given, settings
from hypothesis import strategies as st

SIZE = 17
TOKENS = [b"", *(ToyVocabulary(SIZE).token_bytes(i) for i in range(1, SIZE))]
patterns = st.sampled_from(PATTERNS)
end_sets = st.sampled_from([frozenset(), frozenset({0}), frozenset({0, 3})])


def pair(pattern, ends):
    backend = toy_backend(SIZE)
    return backend.compile(spec("regex", pattern), ends), RegexOracle(pattern, TOKENS, ends)


def rows(count):
    return np.full((count, 1), 0x55555555, np.int32)


@settings(max_examples=30, deadline=None)
@given(pattern=patterns, ends=end_sets, seed=st.integers(0, 10**6))
def test_masks_and_ends_along_a_random_text(pattern, ends, seed):
    matcher, oracle = pair(pattern, ends)
    for token in random_text(RegexOracle(pattern, TOKENS, ends), seed):
        row = rows(1)
        assert matcher.fill(row, []) == 0
        assert allowed(row, SIZE) == np.flatnonzero(oracle.mask()).tolist()
        assert not matcher.done()
        assert matcher.accept([token]) == 1 and oracle.advance(token)
    assert matcher.done() == oracle.done()


@settings(max_examples=100, deadline=None)
@given(pattern=patterns, ends=end_sets, seed=st.integers(0, 10**6), data=st.data())
def test_drafts_get_the_masks_of_their_states_and_leave_none(pattern, ends, seed, data):
    """True drafts, prefixes of truth, garbage, ids outside the vocabulary."""
    text = random_text(RegexOracle(pattern, TOKENS, ends), seed)
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    truth = data.draw(st.integers(0, 4))
    garbage = data.draw(st.lists(st.integers(-1, 40), max_size=3))
    drafts = [*text[start : start + truth], *garbage]
    matcher, oracle = pair(pattern, ends)
    matcher.accept(text[:start])
    for token in text[:start]:
        oracle.advance(token)
    before = rows(1)
    matcher.fill(before, [])
    mask = rows(1 + len(drafts))
    legal = matcher.fill(mask, drafts)
    for place in range(legal + 1):
        if oracle.done():
            assert place == legal  # behind the end nothing is looked at
            break
        assert allowed(mask[place], SIZE) == np.flatnonzero(oracle.mask()).tolist()
        if place < legal:
            assert oracle.advance(drafts[place])
    if legal < len(drafts) and not oracle.done():
        draft = drafts[legal]
        assert not 0 <= draft < SIZE or not oracle.mask()[draft]
    after = rows(1)
    matcher.fill(after, [])
    assert (before == after).all()
    assert matcher.accept(text[start:]) == len(text) - start


@given(pattern=patterns, seed=st.integers(0, 10**6), cut=st.integers(0, 12))
@settings(max_examples=30, deadline=None)
def test_a_fork_moves_on_its_own(pattern, seed, cut):
    ends = frozenset({0})
    text = random_text(RegexOracle(pattern, TOKENS, ends), seed)
    matcher, _ = pair(pattern, ends)
    matcher.accept(text[:cut])
    one, other, twin = rows(1), rows(1), matcher.fork()
    matcher.fill(one, [])
    matcher.accept(text[cut:])
    twin.fill(other, [])
    assert twin.done() == (len(text) <= cut and matcher.done())
    assert (one == other).all()
    assert twin.accept(text[cut:]) == len(text[cut:])


def test_what_lies_behind_the_end_does_not_count():
    matcher, _ = pair("ab", frozenset({0}))
    assert matcher.accept([1, 2, 5, 5]) == 2 and matcher.done()
    matcher, _ = pair("(ab)+", frozenset({0}))
    assert matcher.accept([1, 2, 0, 5]) == 3 and matcher.done()


def test_an_emitted_token_against_the_grammar_is_an_error():
    matcher, _ = pair("ab", frozenset({0}))
    with pytest.raises(RuntimeError, match="Token 5 was emitted against the grammar"):
        matcher.accept([5])


def test_an_empty_text_that_may_end_ends():
    """A grammar of the empty text alone lets nothing but the end follow."""
    matcher = toy_backend(SIZE).compile(spec("ebnf", 'root ::= ""'), frozenset({0}))
    row = rows(1)
    matcher.fill(row, [])
    assert allowed(row, SIZE) == [0]


def test_padding_and_special_tokens_are_never_allowed():
    """Ids that only the logits have, and the special token, under a grammar of anything."""
    backend = backend_for(ToyVocabulary(SIZE), size=70)
    matcher = backend.compile(spec("ebnf", "root ::= [^z]* [z]"), frozenset())
    row = np.full((1, 3), -1, np.int32)
    matcher.fill(row, [])
    middles = {8, 10}  # bytes that go on with a character and cannot begin one
    assert allowed(row, 70) == [i for i in range(1, SIZE) if i not in middles]


def test_batches_answer_what_single_fills_answer():
    from deepinfer.api.grammar import MaskJob

    backend = backend_for(ToyVocabulary(SIZE))
    ends, jobs, alone, first = frozenset({0}), [], [], 0
    for number, pattern in enumerate(PATTERNS * 3):
        matcher = backend.compile(spec("regex", pattern), ends)
        text = random_text(RegexOracle(pattern, TOKENS, ends), number)
        drafts = [*text[:2], number] if number % 2 else []
        jobs.append(MaskJob(matcher, first, drafts))
        alone.append(rows(1 + len(drafts)))
        first += 1 + len(drafts)
    mask = rows(first)
    counts = backend.fill(jobs, mask)
    for job, single, count in zip(jobs, alone, counts, strict=True):
        assert job.grammar.fill(single, job.drafts) == count
        assert (mask[job.first : job.first + 1 + count] == single[: 1 + count]).all()


def test_one_broken_matcher_fails_alone():
    from deepinfer.api.grammar import MaskJob

    backend = backend_for(ToyVocabulary(SIZE))
    good = backend.compile(spec("regex", "ab"), frozenset())
    broken = backend.compile(spec("regex", "ab"), frozenset())
    broken.inner = object()
    mask = rows(2)
    counts = backend.fill([MaskJob(broken, 0), MaskJob(good, 1)], mask)
    assert isinstance(counts[0], AttributeError) and counts[1] == 0
    assert allowed(mask[1], SIZE) == [1, 3]
