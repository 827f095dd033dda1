"""Slot table, KV pool and batch: what the device knows, and that nothing waits for it."""

import dataclasses

import numpy as np
import pytest
import torch
from deepinfer.api.kv import KVGroup, KVSpec
from deepinfer.api.plan import Admit, BatchPlan, RowBlock, RowParams
from deepinfer.api.speculative import Drafts
from deepinfer.errors import UnsupportedError
from deepinfer.worker.batch import BatchBuilder
from deepinfer.worker.kvpool import KVPool
from deepinfer.worker.slots import SlotShape, SlotTable
from rig import CPU, Desk, Req, load, make_runner
from test_drafts import Scripted
from test_runner import EVERYTHING, prompt
from torch.utils._python_dispatch import TorchDispatchMode

NO_ROWS = RowBlock(np.zeros((0, 5), np.int32))


@pytest.fixture(scope="module")
def naive(tmp_path_factory):
    return load(tmp_path_factory.mktemp("tiny"))


def table(draft_len=2):
    shape = SlotShape(slots=3, max_len=10, page_size=4, vocab_size=50, draft_len=draft_len)
    return SlotTable(shape, CPU)


def admit(slot=1, tokens=(4, 5, 6), limit=9, seed=1, **params):
    return Admit(slot, np.array(tokens, np.int32), limit, seed, RowParams(len(tokens), **params))


def plan(*admits, pages=(), rows=NO_ROWS):
    return BatchPlan(0, admits, rows, np.array(pages, np.int32).reshape(-1, 3))


def test_admission_fills_every_column():
    slots = table()
    params = dict(temperature=0.5, top_k=7, top_p=0.5, min_p=0.25)
    slots.apply(plan(admit(seed=(1 << 64) - 2, **params)))
    columns = (slots.length, slots.limit, slots.seed, slots.top_k, slots.drafted)
    assert [int(c[1]) for c in columns] == [3, 9, -2, 7, 0]
    assert [float(c[1]) for c in (slots.temperature, slots.top_p, slots.min_p)] == [0.5, 0.5, 0.25]
    assert slots.tokens[1, :3].tolist() == [4, 5, 6] and slots.bound[1] == 3
    assert slots.params_of([1])[0].top_k == 7


def test_almost_no_temperature_is_none():
    slots = table()
    slots.apply(plan(admit(temperature=1e-9)))
    assert slots.temperature[1] == 0.0


def test_the_last_write_of_a_page_stands():
    slots = table()
    slots.apply(plan(pages=[(0, 0, 5), (1, 2, 7), (0, 0, 6), (0, 1, 8), (1, 2, 9)]))
    assert slots.pages[0, :2].tolist() == [6, 8] and slots.pages[1, 2] == 9


def test_commit_and_drafts():
    slots = table()
    slots.apply(plan(admit(0), admit(2, (1, 2))))
    slot = torch.tensor([0, 2])
    drawn = torch.tensor([[9, 8, 7], [3, 0, 0]])
    slots.commit(slot, slots.length[slot], drawn, torch.tensor([2, 1]))
    assert slots.tokens[0, :5].tolist() == [4, 5, 6, 9, 8]
    assert slots.length.tolist() == [5, 0, 3, 1]  # the last is nobody's
    assert slots.anchors(slot).tolist() == [8, 3]
    slots.set_drafts(slot, torch.tensor([[11, 12], [13, 14]]))
    assert slots.tokens[0, 5:7].tolist() == [11, 12] and slots.drafted.tolist() == [2, 0, 2, 0]
    assert slots.drafts(slot, slots.length[slot], 2).tolist() == [[11, 12], [13, 14]]


def test_bounds_hold_the_lengths():
    slots = table()
    slots.apply(plan(admit(0, limit=7), rows=RowBlock(np.array([[0, 0, 3, 1, 0]], np.int32))))
    assert slots.bound[0] == 4
    decode = RowBlock(np.array([[0, -1, 3, 1, 0]], np.int32))
    for bound in (7, 7):
        slots.apply(plan(rows=decode))
        assert slots.bound[0] == bound


def group(kind, layers, heads, dim):
    return KVGroup(
        name=kind, kind=kind, layers=layers, kv_heads=heads, head_dim=dim, bytes_per_token=0
    )


def test_the_pool_is_one_allocation():
    full, window = group("full", (0, 2), 2, 8), group("window", (1,), 1, 16)
    pool = KVPool(KVSpec((full, window), "test"), 5, 4, torch.bfloat16, CPU)
    shapes = [pool.layer(i)[0].shape for i in range(3)]
    assert shapes == [(5, 4, 2, 8), (5, 4, 1, 16), (5, 4, 2, 8)]
    assert pool.nbytes == 5 * 4 * 3 * 2 * 16 * 2
    for i in range(3):
        for part, value in zip(pool.layer(i), (i + 1, -i - 1), strict=True):
            assert part.is_contiguous() and not part.any()
            part.fill_(value)
    assert [float(pool.layer(i)[0].mean()) for i in range(3)] == [1, 2, 3]
    starts = {pool.layer(i)[j].untyped_storage().data_ptr() for i in range(3) for j in (0, 1)}
    assert len(starts) == 1


