"""Speculation: planner (brain half), drafter and verifier (rank half). House section 7.5.

A plugin sells a :class:`~deepinfer.api.specs.SpeculatorSpec` with three load paths. This is all
that a drafter of its own needs; a whole one, which guesses that every token comes twice::

    class Twice:
        taps = ()                    # hidden rows of no layer are wanted

        @classmethod
        def needs(cls, context: DrafterContext) -> DraftNeeds:
            # Headers only: nothing is loaded, no tensor is made. A drafter with weights opens
            # context.model here and says what its context KV takes in the target's pages.
            return DraftNeeds(draft_len=context.draft_length(None))

        def __init__(self, context: DrafterContext, target: DrafterTarget) -> None:
            # The target is loaded; KV memory is not yet cut, so weights made here are counted.
            self.draft_len = self.needs(context).draft_len

        def bind(self, kv: KVPools, slots: SlotView) -> None:
            # kv.layer(i): pages of layer i of what ``needs`` asked for; slots: every text.
            self.slots = slots

        def allot(self, slots, eligible, k):
            # Which drafts run: int64[R], at most ``eligible`` each and k in all.
            before = eligible.cumsum(0) - eligible
            return (k - before).clamp(min=0).minimum(eligible)

        def commit(self, taps, kept):
            # Every step, chunks of prompts too: hidden rows of tokens that are text now.
            pass

        def propose(self, anchors, slots):
            # anchors int64[R]: the last id of each text, which the next step runs first.
            return Drafts(anchors[:, None].repeat(1, self.draft_len), None)

Order of calls in a process: ``needs``, load the target, ``__init__``, size and allocate KV,
``bind``; then for each step ``allot`` (if drafts run), the target's forward with taps, the draw,
``commit``, ``propose`` (if the plan asks for it). One thread, inside ``torch.inference_mode``,
everything on the device: nothing may wait for the host or copy to it. ``R`` are the step's rows
that emit. What a drafter does may change speed and nothing else, whatever it proposes.

A drafter with ``recorded(tokens, propose)``, a context manager, lets whole steps be recorded as
graphs: ``allot``, ``commit`` and ``propose`` then launch the same for every step of as many rows,
and read nothing of the host but what :class:`SlotView` says. It is entered around each such step
with the step's token rows (0: it is recorded and does not run) and whether drafts are made. Some
rows may be of slot ``max_num_seqs``, behind those of requests: a text that has ended. What it does
beside steps it may record by itself (``DrafterTarget.record``), if it has a method ``release``:
called where memory is short, it gives these graphs back and records none from there on.

KV. Pages hold text: position p of a request lies in page ``slots.pages[slot, p // page_size]`` at
``p % page_size``, and pages behind the text may belong to somebody else. So only ``commit`` writes
into pages, at ``taps.batch.kv_slots`` where ``kept`` and the slot is not −1; K and V of draft rows
live in memory of the drafter's own. What ``commit`` writes is found again by prefix hits, and
survives preemption as far as the target's own KV does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from deepinfer.api.kv import KVSpec

if TYPE_CHECKING:
    import torch

    from deepinfer.api.model import DeviceBatch, KVPools, Model
    from deepinfer.api.plan import StepOutput
    from deepinfer.api.sampler import Sampler, SampleRows


class Drafts(NamedTuple):
    """What a drafter proposes for the R emitting rows of a step.

    ``ids`` int64[R, γ]. ``confidence`` float32[R, γ] or None: the drafter's estimate, calibrated if
    it can be, that draft j+1 stands if those before it do. ``drafted`` int64[R] or None (γ): how
    many of a row's ids are drafts at all; the rest is never run.
    """

    ids: torch.Tensor
    confidence: torch.Tensor | None
    drafted: torch.Tensor | None = None


# The rank half.


class DraftLength(Protocol):
    """The draft length of an engine: what the user asked for, else the smaller of ``usual`` (None:
    5) and ``trained`` (None: no bound).

    Raises:
        ConfigError: more than ``trained`` was asked for; it names what asked and the legal range.
    """

    def __call__(self, trained: int | None, usual: int | None = None) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterContext:
    """What the configuration says, before anything is loaded.

    ``method``: the chosen spec's name. ``model``: what the user named as draft checkpoint, or None.
    ``options``: further options; core has refused those that the spec does not list. ``config``:
    the target's, as its adapter reads it (``max_model_len`` may still shrink); ``raw``: its
    config.json; ``checkpoint``: a :class:`deepinfer.models.checkpoint.Checkpoint` of the target.
    ``max_num_seqs``: slots of requests are below it.
    """

    method: str
    model: str | None
    options: Mapping[str, Any]
    acceptance: Literal["exact", "ratio"]
    config: Any
    raw: Mapping[str, Any]
    checkpoint: Any
    dtype: torch.dtype
    page_size: int
    max_num_seqs: int
    draft_length: DraftLength


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNeeds:
    """What a drafter asks of the engine.

    ``taps``: target layers whose residual-stream rows it reads: id i is the stream *after* decoder
    layer i, −1 the embedding's output (DeepSeek-V4.1: the stream *before* layer i, the mean of its
    copies). ``kv``: groups for its own layers, numbered from 0; core keeps them in the target's
    pages, counts them in memory and gives them back by the same numbers. ``weight_bytes``: what it
    will load, for estimates.
    """

    draft_len: int
    taps: tuple[int, ...] = ()
    kv: KVSpec | None = None
    weight_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterTarget:
    """The loaded target: its model (share ``embed`` and ``head``), ops, sampler and device.

    ``record``: the device's, where it has graphs: what a function launches, recorded without
    running it, as a function that launches it again (``api.backend.Device``); else None.
    """

    model: Model
    ops: Any
    sampler: Sampler
    device: torch.device
    dtype: torch.dtype
    record: Callable[[Callable[[], Any]], Callable[[], Any]] | None = None


class SlotView(Protocol):
    """The slot table as a drafter may read it, indexed by slot, on the device.

    ``tokens`` int32[slots, width]: each text, and drafts behind it; ``pages`` int32[slots, P];
    ``length``, ``limit``, ``seed``, ``top_k`` int64[slots]; ``temperature`` (0: greedy), ``top_p``,
    ``min_p`` float32[slots]. A text of length n has its anchor at position n − 1. On the host:
    ``longest``: no text is longer (so many columns of ``tokens`` are enough); ``greedy``: all whom
    ``propose`` is asked for are; ``filtered``: one of them has a top_k, top_p or min_p.
    """

    @property
    def longest(self) -> int: ...
    @property
    def greedy(self) -> bool: ...
    @property
    def filtered(self) -> bool: ...

    @property
    def tokens(self) -> torch.Tensor: ...
    @property
    def pages(self) -> torch.Tensor: ...
    @property
    def length(self) -> torch.Tensor: ...
    @property
    def limit(self) -> torch.Tensor: ...
    @property
    def seed(self) -> torch.Tensor: ...
    @property
    def temperature(self) -> torch.Tensor: ...
    @property
    def top_k(self) -> torch.Tensor: ...
    @property
    def top_p(self) -> torch.Tensor: ...
    @property
    def min_p(self) -> torch.Tensor: ...


class StepTaps(Protocol):
    """A step's tapped rows, as ``commit`` gets them.

    ``hidden``: layer -> [T, H]; ``slot_of_token`` int64[T]; of ``batch`` a drafter reads ``ids``,
    ``positions`` and ``kv_slots`` [T] (−1: do not write).
    """

    @property
    def hidden(self) -> Mapping[int, torch.Tensor]: ...
    @property
    def batch(self) -> DeviceBatch: ...
    @property
    def slot_of_token(self) -> torch.Tensor: ...


class Drafter(Protocol):
    """Proposes tokens. The module's docstring shows a whole one; ``SpeculatorSpec.drafter`` names
    the class: a :class:`DrafterClass`.
    """

    draft_len: int
    taps: tuple[int, ...]

    def bind(self, kv: KVPools, slots: SlotView) -> None:
        """The memory. ``kv`` knows the layers of ``DraftNeeds.kv`` by their own numbers."""
        ...

    def allot(self, slots: torch.Tensor, eligible: torch.Tensor, k: int) -> torch.Tensor:
        """int64[R], 0 … ``eligible`` int64[R] of each and at most ``k`` in all: drafts to run.

        ``slots`` int64[R]. Of a request always the first ones run. Under the ratio rule the choice
        may not look at the drafts themselves (``deepinfer_speculative.allocation``).
        """
        ...

    def commit(self, taps: StepTaps | None, kept: torch.Tensor) -> None:
        """After every step. ``kept`` bool[T]: which token rows of the step are text now."""
        ...

    def propose(self, anchors: torch.Tensor, slots: torch.Tensor) -> Drafts:
        """Drafts behind the texts of ``slots`` int64[R], which end with ``anchors`` int64[R].

        R may be 0, and some of the texts may have reached their limit.
        """
        ...


class SamplingDrafter(Drafter, Protocol):
    """A drafter that draws its drafts: what the ratio rule must know of it."""

    def proposal(self, slots: torch.Tensor) -> torch.Tensor | None:
        """float32[R, γ, V]: the distributions that the last drafts of ``slots`` int64[R] were drawn
        from, filters and all; a one-hot row where a draft was the best id. None: all were.

        The noise must not have been used before: domain ``DRAFT``, keyed with the anchor's position
        too (``deepinfer_speculative.ratio.round_seed``).
        """
        ...


class DrafterClass(Protocol):
    """What ``SpeculatorSpec.drafter`` names."""

    def needs(self, context: DrafterContext) -> DraftNeeds:
        """From headers alone; ``deepinfer config memory`` asks too."""
        ...

    def __call__(self, context: DrafterContext, target: DrafterTarget) -> Drafter: ...


class Verifier(Protocol):
    """Logits rows and drafts to emitted tokens."""

    def verify(
        self,
        logits: torch.Tensor,
        rows: SampleRows,
        drafts: torch.Tensor,
        lengths: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens int64[R, 1+γ], counts int64[R]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierContext:
    """What ``SpeculatorSpec.verifier`` is called with."""

    ops: Any
    sampler: Sampler
    drafter: Drafter


# The brain half: no torch.


class DraftView(Protocol):
    """A decoding request as a planner sees it.

    ``generation``: a number that no other admission of any request has; it changes when a request
    is preempted and resumes. ``most_drafts``: no more of its drafts can stand, because its text
    ends. ``rows_ahead``: rows of it that are on their way: 0 means that the newest confidences seen
    belong to the drafts that will be verified next.
    """

    @property
    def generation(self) -> int: ...
    @property
    def most_drafts(self) -> int: ...
    @property
    def rows_ahead(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFacts:
    """What stands before a step.

    ``step``: its number, above the last one's. ``decoding``: requests that will run a decode row,
    each one token without drafts; they are looked for when somebody looks. ``running``: about as
    many, known at once. ``prefill_tokens`` that will likely run beside them, of which
    ``emitting`` prompts end in this step (a guess where admissions are still open). ``room``: most
    draft rows that the token budget leaves.
    """

    step: int
    now: float
    decoding: Sequence[DraftView]
    prefill_tokens: int
    emitting: int
    room: int
    running: int


class DraftChoice(NamedTuple):
    """``rows``: draft rows of the step (K). ``keep``: of the drafts that run only as many may stand
    (mode ``cap``); −1 all. ``propose``: draft at the end of the step, for the next. ``hold``: of a
    choice without drafts, so many steps more are chosen alike without asking, and their answers are
    not shown, while as many requests run and none that waits finds a slot.
    """

    rows: int
    keep: int = -1
    propose: bool = True
    hold: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsLanded:
    """A step's answer with who it is of. ``generations``: of each plan row, none where the answer
    has no drafts; ``decodes``: the first so many rows are decodes. ``now``: seconds of the engine's
    clock, ``before``: when the step before it arrived.
    """

    out: StepOutput
    generations: Sequence[int]
    decodes: int
    now: float
    before: float


class DraftPlanner(Protocol):
    """Decides how many draft rows a step verifies; the text never depends on it (exact rule)."""

    draft_len: int

    def choose(self, facts: DraftFacts) -> DraftChoice:
        """For the step that is being planned. Microseconds; asked once a step, in order."""
        ...

    def observe(self, landed: DraftsLanded) -> None:
        """A step has arrived."""
        ...


class StepShape(NamedTuple):
    """A step to be timed: ``requests`` that decode, ``drafts`` draft rows in all, and whether it
    drafts for the next.
    """

    requests: int
    drafts: int
    propose: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerContext:
    """What ``SpeculatorSpec.planner`` is called with, once the ranks have started.

    ``measure(shapes)``: seconds of a step of each shape on the device in use, least of several;
    blocking, and only before the first request. ``identity``: names model, device, dtype and
    everything else that these depend on. ``cache_dir``: where what was measured may be kept; it
    need not exist. ``graph_rows``: as in :class:`~deepinfer.api.executor.ModelFacts`.
    """

    method: str
    mode: Literal["static", "cap", "adaptive"]
    acceptance: Literal["exact", "ratio"]
    draft_len: int
    options: Mapping[str, Any]
    max_num_seqs: int
    max_tokens: int
    identity: str
    cache_dir: Path
    measure: Callable[[Sequence[StepShape]], list[float]]
    graph_rows: int = 0
