"""Small steps as one graph each: where the device has graphs, launches are their time.

Where you are: beside ``runner``, which asks :meth:`RecordedSteps.run` first and goes on launch by
launch where that has no graph for a step: long prompts, masks, penalties, logprobs, images, models
that keep state or truncate.

A graph holds everything from the slot table back to the slot table, drafts included. Its inputs are
the slots of its rows and what of their prompts runs; text, pages, lengths and parameters lie in the
table. It has a tier of rows: those behind the step's own are the table's last slot, a text that has
ended, which writes nowhere. The first step of a kind runs launch by launch: kernels may have to be
compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer.api.plan import DECODE
from deepinfer.errors import PluginError
from deepinfer.sampling.pipeline import uses_stage
from deepinfer.sampling.transfer import to_device
from deepinfer.sampling.verify import EqualityVerifier
from deepinfer.worker.batch import emitting_rows, filters, is_greedy
from deepinfer.worker.drafting import HiddenTaps
from deepinfer.worker.output import pack

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from deepinfer.api.plan import BatchPlan
    from deepinfer.api.speculative import Drafts
    from deepinfer.worker.batch import BatchBuilder, PlanRows, StepBatch
    from deepinfer.worker.runner import Rig

log = logging.getLogger(__name__)

MOST_ROWS, MOST_ROWS_LIGHT = 512, 1536
"""Token rows of the largest graph: beyond, launches hide behind the work."""
LIGHT = 4 << 30
"""Bytes of weights up to which they do not hide behind the work of fewer than a thousand rows."""
LOGITS_BYTES = 128 << 20
"""Logits of the largest graph."""
WISHED = 1 << 14
"""Tokens too many that steps of a kind run in larger graphs before it has its own, which costs as
much as some dozen steps.
"""
SMALL, SMALL_HEAVY = 256, 64
"""Tokens of a graph that any smaller step may run in; else it has at most twice the step's own, of
a heavy model a quarter more.
"""
HEAVY = 8 << 30
"""Bytes of weights from which launches hide behind a step's work: a step that has no graph of its
own runs launch by launch sooner than in one with many rows too many, and one must come often before
it is worth a graph.
"""
OFTEN = 8
"""Steps of a kind before a heavy model's is recorded."""
MORE = (16, 64, 256, 512, 1024)
"""Tokens of prompts that graphs have room for: steps in which prompts end differ in all they have,
so they share few graphs.
"""
MOST_GRAPHS = 128
"""Each takes some megabytes of the device; kinds that come later are launched."""
LEAST_LONGEST = 1024
"""Shorter texts have the graphs of texts so long: what they would save is nothing."""


class Outcome(NamedTuple):
    """What a step's second half leaves: tokens int64[R, w], of which counts int64[R] are text,
    faults uint8[R]; drafts of the next step, and how many ran in this one, int64[R]; ``packed``:
    all whole numbers of these, see ``output.pack``; ``warming``: later steps take less time.
    """

    tokens: Tensor
    counts: Tensor
    faults: Tensor
    drafts: Drafts | None
    verified: Tensor | None
    packed: Tensor | None = None
    warming: bool = False

    def first(self, rows: int) -> Outcome:
        """Of the first rows."""
        drafts = self.drafts
        if drafts is not None:
            ids, *rest = (None if part is None else part[:rows] for part in drafts)
            assert ids is not None
            drafts = type(drafts)(ids, *rest)
        verified = None if self.verified is None else self.verified[:rows]
        packed = None if self.packed is None else self.packed[:rows]
        return self._replace(
            tokens=self.tokens[:rows],
            counts=self.counts[:rows],
            faults=self.faults[:rows],
            drafts=drafts,
            verified=verified,
            packed=packed,
        )


