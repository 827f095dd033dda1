"""The hands: one :class:`ModelRunner` runs the plans of one device.

Where you are: the sixth stop of the reading tour. ``forward`` turns a plan into token rows and runs
the model; ``sample`` takes the masks, draws, and moves the slot table on. The brain calls them in
the order forward N, sample N, forward N+1, …, one step ahead of what it has seen: nothing here
waits for the host, and nothing that shapes a step is decided here.

Beside it: ``batch`` (plan to tensors), ``slots`` (where requests stand), ``sampling.pipeline``
(masks and penalties), ``sampling.verify`` (drafts), ``output`` (the way back to the host).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from deepinfer.api.plan import Fault
from deepinfer.api.speculative import Drafts
from deepinfer.sampling.pipeline import LogitsPipeline
from deepinfer.sampling.transfer import to_device
from deepinfer.worker.batch import BatchBuilder, StepBatch
from deepinfer.worker.drafting import HiddenTaps
from deepinfer.worker.images import SlotImages
from deepinfer.worker.output import PromptScores, Scores, StepFuture, StepResult
from deepinfer.worker.recorded import Outcome, PlainRows, RecordedSteps
from deepinfer.worker.shortage import Shortage

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from deepinfer.api.backend import Device, OutputFuture
    from deepinfer.api.kv import KVSpec
    from deepinfer.api.model import Model, SeeingModel
    from deepinfer.api.plan import BatchPlan, RowInputs
    from deepinfer.api.speculative import Drafter, Verifier
    from deepinfer.ops.table import OpSet
    from deepinfer.worker.batch import PlanRows
    from deepinfer.worker.kvpool import KVPool
    from deepinfer.worker.slots import SlotTable

_TILE_BYTES = 64 << 20  # logits of prompt tokens at a time


class Recorder(Protocol):
    """Watches steps, as the determinism checker does. Called on the runner's thread."""

    def begin_step(self, plan: BatchPlan, step: StepBatch) -> None:
        """Before the model runs; the token rows' slots are ``step.layout.slot``."""
        ...

    def end_step(self) -> None:
        """After the draw."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """What a runner is made of.

    ``seeing``: the model again if it takes images; ``image_token``: the id that is never drawn
    then, else −1. ``weight_bytes``: of model and draft.
    """

    model: Model
    ops: OpSet
    spec: KVSpec
    kv: KVPool
    device: Device
    slots: SlotTable
    drafter: Drafter
    verifier: Verifier
    seeing: SeeingModel | None = None
    image_token: int = -1
    weight_bytes: int = 0


@dataclass(slots=True)
class _OpenStep:
    """A step between its halves. ``lines``: the hidden rows that ``logits`` [m, V] are of; what the
    stages of the draw have changed is ``spoilt``.
    """

    step: StepBatch
    lines: Tensor | None
    logits: Tensor
    prompt: tuple[PromptScores, ...]
    taps: HiddenTaps | None
    seconds: float
    keep: int
    propose: bool
    verified: Tensor | None = None
    spoilt: bool = False


class _RanStep(NamedTuple):
    """A step that ran whole in its first half."""

    rows: PlainRows
    outcome: Outcome
    seconds: float


class ModelRunner:
    """Runs plans in order. One thread at a time may call it, inside ``inference_mode``.

    Args:
        rig: model, ops, memory and the rooms around the draw.

    Attributes:
        seconds: time in ``forward`` and in ``sample``, and the number of steps, so far.
    """

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._batches = BatchBuilder(rig.slots, rig.ops, rig.drafter, rig.spec)
        self._pipeline = LogitsPipeline(rig.ops, rig.image_token)
        see = None if rig.seeing is None else rig.seeing.see
        self._images = None if see is None else SlotImages(see, rig.slots.device)
        self._open: dict[int, _OpenStep] = {}
        self._recorder: Recorder | None = None
        self._recorded = RecordedSteps(rig, self._batches, self._whole)
        self._shortage = Shortage(rig.device, rig.spec, self._recorded.release)
        self._ran: dict[int, _RanStep] = {}
        self._moved = False
        self.seconds = {"forward": 0.0, "sample": 0.0, "steps": 0.0}

    @property
    def slots(self) -> SlotTable:
        """Where requests stand; only the runner's thread may touch it."""
        return self._rig.slots

    @property
    def warm_steps(self) -> int:
        """Steps before one of the same kind takes what it will take from there on."""
        return max(2, self._recorded.warm)

    @property
    def graph_rows(self) -> int:
        """Token rows of the largest step that runs as one graph; 0: none does."""
        return self._recorded.most_rows

    def measuring(self) -> AbstractContextManager[None]:
        """Within, no step runs in a graph made for larger ones."""
        return self._recorded.exactly()

    def ops(self) -> OpSet:
        """What the model was built from: who puts wrappers in sees every call of every step."""
        return self._rig.ops

    def trace(self, recorder: Recorder | None) -> None:
        """Let a recorder watch every step from here on; None ends it. It sees every row run."""
        self._recorder = recorder
        self._batches.tails = recorder is None

    def close(self) -> None:
        """Forget steps between their halves. No step may follow."""
        self._open.clear()
        self._ran.clear()
        self._recorded.release()

    def forward(self, plan: BatchPlan) -> None:
        """First half: run the plan's rows. It needs no token from the host."""
        with self._shortage.told():
            self._forward(plan)

    def _forward(self, plan: BatchPlan) -> None:
        began = time.perf_counter()
        rig = self._rig
        rig.kv.copy_blocks(plan.saves)
        rig.kv.copy_blocks(plan.restores)
        rig.slots.apply(plan)
        done = self._at_once(plan)
        if done is not None:
            took = time.perf_counter() - began
            self.seconds["forward"] += took
            self._ran[plan.step] = _RanStep(*done, took)
            return
        step = self._with_images(plan, self._batches.build(plan))
        if self._recorder is not None:
            self._recorder.begin_step(plan, step)
        taps = None
        if rig.drafter.taps:
            taps = HiddenTaps(rig.drafter.taps, step.batch, step.layout.slot)
        lines, prompt = self._compute(plan, step, taps)
        logits = self._logits(lines)
        took = time.perf_counter() - began
        self.seconds["forward"] += took
        self._open[plan.step] = _OpenStep(
            step, lines, logits, prompt, taps, took, plan.keep, plan.propose
        )

    def sample(self, step: int, inputs: RowInputs | None) -> OutputFuture:
        """Second half: masks, draw, acceptance, commit, drafts of the next step.

        Of a step that ran as one graph it is done already.
        """
        with self._shortage.told():
            return self._sample(step, inputs)

    def _sample(self, step: int, inputs: RowInputs | None) -> OutputFuture:
        began = time.perf_counter()
        if step in self._ran:
            return self._answer(step, self._ran.pop(step), began)
        work, rig = self._open.pop(step), self._rig
        batch = work.step
        raw, tokens, counts, faults = self._shortage.again(lambda: self._drawn(work, inputs))
        rig.slots.commit(batch.rows.emit_slot, batch.length, tokens, counts)
        drafts = self._draft(work, counts) if rig.drafter.draft_len else None
        scores = self._score(batch.rows, raw, tokens)
        if self._recorder is not None:
            self._recorder.end_step()
        took = time.perf_counter() - began
        self.seconds["sample"] += took
        self.seconds["steps"] += 1
        outcome = Outcome(tokens, counts, faults, drafts, work.verified)
        return self._future(step, batch.rows, outcome, scores, work.prompt, work.seconds + took)

    def _at_once(self, plan: BatchPlan) -> tuple[PlainRows, Outcome] | None:
        """The whole step, draw and all, if it is one of those that run as a graph."""
        if self._recorder is not None:
            return None
        self._moved = False
        try:
            return self._recorded.run(plan)
        except torch.OutOfMemoryError as why:
            if self._moved:
                raise
            self._shortage.note(why)
        self._shortage.release()  # outside, as there; then launch by launch
        return None

    def _whole(
        self, rows: PlanRows, step: StepBatch, taps: HiddenTaps | None, propose: bool
    ) -> Outcome:
        """Both halves of a step without masks, scores and images."""
        rig = self._rig
        hidden = rig.model.forward(step.batch, rig.kv, taps)
        lines = _lines(step, hidden)
        work = _OpenStep(step, lines, rig.model.logits(lines), (), taps, 0.0, -1, propose)
        tokens, counts, faults = self._draw(work, None)
        self._moved = True
        rig.slots.commit(rows.emit_slot, step.length, tokens, counts)
        drafts = self._draft(work, counts) if rig.drafter.draft_len else None
        return Outcome(tokens, counts, faults, drafts, work.verified)

    def _answer(self, step: int, ran: _RanStep, began: float) -> OutputFuture:
        took = time.perf_counter() - began
        self.seconds["sample"] += took
        self.seconds["steps"] += 1
        return self._future(step, ran.rows, ran.outcome, None, (), ran.seconds + took)

    def _future(
        self,
        step: int,
        rows: PlanRows | PlainRows,
        outcome: Outcome,
        scores: Scores | None,
        prompt: tuple[PromptScores, ...],
        seconds: float,
    ) -> OutputFuture:
        result = StepResult(
            step=step,
            rows=len(rows.array),
            draft_len=self._rig.slots.shape.draft_len,
            emit=rows.emit,
            tokens=outcome.tokens,
            counts=outcome.counts,
            faults=outcome.faults,
            drafts=outcome.drafts,
            verified=outcome.verified,
            scored=rows.scored,
            wanted=rows.wanted,
            scores=scores,
            prompt=prompt,
            seconds=seconds,
            packed=outcome.packed,
            warming=outcome.warming,
        )
        return StepFuture(self._rig.device, result)

    def _with_images(self, plan: BatchPlan, step: StepBatch) -> StepBatch:
        if self._images is None:
            assert not any(admit.images for admit in plan.admits), "the brain refuses images"
            return step
        self._images.admit(plan.admits)
        images = self._images.of_step(plan.rows.array, step.layout.cu_q)
        return step if images is None else replace(step, batch=replace(step.batch, images=images))

    def _compute(
        self, plan: BatchPlan, step: StepBatch, taps: HiddenTaps | None
    ) -> tuple[Tensor | None, tuple[PromptScores, ...]]:
        """Hidden rows of the step's lines, None if there are none; scores of prompt tokens."""
        if not len(step.batch.ids):
            return None, ()
        hidden = self._hidden(plan, step, taps)
        scores = self._shortage.again(lambda: self._score_prompts(step, hidden))
        return _lines(step, hidden) if len(step.batch.logit_rows) else None, scores

    def _hidden(self, plan: BatchPlan, step: StepBatch, taps: HiddenTaps | None) -> Tensor:
        def part(half: BatchPlan) -> Tensor:
            step = self._batches.build(half)
            return self._hidden(half, replace(step, batch=replace(step.batch, tail=None)), None)

        batch, rig = step.batch, self._rig
        whole = taps is not None or batch.late is not None or batch.images is not None
        return self._shortage.hidden(
            plan, lambda: rig.model.forward(batch, rig.kv, taps), None if whole else part
        )

    def _logits(self, lines: Tensor | None) -> Tensor:
        """float32[m, V] of hidden rows. Ops never see zero rows."""
        if lines is None:
            slots = self._rig.slots
            return torch.empty((0, slots.shape.vocab_size), device=slots.device)
        return self._shortage.again(lambda: self._rig.model.logits(lines))

    def _drawn(
        self, work: _OpenStep, inputs: RowInputs | None
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        """Raw logits that somebody wants to see, and the draw: tokens, counts, faults.

        The stages change logits in place, so a second try makes them anew.
        """
        if work.spoilt:
            del work.logits
            work.logits = self._logits(work.lines)
        work.spoilt = True
        return self._raw_lines(work, inputs), *self._draw(work, inputs)

    def _draw(self, work: _OpenStep, inputs: RowInputs | None) -> tuple[Tensor, Tensor, Tensor]:
        """tokens int64[R, w], counts int64[R], faults uint8[R]."""
        batch, logits, rig = work.step, work.logits, self._rig
        if not len(logits):
            counts = batch.length
            return batch.layout.grid, counts, counts.to(torch.uint8)
        faults = self._pipeline.apply(logits, batch.lines, *self._masks(batch, inputs))
        ran = batch.layout.lengths
        tokens, counts = rig.verifier.verify(logits, batch.lines.sample, batch.drafts, ran)
        if work.keep >= 0 and batch.drafts.shape[1]:
            ran = rig.drafter.allot(batch.rows.emit_slot, ran, work.keep)
            counts = torch.minimum(counts, 1 + ran)
        work.verified = ran
        return tokens, *_settle(batch, counts, faults)

    def _masks(
        self, batch: StepBatch, inputs: RowInputs | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The host's masks and the line of each, on the device; −1 for lines that do not exist."""
        if inputs is None or inputs.bitmask is None or not len(inputs.index):
            return None, None
        emit_of_row = np.full(len(batch.rows.array) + 1, -1, np.int64)
        emit_of_row[batch.rows.emit] = np.arange(len(batch.rows.emit))
        row, j = np.divmod(inputs.index.astype(np.int64), 1 + self._rig.slots.shape.draft_len)
        emit, width = emit_of_row[row], batch.layout.grid.shape[1]
        real = torch.from_numpy((emit >= 0) & (j < width))
        at = torch.from_numpy(np.stack((np.maximum(emit, 0), np.minimum(j, width - 1))))
        device = self._rig.slots.device
        at, real = to_device(at, device), to_device(real, device)
        bitmask = to_device(torch.from_numpy(np.array(inputs.bitmask, np.int32)), device)
        return bitmask, torch.where(real, batch.layout.grid[at[0], at[1]], -1)

    def _draft(self, work: _OpenStep, counts: Tensor) -> Drafts | None:
        """Tell the drafter what stood, and put its proposals behind the texts; None: no draft ran
        and none is there for the next step.
        """
        rig, rows = self._rig, work.step.rows
        rig.drafter.commit(work.taps, _kept(work.step, counts))
        if not work.propose:
            rig.slots.no_drafts(rows.emit_slot)
            if not work.step.drafts.shape[1]:
                return None
            none = counts.new_zeros((len(counts), rig.drafter.draft_len))
            return Drafts(none, None, torch.zeros_like(counts))
        rig.slots.greedy, rig.slots.filtered = rows.greedy, rows.filtered
        drafts = rig.drafter.propose(rig.slots.anchors(rows.emit_slot), rows.emit_slot)
        rig.slots.set_drafts(rows.emit_slot, drafts.ids, drafts.drafted)
        return drafts

    def _raw_lines(self, work: _OpenStep, inputs: RowInputs | None) -> Tensor | None:
        """The model's own logits of lines whose logprobs somebody wants, before any stage."""
        rows = work.step.rows
        if not len(rows.scored):
            return None
        changed = inputs is not None or rows.stages.any or self._rig.image_token >= 0
        if not changed and len(rows.scored) == len(work.logits):
            return work.logits
        lines = work.step.layout.grid[rows.scored_row]
        return work.logits[lines.flatten().clamp(min=0)]

    def _score(self, rows: PlanRows, raw: Tensor | None, tokens: Tensor) -> Scores | None:
        """Logprobs of what was drawn, in the model's raw distribution."""
        if raw is None:
            return None
        chosen = tokens[rows.scored_row].flatten()
        return self._logprobs(raw, int(rows.wanted.max()), chosen)

    def _logprobs(self, logits: Tensor, k: int, chosen: Tensor) -> Scores:
        ops, most = self._rig.ops, min(k, logits.shape[1])
        return Scores(chosen, *self._shortage.again(lambda: ops.logprobs(logits, most, chosen)))

    def _score_prompts(self, step: StepBatch, hidden: Tensor) -> tuple[PromptScores, ...]:
        """Logprobs of the prompt tokens that this step's chunks predict."""
        found = []
        for row, slot, start, count, wanted in step.rows.prompts:
            place = step.layout.cu_q[row] + torch.arange(count, device=hidden.device)
            target = self._rig.slots.tokens[slot, start + 1 : start + 1 + count].long()
            scores = self._tiled(hidden, place, wanted, target)
            found.append(PromptScores(row=row, position=start + 1, wanted=wanted, scores=scores))
        return tuple(found)

    def _tiled(self, hidden: Tensor, place: Tensor, k: int, target: Tensor) -> Scores:
        """Logits of many rows would outgrow memory: a tile of rows at a time."""
        tile = max(1, _TILE_BYTES // (4 * self._rig.slots.shape.vocab_size))
        parts = [
            self._logprobs(self._rig.model.logits(hidden[rows]), k, ids).tensors()
            for rows, ids in zip(torch.split(place, tile), torch.split(target, tile), strict=True)
        ]
        return Scores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _lines(step: StepBatch, hidden: Tensor) -> Tensor:
    """Rows [m, H] of the step's lines, of hidden rows of all tokens or of these."""
    lines = step.batch.logit_rows
    if step.layout.each or (step.batch.tail is not None and len(hidden) == len(lines)):
        return hidden
    return hidden[lines]


def _kept(batch: StepBatch, counts: Tensor) -> Tensor:
    """bool[T]: which token rows are text now; counts int64[R]: tokens of each emitting row."""
    rows, layout = batch.rows, batch.layout
    if layout.each:
        return counts > 0
    kept = layout.count.clone()
    kept[rows.emit_row] = torch.where(rows.decode[rows.emit_row], counts, kept[rows.emit_row])
    return (layout.row >= 0) & (layout.offset < kept[layout.row])


def _settle(batch: StepBatch, counts: Tensor, faults: Tensor) -> tuple[Tensor, Tensor]:
    """Dead rows emit nothing; a broken line ends what its row emits before it.

    So a row with drafts emits what it would have without them, and meets the fault in a step in
    which nothing comes before it.
    """
    grid = batch.layout.grid
    if grid.shape[1] == 1:  # no drafts: a line for each row
        sound = batch.alive & (faults == Fault.NONE)
        return torch.where(sound, counts, 0), faults * batch.alive
    broken = torch.where(grid >= 0, faults[grid.clamp(min=0)], Fault.NONE)
    whole = (broken == Fault.NONE).long().cumprod(1).sum(1)
    counts = torch.where(batch.alive, torch.minimum(counts, whole), 0)
    return counts, torch.where(batch.alive, broken[:, 0], Fault.NONE).to(torch.uint8)
