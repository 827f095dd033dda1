"""What crosses between the brain (``engine``) and the hands (``executors``, ``worker``).

First stop of the reading tour. The scheduler makes one :class:`BatchPlan` a step; everything that
shapes the step is in it, and ranks never decide. The hands answer with one :class:`StepOutput`.
Wire types hold numbers, tuples and numpy arrays only. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Int32Array = NDArray[np.int32]
    Float32Array = NDArray[np.float32]

DECODE: Final = -1
"""``Row.start`` of a decode row: the device's slot table knows where the request stands."""


class FinishReason:
    """Why a request ended; the names that clients know."""

    STOP: Final = "stop"
    LENGTH: Final = "length"
    SCHEMA_VIOLATION: Final = "schema_violation"
    ABORT: Final = "abort"
    ERROR: Final = "error"


@dataclass(frozen=True, slots=True)
class RowParams:
    """The sampling parameters that the device keeps in the slot table while a request runs.

    ``prompt_len`` and ``min_len`` are absolute lengths (prompt included): ids in ``stop_ids`` are
    masked while the text is shorter than ``min_len``. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are
    off. ``logprobs`` and ``prompt_logprobs``: −1 none, 0 the chosen id only, k the k best too.
    Presence and frequency penalties count output tokens, the repetition penalty prompt and output.
    """

    prompt_len: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_len: int = 0
    stop_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int = -1
    prompt_logprobs: int = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Image:
    """An image of a prompt, as the model takes it.

    It fills positions ``start … stop−1`` of the text, each of which has the model's image token as
    id. ``pixels`` uint8[height, width, 3]: RGB, sized and padded by the family's
    :class:`~deepinfer.api.model.ImageReader`. ``digest``: 16 bytes over shape and pixels, equal for
    equal images alone.
    """

    pixels: NDArray[np.uint8]
    tokens: int
    digest: bytes
    start: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.tokens


@dataclass(frozen=True, slots=True)
class Admit:
    """A request enters a slot.

    ``tokens`` int32[n]: all its tokens so far (more than the prompt when it resumes). ``limit``:
    the absolute length at which it ends. ``seed``: 64 bits, the key of its noise. ``floor``: the
    first position that a truncating model's late layers run. ``images``: those with positions that
    will run, ascending.
    """

    slot: int
    tokens: Int32Array
    limit: int
    seed: int
    params: RowParams
    floor: int = 0
    images: tuple[Image, ...] = ()


class Row(NamedTuple):
    """One request's part of a step.

    A prefill chunk runs positions ``start … start+count−1`` of the slot's tokens. A decode row has
    ``start == DECODE`` and ``count`` 1 + the most draft rows it may run. ``emits``: 1 if the last
    position's logits are sampled. ``replay``: leading positions that write only window groups.
    """

    slot: int
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody misses here
    emits: int
    replay: int


class RowBlock:
    """The rows of a step as one ``int32[n, 5]`` block (columns as in :class:`Row`)."""

    __slots__ = ("array",)

    def __init__(self, array: Int32Array) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[Row]:
        return map(Row._make, self.array.tolist())


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step, whole: who enters, which rows run, which pages were given out, how many drafts.

    ``pages`` int32[n, 3] (slot, index in the request, page), in order. ``draft_rows``: draft rows
    of the whole step (K); ``keep``: of the drafts that run only as many may stand, −1 all;
    ``propose``: the step ends with drafts for the next, where there is a drafter. ``shape``: the
    token count that graphs and replicas pad to.
    ``constrained``: some row waits for a mask, so ``sample`` gets :class:`RowInputs`.

    ``saves`` and ``restores``, (slot, block) each: state blocks to copy before anything else
    happens, saves first; a slot's own block has the slot's number. A saved block holds what the
    slot's request had written before this step.
    """

    step: int
    admits: tuple[Admit, ...]
    rows: RowBlock
    pages: Int32Array
    draft_rows: int = 0
    shape: int = 0
    constrained: bool = False
    saves: tuple[tuple[int, int], ...] = ()
    restores: tuple[tuple[int, int], ...] = ()
    keep: int = -1
    propose: bool = True


@dataclass(frozen=True, slots=True)
class RowInputs:
    """Masks for some sampled rows.

    ``bitmask`` int32[k, ⌈V/32⌉], bit v%32 of word v//32 set if id v is allowed; ``index`` int32[k]:
    row·(1+γ) + draft index. Rows that are not named are unconstrained.
    """

    bitmask: Int32Array | None
    index: Int32Array


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Logprobs of emitted (or prompt) tokens, natural logarithm, of the model's raw distribution.

    ``index`` int32[m]: row·(1+γ) + j for the j-th emitted token of a row; for prompt tokens their
    absolute position. ``token_ids`` int32[m, 1+k] and ``values`` float32[m, 1+k]: the token itself
    first, then the k best, best first, ties to the lower id; where a row asked for fewer, id −1.
    ``ranks`` int32[m]: 1-based rank of the token itself.
    """

    index: Int32Array
    token_ids: Int32Array
    values: Float32Array
    ranks: Int32Array