class _Kind(NamedTuple):
    """What a graph depends on beside its inputs. ``more``: tokens of prompts beside the one of
    each row, 0 where all rows decode; ``longest``: no text is longer; ``filtered``: who samples may
    have a top_k, top_p or min_p.
    """

    rows: int
    draft_rows: int
    more: int
    longest: int
    filtered: bool
    propose: bool

    @property
    def lines(self) -> int:
        """Rows of logits."""
        return self.rows + self.draft_rows

    @property
    def tokens(self) -> int:
        """Token rows."""
        return self.lines + self.more

    def serves(self, kind: _Kind, heavy: bool = False) -> bool:
        """Whether a step of that kind may run in this graph too; ``heavy``: each row costs."""
        if (self.filtered, self.propose) != (kind.filtered, kind.propose):
            return False
        fits = self.rows >= kind.rows and self.draft_rows >= kind.draft_rows
        drafts = kind.draft_rows > 0 or kind.propose or not self.draft_rows
        prompts = self.more >= kind.more and (kind.more > 0 or not self.more)
        most, small = (kind.tokens * 5 // 4, SMALL_HEAVY) if heavy else (2 * kind.tokens, SMALL)
        near = self.tokens <= max(most, small)
        return fits and drafts and prompts and near and self.longest >= kind.longest


@dataclass(frozen=True, slots=True)
class PlainRows:
    """Rows that all emit and ask for nothing but a draw, as the host knows them: what an answer
    needs of :class:`~deepinfer.worker.batch.PlanRows`. ``more``, ``filtered``: as in a kind.
    """

    key: tuple[int, bytes]
    array: NDArray[np.int32]
    emit: NDArray[np.int64]
    scored: NDArray[np.int64]
    wanted: NDArray[np.int64]
    more: int
    filtered: bool


@dataclass(slots=True)
class _Stage:
    """A graph's standing inputs int64[3, rows], of each row: slot, start, tokens that may run.
    ``ran``: steps that were launched in it; ``wished``: tokens too many of steps that ran in a
    larger one instead.
    """

    inputs: Tensor
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
        spec = rig.spec
        plain = all(group.entry is None for group in spec.groups)
        plain = plain and spec.truncation is None and not spec.lookback and rig.seeing is None
        if not plain or self._drafting is None or not isinstance(rig.verifier, EqualityVerifier):
            self._record = None
        self._stages: dict[_Kind, _Stage] = {}
        self._larger: dict[_Kind, _Kind | None] = {}  # which graph serves, of those there are
        self._heavy = rig.weight_bytes >= HEAVY
        self._most = MOST_ROWS_LIGHT if rig.weight_bytes <= LIGHT else MOST_ROWS
        self._exact = False  # steps of each kind have a graph of their own
        self._last: tuple[tuple[int, bytes], PlainRows | None] = ((-1, b""), None)

    @property
    def warm(self) -> int:
        """Steps after which one of the same kind takes what it will take from there on."""
        return 0 if self._record is None else 2

    @property
    def most_rows(self) -> int:
        """Token rows of the largest graph; 0 where there are none."""
        return 0 if self._record is None else self._most

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Within, no step runs in a larger graph: what it takes is what its kind comes to."""
        self._exact = True
        try:
            yield
        finally:
            self._exact = False
            # Nobody verifies without drafting again, but for the end of a text.
            kept = {k: s for k, s in self._stages.items() if k.propose or not k.draft_rows}
            self._stages = kept
            self._larger.clear()

    def release(self) -> None:
        """Give back all graphs, and record none from here on: memory is short."""
        self._stages.clear()
        self._larger.clear()
        self._record = None
        getattr(self._rig.drafter, "release", lambda: None)()

    def run(self, plan: BatchPlan) -> tuple[PlainRows, Outcome] | None:
        """A plan that the slot table has seen; None: run it launch by launch."""
        if self._record is None or plan.constrained or plan.keep >= 0:
            return None
        rows = self._plain(plan)
        kind = None if rows is None else self._kind(plan, rows)
        if rows is None or kind is None:
            return None
        kind, stage = self._served(kind)
        self._fill(stage, rows)
        assert self._drafting is not None
        warming = stage.replay is None and self._has_room()
        often = OFTEN if self._heavy and not self._exact else 1
        if warming and stage.ran >= often and not self._recorded(kind, stage):
            return None
        with self._drafting(kind.tokens, kind.propose):
            outcome = self._step(kind, stage) if stage.replay is None else stage.replay()
        stage.ran += 1
        return rows, outcome.first(len(rows.array))._replace(warming=warming)

    def _served(self, kind: _Kind) -> tuple[_Kind, _Stage]:
        """What a step of that kind runs in."""
        stage = self._stage(kind)
        wanted = self._exact or (stage.wished >= WISHED and self._has_room())
        if stage.replay is not None or wanted:
            return kind, stage
        if kind not in self._larger:
            larger = [k for k in self._graphs() if k.serves(kind, self._heavy)]
            self._larger[kind] = min(larger, key=lambda k: k.tokens, default=None)
        least = self._larger[kind]
        if least is None:
            kind = self._roomy(kind) if self._has_room() else kind
            return kind, self._stage(kind)
        stage.wished += max(least.tokens - kind.tokens, 1)
        return least, self._stages[least]

    def _stage(self, kind: _Kind) -> _Stage:
        if kind not in self._stages:
            inputs = self._rig.slots.length.new_empty((3, kind.rows))
            self._stages[kind] = _Stage(inputs)
        return self._stages[kind]

    def _roomy(self, kind: _Kind) -> _Kind:
        """One with room for as many drafts and for longer prompts, as far as that costs little:
        both differ from step to step.
        """
        most = self._rig.slots.shape.draft_len * kind.rows
        wide = kind._replace(
            draft_rows=most if kind.draft_rows else 0, more=kind.more and max(kind.more, MORE[1])
        )
        for found in (wide, wide._replace(more=kind.more)):
            if found.tokens <= (SMALL_HEAVY if self._heavy else SMALL) and not self._large(found):
                return found
        return kind

    def _large(self, kind: _Kind) -> bool:
        logits = kind.lines * self._rig.slots.shape.vocab_size * 4
        return kind.tokens > self._most or logits > LOGITS_BYTES

    def _has_room(self) -> bool:
        """For one graph more."""
        return len(self._graphs()) < MOST_GRAPHS

    def _graphs(self) -> list[_Kind]:
        return [kind for kind, stage in self._stages.items() if stage.replay is not None]

    def _plain(self, plan: BatchPlan) -> PlainRows | None:
        """None: some row wants what no graph has. The last answer, if the same rows run again."""
        array, slots = plan.rows.array, self._rig.slots
        key = (slots.version, array.tobytes())
        if self._last[0] != key:
            self._last = key, self._told(key, array)
        return self._last[1]

    def _told(self, key: tuple[int, bytes], array: NDArray[np.int32]) -> PlainRows | None:
        if not array[:, 3].all() or array[:, 4].any() or not len(array):
            return None
        ends = np.flatnonzero(array[:, 1] != DECODE)
        more = max(int((array[ends, 2] - 1).sum()), min(len(ends), 1))
        if more > MORE[-1]:
            return None
        params = self._rig.slots.params_of(array[:, 0].tolist())
        if any(uses_stage(p) or p.logprobs >= 0 for p in params):
            return None
        if any(params[row].prompt_logprobs >= 0 for row in ends):
            return None
        none = np.zeros(0, np.int64)
        filtered = any(filters(p) for p in params) and not all(is_greedy(p) for p in params)
        return PlainRows(key, array, np.arange(len(array)), none, none, more, filtered)

    def _kind(self, plan: BatchPlan, rows: PlainRows) -> _Kind | None:
        """None: too large."""
        shape = self._rig.slots.shape
        count = min(tier(len(rows.array)), max(shape.slots, len(rows.array)))
        drafts = draft_tier(count, plan.draft_rows)
        if rows.more and drafts:
            drafts = min(tier(-(-drafts // count)), shape.draft_len) * count
        longest = max(self._batches.longest(rows.array), LEAST_LONGEST)
        pages = 1 << (-(-longest // shape.page_size) - 1).bit_length()
        longest = min(pages, self._rig.slots.pages.shape[1]) * shape.page_size
        more = rows.more and next(most for most in MORE if most >= rows.more)
        kind = _Kind(count, drafts, more, longest, rows.filtered, plan.propose)
        return None if self._large(kind) else kind

    def _fill(self, stage: _Stage, rows: PlainRows) -> None:
        if stage.holds == rows.key:
            return
        inputs = np.empty(stage.inputs.shape, np.int64)
        inputs.T[:] = self._rig.slots.nobody, DECODE, 1
        inputs[:, : len(rows.array)] = rows.array[:, :3].T
        stage.inputs.copy_(to_device(torch.from_numpy(inputs), stage.inputs.device))
        stage.holds = rows.key

    def _recorded(self, kind: _Kind, stage: _Stage) -> bool:
        """False where it cannot be; nothing has run then."""
        assert self._record is not None and self._drafting is not None
        try:
            with self._drafting(0, kind.propose):
                stage.replay = self._record(lambda: self._step(kind, stage))
            self._larger.clear()
        except (RuntimeError, PluginError) as why:  # memory is short, or an op waits for the host
            said = (str(why).splitlines() or [""])[0]
            log.warning("Steps are launched kernel by kernel: no graph of them. %s", said)
            self.release()
            return False
        return True

    def _step(self, kind: _Kind, stage: _Stage) -> Outcome:
        rig = self._rig
        rows = emitting_rows(stage.inputs, rig.slots, more=kind.more, filtered=kind.filtered)
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
