"""One request as the brain sees it: :class:`RequestState`. Third stop of the reading tour.

``engine.py`` makes one for each :class:`~deepinfer.api.plan.Request`; ``scheduler.py`` moves it
through its states; ``cache.py`` gives it pages and takes them back. The device is ahead of the
host, so the host knows a text's length only as bounds ``lo <= length <= hi``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from deepinfer.errors import InvalidRequestError, KVCacheTooSmallError

if TYPE_CHECKING:
    from deepinfer.api.executor import ModelFacts
    from deepinfer.api.grammar import Grammar
    from deepinfer.api.kv import Truncation
    from deepinfer.api.plan import Image, Request, StepOutput
    from deepinfer.engine.output import OutputState
    from deepinfer.engine.pages import Node

_MASK64: Final = (1 << 64) - 1


def mix(seed: int, i: int) -> int:
    """The seed of parallel sample ``i``: 64 bits; ``mix(seed, 0)`` is ``seed`` itself.

    So sample 0 of a request with ``n`` > 1 equals the same request with ``n`` = 1. For other i it
    is the SplitMix64 finaliser of ``seed + i·φ``, a bijection of the seed for every i.
    """
    if i == 0:
        return seed & _MASK64
    x = (seed + i * 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


class Status(Enum):
    """Where a request stands. PREEMPTED lasts until its steps in flight have arrived."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Ahead(NamedTuple):
    """A row in flight: it emits between ``lo`` and ``hi`` tokens.

    ``written``: the text length whose KV it completes if it is a prefill chunk, −1 for a decode.
    """

    lo: int
    hi: int
    written: int


class Chain:
    """What of a request stands in the prefix index.

    ``digests``: of its leading full pages, each computed once in the request's life, because
    tokens are only ever appended. ``nodes``: index entries of its leading pages while it holds
    them. ``hit``: positions whose KV it found at its last admission.

    For models with state: ``cuts``, where its prefill stops for a snapshot; ``promised``,
    boundaries whose snapshot others wait for; ``saved``, the last boundary that was asked for;
    ``pending``, boundary → block of those whose pages are not published yet.
    """

    __slots__ = ("cuts", "digests", "hit", "nodes", "pending", "promised", "saved")

    def __init__(self) -> None:
        self.digests: list[bytes] = []
        self.nodes: list[Node] = []
        self.hit = 0
        self.cuts: set[int] = set()
        self.promised: set[int] = set()
        self.saved = 0
        self.pending: dict[int, int] = {}


class RequestState:
    """A request's tokens, its place on the device, and what is in flight for it.

    It holds its pages and slot while it runs; each row in flight and each transfer (``leases``)
    holds them too. ``KVCache.settle`` gives them back when nothing does. ``floor``: the first
    position that a truncating model's late layers run; it depends on the prompt's length alone.
    ``generation`` counts admissions of all requests; ``landed``: its tokens when its last step
    arrived. It is also the policy's :class:`~deepinfer.api.policy.View` of the request, and the
    draft planner's :class:`~deepinfer.api.speculative.DraftView`.
    """

    __slots__ = (
        "ahead_hi",
        "ahead_lo",
        "chain",
        "drafts",
        "floor",
        "generation",
        "grammar",
        "in_flight",
        "landed",
        "leases",
        "output",
        "pages",
        "prefill_to",
        "prefilled",
        "request",
        "slot",
        "status",
        "tokens",
    )

    def __init__(self, request: Request, output: OutputState) -> None:
        self.request = request
        self.output = output
        self.tokens: list[int] = list(request.token_ids)
        self.status = Status.WAITING
        self.slot = -1
        self.pages: list[int] = []
        self.prefilled = 0
        self.prefill_to = len(self.tokens)
        self.in_flight: deque[Ahead] = deque()
        self.ahead_lo = 0
        self.ahead_hi = 0
        self.leases = 0
        self.grammar: Grammar | None = None
        self.drafts: list[int] = []
        self.chain = Chain()
        self.floor = 0
        self.generation = 0
        self.landed = 0

    @property
    def lo(self) -> int:
        """The text is at least this long on the device once what is in flight has run."""
        return min(self.request.limit, len(self.tokens) + self.ahead_lo)

    @property
    def hi(self) -> int:
        """The text is at most this long on the device once what is in flight has run."""
        return min(self.request.limit, len(self.tokens) + self.ahead_hi)

    def launch(self, ahead: Ahead) -> None:
        """A row of this request enters a plan."""
        self.in_flight.append(ahead)
        self.ahead_lo += ahead.lo
        self.ahead_hi += ahead.hi

    def land(self) -> Ahead:
        """Its oldest row has arrived."""
        return self._forget(self.in_flight.popleft)

    def recall(self) -> Ahead:
        """Its newest row leaves a plan that was not sent."""
        return self._forget(self.in_flight.pop)

    def _forget(self, take: Callable[[], Ahead]) -> Ahead:
        ahead = take()
        self.ahead_lo -= ahead.lo
        self.ahead_hi -= ahead.hi
        return ahead

    # The policy's view.

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def arrival(self) -> float:
        return self.request.arrival

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - len(self.request.token_ids)

    @property
    def held_pages(self) -> int:
        return len(self.pages)

    # The draft planner's.

    @property
    def decodes(self) -> bool:
        """It is past its prompt and runs."""
        return self.prefilled >= self.prefill_to and self.status is Status.RUNNING

    @property
    def most_drafts(self) -> int:
        """Drafts that its text has room for; negative: what is in flight certainly completes it."""
        return self.request.limit - len(self.tokens) - self.ahead_lo - 1

    @property
    def rows_ahead(self) -> int:
        return len(self.in_flight)