class Fault:
    """Values of ``StepOutput.faults``."""

    NONE: Final = 0
    NAN: Final = 1
    NOTHING_ALLOWED: Final = 2


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step produced, on the host.

    ``tokens`` int32[n, 1+γ] with the first ``counts[i]`` of row i emitted (0 for rows that do not
    emit and for dead rows); ``drafts`` int32[n, γ] for the next step (None: none ran in this one,
    and there are none), of which the first ``drafted`` int32[n] are any (None: all); ``verified``
    int32[n]: how many drafts ran in this step and could stand; ``faults`` uint8[n]
    (:class:`Fault`), a row with a fault emits nothing;
    ``prompt_logprobs``: (row, logprobs) pairs; ``warming``: the first steps of their kind prepare
    the device for those that follow, so their time says nothing of these.
    """

    step: int
    tokens: Int32Array
    counts: Int32Array
    drafts: Int32Array | None = None
    confidence: Float32Array | None = None
    logprobs: LogprobRows | None = None
    prompt_logprobs: tuple[tuple[int, LogprobRows], ...] = ()
    faults: NDArray[np.uint8] | None = None
    device_seconds: float = 0.0
    drafted: Int32Array | None = None
    verified: Int32Array | None = None
    warming: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """What the front door hands to the brain. ``eos_ids`` end the text unless ``ignore_eos``.

    ``sampling`` is the validated :class:`deepinfer.sampling_params.SamplingParams`; ``seed`` the 64
    bits of this request's noise (of this sample: parallel samples get ``mix(seed, i)``);
    ``limit`` the absolute length at which it must end; ``cache_salt`` keeps prefixes of tenants
    apart; ``structured`` and ``ticket`` belong to optional rooms; ``images`` ascending, and no
    position outside them has the image token. ``reasoning_end``: ids behind which ``structured``
    rules, if the answer begins with reasoning. ``stream``: text is wanted as it comes; else it may
    come with the end.
    """

    id: str
    token_ids: tuple[int, ...]
    sampling: Any
    row_params: RowParams
    seed: int
    limit: int
    eos_ids: frozenset[int] = frozenset()
    priority: int = 0
    arrival: float = 0.0
    cache_salt: str = ""
    structured: Any = None
    ticket: Any = None
    images: tuple[Image, ...] = ()
    reasoning_end: tuple[int, ...] = ()
    stream: bool = True


@dataclass(slots=True)
class RequestMetrics:
    """Times are ``time.monotonic()`` seconds; None until reached.

    Of speculation: draft tokens that were proposed, that ran in the target, and that became text.
    """

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0

    @property
    def queue_seconds(self) -> float | None:
        """From arrival to the first step that ran a row of it."""
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def prefill_seconds(self) -> float | None:
        """From the first step to the first token."""
        if self.first_token is None or self.first_scheduled is None:
            return None
        return self.first_token - self.first_scheduled

    @property
    def decode_seconds(self) -> float | None:
        """From the first token to the end."""
        if self.finished is None or self.first_token is None:
            return None
        return self.finished - self.first_token


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One candidate: natural logarithm, 1-based rank, and its text when detokenised."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What one request gained in a step. ``text`` is new, valid and never taken back.

    ``token_ids`` may run ahead of ``text`` while a stop string or a character is incomplete.
    ``stop_reason``: the stop string or stop id that ended it, or what a text breaks that ended as
    ``schema_violation``; ``error``: the cause when ``finish`` is ``error``.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[dict[int, TokenLogprob], ...] | None = None
    prompt_logprobs: tuple[dict[int, TokenLogprob] | None, ...] | None = None
    finish: Literal["stop", "length", "schema_violation", "abort", "error"] | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    metrics: RequestMetrics | None = None


@dataclass(slots=True)
class StepStats:
    """Counters of one engine step; times in seconds."""

    step: int = 0
    rows: int = 0
    prefill_tokens: int = 0
    decode_rows: int = 0
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    free_pages: int = 0
    cached_tokens: int = 0
    plan_seconds: float = 0.0
    collect_seconds: float = 0.0
    output_seconds: float = 0.0
    wait_seconds: float = 0.0
    device_seconds: float = 0.0
    mask_seconds: float = 0.0
    finished: list[str] = field(default_factory=list)
