"""The worked example of the specification (4.6), and what holds of every schedule."""

import numpy as np
import pytest
import torch
from deepinfer_speculative.allocation import SlotSurvival
from deepinfer_speculative.allocation import allocate as on_device
from deepinfer_speculative.costs import CostCurve, CostTable
from deepinfer_speculative.schedule import (
    allocate,
    best_rows,
    causal_rows,
    ranked,
    throughput,
)
from hypothesis import given, settings
from hypothesis import strategies as st

CONFIDENCE = np.array(
    [
        [0.95, 0.90, 0.85, 0.80, 0.75],
        [0.80, 0.70, 0.60, 0.50, 0.40],
        [0.60, 0.50, 0.40, 0.30, 0.20],
        [0.30, 0.30, 0.30, 0.30, 0.30],
    ]
)
SURVIVAL = np.cumprod(CONFIDENCE, axis=1)
FULL = np.full(4, 5)
TIERS = CostCurve(
    (4, 8, 12, 16, 24, 32), (0.0100, 0.0104, 0.0116, 0.0124, 0.0160, 0.0200), tier_limit=32
)
COSTS = CostTable(TIERS, TIERS, CostCurve((1,), (0.0015,), tier_limit=64))


def rates(survival, tokens, emitting, table=COSTS, requests=4):
    gains = ranked(survival, np.full(len(survival), survival.shape[1]))
    seconds = table.plain(np.arange(tokens, tokens + len(gains) + 1)) + 0.0015
    return throughput(gains, emitting, seconds)


def test_the_survivals():
    assert SURVIVAL[0].tolist() == pytest.approx([0.95, 0.855, 0.72675, 0.5814, 0.43605])
    assert SURVIVAL[1].tolist() == pytest.approx([0.8, 0.56, 0.336, 0.168, 0.0672])
    assert SURVIVAL[2].tolist() == pytest.approx([0.6, 0.3, 0.12, 0.036, 0.0072])
    assert SURVIVAL[3].tolist() == pytest.approx([0.3, 0.09, 0.027, 0.0081, 0.00243])


def test_a_decode_only():
    rate = rates(SURVIVAL, 4, 4)
    said = {
        0: 347.83, 1: 415.97, 2: 487.82, 3: 555.04, 4: 616.11, 5: 605.48, 8: 725.89, 9: 708.29,
        12: 763.54, 13: 613.33, 16: 624.37, 20: 626.92,
    }  # fmt: skip
    assert {k: round(float(rate[k]), 2) for k in said} == said
    assert causal_rows(rate) == 4
    assert allocate(SURVIVAL, FULL, 4).tolist() == [3, 1, 0, 0]
    best = best_rows(rate)
    assert best == 12 and allocate(SURVIVAL, FULL, 12).tolist() == [5, 4, 2, 1]
    tokens = 4 + ranked(SURVIVAL, FULL)[:12].sum()
    assert round(float(tokens), 4) == 10.6132
    assert round(100 * (763.54 / 626.92 - 1), 1) == 21.8
    assert 4 / float(TIERS(np.array(4))) == pytest.approx(400)


def test_a_ties_go_to_the_lower_position():
    for k, right in {8: [5, 2, 1, 0], 10: [5, 3, 1, 1], 11: [5, 3, 2, 1]}.items():
        assert allocate(SURVIVAL, FULL, k).tolist() == right
        found = on_device(torch.tensor(SURVIVAL).float(), torch.tensor(FULL), k)
        assert found.tolist() == right


def test_a_floor_lookup_would_promise_too_much():
    """Why sizes are looked up at the next tier: 797 would be promised where 751 come."""
    gains = np.cumsum(ranked(SURVIVAL, FULL))
    assert round(float((4 + gains[10]) / 0.0131)) == 797
    assert round(float(rates(SURVIVAL, 4, 4)[11])) == 751


@pytest.mark.parametrize(
    "emitting, said", [(4, {0: 287.77, 8: 543.38, 20: 466.86}), (5, {8: 600.53})]
)
def test_b_beside_a_chunk(emitting, said):
    rate = rates(SURVIVAL, 16, emitting)
    assert best_rows(rate) == 8
    assert allocate(SURVIVAL, FULL, 8).tolist() == [5, 2, 1, 0]
    assert {k: round(float(rate[k]), 2) for k in said} == said


