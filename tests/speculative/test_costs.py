"""Cost curves: what they say between, below and beyond their points; and the file they lie in."""

import json

import numpy as np
import pytest
from deepinfer.api.speculative import StepShape
from deepinfer.errors import ConfigError
from deepinfer_speculative import costs
from deepinfer_speculative.costs import CostCurve, CostTable, cached, load, profile
from hypothesis import given
from hypothesis import strategies as st


def at(curve, *sizes):
    return curve(np.array(sizes)).tolist()


def test_tiers_cost_what_the_next_point_costs():
    curve = CostCurve((4, 8, 16), (1.0, 2.0, 3.0), tier_limit=16)
    assert at(curve, 1, 4, 5, 8, 9, 16) == [1, 1, 2, 2, 3, 3]


def test_leaving_the_tiers_is_a_jump_and_not_blended():
    curve = CostCurve((4, 8, 16, 32), (1.0, 2.0, 10.0, 20.0), tier_limit=8)
    assert at(curve, 8, 9, 15, 16, 24, 32) == [2, 10, 10, 10, 15, 20]


def test_beyond_the_last_point_it_goes_on():
    assert at(CostCurve((1, 3), (1.0, 2.0)), 5) == [3.0]
    assert at(CostCurve((4,), (1.0,)), 2, 4, 8) == [1.0, 1.0, 2.0]
    assert at(CostCurve((4, 8), (1.0, 2.0), tier_limit=8), 12) == [3.0]


def test_no_size_costs_less_than_a_smaller_one():
    assert at(CostCurve((1, 2, 4), (2.0, 1.0, 3.0)), 1, 2, 3, 4) == [2, 2, 2.5, 3]


@given(
    st.lists(st.tuples(st.integers(1, 200), st.floats(0, 9)), min_size=1, max_size=8),
    st.integers(0, 220),
)
def test_it_is_monotone_everywhere(points, limit):
    by_size = dict(points)
    sizes = tuple(sorted(by_size))
    curve = CostCurve(sizes, tuple(by_size[s] for s in sizes), limit)
    values = curve(np.arange(260))
    assert (np.diff(values) >= -1e-9).all()


@pytest.mark.parametrize(
    "points",
    [((), ()), ((2, 1), (1.0, 1.0)), ((1,), (-1.0,)), ((1, 2), (1.0,)), ((1,), (float("nan"),))],
)
def test_what_is_no_curve_is_refused(points):
    with pytest.raises(ConfigError, match="cost curve"):
        CostCurve(*points)


def test_steps_know_drafts_from_none():
    plain, verify, draft = (CostCurve((100,), (cost,), 100) for cost in (1.0, 2.0, 0.5))
    table = CostTable(plain, verify, draft)
    assert table.steps(4, 2, 4, propose=False).tolist() == [1, 2, 2]
    assert table.steps(4, 2, 4, propose=True).tolist() == [1.5, 2.5, 2.5]


def timer(asked):
    """A device whose step takes 10 ms and 1 ms a row, 2 ms more where it drafts."""

    def measure(shapes):
        asked.extend(shapes)
        return [0.01 + 0.001 * (s.requests + s.drafts) + 0.002 * s.propose for s in shapes]

    return measure


def test_a_profile_asks_for_steps_and_sorts_them():
    asked = []
    table = profile(timer(asked), 4, max_requests=8, max_tokens=512, budget=60)
    assert table.plain.sizes == (1, 2, 4, 8)
    assert table.verify.sizes == (2, 3, 4, 5, 10, 20, 40)
    assert at(table.verify, 5, 40) == pytest.approx([0.015, 0.05])
    assert at(table.draft, 1, 8) == pytest.approx([0.002, 0.002])
    assert max(s.requests for s in asked) == 8
    assert all(isinstance(s, StepShape) for s in asked)


def test_where_steps_are_padded_cost_goes_by_stairs():
    """Every multiple of the requests is measured, and what lies between costs the next one."""
    asked = []
    table = profile(timer(asked), 5, max_requests=64, max_tokens=512, budget=60, graph_rows=512)
    every = {n * k for n in (1, 4, 16, 64) for k in range(2, 7)} | {12, 48, 192}
    assert set(table.verify.sizes) == every and len(asked) == len(set(asked))
    steps = table.steps(16, 80, 16, propose=False)
    some = steps[[1, 16, 17, 32, 33, 80]]
    assert some == pytest.approx([0.042, 0.042, 0.058, 0.058, 0.074, 0.106])
    assert table.steps(16, 600, 16, propose=False)[-1] == pytest.approx(0.01 + 0.616)
    assert at(table.plain, 5, 33, 64) == pytest.approx([0.018, 0.074, 0.074])


def test_a_profile_keeps_to_its_limits():
    asked = []
    profile(timer(asked), 5, max_requests=64, max_tokens=24, budget=60)
    assert all(s.requests + s.drafts <= 24 for s in asked)
    asked.clear()
    profile(timer(asked), 5, max_requests=64, max_tokens=512, budget=0.0)
    assert {s.requests for s in asked} == {1}


def test_a_profile_reaches_far_where_only_compiling_is_slow(monkeypatch):
    """And ends early where steps themselves would take too long."""
    now = [0.0]
    monkeypatch.setattr(costs.time, "monotonic", lambda: now[0])

    def measure(shapes):
        asked.update((s.requests, s.drafts // s.requests) for s in shapes if s.propose)
        now[0] += 5.0  # kernels are compiled
        return [cost * (s.requests + s.drafts) for s in shapes]

    asked, cost = set(), 1e-5
    profile(measure, 5, max_requests=64, max_tokens=512, budget=8.0)
    assert asked == {(n, 5) for n in (1, 4, 16, 64, 2, 8)}
    asked, cost = set(), 5e-3
    profile(measure, 5, max_requests=64, max_tokens=512, budget=8.0)
    assert asked == {(1, 5), (4, 5), (16, 1)}, "fewer drafts have to do"
    asked, cost = set(), 1e-2
    profile(measure, 5, max_requests=64, max_tokens=512, budget=8.0)
    assert asked == {(1, 5), (4, 5)}


def test_a_table_is_measured_once(tmp_path):
    asked = []

    def measure():
        return profile(timer(asked), 4, 4, 512, 60)

    first = cached(tmp_path / "new", "one model", measure)
    count = len(asked)
    assert cached(tmp_path / "new", "one model", measure) == first and len(asked) == count
    cached(tmp_path / "new", "another", measure)
    assert len(asked) == 2 * count
    for path in (tmp_path / "new").iterdir():
        path.write_text("{")  # cut short: measured again
    assert cached(tmp_path / "new", "one model", measure) == first and len(asked) == 3 * count


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert cached(blocked, "x", lambda: profile(timer([]), 2, 2, 64, 1)).plain.sizes == (1, 2)


def test_a_named_file(tmp_path):
    path = tmp_path / "costs.json"
    table = profile(timer([]), 2, 4, 64, 60)
    path.write_text(json.dumps(table.to_json()))
    assert load(path) == table
    for wrong in ("", "[]", '{"version": 1}', json.dumps({**table.to_json(), "version": 9})):
        path.write_text(wrong)
        with pytest.raises(ConfigError):
            load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.json")
