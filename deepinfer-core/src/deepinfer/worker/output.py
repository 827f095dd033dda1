"""A step's answer on its way to the host: device tensors become one :class:`StepOutput`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.api.plan import LogprobRows, StepOutput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from deepinfer.api.backend import Device
    from deepinfer.api.speculative import Drafts


@dataclass(frozen=True, slots=True)
class Scores:
    """Some tokens int64[m], and what ``ops.logprobs`` said of them."""

    token: Tensor
    top_ids: Tensor
    top_values: Tensor
    value: Tensor
    rank: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of the fields."""
        return self.token, self.top_ids, self.top_values, self.value, self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """Scores of one row's prompt tokens: plan row, first position, ids wanted."""

    row: int
    position: int
    wanted: int
    scores: Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Everything that a step sends to the host. n plan rows, R emitting ones, γ drafts.

    ``tokens`` int64[R, w], ``counts`` int64[R], ``faults`` uint8[R]; ``drafts`` of the next step,
    None where nobody speculates; ``verified`` int64[R]: drafts that ran and could stand;
    ``scores`` of the first w tokens of emitting rows ``scored``, of which ``wanted`` best;
    ``packed``: whole numbers of the above by :func:`pack`; ``warming`` as in ``StepOutput``.
    """

    step: int
    rows: int
    draft_len: int
    emit: NDArray[np.int64]
    tokens: Tensor
    counts: Tensor
    faults: Tensor
    drafts: Drafts | None
    verified: Tensor | None
    scored: NDArray[np.int64]
    wanted: NDArray[np.int64]
    scores: Scores | None
    prompt: tuple[PromptScores, ...]
    seconds: float
    packed: Tensor | None = None
    warming: bool = False


class StepFuture:
    """An :class:`api.backend.OutputFuture`. ``result()`` waits for the copies and may be repeated.

    Args:
        device: starts the copies at once, so later steps may change their tables.
        result: what to send.
    """

    def __init__(self, device: Device, result: StepResult) -> None:
        self._what = result
        tensors = list(_told(result))
        if result.packed is not None:  # one copy of all that are whole numbers
            tensors = [result.packed, *(t for t in tensors if t.is_floating_point())]
        for scores in (result.scores, *(p.scores for p in result.prompt)):
            tensors += scores.tensors() if scores is not None else ()
        self._copies = device.future(*tensors)
        self._output: StepOutput | None = None

    def done(self) -> bool:
        """Whether ``result()`` returns at once."""
        return self._output is not None or self._copies.done()

    def result(self) -> StepOutput:
        """The step's output, on the host."""
        if self._output is None:
            arrays = [t.numpy() for t in self._copies.result()]
            if self._what.packed is not None:
                arrays = _unpacked(self._what, *arrays)
            self._output = self._assemble(arrays)
        return self._output

    def _assemble(self, arrays: list[NDArray[Any]]) -> StepOutput:
        what, rest = self._what, iter(arrays)
        shape = (what.rows, 1 + what.draft_len)
        tokens, counts = np.zeros(shape, np.int32), np.zeros(what.rows, np.int32)
        faults = np.zeros(what.rows, np.uint8)
        drawn = next(rest)
        tokens[what.emit, : drawn.shape[1]] = drawn
        counts[what.emit], faults[what.emit] = next(rest), next(rest)
        drafts, confidence, drafted, verified = self._drafts(rest)
        logprobs = None
        if what.scores is not None:
            logprobs = self._emitted(_take(rest), counts)
        prompt = tuple((p.row, _prompt(_take(rest), p)) for p in what.prompt)
        return StepOutput(
            step=what.step,
            tokens=tokens,
            counts=counts,
            drafts=drafts,
            confidence=confidence,
            logprobs=logprobs,
            prompt_logprobs=prompt,
            faults=faults,
            device_seconds=what.seconds,
            drafted=drafted,
            verified=verified,
            warming=what.warming,
        )

    def _drafts(self, rest: Iterator[NDArray[Any]]) -> tuple[Any, Any, Any, Any]:
        """Drafts, confidences, how many are any and how many ran, a row for each plan row."""
        what = self._what
        if what.drafts is None:
            return None, None, None, None

        def spread(there: Tensor | None, dtype: Any, *shape: int) -> NDArray[Any] | None:
            if there is None:
                return None
            whole = np.zeros((what.rows, *shape), dtype)
            whole[what.emit] = next(rest)
            return whole

        ids = spread(what.drafts.ids, np.int32, what.draft_len)
        sure = spread(what.drafts.confidence, np.float32, what.draft_len)
        drafted = spread(what.drafts.drafted, np.int32)
        return ids, sure, drafted, spread(what.verified, np.int32)

    def _emitted(self, scores: _Host, counts: NDArray[np.int32]) -> LogprobRows:
        """Of the scored tokens those that were emitted."""
        what = self._what
        width = len(scores.token) // max(len(what.scored), 1)
        row = np.repeat(what.emit[what.scored], width)
        j = np.tile(np.arange(width), len(what.scored))
        wanted = np.repeat(what.wanted, width)
        keep = j < counts[row]
        index = row * (1 + what.draft_len) + j
        return scores.rows(index[keep], wanted[keep], keep)


