"""Sampling references against oracles in plain Python."""

import math

import numpy as np
import pytest
import torch
from deepinfer.ops.reference import sample
from deepinfer.sampling.philox import gumbel
from hypothesis import given, settings
from hypothesis import strategies as st

INF, NAN = math.inf, math.nan
few = settings(deadline=None, max_examples=80)
# Coarse values, so that ties are common.
values = st.sampled_from([-INF, -3.0, -1.5, -0.0, 0.0, 0.25, 1.0, 1.5, 4.0])
rows = st.lists(values, min_size=1, max_size=12)


def f32(x):
    return torch.tensor(x, dtype=torch.float32)


def i64(x):
    return torch.tensor(x, dtype=torch.int64)


def order(z):
    return sorted(range(len(z)), key=lambda v: (-z[v], v))


def filtered(z, temperature, top_k, top_p, min_p):
    """The kept ids, by definition."""
    if temperature == 0:
        return set(range(len(z)))
    ids = order(z)
    scaled = [float(np.float32(z[v]) / np.float32(temperature)) for v in ids]
    weight = [1.0 if s == scaled[0] else math.exp(s - scaled[0]) for s in scaled]
    n = len(ids) if top_k <= 0 else min(top_k, len(ids))
    ids, weight = ids[:n], weight[:n]
    if top_p < 1:
        total, below = sum(weight), 0.0
        kept = 0
        while kept < n and below < float(np.float32(top_p)) * total:
            below += weight[kept]
            kept += 1
        ids, weight = ids[: max(kept, 1)], weight[: max(kept, 1)]
    return {v for v, w in zip(ids, weight, strict=True) if w >= float(np.float32(min_p))}


@few
@given(
    z=st.lists(st.sampled_from([-INF, -3.0, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=12),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 0, 1, 2, 3, 50]),
    top_p=st.sampled_from([0.01, 0.31, 0.61, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.5, 1.0]),
)
def test_filter_top(z, temperature, top_k, top_p, min_p):
    if max(z) == -INF:
        return  # nothing to filter
    logits = f32([z])
    out = sample.filter_top(logits, f32([temperature]), i64([top_k]), f32([top_p]), f32([min_p]))
    want = filtered(z, temperature, top_k, top_p, min_p)
    assert torch.equal(logits, f32([z])), "the argument is not changed"
    for v in range(len(z)):
        assert out[0, v].item() == (z[v] if v in want else -INF)


@pytest.mark.parametrize("vocab", [255, 256, 257, 1000])
def test_filter_top_beyond_the_candidates(vocab):
    """Rows whose survivors outnumber the short list are ordered whole."""
    gen = torch.Generator().manual_seed(vocab)
    z = (torch.randn(6, vocab, generator=gen) * 2).round(decimals=1)
    temperature, top_k = f32([1.0, 30.0, 30.0, 1.0, 0.7, 0.0]), i64([0, 0, 300, 256, 5, 3])
    top_p, min_p = f32([0.99, 0.97, 0.9, 1.0, 0.8, 0.1]), f32([0, 0, 0, 0, 0.1, 0.1])
    out = sample.filter_top(z, temperature, top_k, top_p, min_p)
    for r in range(6):
        args = (z[r].tolist(), *(float(x[r]) for x in (temperature, top_k, top_p, min_p)))
        want = filtered(args[0], args[1], int(args[2]), *args[3:])
        assert set(torch.nonzero(out[r] > -INF)[:, 0].tolist()) == want, r


def test_top_k_ties_keep_the_lower_ids():
    z = f32([[1.0, 2.0, 2.0, 2.0, 0.0]])
    out = sample.filter_top(z, f32([1.0]), i64([2]), f32([1.0]), f32([0.0]))
    assert out.tolist() == [[-INF, 2.0, 2.0, -INF, -INF]]


def test_top_p_keeps_one_and_min_p_the_best():
    z = f32([[0.0, 3.0, 1.0]])
    for top_p, min_p in ((1e-9, 0.0), (1.0, 1.0)):
        out = sample.filter_top(z, f32([1.0]), i64([0]), f32([top_p]), f32([min_p]))
        assert out.tolist() == [[-INF, 3.0, -INF]]


@few
@given(z=rows, shift=st.integers(0, 3))
def test_greedy_takes_the_lowest_of_the_best(z, shift):
    z = [NAN if i % 4 == shift and shift else v for i, v in enumerate(z)]
    got = sample.gumbel_argmax(f32([z]), f32([0.0]), i64([1]), i64([1])).item()
    clean = [-INF if math.isnan(v) else v for v in z]
    assert got == clean.index(max(clean))


@few
@given(z=rows, seed=st.integers(-(1 << 63), (1 << 63) - 1), position=st.integers(0, 1 << 34))
def test_gumbel_argmax(z, seed, position):
    noise = gumbel(i64([seed]), i64([position]), len(z))[0]
    score = (f32(z) / f32(0.7) + noise).tolist()
    got = sample.gumbel_argmax(f32([z]), f32([0.7]), i64([seed]), i64([position])).item()
    assert got == score.index(max(score))


