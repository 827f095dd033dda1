"""Steps that only decode, as one graph each: where the device has graphs, launches are their time.

Where you are: beside ``runner``, which asks :meth:`RecordedSteps.run` first and goes on launch by
launch where that has no graph for a step: prompts, masks, penalties, logprobs, images, models that
keep state or truncate.

A graph holds everything from the slot table back to the slot table, drafts included. Its inputs are
the slots of its rows; text, pages, lengths and parameters lie in the table. It has a tier of rows:
those behind the step's own are the table's last slot, a text that has ended, which writes nowhere.
The first steps of a kind run launch by launch: recording takes as long as some dozen steps, and
kernels have to be compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from deepinfer.errors import PluginError
from deepinfer.sampling.verify import EqualityVerifier
from deepinfer.worker.batch import decoding_rows
from deepinfer.worker.drafting import HiddenTaps
from deepinfer.worker.output import pack

if TYPE_CHECKING:
    from deepinfer.api.plan import BatchPlan
    from deepinfer.api.speculative import Drafts
    from deepinfer.worker.batch import BatchBuilder, PlanRows, StepBatch
    from deepinfer.worker.runner import Rig

log = logging.getLogger(__name__)

MOST_ROWS = 512
"""Token rows of the largest graph: beyond, launches hide behind the work."""
LOGITS_BYTES = 128 << 20
"""Logits of the largest graph."""
SEEN, WISHED = 8, 64
"""Steps of a kind before it is recorded: if no other graph does, and if a larger one did."""
SMALL = 128
"""Lines of a graph that any smaller step may run in; else it has at most twice the step's own."""
LEAST_LONGEST = 1024
"""Shorter texts have the graphs of texts so long: what they would save is nothing."""


class Outcome(NamedTuple):
    """What a step's second half leaves: tokens int64[R, w], of which counts int64[R] are text,
    faults uint8[R]; drafts of the next step, and how many ran in this one, int64[R]; ``packed``:
    all whole numbers of these, see ``output.pack``.
    """

    tokens: Tensor
    counts: Tensor
    faults: Tensor
    drafts: Drafts | None
    verified: Tensor | None
    packed: Tensor | None = None

    def first(self, rows: int) -> Outcome:
        """Of the first rows."""
        drafts = self.drafts
        if drafts is not None:
            ids, *rest = (None if part is None else part[:rows] for part in drafts)
            assert ids is not None
            drafts = type(drafts)(ids, *rest)
        verified = None if self.verified is None else self.verified[:rows]
        packed = None if self.packed is None else self.packed[:rows]
        return Outcome(
            self.tokens[:rows], self.counts[:rows], self.faults[:rows], drafts, verified, packed
        )


class _Kind(NamedTuple):
    """What a graph depends on beside its inputs. ``longest``: no text is longer; ``filtered``: who
    samples may have a top_k, top_p or min_p.
    """

    rows: int
    draft_rows: int
    longest: int
    filtered: bool
    propose: bool

    @property
    def lines(self) -> int:
        """Rows of logits, and token rows."""
        return self.rows + self.draft_rows

    def serves(self, kind: _Kind) -> bool:
        """Whether a step of that kind may run in this graph too."""
        if (self.filtered, self.propose) != (kind.filtered, kind.propose):
            return False
        fits = self.rows >= kind.rows and self.draft_rows >= kind.draft_rows
        drafts = kind.draft_rows > 0 or kind.propose or not self.draft_rows
        near = self.lines <= max(2 * kind.lines, SMALL)
        return fits and drafts and near and self.longest >= kind.longest


@dataclass(slots=True)
class _Stage:
    """A graph's standing inputs: slot int64[rows], and the tokens that each row may run. ``ran``:
    steps in it; ``wished``: steps that wanted it before it was recorded.
    """

    slot: Tensor
    count: Tensor
    holds: tuple[int, bytes] | None = None
    replay: Callable[[], Outcome] | None = None
    ran: int = 0
    wished: int = 0


Body = Callable[["PlanRows", "StepBatch", HiddenTaps | None, bool], Outcome]
"""Of a step on the device: run the model, draw, move the table on, draft."""