def test_a_state_group_without_an_entry_is_refused():
    spec = KVSpec((group("state", (0,), 1, 8),), "test")
    with pytest.raises(UnsupportedError, match="'state'"):
        KVPool(spec, 1, 4, torch.float32, CPU)


@pytest.mark.parametrize("looks", [True, False])
def test_the_batch_of_a_mixed_step(naive, looks):
    """A chunk that replays two positions, a decode row, a dead row and a draft that cannot run."""
    slots = SlotTable(SlotShape(slots=3, max_len=10, page_size=4, vocab_size=50, draft_len=1), CPU)
    rows = [[0, 1, 4, 1, 2], [1, -1, 2, 1, 0], [2, -1, 2, 1, 0]]
    step = plan(
        admit(0, (1, 2, 3, 4, 5)),
        admit(1, (6, 7, 8)),
        admit(2, (9, 9), limit=3),
        pages=[(0, 0, 5), (0, 1, 6), (1, 0, 7), (2, 0, 8)],
        rows=RowBlock(np.array(rows, np.int32)),
    )
    step = dataclasses.replace(step, draft_rows=2)
    slots.apply(step)
    slots.length[2] = 3  # the device knows that it has ended
    slots.set_drafts(torch.tensor([1, 2]), torch.tensor([[33], [34]]))
    builder = BatchBuilder(slots, naive.ops, Quiet(1, 0.0), naive.spec)
    builder.looks = looks
    built = builder.build(step)
    batch = built.batch
    # Four tokens of the chunk, anchor and draft, the dead row's place, one of padding where the
    # host does not look.
    padding = [] if looks else [-1]
    assert batch.row_of_token.tolist() == [0, 0, 0, 0, 1, 1, 2, *padding]
    assert batch.positions.tolist()[:7] == [1, 2, 3, 4, 2, 3, 2]
    assert batch.ids.tolist()[:6] == [2, 3, 4, 5, 8, 33]
    places = [-1, -1, 5 * 4 + 3, 6 * 4, 7 * 4 + 2, 7 * 4 + 3, -1, *padding]
    assert batch.kv_slots.tolist() == places
    assert batch.logit_rows.tolist()[:4] == [3, 4, 5, 6]
    assert built.layout.grid.tolist() == [[0, -1], [1, 2], [3, -1]]
    assert built.lines.sample.position.tolist()[:4] == [5, 3, 4, 3]
    assert built.alive.tolist() == [True, True, False]
    assert built.drafts[1].tolist() == [33] and built.length.tolist() == [5, 3, 3]


class NoWait(TorchDispatchMode):
    """Fails on what would make a host wait for its device."""

    waits = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        assert not any(wait in name for wait in self.waits), f"{name} waits for the device"
        if name == "index":
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "a mask as an index"
        return func(*args, **(kwargs or {}))


class Quiet(Scripted):
    """A drafter that does not look either."""

    def allot(self, slots, eligible, k):
        return torch.minimum(eligible, torch.ones_like(eligible))

    def commit(self, taps, kept):
        pass

    def propose(self, anchors, slots):
        ids = torch.stack((anchors, anchors + 1), 1)
        return Drafts(ids, None)


@pytest.mark.parametrize("gamma", [0, 2])
def test_nothing_waits_for_the_device(naive, monkeypatch, gamma):
    """Ops and model aside, which are a backend's: their references may look."""
    ops, inside = naive.ops, []

    def aside(fn):
        def call(*args, **kwargs):
            with torch.utils._python_dispatch._disable_current_modes():
                inside.append(getattr(fn, "__name__", "op"))
                return fn(*args, **kwargs)

        return call

    for name in ops.origin:
        if name not in ("expand_rows", "logit_bias", "accept_prefix"):
            monkeypatch.setattr(ops, name, aside(getattr(ops, name)))
    for name in ("forward", "logits"):
        monkeypatch.setattr(naive.model, name, aside(getattr(naive.model, name)))
    everything = [
        *EVERYTHING.values(),
        {"temperature": 0.5, "logprobs": 2, "prompt_logprobs": 1, "bad_words": ((3, 4, 5),)},
    ]
    drafter = Quiet(2, 0.0) if gamma else None
    runner = make_runner(naive, slots=len(everything), drafter=drafter)
    runner._batches.looks = False  # as on any device but the host's own
    desk = Desk(runner, gamma=gamma)
    requests = [
        Req(prompt(i, 6), 14, params=p, allowed=(lambda text: range(300)) if i == 1 else None)
        for i, p in enumerate(everything)
    ]
    for slot, request in enumerate(requests):
        desk.enter(request, slot)
    with NoWait():
        desk.run([(r, desk.chunk(r, 6 if i % 2 else 4)) for i, r in enumerate(requests)])
        for _ in range(2):
            pairs = [(r, desk.decode(r) if r.done == 6 else desk.chunk(r, 2)) for r in requests]
            desk.run(pairs, len(pairs) if gamma else 0)
    assert "forward" in inside and all(r.out for r in requests)
