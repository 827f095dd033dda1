"""The sampler's distribution, and acceptance by equality."""

import torch
from deepinfer.api.sampler import SampleRows
from deepinfer.ops.table import OpSet
from deepinfer.sampling.sampler import GumbelSampler
from deepinfer.sampling.verify import EqualityVerifier, line_grid

CHI2_49_999 = 85.4  # 0.999 quantile of chi-squared with 49 degrees of freedom


def sample_rows(m, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=None, position=None):
    zeros = torch.zeros(m, dtype=torch.int64)
    return SampleRows(
        slot=zeros,
        position=zeros + 7 if position is None else position,
        seed=torch.arange(m) if seed is None else seed,
        temperature=torch.full((m,), temperature),
        top_k=zeros + top_k,
        top_p=torch.full((m,), top_p),
        min_p=torch.full((m,), min_p),
        filtered=top_k > 0 or top_p < 1 or min_p > 0,
        greedy=temperature == 0,
    )


def chi_squared(ids, p):
    counts = torch.bincount(ids, minlength=len(p)).double()
    want = p.double() * len(ids)
    assert counts[want == 0].sum() == 0, "a removed id was drawn"
    live = want > 0
    return float(((counts - want)[live] ** 2 / want[live]).sum()), int(live.sum()) - 1


def logits(seed, vocab=50):
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 1.2


def test_draws_over_seeds_follow_the_distribution():
    sampler, z, m = GumbelSampler(OpSet({}, "test")), logits(0), 40_000
    rows = sample_rows(m, temperature=0.8)
    p = sampler.probs(z[None], sample_rows(1, temperature=0.8))[0]
    assert torch.allclose(p, torch.softmax(z / 0.8, 0))
    stat, freedom = chi_squared(sampler(z.expand(m, -1), rows), p)
    assert freedom == 49 and stat < CHI2_49_999


def test_draws_over_positions_follow_the_distribution():
    sampler, z, m = GumbelSampler(OpSet({}, "test")), logits(1), 40_000
    rows = sample_rows(m, seed=torch.full((m,), -12345), position=torch.arange(m) + 3)
    stat, _ = chi_squared(sampler(z.expand(m, -1), rows), torch.softmax(z, 0))
    assert stat < CHI2_49_999


def test_filtered_draws_follow_the_filtered_distribution():
    sampler, z, m = GumbelSampler(OpSet({}, "test")), logits(2), 20_000
    how = dict(temperature=1.3, top_k=30, top_p=0.9, min_p=0.02)
    p = sampler.probs(z[None], sample_rows(1, **how))[0]
    assert 3 < int((p > 0).sum()) < 30 and abs(float(p.sum()) - 1) < 1e-6
    stat, freedom = chi_squared(sampler(z.expand(m, -1), sample_rows(m, **how)), p)
    assert stat < freedom + 6 * (2 * freedom) ** 0.5


def test_greedy_probs_are_one_hot():
    sampler = GumbelSampler(OpSet({}, "test"))
    z = torch.tensor([[1.0, 3.0, 3.0], [float("nan"), -1.0, -2.0]])
    assert sampler.probs(z, sample_rows(2, temperature=0.0)).tolist() == [[0, 1, 0], [0, 1, 0]]


def test_line_grid():
    grid = line_grid(torch.tensor([2, 0, 1]), 4)
    assert grid.tolist() == [[0, 1, 2, -1], [3, -1, -1, -1], [4, 5, -1, -1]]


class Script:
    """A sampler that draws what it is told."""

    def __init__(self, ids):
        self.ids = torch.tensor(ids)

    def __call__(self, logits, rows):
        return self.ids


def test_drafts_stand_while_they_are_what_is_drawn():
    ops = OpSet({}, "test")
    # Row 0 runs two drafts, row 1 none, row 2 one; the last line is padding.
    verifier = EqualityVerifier(ops, Script([5, 6, 7, 8, 9, 1, 0]))
    drafts = torch.tensor([[5, 6], [8, 8], [4, 1]])
    tokens, counts = verifier.verify(
        torch.zeros(7, 10), sample_rows(7), drafts, torch.tensor([2, 0, 1])
    )
    assert counts.tolist() == [3, 1, 1]
    assert tokens[0].tolist() == [5, 6, 7] and tokens[1, 0] == 8 and tokens[2, 0] == 9


def test_without_drafts_every_row_emits_one():
    verifier = EqualityVerifier(OpSet({}, "test"), Script([4, 2]))
    none = torch.empty((2, 0), dtype=torch.int64)
    tokens, counts = verifier.verify(
        torch.zeros(2, 5), sample_rows(2), none, torch.zeros(2, dtype=torch.int64)
    )
    assert tokens.tolist() == [[4], [2]] and counts.tolist() == [1, 1]