class LandedDrafts:
    """What a step's output says of drafts, request by request: those that ran, the next ones.

    Without ``drafts`` none ran, and there are none for the next step.
    """

    def __init__(self, out: StepOutput) -> None:
        self._out = out
        self._drafts = None if out.drafts is None else out.drafts.tolist()
        self._drafted = None if out.drafted is None else out.drafted.tolist()
        self._verified = None if out.verified is None else out.verified.tolist()

    def take(self, r: RequestState, i: int, decode: bool) -> None:
        """Row i, after its tokens have become text; what lies behind a stop is no draft's merit."""
        gained = len(r.tokens) - r.landed
        r.landed = len(r.tokens)
        if self._drafts is None and not r.drafts:
            return
        count = int(self._out.counts[i])
        if decode and count:
            metrics = r.output.metrics
            metrics.drafted += len(r.drafts)
            metrics.verified += 0 if self._verified is None else self._verified[i]
            metrics.accepted += min(count - 1, gained)
        r.drafts = [] if self._drafts is None else self._drafts[i]
        if self._drafted is not None:
            r.drafts = r.drafts[: self._drafted[i]]


def floor_of(request: Request, truncation: Truncation | None) -> int:
    """Where a truncating model's late layers begin on this request.

    Logprobs of the prompt need all layers on every row.
    """
    if truncation is None or request.row_params.prompt_logprobs >= 0:
        return 0
    return truncation.floor(len(request.token_ids))


def check_request(request: Request, facts: ModelFacts) -> None:
    """Refuse a request that can never run, naming the bound that it breaks."""
    length, longest = len(request.token_ids), facts.max_model_len
    if not length:
        raise InvalidRequestError(f"Request {request.id}: the prompt is empty.", setting="prompt")
    if request.limit > longest or length >= request.limit:
        raise InvalidRequestError(
            f"Request {request.id}: {length} prompt tokens and a limit of {request.limit} do not "
            f"fit into max_model_len={longest}.",
            setting="max_model_len",
            next_step="The prompt must leave room for one token at least.",
        )
    whose = f"Request {request.id}: "
    in_vocabulary("prompt_token_ids", request.token_ids, facts.vocab_size, whose)
    check_images(request.token_ids, request.images, facts, whose)
    need = -(-request.limit // facts.page_size)
    if need > facts.num_pages:
        per_page = facts.page_size * facts.kv.bytes_per_token
        raise KVCacheTooSmallError(
            f"Request {request.id}: {request.limit} tokens need {need} pages of KV "
            f"({need * per_page} bytes), and there are {facts.num_pages} "
            f"({facts.num_pages * per_page} bytes).",
            setting="kv_cache_memory",
            next_step=f"Set kv_cache_memory to {need * per_page} or more, or lower max_tokens.",
        )


def in_vocabulary(field: str, ids: Collection[int], vocab_size: int, whose: str = "") -> None:
    """Refuse ids that the model does not have, naming the field, the first such id and the bound.

    The one place for the prompt's ids and for those in parameters, at whichever door they enter.
    """
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise InvalidRequestError(
            f"{whose}{field}: id {wrong} is outside the vocabulary (0 … {vocab_size - 1}).",
            setting=field,
        )


def check_images(
    ids: Sequence[int], images: Sequence[Image], facts: ModelFacts, whose: str = ""
) -> None:
    """Refuse images that the model does not take, and image tokens that no image stands for."""
    token, done = facts.image_token, 0
    if images and token < 0:
        raise InvalidRequestError(
            f"{whose}{facts.architecture} takes no images.", setting="multi_modal_data"
        )
    for image in images:
        inside = ids[image.start : image.stop]
        if image.start < done or list(inside) != [token] * image.tokens:
            raise InvalidRequestError(
                f"{whose}an image of {image.tokens} positions is said to begin at {image.start}, "
                f"where the prompt has no such span of id {token}.",
                setting="multi_modal_data",
            )
        _no_image(ids[done : image.start], done, token, whose)
        done = image.stop
    _no_image(ids[done:], done, token, whose)


def _no_image(ids: Sequence[int], start: int, token: int, whose: str) -> None:
    if token >= 0 and token in ids:
        raise InvalidRequestError(
            f"{whose}prompt_token_ids: position {start + ids.index(token)} has id {token}, which "
            "stands for an image, and no image is given for it.",
            setting="prompt_token_ids",
            next_step="Give images as parts of LLM.chat's messages, or as multi_modal_data.",
        )