def test_c_appendix_a():
    """The causal walk stays at 0 whatever c2 is; the live global choice lets it leak."""
    seconds = np.array([1.0, 1 / 0.5, 1 / 0.45])
    for c2, best in ((0.9, 2), (0.0, 0)):
        survival = np.cumprod([[0.8, c2]], axis=1)
        gains = np.sort(survival[0])[::-1]
        rate = throughput(gains, 1, seconds)
        assert causal_rows(rate) == 0
        assert best_rows(rate) == best
        if best:
            assert round(float(rate[2]), 3) == 1.134


def draws(seed, rows, gamma, quantised):
    rng = np.random.default_rng(seed)
    c = rng.random((rows, gamma))
    if quantised:
        c = np.round(c * 4) / 4
    return np.cumprod(c, axis=1), rng.integers(0, gamma + 1, rows)


SHAPES = (st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 7), st.booleans())


@settings(deadline=None, max_examples=150)
@given(*SHAPES, st.integers(0, 70))
def test_allocations_are_prefixes_of_the_best(seed, rows, gamma, quantised, k):
    a, eligible = draws(seed, rows, gamma, quantised)
    got = allocate(a, eligible, k)
    device = on_device(torch.from_numpy(a), torch.from_numpy(eligible), k)
    assert device.tolist() == got.tolist()
    assert got.sum() == min(k, eligible.sum()) and (got <= eligible).all()
    for r in range(rows):
        for j in range(got[r]):  # nothing left out is better than what was taken
            for s in range(rows):
                if got[s] < eligible[s]:
                    out = (-a[s, got[s]], got[s], s)
                    assert (-a[r, j], j, r) <= out
    if k:  # one more row only adds
        assert (allocate(a, eligible, k - 1) <= got).all()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 7), st.integers(0, 70))
def test_order_of_requests_does_not_matter_without_ties(seed, rows, gamma, k):
    a, eligible = draws(seed, rows, gamma, False)
    order = np.random.default_rng(seed).permutation(rows)
    assert allocate(a[order], eligible[order], k).tolist() == (
        allocate(a, eligible, k)[order].tolist()
    )


@settings(deadline=None, max_examples=60)
@given(*SHAPES, st.integers(0, 24))
def test_the_best_is_at_the_edge_of_a_tier_or_at_the_end(seed, rows, gamma, quantised, prefill):
    a, eligible = draws(seed, rows, gamma, quantised)
    gains = ranked(a, eligible)
    tokens = rows + prefill
    rate = throughput(gains, rows, TIERS(np.arange(tokens, tokens + len(gains) + 1)))
    k = best_rows(rate)
    edges = set(TIERS.sizes)
    beyond = tokens + k > TIERS.sizes[-1]
    assert k == len(gains) or tokens + k in edges or beyond or gains[k] <= 1e-6


def test_costs_that_explode_take_nothing_and_flat_ones_everything():
    gains = ranked(SURVIVAL, FULL)
    sizes = np.arange(4, 25)
    assert best_rows(throughput(gains, 4, np.where(sizes > 4, 10.0, 0.01))) == 0
    assert best_rows(throughput(gains, 4, np.full(21, 0.01))) == 20


def test_a_small_gain_is_not_worth_trimming():
    rate = np.array([1.0, 1.05, 1.02])
    assert best_rows(rate) == 1 and best_rows(rate, min_gain=0.04) == 2


def test_limits_count():
    eligible = np.array([1, 0, 5, 2])
    assert len(ranked(SURVIVAL, eligible)) == 8
    assert allocate(SURVIVAL, eligible, 99).tolist() == [1, 0, 5, 2]


def test_survival_by_slot():
    table = SlotSurvival(6, 3, torch.device("cpu"))
    table.put(torch.tensor([4, 1]), torch.tensor([[0.5, 0.5, 0.5], [0.9, 0.9, 0.9]]))
    assert table.allot(torch.tensor([4, 1]), torch.tensor([3, 3]), 3).tolist() == [0, 3]
    table.put(torch.tensor([4]), None)
    assert table.allot(torch.tensor([4, 1]), torch.tensor([3, 3]), 4).tolist() == [3, 1]


def test_no_row_and_no_number():
    none = torch.zeros((0, 3)), torch.zeros(0, dtype=torch.int64)
    assert on_device(*none, 5).tolist() == []
    odd = torch.tensor([[float("nan"), 0.5], [0.3, 0.2]])
    assert on_device(odd, torch.tensor([2, 2]), 2).tolist() == [0, 2]