def test_cold_and_hot_rows_side_by_side():
    gen = torch.Generator().manual_seed(3)
    z = torch.randn(6, 50, generator=gen)
    t, seed, position = f32([0, 1, 0, 2, 0.5, 0]), i64(range(6)), i64(range(6))
    together = sample.gumbel_argmax(z, t, seed, position)
    for r in range(6):
        part = slice(r, r + 1)
        assert sample.gumbel_argmax(z[part], t[part], seed[part], position[part]) == together[r]


def test_nothing_above_minus_infinity_gives_zero():
    z = torch.full((2, 7), -INF)
    z[1] = NAN
    got = sample.gumbel_argmax(z, f32([0.0, 1.0]), i64([1, 1]), i64([1, 1]))
    assert got.tolist() == [0, 0]


@few
@given(z=rows.filter(lambda z: max(z) > -INF), k=st.integers(0, 12), data=st.data())
def test_logprobs(z, k, data):
    k = min(k, len(z))
    chosen = data.draw(st.integers(0, len(z) - 1))
    ids, top, value, rank = sample.logprobs(f32([z]), k, i64([chosen]))
    norm = math.log(sum(math.exp(v - max(z)) for v in z)) + max(z)
    want = order(z)
    assert ids.tolist() == [want[:k]] and ids.dtype == torch.int32
    assert top[0].tolist() == pytest.approx([z[v] - norm for v in want[:k]], abs=1e-5)
    assert value.item() == pytest.approx(z[chosen] - norm, abs=1e-5)
    assert rank.tolist() == [want.index(chosen) + 1]


@few
@given(
    z=st.lists(st.sampled_from([-2.0, -0.5, 0.0, 1.0, 3.0]), min_size=4, max_size=4),
    prompt=st.lists(st.integers(0, 3), max_size=4),
    output=st.lists(st.integers(0, 3), max_size=5),
    presence=st.sampled_from([-0.5, 0.0, 0.75]),
    frequency=st.sampled_from([-0.25, 0.0, 1.5]),
    repetition=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_penalties(z, prompt, output, presence, frequency, repetition):
    text = [*prompt, *output, -1, -1]
    want = []
    for v, x in enumerate(z):
        if v in prompt or v in output:
            x = x / repetition if x > 0 else x * repetition
        count = output.count(v)
        want.append(x - frequency * count - presence * (count > 0))
    logits = f32([z])
    got = sample.penalties(
        logits, i64([text]), i64([len(prompt)]), f32([presence]), f32([frequency]),
        f32([repetition]),
    )  # fmt: skip
    assert got is logits and got.tolist() == [want]


def test_neutral_penalties_change_no_bit():
    z = f32([[0.0, -0.0, INF, -INF, 1e-42, -3.3]])
    before = z.view(torch.int32).clone()
    sample.penalties(z, i64([[0, 1, 2, 3, 4, 5]]), i64([3]), f32([0]), f32([0]), f32([1]))
    assert torch.equal(z.view(torch.int32), before)


def test_logit_bias_adds_and_ignores_row_minus_one():
    z = torch.zeros(2, 4)
    sample.logit_bias(z, i64([0, 1, 1, -1]), i64([3, 1, 1, 0]), f32([2.0, 1.0, 0.5, -INF]))
    assert z.tolist() == [[0, 0, 0, 2.0], [0, 1.5, 0, 0]]


@few
@given(vocab=st.integers(1, 70), words=st.integers(1, 3), seed=st.integers(0, 99))
def test_apply_bitmask(vocab, words, seed):
    rng = np.random.default_rng(seed)
    mask = rng.integers(-(1 << 31), 1 << 31, (3, words)).astype(np.int32)
    index = [1, -1, 3]
    z = torch.arange(4 * vocab, dtype=torch.float32).view(4, vocab)
    got = sample.apply_bitmask(z.clone(), torch.from_numpy(mask), i64(index))
    for r in range(4):
        for v in range(vocab):
            k = index.index(r) if r in index else None
            word = None if k is None or v // 32 >= words else int(mask[k, v // 32])
            free = k is None or (word is not None and word >> (v % 32) & 1)
            assert got[r, v].item() == (z[r, v].item() if free else -INF)


@few
@given(st.data())
def test_accept_prefix(data):
    gamma, n = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 4))
    ids = st.integers(0, 1)
    sampled = [data.draw(st.lists(ids, min_size=gamma + 1, max_size=gamma + 1)) for _ in range(n)]
    drafts = [data.draw(st.lists(ids, min_size=gamma, max_size=gamma)) for _ in range(n)]
    lengths = [data.draw(st.integers(0, gamma)) for _ in range(n)]
    want = []
    for s, d, length in zip(sampled, drafts, lengths, strict=True):
        a = 0
        while a < length and s[a] == d[a]:
            a += 1
        want.append(1 + a)
    got = sample.accept_prefix(i64(sampled), i64(drafts).view(n, gamma), i64(lengths))
    assert got.tolist() == want


def test_no_rows_at_all():
    z, none, floats = torch.empty(0, 5), i64([]), f32([])
    assert sample.gumbel_argmax(z, floats, none, none).shape == (0,)
    assert sample.filter_top(z, floats, none, floats, floats).shape == (0, 5)
    assert [t.shape[0] for t in sample.logprobs(z, 2, none)] == [0] * 4
    assert sample.logit_bias(z, none, none, floats).shape == (0, 5)
    mask = torch.empty((0, 1), dtype=torch.int32)
    assert sample.apply_bitmask(z, mask, none).shape == (0, 5)