@dataclass(frozen=True, slots=True)
class _Host:
    """:class:`Scores` on the host."""

    token: NDArray[np.int64]
    top_ids: NDArray[np.int32]
    top_values: NDArray[np.float32]
    value: NDArray[np.float32]
    rank: NDArray[np.int32]

    def rows(
        self,
        index: NDArray[np.int64],
        wanted: NDArray[np.int64],
        keep: NDArray[np.bool_] | slice,
    ) -> LogprobRows:
        """The kept ones; ids beyond what was asked for are −1."""
        best = self.top_ids[keep]
        beyond = np.arange(best.shape[1]) >= wanted[:, None]
        ids = np.concatenate((self.token[keep][:, None], np.where(beyond, -1, best)), 1)
        values = np.concatenate((self.value[keep][:, None], self.top_values[keep]), 1)
        return LogprobRows(index.astype(np.int32), ids.astype(np.int32), values, self.rank[keep])


def _told(what: StepResult) -> Iterator[Tensor]:
    """Tokens, counts and faults; ids, confidences, numbers of drafts and of those that ran, as far
    as there are any.
    """
    yield from (what.tokens, what.counts, what.faults)
    if what.drafts is not None:
        yield from (t for t in (*what.drafts, what.verified) if t is not None)


def pack(tokens: Tensor, counts: Tensor, faults: Tensor, *told: Tensor | None) -> Tensor:
    """int64[R, ·]: a step's whole numbers side by side, in the order in which they are told."""
    columns = [tokens, counts[:, None], faults.long()[:, None]]
    for part in told:
        if part is not None and not part.is_floating_point():
            columns.append(part if part.dim() > 1 else part[:, None])
    return torch.cat(columns, 1)


def _unpacked(
    what: StepResult, packed: NDArray[Any], *floating: NDArray[Any]
) -> list[NDArray[Any]]:
    """The arrays of :func:`_told`."""
    found: list[NDArray[Any]] = []
    at, rest = 0, iter(floating)
    for tensor in _told(what):
        if tensor.is_floating_point():
            found.append(next(rest))
            continue
        wide = tensor.shape[1] if tensor.dim() > 1 else 1
        part = packed[:, at : at + wide]
        found.append(part if tensor.dim() > 1 else part[:, 0])
        at += wide
    return found


def _take(arrays: Iterator[NDArray[Any]]) -> _Host:
    return _Host(*(next(arrays) for _ in range(5)))


def _prompt(scores: _Host, what: PromptScores) -> LogprobRows:
    index = what.position + np.arange(len(scores.token))
    wanted = np.full(len(index), what.wanted)
    return scores.rows(index, wanted, slice(None))
