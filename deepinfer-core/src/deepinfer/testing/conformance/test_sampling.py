"""The draw: it follows the distribution, is a function of its arguments, and obeys masks.

Seeds are fixed, so these tests give the same verdict each time. The chi-squared bounds are the
99.99 % quantiles: a sound backend passes, a biased draw does not.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer.testing.conformance.kit import Kit, Run

DRAWS = 20_000
Z_9999 = 3.719  # the normal quantile


def quantile(freedom: int) -> float:
    """The 99.99 % quantile of chi-squared (Wilson and Hilferty's approximation)."""
    part = 2 / (9 * freedom)
    return float(freedom * (1 - part + Z_9999 * part**0.5) ** 3)


def chi_squared(ids: Tensor, p: Tensor) -> tuple[float, float]:
    """(statistic, bound); ids of probability 0 must not occur."""
    counts = torch.bincount(ids, minlength=len(p)).double()
    assert not counts[p == 0].any(), "an id of probability 0 was drawn"
    expected = p[p > 0] * len(ids)
    statistic = ((counts[p > 0] - expected).square() / expected).sum()
    return float(statistic), quantile(int((p > 0).sum()) - 1)


def draw(run: Run, logits: Tensor, temperature: float, seeds: Tensor, positions: Tensor) -> Tensor:
    """One id for each seed and position, from one row of logits."""
    rows = logits.expand(len(seeds), -1).contiguous()
    columns = run.put(torch.full((len(seeds),), temperature)), run.put(seeds), run.put(positions)
    with torch.inference_mode():
        ids: Tensor = run.ops.gumbel_argmax(run.place(rows), *columns)
    return ids.cpu()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_draws_follow_the_distribution(kit: Kit, temperature: float, along: str) -> None:
    """Over seeds at one position, and over positions with one seed."""
    run = kit.run(kit.dtypes[0])
    logits = run.draw.wide(23, scale=1.5)
    logits[[3, 11]] = -torch.inf
    count = torch.arange(DRAWS)
    fixed = torch.full((DRAWS,), 12345)
    seeds, positions = (count, fixed) if along == "seeds" else (fixed, count)
    ids = draw(run, logits, temperature, seeds, positions)
    statistic, bound = chi_squared(ids, (logits.double() / temperature).softmax(0))
    assert statistic < bound, f"chi-squared {statistic:.1f}, at most {bound:.1f}"


def test_filtered_draws_follow_the_distribution(kit: Kit) -> None:
    """top-k 9, then top-p 0.8 of those, then min-p: the renormalised rest, nothing else."""
    run = kit.run(kit.dtypes[0])
    logits = run.draw.wide(1, 23, scale=1.5)
    limits = [torch.tensor([v]) for v in (1.0, 9, 0.8, 0.1)]
    with torch.inference_mode():
        kept = run.ops.filter_top(run.place(logits), *map(run.put, limits)).cpu()[0]
    p = logits[0].double().softmax(0)
    best = p.sort(descending=True).indices[:9]
    share = p[best] / p[best].sum()
    stay = best[(share.cumsum(0) - share < 0.8) & (share >= 0.1 * share[0])]
    want = torch.zeros(23, dtype=torch.float64)
    want[stay] = p[stay] / p[stay].sum()
    ids = draw(run, kept, 1.0, torch.arange(DRAWS), torch.full((DRAWS,), 7))
    statistic, bound = chi_squared(ids, want)
    assert statistic < bound, f"chi-squared {statistic:.1f}, at most {bound:.1f}"


def test_draws_of_neighbours_are_independent(kit: Kit) -> None:
    """Pairs (position, position + 1) fill the square evenly."""
    run = kit.run(kit.dtypes[0])
    logits = torch.zeros(5)
    ids = draw(run, logits, 1.0, torch.full((DRAWS,), 99), torch.arange(DRAWS))
    pairs = ids[0::2] * 5 + ids[1::2]
    statistic, bound = chi_squared(pairs, torch.full((25,), 1 / 25, dtype=torch.float64))
    assert statistic < bound, f"chi-squared {statistic:.1f}, at most {bound:.1f}"


def test_greedy_is_the_argmax(kit: Kit) -> None:
    """T = 0 ignores seed and position."""
    run = kit.run(kit.dtypes[0])
    logits = run.draw.grid(70)
    ids = draw(run, logits, 0.0, torch.arange(70), torch.arange(70))
    assert set(ids.tolist()) == {int(logits.argmax())}


def test_greedy_takes_the_lowest_of_equals(kit: Kit) -> None:
    """For every first place of a tie, in a vocabulary that no vector width divides."""
    run = kit.run(kit.dtypes[0])
    logits = torch.zeros(70, 70)
    for first in range(70):
        logits[first, first:] = 1.0
    columns = run.put(torch.zeros(70)), run.put(torch.arange(70)), run.put(torch.arange(70))
    with torch.inference_mode():
        ids = run.ops.gumbel_argmax(run.place(logits), *columns).cpu()
    assert ids.tolist() == list(range(70))


def test_a_draw_is_a_function(kit: Kit) -> None:
    """The same seed and position draw the same id, whatever was drawn in between."""
    run = kit.run(kit.dtypes[0])
    logits = run.draw.wide(70)
    seeds, positions = torch.arange(40), torch.arange(40) % 7
    first = draw(run, logits, 1.0, seeds, positions)
    torch.rand(17)
    draw(run, logits, 1.0, seeds + 1, positions)
    assert torch.equal(first, draw(run, logits, 1.0, seeds, positions))
    assert len(set(first.tolist())) > 5


def test_noise_does_not_depend_on_the_logits(kit: Kit) -> None:
    """A mask moves a draw only if it forbids what was drawn: what speculation rests on."""
    run = kit.run(kit.dtypes[0])
    logits = run.draw.wide(70)
    seeds, positions = torch.arange(200), torch.arange(200)
    free = draw(run, logits, 1.0, seeds, positions)
    masked = logits.clone()
    masked[::3] = -torch.inf
    held = draw(run, masked, 1.0, seeds, positions)
    kept = free % 3 != 0
    assert torch.equal(free[kept], held[kept]) and not (held % 3 == 0).any()


@pytest.mark.parametrize("vocab", [31, 32, 33, 70, 1000])
def test_masks_allow_exactly_their_bits(kit: Kit, vocab: int) -> None:
    """For each id a mask of its bit alone, with padding bits set behind the vocabulary."""
    run = kit.run(kit.dtypes[0])
    words = -(-vocab // 32) + 1
    ids = torch.arange(vocab)
    mask = torch.zeros(vocab, words, dtype=torch.int64)
    mask[ids, ids // 32] = 1 << (ids % 32)
    mask[:, -1] = (1 << 32) - 1
    tail = vocab % 32
    if tail:
        mask[:, vocab // 32] |= ((1 << 32) - 1) ^ ((1 << tail) - 1)
    signed = torch.where(mask >= 1 << 31, mask - (1 << 32), mask).int()
    logits = run.place(torch.zeros(vocab, vocab))
    with torch.inference_mode():
        out = run.ops.apply_bitmask(logits, run.put(signed), run.put(ids)).cpu()
    assert torch.equal(out == 0, torch.eye(vocab, dtype=torch.bool))
    assert torch.equal(out.isneginf(), ~torch.eye(vocab, dtype=torch.bool))


def test_a_short_mask_forbids_the_padding(kit: Kit) -> None:
    """Ids behind the last word, as in a vocabulary padded by the model, are never drawn."""
    run = kit.run(kit.dtypes[0])
    logits = run.place(torch.zeros(3, 100))
    mask = torch.full((1, 2), -1, dtype=torch.int32)
    with torch.inference_mode():
        out = run.ops.apply_bitmask(logits, run.put(mask), run.put(torch.tensor([1]))).cpu()
    assert out[1, 64:].isneginf().all() and not out[1, :64].any()
    assert not out[0].any() and not out[2].any()
