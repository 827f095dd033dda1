"""From a plan to token rows: positions, addresses, lines, all on the device.

Where you are: the first half of ``runner.forward``. Shapes come from the plan alone: T = prefill
tokens + decode rows + draft rows (K), and one line for each emitting row + K. What depends on how
far requests have come, or on how many drafts each may still run, is tensor arithmetic, so the host
never waits here.

A decode row whose text has reached its limit is dead: it keeps one place in the shape, writes
nowhere, sees no key and emits nothing. If fewer than K drafts can run, the rest is padding at the
end: token rows without an owner, lines that nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deepinfer.api.model import DeviceBatch, StepRequests
from deepinfer.api.plan import DECODE
from deepinfer.api.sampler import SampleRows
from deepinfer.sampling.pipeline import Lines, Stages, gather_stages
from deepinfer.sampling.transfer import to_device
from deepinfer.sampling.verify import line_grid
from deepinfer.worker.late import late_batch, rows_below
from deepinfer.worker.slots import COLD

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from deepinfer.api.kv import KVSpec
    from deepinfer.api.plan import BatchPlan, RowParams
    from deepinfer.api.speculative import Drafter
    from deepinfer.ops.table import OpSet
    from deepinfer.worker.slots import SlotTable

_LAYOUTS = 32  # of the same rows with different drafts, kept at a time
_FEW_ROWS = 256  # token rows that are not worth leaving out of a layer: their steps run as graphs,
_FEW_ROWS_CPU = 32  # or, on a CPU, as one call


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRows:
    """The rows of a plan, as the host knows them, on both sides; n rows, R of them emit.

    ``emit``: plan row of each emitting row (host); ``emit_row`` the same on the device.
    ``limit`` int64[n]: the longest that each text may get. ``plain``: all rows decode and emit.
    ``tokens``: token rows, drafts aside; in a graph, for at most so many.
    ``stages``, ``filtered``, ``greedy``: what the emitting rows use. ``scored``: emitting rows
    that want logprobs, ``scored_row`` the same on the device, ``wanted`` how many best ids.
    ``prompts``: (plan row, slot, start, tokens, best ids) of chunks that predict prompt tokens
    whose logprobs are wanted. ``below``: leading token rows that late layers do not run, None if
    there are none, ``dropped`` their sum.
    """

    key: tuple[int, bytes]
    array: NDArray[np.int32]
    slot: Tensor
    start: Tensor
    count: Tensor
    decode: Tensor
    limit: Tensor
    plain: bool
    tokens: int
    replay: Tensor | None
    emit: NDArray[np.int64]
    emit_row: Tensor
    emit_slot: Tensor
    stages: Stages
    filtered: bool
    greedy: bool
    scored: NDArray[np.int64]
    scored_row: Tensor
    wanted: NDArray[np.int64]
    prompts: tuple[tuple[int, int, int, int, int], ...]
    below: Tensor | None
    dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLayout:
    """Which token row belongs to whom, and which of them have lines.

    Without drafts it depends on the plan only, and steps that decode the same rows share it.
    ``each``: every plan row is one token row and one line, in order, so nothing is looked up by
    row. ``count`` int64[n]; ``row`` int64[T], −1 padding; ``offset`` int64[T]: place within its
    row; ``slot`` int64[T], whose tokens and pages begin at ``text`` and ``page_row`` int64[T];
    ``cu_q`` int32[n+1]; ``lengths`` int64[R]: drafts that run; ``grid`` int64[R, w]; ``owner``
    int64[m]; ``logit_rows`` int64[m].
    """

    each: bool
    count: Tensor
    row: Tensor
    offset: Tensor
    slot: Tensor
    text: Tensor
    page_row: Tensor
    cu_q: Tensor
    lengths: Tensor
    grid: Tensor
    owner: Tensor
    logit_rows: Tensor
    params: SampleRows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """A step on the device: ``batch`` for the model, the rest for the draw.

    ``length`` and ``alive`` [R]: each emitting row's text before the step, and whether it may
    grow; ``drafts`` int64[R, w−1].
    """

    rows: PlanRows
    layout: TokenLayout
    batch: DeviceBatch
    lines: Lines
    length: Tensor
    alive: Tensor
    drafts: Tensor


class BatchBuilder:
    """Builds a step's batch; remembers the layouts of the last rows that decode.

    Args:
        slots: the slot table.
        ops: serves ``expand_rows`` and ``plan_attention``.
        drafter: splits a step's draft rows among requests.
        spec: the model's KV: what of a batch it reads.

    Attributes:
        looks: whether the host may read how a step's drafts were split, which costs nothing on a
            CPU. Else as many rows run as the plan allows, drafts or none.
        tails: False if the last layer is to run all rows, see ``DeviceBatch.tail``.
        few_rows: so many rows without a line are not worth leaving out.
    """

    def __init__(self, slots: SlotTable, ops: OpSet, drafter: Drafter, spec: KVSpec) -> None:
        self._slots = slots
        self._ops = ops
        self._drafter = drafter
        self._spec = spec
        self._pairs = any(group.entry is None for group in spec.groups)
        self._entries = any(group.entry is not None for group in spec.groups)
        self._rows: PlanRows | None = None
        self._layout: TokenLayout | None = None
        self._drafted: dict[tuple[int, ...], TokenLayout] = {}
        self.looks = slots.device.type == "cpu"
        self.tails = True
        self.few_rows = _FEW_ROWS_CPU if self.looks else _FEW_ROWS

    def build(self, plan: BatchPlan) -> StepBatch:
        """The batch of a plan that ``slots.apply`` has seen. No host synchronisation."""
        rows = self.rows(plan)
        length = self._slots.length[rows.slot]
        layout = self._token_layout(plan, rows, length)
        return self._batch(rows, layout, length, self.longest(rows.array))

    def standing(self, rows: PlanRows, draft_rows: int, longest: int) -> StepBatch:
        """The batch of :func:`emitting_rows`, from the device's tables alone; ``longest``: no text
        is longer.
        """
        length = self._slots.length[rows.slot]
        lengths = torch.zeros_like(rows.emit_row)
        if draft_rows:
            lengths = self._allot(rows, length, draft_rows)
        layout = self._make_layout(rows, lengths, draft_rows)
        return self._batch(rows, layout, length, longest)

    def longest(self, array: NDArray[np.int32]) -> int:
        """No text of these rows is longer after the steps so far; at least 1."""
        return int(self._slots.bound[array[:, 0]].max(initial=1))

    def _batch(
        self, rows: PlanRows, layout: TokenLayout, length: Tensor, longest: int
    ) -> StepBatch:
        slots = self._slots
        alive = length < rows.limit
        if layout.each:  # the step that runs most: few and small launches are its whole cost here
            start = position = length - 1
            emit_length, emit_alive, drawn = length, alive, length
        else:
            alive = ~rows.decode | alive
            start = torch.where(rows.decode, length - 1, rows.start)
            position = start[layout.row] + layout.offset
            emit_length, emit_alive = length[rows.emit_row], alive[rows.emit_row]
            drawn = position[layout.logit_rows] + 1  # the next one is drawn
        batch = self._device_batch(rows, layout, start, alive, position, longest)
        width = layout.grid.shape[1]
        return StepBatch(
            rows=rows,
            layout=layout,
            batch=batch,
            lines=self._lines(rows, layout, drawn, longest),
            length=emit_length,
            alive=emit_alive,
            drafts=slots.drafts(rows.emit_slot, emit_length, width - 1),
        )

    def rows(self, plan: BatchPlan) -> PlanRows:
        """The plan's: the last step's, if the same rows decode again and nobody has entered."""
        key = (self._slots.version, plan.rows.array.tobytes())
        if self._rows is None or self._rows.key != key:
            cuts = self._spec.truncation is not None and self._spec.truncation.compact
            self._rows, self._layout = _plan_rows(plan.rows.array, key, self._slots, cuts), None
            self._drafted.clear()
        return self._rows

    def _token_layout(self, plan: BatchPlan, rows: PlanRows, length: Tensor) -> TokenLayout:
        if plan.draft_rows:
            lengths = self._allot(rows, length, plan.draft_rows)
            if not self.looks:
                return self._make_layout(rows, lengths, plan.draft_rows)
            # No row runs without a draft, and the same few layouts come again and again.
            if any(ran := tuple(lengths.tolist())):
                if ran not in self._drafted:
                    if len(self._drafted) >= _LAYOUTS:
                        self._drafted.clear()
                    self._drafted[ran] = self._make_layout(rows, lengths, sum(ran))
                return self._drafted[ran]
        if self._layout is None:
            self._layout = self._make_layout(rows, torch.zeros_like(rows.emit_row), 0)
        return self._layout

    def _allot(self, rows: PlanRows, length: Tensor, k: int) -> Tensor:
        """int64[R]: how many drafts each emitting row runs, at most ``k`` in all."""
        slots, at = self._slots, rows.emit_row
        left = slots.limit[rows.emit_slot] - length[at] - 1  # one token comes without a draft
        most = torch.minimum(slots.drafted[rows.emit_slot], rows.count[at] - 1)
        eligible = torch.where(rows.decode[at], torch.minimum(most, left).clamp(min=0), 0)
        return self._drafter.allot(rows.emit_slot, eligible, k)

    def _make_layout(self, rows: PlanRows, lengths: Tensor, draft_rows: int) -> TokenLayout:
        count = torch.where(rows.decode, 1, rows.count)
        count = count.index_add(0, rows.emit_row, lengths)
        row, offset = self._ops.expand_rows(
            torch.zeros_like(count), count, rows.tokens + draft_rows
        )
        ends = count.cumsum(0)
        first = ends[rows.emit_row] - 1 - lengths
        owner, logit_rows = self._ops.expand_rows(first, 1 + lengths, len(lengths) + draft_rows)
        width = self._slots.shape.draft_len + 1 if draft_rows else 1
        slot = rows.slot[row]
        return TokenLayout(
            each=rows.plain and not draft_rows,
            count=count,
            row=row,
            offset=offset,
            slot=slot,
            text=slot * self._slots.width,
            page_row=slot * self._slots.pages.shape[1],
            cu_q=torch.cat((ends.new_zeros(1), ends)).int(),
            lengths=lengths,
            grid=line_grid(lengths, width),
            owner=owner,
            logit_rows=logit_rows,
            params=_sample_params(self._slots, rows, slot[logit_rows]),
        )

    def _device_batch(
        self,
        rows: PlanRows,
        layout: TokenLayout,
        start: Tensor,
        alive: Tensor,
        position: Tensor,
        longest: int,
    ) -> DeviceBatch:
        slots = self._slots
        size = slots.shape.page_size
        ids = slots.tokens.view(-1)[layout.text + position].long()
        page = slots.pages.view(-1)[layout.page_row + position // size]
        writes = alive if layout.each else alive[layout.row] & (layout.row >= 0)
        if rows.replay is not None:
            writes = writes & (layout.offset >= rows.replay[layout.row])
        table = slots.pages[rows.slot, : -(-longest // size)]
        kv_length = torch.where(alive, start + layout.count, 0)
        plan_attention = self._ops.plan_attention
        batch = DeviceBatch(
            ids=ids,
            positions=position,
            row_of_token=layout.row,
            kv_slots=torch.where(writes, page * size + position % size, -1),
            attn=plan_attention(table, kv_length, layout.cu_q, size) if self._pairs else None,
            logit_rows=layout.logit_rows,
        )
        if not self._entries and self._spec.truncation is None and not self._spec.lookback:
            few = len(ids) - len(layout.logit_rows) <= self.few_rows
            if few or rows.prompts or not self.tails:
                return batch
            lines = torch.zeros_like(kv_length).index_add(0, rows.emit_row, 1 + layout.lengths)
            cu_q = torch.cat((lines.new_zeros(1), lines.cumsum(0))).int()
            return replace(batch, tail=plan_attention(table, kv_length, cu_q, size))
        batch = self._with_requests(batch, rows, layout, start, table)
        if rows.below is None:
            return batch
        late, place = late_batch(batch, self._ops, rows.below, rows.dropped)
        if self._pairs:
            assert late.requests is not None
            attn = plan_attention(table, kv_length, late.requests.cu_q, size)
            late = replace(late, attn=attn)
        return replace(batch, late=late, late_rows=place)

    def _with_requests(
        self,
        batch: DeviceBatch,
        rows: PlanRows,
        layout: TokenLayout,
        start: Tensor,
        table: Tensor,
    ) -> DeviceBatch:
        """The same with what models read that keep state, truncate or look back."""
        slots, lookback = self._slots, self._spec.lookback
        requests = StepRequests(
            cu_q=layout.cu_q,
            starts=start,
            block_table=table,
            blocks=rows.slot,
            floors=slots.floor[rows.slot],
        )
        if not lookback:
            return replace(batch, requests=requests)
        return replace(
            batch,
            requests=requests,
            history=slots.before(layout.slot, batch.positions, lookback),
            ahead=self._ahead(rows.array, lookback),
        )

    def _ahead(self, array: NDArray[np.int32], lookback: int) -> tuple[Tensor, Tensor] | None:
        """Ids and history of as many tokens again behind each chunk that is not its text's last."""
        slots = self._slots
        chunks = array[(array[:, 1] != DECODE) & (array[:, 3] == 0)].astype(np.int64)
        slot, start, count = chunks[:, 0], chunks[:, 1], chunks[:, 2]
        more = np.minimum(count, slots.bound[slot] - start - count)
        if not more.sum():
            return None
        offset = np.arange(more.sum()) - np.repeat(more.cumsum() - more, more)
        place = np.stack((np.repeat(slot, more), np.repeat(start + count, more) + offset))
        at, position = to_device(torch.from_numpy(place), slots.device)
        ids = slots.tokens.view(-1)[at * slots.width + position].long()
        return ids, slots.before(at, position, lookback)

    def _lines(self, rows: PlanRows, layout: TokenLayout, position: Tensor, longest: int) -> Lines:
        return Lines(
            sample=replace(layout.params, position=position),
            grid=layout.grid,
            owner=layout.owner,
            stages=rows.stages,
            text=self._slots.tokens,
            longest=longest,
        )


