"""The host half of logits processing: parameters for the slot table, masks for a step.

The device half (biases, penalties, filters, the draw) is ``sampling``'s. Last stop in this room:
``to_row_params`` runs at submission, :class:`LogitsPipeline` between ``forward`` and ``sample``;
grammars come from ``grammars.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from deepinfer.api.grammar import MaskJob
from deepinfer.api.plan import DECODE, RowInputs, RowParams
from deepinfer.engine.reasoning import AfterReasoning
from deepinfer.engine.request import Status, in_vocabulary
from deepinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from deepinfer.api.grammar import GrammarBackend
    from deepinfer.api.plan import BatchPlan
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
    """The masks of a plan's constrained rows.

    Matchers do not move here: they move by emitted tokens only, in ``output.py``.
    """

    def __init__(self, vocab_size: int, draft_len: int, backend: GrammarBackend | None) -> None:
        self._words = -(-vocab_size // 32)
        self._width = 1 + draft_len
        self._backend = backend

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
        users, jobs, size = self._jobs(plan, planned)
        if not jobs:
            return None
        rows = np.empty((size, self._words), np.int32)
        kept: list[NDArray[np.intp]] = []
        index: list[NDArray[np.intp]] = []
        for (r, row), job, legal in zip(users, jobs, self._fill(jobs, rows), strict=True):
            if isinstance(legal, Exception):
                fail(r, legal)
                continue
            lines = np.arange(1 + legal)
            kept.append(job.first + lines)
            index.append(row * self._width + lines)
        if not kept:
            return None
        legal_rows = np.concatenate(kept)
        bitmask = rows if len(legal_rows) == size else rows[legal_rows]
        return RowInputs(bitmask, np.concatenate(index).astype(np.int32))

    def _jobs(
        self, plan: BatchPlan, planned: Sequence[RequestState]
    ) -> tuple[list[tuple[RequestState, int]], list[MaskJob], int]:
        """Who needs masks, in which row of the plan; a job for each; how many masks at most."""
        users: list[tuple[RequestState, int]] = []
        jobs: list[MaskJob] = []
        size = 0
        for i, (r, row) in enumerate(zip(planned, plan.rows, strict=True)):
            if r.grammar is None or not row.emits or r.status is Status.FINISHED:
                continue
            drafts = r.drafts[: row.count - 1] if row.start == DECODE else []
            users.append((r, i))
            jobs.append(MaskJob(r.grammar, size, drafts))
            size += 1 + len(drafts)
        return users, jobs, size

    def _fill(self, jobs: list[MaskJob], rows: NDArray[np.int32]) -> list[int | Exception]:
        """In one call of the backend; matchers that still wait for reasoning to end fill alone."""
        assert self._backend is not None
        together = [job for job in jobs if not isinstance(job.grammar, AfterReasoning)]
        try:
            filled = self._backend.fill(together, rows) if together else []
        except Exception as why:  # its own bug: those who need it fail, the others do not
            filled = [why] * len(together)
        batch = iter(filled)
        return [
            _alone(job, rows) if isinstance(job.grammar, AfterReasoning) else next(batch)
            for job in jobs
        ]


def _alone(job: MaskJob, rows: NDArray[np.int32]) -> int | Exception:
    try:
        return job.grammar.fill(rows[job.first : job.first + 1 + len(job.drafts)], job.drafts)
    except Exception as why:
        return why
