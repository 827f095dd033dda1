"""The host half of logits processing: parameters for the slot table, masks for a step.

The device half (biases, penalties, filters, the draw) is ``sampling``'s. Last stop in this room:
``to_row_params`` runs at submission, :class:`LogitsPipeline` between ``forward`` and ``sample``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from deepinfer.api.plan import DECODE, RowInputs, RowParams
from deepinfer.engine.request import Status, in_vocabulary
from deepinfer.errors import InvalidRequestError, UnsupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from deepinfer.api.grammar import Grammar, GrammarBackend
    from deepinfer.api.plan import BatchPlan, Request
    from deepinfer.engine.request import RequestState
    from deepinfer.sampling_params import SamplingParams

Encode = Callable[[str], Sequence[int]]


_FOREVER = 2**31 - 1  # longer than any text


def to_row_params(
    params: SamplingParams,
    prompt_len: int,
    eos_ids: Iterable[int],
    vocab_size: int,
    encode: Encode | None,
) -> RowParams:
    """What the device must know. Refuses ids outside the vocabulary, naming field and bound.

    ``encode`` turns a text into ids without special tokens; only ``bad_words`` need it.
    """
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_ids))
    in_vocabulary("stop_token_ids", params.stop_token_ids, vocab_size)
    in_vocabulary("logit_bias", params.logit_bias or (), vocab_size)
    in_vocabulary("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    allowed = params.allowed_token_ids
    return RowParams(
        prompt_len=prompt_len,
        temperature=params.temperature,
        top_k=0 if params.top_k < 0 or params.top_k >= vocab_size else params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        min_len=min(prompt_len + params.min_tokens, _FOREVER) if params.min_tokens else 0,
        stop_ids=tuple(sorted(i for i in stop_ids if i < vocab_size)),
        logit_bias=tuple(sorted((params.logit_bias or {}).items())),
        allowed_token_ids=None if allowed is None else tuple(sorted(set(allowed))),
        bad_words=_bad_words(params.bad_words, vocab_size, encode),
        logprobs=_count(params.logprobs, vocab_size),
        prompt_logprobs=_count(params.prompt_logprobs, vocab_size),
    )


def _count(asked: int | None, vocab_size: int) -> int:
    """None to −1 (off), −1 to the whole vocabulary."""
    if asked is None:
        return -1
    return vocab_size if asked < 0 else min(asked, vocab_size)


def _bad_words(
    words: Sequence[str], vocab_size: int, encode: Encode | None
) -> tuple[tuple[int, ...], ...]:
    """Each word as it is written at the start of a text and, if that differs, after a space.

    The second spelling is only another one if it is as long and begins with another id;
    otherwise the space is a token of its own and the first spelling covers it.
    """
    if words and encode is None:
        raise InvalidRequestError(
            "bad_words need a tokenizer, and this engine has none.",
            setting="bad_words",
            next_step="Load the model with its tokenizer, or use logit_bias on ids.",
        )
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        assert encode is not None
        bare = tuple(encode(word.lstrip()))
        spaced = tuple(encode(" " + word.lstrip()))
        found[bare] = None
        if bare and len(spaced) == len(bare) and spaced[0] != bare[0]:
            found[spaced] = None
    spellings = tuple(ids for ids in found if ids)
    for ids in spellings:
        in_vocabulary("bad_words", ids, vocab_size)
    return spellings


class LogitsPipeline:
    """Grammars while they are compiled, then the masks of a plan's constrained rows.

    Matchers do not move here: they move by emitted tokens only, in ``output.py``.
    """

    def __init__(self, vocab_size: int, draft_len: int, backend: GrammarBackend | None) -> None:
        self._words = -(-vocab_size // 32)
        self._width = 1 + draft_len
        self._backend = backend
        self._pool: ThreadPoolExecutor | None = None
        self._compiling: dict[RequestState, Future[Grammar]] = {}

    # Compiling, beside the steps.

    def check(self, request: Request) -> None:
        """Refuse a structured request if nothing here can enforce it."""
        if request.structured is not None and self._backend is None:
            raise UnsupportedError(
                f"Request {request.id}: structured output needs a grammar plugin, and none is "
                "loaded.",
                setting="so_args",
                next_step="deepinfer-structured will bring one; this version does not have it yet.",
            )

    def compile(self, r: RequestState) -> None:
        """Start; ``compiled`` gives the request back."""
        assert self._backend is not None
        if self._pool is None:
            self._pool = ThreadPoolExecutor(2, thread_name_prefix="deepinfer-grammar")
        self._compiling[r] = self._pool.submit(self._backend.compile, r.request.structured)

    @property
    def compiling(self) -> bool:
        return bool(self._compiling)

    def compiled(self) -> list[tuple[RequestState, Exception | None]]:
        """Requests whose grammar is ready, or why it is refused."""
        ready = [r for r, grammar in self._compiling.items() if grammar.done()]
        answer: list[tuple[RequestState, Exception | None]] = []
        for r in ready:
            try:
                r.grammar = self._compiling.pop(r).result()
                answer.append((r, None))
            except Exception as why:
                answer.append((r, why))
        return answer

    def forget(self, r: RequestState) -> None:
        """The request has ended; what is being compiled for it is dropped."""
        grammar = self._compiling.pop(r, None)
        if grammar is not None:
            grammar.cancel()

    def close(self) -> None:
        """Wait for the compiler threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    # Masks.

    def prepare(
        self,
        plan: BatchPlan,
        planned: Sequence[RequestState],
        fail: Callable[[RequestState, Exception], None],
    ) -> RowInputs | None:
        """One mask for the next token of each constrained row and one for each legal draft.

        A draft that is not legal is masked in the row before it, so it cannot be accepted and
        what follows it needs no mask. A matcher that raises fails its own request.
        """
        if not plan.constrained:
            return None
        masks: list[NDArray[np.int32]] = []
        index: list[int] = []
        for i, (r, row) in enumerate(zip(planned, plan.rows, strict=True)):
            if r.grammar is None or not row.emits or r.status is Status.FINISHED:
                continue
            drafts = r.drafts[: row.count - 1] if row.start == DECODE else []
            rows = np.full((1 + len(drafts), self._words), -1, np.int32)
            try:
                legal = r.grammar.fill(rows, drafts)
            except Exception as why:
                fail(r, why)
                continue
            masks.append(rows[: 1 + legal])
            index.extend(range(i * self._width, i * self._width + 1 + legal))
        if not masks:
            return None
        return RowInputs(np.concatenate(masks), np.array(index, np.int32))