def _plan_rows(
    array: NDArray[np.int32], key: tuple[int, bytes], slots: SlotTable, cuts: bool
) -> PlanRows:
    """Once for each new set of rows; the only loop over rows in Python.

    ``cuts``: the model takes rows below their floor out of late layers.
    """
    below = rows_below(array, slots.floors) if cuts else np.zeros(len(array), np.int64)
    table = to_device(torch.from_numpy(np.ascontiguousarray(array.T, np.int64)), slots.device)
    emit = np.flatnonzero(array[:, 3])
    emit_row = to_device(torch.from_numpy(emit), slots.device)
    params = slots.params_of(array[emit, 0].tolist())
    logprobs = np.array([p.logprobs for p in params], np.int64)
    decodes = array[:, 1] == DECODE
    scored = np.flatnonzero(logprobs >= 0)
    return PlanRows(
        key=key,
        array=array,
        slot=table[0],
        start=table[1],
        count=table[2],
        decode=table[1] == DECODE,
        limit=slots.limit[table[0]],
        plain=bool(decodes.all()) and len(emit) == len(array),
        tokens=int(np.where(decodes, 1, array[:, 2]).sum()),
        replay=table[4] if array[:, 4].any() else None,
        emit=emit,
        emit_row=emit_row,
        emit_slot=table[0][emit_row],
        stages=gather_stages(params, slots.shape.vocab_size, slots.device),
        filtered=any(map(filters, params)),
        greedy=all(map(is_greedy, params)),
        scored=scored,
        scored_row=to_device(torch.from_numpy(scored), slots.device),
        wanted=logprobs[scored],
        prompts=tuple(_prompts(array, slots)),
        below=to_device(torch.from_numpy(below), slots.device) if below.any() else None,
        dropped=int(below.sum()),
    )


