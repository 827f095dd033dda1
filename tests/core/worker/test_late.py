"""Rows for late layers, and what else a batch says to models with state."""

import numpy as np
import pytest
import torch
from deepinfer.api.backend import OpContext
from deepinfer.api.kv import Entry, KVGroup, KVSpec, Truncation
from deepinfer.api.plan import Admit, BatchPlan, RowBlock, RowParams
from deepinfer.ops.backend import ReferenceBackend, build_ops
from deepinfer.worker.batch import BatchBuilder
from deepinfer.worker.slots import SlotShape, SlotTable
from hypothesis import given, settings
from hypothesis import strategies as st
from test_drafts import Scripted

CPU = torch.device("cpu")
OPS = build_ops(ReferenceBackend(), OpContext(dtype=torch.float32, device=CPU, page_size=4))
GROUP = KVGroup(name="g", kind="full", layers=(0,), entry=Entry(width=1, dtype="uint8"))


def spec(compact=True, lookback=0):
    cut = Truncation(keep=3, reach=9, first_layer=1, compact=compact)
    return KVSpec((GROUP,), "test", lookback=lookback, truncation=cut)


def admit(slot, count, floor=0):
    tokens = np.arange(1, count + 1, dtype=np.int32) + 100 * slot
    return Admit(slot, tokens, 40, 1, RowParams(count), floor)


def build(rows, *admits, kv=None, drafts=0):
    slots = SlotTable(SlotShape(slots=4, max_len=40, page_size=4, vocab_size=500, draft_len=2), CPU)
    step = BatchPlan(
        0, admits, RowBlock(np.array(rows, np.int32)), np.zeros((0, 3), np.int32), drafts
    )
    slots.apply(step)
    if drafts:
        decodes = torch.tensor([row[0] for row in rows if row[1] == -1])
        slots.set_drafts(decodes, torch.full((len(decodes), 2), 77))
    return BatchBuilder(slots, OPS, Scripted(2, 1.0), kv or spec()).build(step).batch


def test_a_model_with_entries_plans_no_attention_and_knows_its_requests():
    batch = build([[2, 3, 4, 1, 0], [0, -1, 1, 1, 0]], admit(2, 7), admit(0, 5, floor=2))
    assert batch.attn is None and batch.late is None and batch.history is None
    requests = batch.requests
    assert requests.cu_q.tolist() == [0, 4, 5] and requests.cu_q.dtype == torch.int32
    assert requests.starts.tolist() == [3, 4]
    assert requests.blocks.tolist() == [2, 0] and requests.floors.tolist() == [0, 2]
    assert requests.block_table.shape[0] == 2


def test_history_is_what_lies_before_each_token():
    batch = build(
        [[0, 1, 3, 1, 0], [1, -1, 1, 1, 0]], admit(0, 4), admit(1, 2), kv=spec(lookback=3)
    )
    assert batch.history.tolist() == [[1, -1, -1], [2, 1, -1], [3, 2, 1], [101, -1, -1]]


def test_ahead_is_what_chunks_leave_for_the_next_step():
    """As many tokens again, within the text; nothing behind a last chunk, or behind a decode."""
    rows = [[3, -1, 1, 1, 0], [0, 1, 3, 0, 0], [1, 2, 2, 1, 0], [2, 0, 4, 0, 0]]
    batch = build(
        rows, admit(0, 9), admit(1, 4), admit(2, 6), admit(3, 4), kv=spec(lookback=2)
    )  # fmt: skip
    ids, history = batch.ahead
    assert ids.tolist() == [5, 6, 7, 205, 206]
    assert history.tolist() == [[4, 3], [5, 4], [6, 5], [204, 203], [205, 204]]
    assert build([[0, 0, 4, 1, 0]], admit(0, 4), kv=spec(lookback=2)).ahead is None


def test_rows_below_the_floor_are_taken_out():
    """A decode, a chunk across its floor, one below, one above."""
    batch = build(
        [[3, -1, 1, 1, 0], [0, 2, 6, 1, 0], [1, 0, 3, 0, 0], [2, 4, 2, 1, 0]],
        admit(0, 8, floor=5),
        admit(1, 9, floor=6),
        admit(2, 6, floor=3),
        admit(3, 4, floor=1),
    )
    late = batch.late
    assert batch.late_rows.tolist() == [0, 4, 5, 6, 10, 11]
    assert late.positions.tolist() == [3, 5, 6, 7, 4, 5]
    assert late.row_of_token.tolist() == [0, 1, 1, 1, 3, 3]
    assert late.requests.cu_q.tolist() == [0, 1, 4, 4, 6]
    assert late.requests.starts.tolist() == [3, 5, 3, 4]
    assert batch.late_rows[late.logit_rows].tolist() == batch.logit_rows.tolist() == [0, 6, 11]


def test_a_step_may_have_no_late_row():
    batch = build([[0, 0, 3, 0, 0]], admit(0, 9, floor=6))
    assert len(batch.late.ids) == 0 and batch.late_rows.tolist() == []
    assert batch.late.requests.cu_q.tolist() == [0, 0]


@pytest.mark.parametrize("compact", [True, False])
def test_only_compact_takes_rows_out(compact):
    batch = build([[0, 0, 9, 1, 0]], admit(0, 9, floor=6), kv=spec(compact))
    assert (batch.late is not None) == compact
    assert batch.requests.floors.tolist() == [6]


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_late_rows_are_the_rows_that_masking_keeps(data):
    """Any mix of chunks, decodes and drafts, some of which cannot run: rows are padding then."""
    rows, admits = [], []
    for slot in data.draw(st.permutations(range(4)))[: data.draw(st.integers(1, 4))]:
        count = data.draw(st.integers(2, 12))
        admits.append(admit(slot, count, data.draw(st.integers(0, count - 1))))
        if data.draw(st.booleans()):
            rows.append([slot, -1, 3, 1, 0])
        else:
            start = data.draw(st.integers(0, count - 1))
            size = data.draw(st.integers(1, count - start))
            rows.append([slot, start, size, int(start + size == count), 0])
    rows.sort(key=lambda row: row[1])  # decodes first, as plans have them
    most = 2 * sum(row[1] == -1 for row in rows)
    batch = build(rows, *admits, drafts=data.draw(st.integers(0, most)))
    floors = batch.requests.floors[batch.row_of_token]
    kept = (batch.row_of_token < 0) | (batch.positions >= floors)
    if kept.all():
        assert batch.late is None
        return
    late, place = batch.late, batch.late_rows
    assert place.tolist() == kept.nonzero()[:, 0].tolist()
    for name in ("ids", "positions", "row_of_token", "kv_slots"):
        assert torch.equal(getattr(late, name), getattr(batch, name)[place]), name
    assert torch.equal(place[late.logit_rows], batch.logit_rows)
    counts = torch.bincount(late.row_of_token[late.row_of_token >= 0], minlength=len(rows))
    assert torch.equal(late.requests.cu_q.diff(), counts.int())
    owned = (counts > 0).nonzero()[:, 0]
    first = late.requests.cu_q[owned].long()
    assert torch.equal(late.requests.starts[owned], late.positions[first])