class RecordedSteps:
    """Graphs of one runner's steps.

    Args:
        rig: the runner's.
        batches: builds their batches.
        body: what a step does with its batch.
    """

    def __init__(self, rig: Rig, batches: BatchBuilder, body: Body) -> None:
        self._rig, self._batches, self._body = rig, batches, body
        self._record = getattr(rig.device, "record", None)
        self._drafting = getattr(rig.drafter, "recorded", None)
        if not rig.drafter.draft_len:
            self._drafting = lambda tokens, propose: nullcontext()
        spec = rig.spec
        plain = all(group.entry is None for group in spec.groups)
        plain = plain and spec.truncation is None and not spec.lookback and rig.seeing is None
        if not plain or self._drafting is None or not isinstance(rig.verifier, EqualityVerifier):
            self._record = None
        self._stages: dict[_Kind, _Stage] = {}

    @property
    def warm(self) -> int:
        """Steps after which one of the same kind takes what it will take from there on."""
        return 0 if self._record is None else SEEN + 1

    def release(self) -> None:
        """Give back all graphs, and record none from here on: memory is short."""
        self._stages.clear()
        self._record = None

    def run(self, plan: BatchPlan) -> tuple[PlanRows, Outcome] | None:
        """A plan that the slot table has seen; None: run it launch by launch."""
        if self._record is None or plan.constrained or plan.keep >= 0:
            return None
        rows = self._batches.rows(plan)
        if not rows.plain or rows.stages.any or len(rows.scored):
            return None
        kind = self._kind(plan, rows)
        if kind is None:
            return None
        stage = self._stages.get(kind)
        if stage is None:
            slot, count = rows.slot.new_empty((2, kind.rows)).unbind(0)
            stage = self._stages[kind] = _Stage(slot, count)
        if stage.replay is None:
            stage.wished += 1
            if stage.wished < WISHED:
                kind = self._larger(kind)
                stage = self._stages[kind]
        self._fill(stage, rows)
        assert self._drafting is not None
        ready = stage.ran >= SEEN or (stage.ran and stage.wished >= WISHED)
        if stage.replay is None and ready and not self._recorded(kind, stage):
            return None
        with self._drafting(kind.lines, kind.propose):
            outcome = self._step(kind, stage) if stage.replay is None else stage.replay()
        stage.ran += 1
        return rows, outcome.first(len(rows.array))

    def _larger(self, kind: _Kind) -> _Kind:
        """The smallest that is recorded and serves, else the same."""
        recorded = (k for k, stage in self._stages.items() if stage.replay is not None)
        return min((k for k in recorded if k.serves(kind)), key=lambda k: k.lines, default=kind)

    def _kind(self, plan: BatchPlan, rows: PlanRows) -> _Kind | None:
        """None: too large."""
        shape = self._rig.slots.shape
        count = min(tier(len(rows.array)), max(shape.slots, len(rows.array)))
        drafts = draft_tier(count, plan.draft_rows)
        longest = max(self._batches.longest(rows), LEAST_LONGEST)
        pages = 1 << (-(-longest // shape.page_size) - 1).bit_length()
        longest = min(pages, self._rig.slots.pages.shape[1]) * shape.page_size
        filtered = rows.filtered and not rows.greedy
        kind = _Kind(count, drafts, longest, filtered, plan.propose)
        large = kind.lines > MOST_ROWS or kind.lines * shape.vocab_size * 4 > LOGITS_BYTES
        return None if large else kind

    def _fill(self, stage: _Stage, rows: PlanRows) -> None:
        if stage.holds == rows.key:
            return
        mine = len(rows.array)
        stage.slot[:mine], stage.count[:mine] = rows.slot, rows.count
        stage.slot[mine:], stage.count[mine:] = self._rig.slots.nobody, 1
        stage.holds = rows.key

    def _recorded(self, kind: _Kind, stage: _Stage) -> bool:
        """False where it cannot be; nothing has run then."""
        assert self._record is not None and self._drafting is not None
        try:
            with self._drafting(0, kind.propose):
                stage.replay = self._record(lambda: self._step(kind, stage))
        except (RuntimeError, PluginError) as why:  # memory is short, or an op waits for the host
            said = (str(why).splitlines() or [""])[0]
            log.warning("Steps are launched kernel by kernel: no graph of them. %s", said)
            self.release()
            return False
        return True

    def _step(self, kind: _Kind, stage: _Stage) -> Outcome:
        rig = self._rig
        rows = decoding_rows(stage.slot, stage.count, rig.slots, filtered=kind.filtered)
        with rig.slots.no_longer_than(kind.longest):
            step = self._batches.standing(rows, kind.draft_rows, kind.longest)
            taps = None
            if rig.drafter.taps:
                taps = HiddenTaps(rig.drafter.taps, step.batch, step.layout.slot)
            done = self._body(rows, step, taps, kind.propose)
        told = () if done.drafts is None else (*done.drafts, done.verified)
        return done._replace(packed=pack(done.tokens, done.counts, done.faults, *told))


def tier(rows: int) -> int:
    """The rows of a graph for so many: few graphs, since each costs tens of milliseconds once, and
    where a row costs something few rows too many.
    """
    if rows <= 32:
        return 1 << (rows - 1).bit_length()
    step = 16 if rows <= 64 else 32
    return -(-rows // step) * step


def draft_tier(rows: int, drafts: int) -> int:
    """The draft rows of a graph of ``rows`` rows for so many: what a planner wants changes from
    step to step.
    """
    return -(-drafts // rows) * rows
