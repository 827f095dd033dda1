"""Memory that runs out within a step: texts stay what they are, and what cannot go on says so."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deepinfer.api.kv import KVGroup
from deepinfer.api.plan import DECODE, BatchPlan, RowBlock
from deepinfer.errors import PluginError
from deepinfer.worker.shortage import Shortage, halves
from hypothesis import given
from hypothesis import strategies as st
from rig import NO_PAGES, Desk, Req, expected, load, make_runner

OUT = torch.OutOfMemoryError
PARAMS = {
    "greedy": {"temperature": 0.0},
    "penalised": {"temperature": 0.8, "presence_penalty": 0.6, "repetition_penalty": 1.3},
    "scored": {"temperature": 0.7, "top_p": 0.8, "logprobs": 3},
}


@pytest.fixture(scope="module")
def naive(tmp_path_factory):
    return load(tmp_path_factory.mktemp("tiny"))


class Small:
    """A model, or an op, on a device whose memory holds ``most`` rows; it counts refusals."""

    def __init__(self, monkeypatch, owner, name, most, rows):
        self.real, self.most, self.rows, self.refused = getattr(owner, name), most, rows, 0
        monkeypatch.setattr(owner, name, self)

    def __call__(self, *args, **kwargs):
        if self.rows(*args) > self.most:
            self.refused += 1
            raise OUT("the device is full")
        return self.real(*args, **kwargs)


def requests():
    rng = np.random.default_rng(3)
    return [
        Req(rng.integers(3, 320, 5 + 4 * i).tolist(), 26, seed=i, params=params)
        for i, params in enumerate(PARAMS.values())
    ]


def run(runner, **how):
    desk, live = Desk(runner, seed=1), requests()
    for slot, request in enumerate(live):
        desk.enter(request, slot)
    desk.finish(live, **how)
    return live


@pytest.mark.parametrize("most, few_rows", [(1, 0), (2, 0), (3, 0), (7, 0), (7, 5)])
def test_a_step_that_does_not_fit_runs_in_parts(naive, monkeypatch, most, few_rows):
    """Prompts in one chunk each: rows are parted first, then a chunk."""
    small = Small(monkeypatch, naive.model, "forward", most, lambda batch, *_: len(batch.ids))
    runner = make_runner(naive, few_rows=few_rows)
    done = run(runner, chunk=99)
    monkeypatch.undo()
    assert small.refused > 0
    for request in done:
        assert request.out == expected(naive, request)[0]


@pytest.mark.parametrize("op", ["penalties", "gumbel_argmax", "filter_top", "logprobs"])
def test_a_draw_that_fails_once_is_drawn_again_from_fresh_logits(naive, monkeypatch, op):
    """Stages change logits in place: half of them done twice would change the text."""
    real, state = getattr(naive.ops, op), {"calls": 0}

    def failing(*args, **kwargs):
        state["calls"] += 1
        if state["calls"] % 3 == 1:
            raise OUT("the device is full")
        return real(*args, **kwargs)

    plain = run(make_runner(naive))
    monkeypatch.setattr(naive.ops, op, failing)
    done = run(make_runner(naive))
    monkeypatch.undo()
    assert state["calls"] > 3
    assert [r.out for r in done] == [r.out for r in plain]
    assert [r.logprobs for r in done] == [r.logprobs for r in plain]


def test_what_can_be_made_again_is_given_back_before_anything_is_cut(naive, monkeypatch):
    runner = make_runner(naive)
    freed = []
    small = Small(monkeypatch, naive.model, "forward", 0, lambda batch, *_: 0 if freed else 1)
    runner._shortage._releases = (lambda: freed.append(1),)
    done = run(runner)
    monkeypatch.undo()
    assert (small.refused, len(freed), runner._shortage.times) == (1, 1, 1)
    assert done[0].out == expected(naive, done[0])[0]


def test_a_single_token_that_does_not_fit_ends_the_step(naive, monkeypatch):
    Small(monkeypatch, naive.model, "forward", 0, lambda batch, *_: len(batch.ids))
    with pytest.raises(OUT, match="the device is full"):
        run(make_runner(naive))


def test_a_step_that_moves_state_is_not_run_again():
    calls = []

    def whole():
        calls.append(1)
        raise OUT("full")

    state = KVGroup(name="state", kind="state", layers=(0,), entry=SimpleNamespace(nbytes=4))
    shortage = Shortage(SimpleNamespace(), SimpleNamespace(groups=(state,)), lambda: None)
    with pytest.raises(OUT):
        shortage.hidden(SimpleNamespace(draft_rows=0), whole, None)
    assert len(calls) == 1


def test_a_lost_device_speaks_in_its_own_words():
    lost = RuntimeError("The GPU is lost.")
    device = SimpleNamespace(explain=lambda why: lost if "assert" in str(why) else why)
    shortage = Shortage(device, SimpleNamespace(groups=()), lambda: None)
    with pytest.raises(RuntimeError, match=r"The GPU is lost\.") as caught, shortage.told():
        raise RuntimeError("device-side assert")
    assert "device-side" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match=r"The GPU is lost\."), shortage.told():
        raise PluginError("a drafter raised it") from RuntimeError("device-side assert")
    with pytest.raises(PluginError, match="a drafter"), shortage.told():
        raise PluginError("a drafter raised it") from KeyError("no device")
    with pytest.raises(RuntimeError, match="other") as caught, shortage.told():
        raise RuntimeError("other")
    assert caught.value.__cause__ is None


def tokens(plan):
    """(slot, position or decode, emits, replayed) of each token, in order."""
    found = []
    for slot, start, count, emits, replay in plan.rows.array.tolist():
        if start == DECODE:
            found.append((slot, DECODE, emits, False))
        else:
            last = count - 1
            found += [
                (slot, start + i, emits if i == last else 0, i < replay) for i in range(count)
            ]
    return found


rows = st.builds(
    lambda decode, start, count, emits, share: (
        (DECODE, 1, 1, 0) if decode else (start, count, emits, count * share // 4)
    ),
    st.booleans(), st.integers(0, 50), st.integers(1, 20), st.integers(0, 1), st.integers(0, 4),
)  # fmt: skip


@given(st.lists(rows, min_size=1, max_size=8))
def test_halves_are_the_same_tokens_in_the_same_order(made):
    block = np.array([(slot, *row) for slot, row in enumerate(made)], np.int32)
    plan = BatchPlan(0, (), RowBlock(block), NO_PAGES)
    parts, whole = [plan], tokens(plan)
    while len(parts) < len(whole):
        parts = [half for part in parts for half in halves(part) or (part,)]
        assert [token for part in parts for token in tokens(part)] == whole
    assert all(halves(part) is None for part in parts)