def filters(params: RowParams) -> bool:
    """It has a top_k, top_p or min_p."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def is_greedy(params: RowParams) -> bool:
    """It draws the best id."""
    return params.temperature < COLD


def emitting_rows(inputs: Tensor, slots: SlotTable, *, more: int, filtered: bool) -> PlanRows:
    """Rows that all emit and ask for nothing but their parameters in the slot table.

    inputs int64[3, n]: slot, start and count of each, as in a plan; ``more``: token rows for
    prompts beside the one of each row, 0 if all decode.
    """
    slot, start, count = inputs.unbind(0)
    every = np.arange(len(slot))
    array = np.zeros((len(slot), 5), np.int32)
    array[:, 1], array[:, 3] = DECODE, 1
    return PlanRows(
        key=(slots.version, b""),
        array=array,
        slot=slot,
        start=start,
        count=count,
        decode=start == DECODE,
        limit=slots.limit[slot],
        plain=not more,
        tokens=len(slot) + more,
        replay=None,
        emit=every,
        emit_row=torch.arange(len(slot), device=slot.device),
        emit_slot=slot,
        stages=Stages(),
        filtered=filtered,
        greedy=False,
        scored=every[:0],
        scored_row=slot[:0],
        wanted=every[:0],
        prompts=(),
        below=None,
        dropped=0,
    )


def _prompts(
    array: NDArray[np.int32], slots: SlotTable
) -> Iterator[tuple[int, int, int, int, int]]:
    for row in np.flatnonzero(array[:, 1] != DECODE).tolist():
        slot, start, count, _, _ = array[row].tolist()
        (params,) = slots.params_of([slot])
        scored = min(count, params.prompt_len - 1 - start)  # row j predicts token start + j + 1
        if params.prompt_logprobs >= 0 and scored > 0:
            yield row, slot, start, scored, params.prompt_logprobs


def _sample_params(slots: SlotTable, rows: PlanRows, slot: Tensor) -> SampleRows:
    """Each line's parameters; positions are filled in for each step."""
    return SampleRows(
        slot=slot,
        position=slot,
        seed=slots.seed[slot],
        temperature=slots.temperature[slot],
        top_k=slots.top_k[slot],
        top_p=slots.top_p[slot],
        min_p=slots.min_p[slot],
        filtered=rows.filtered,
        greedy=rows.greedy,
    )
