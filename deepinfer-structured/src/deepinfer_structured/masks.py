"""The masks of a step in one call: :class:`Masks`.

A mask usually takes a few microseconds, so a batch of them is quickest on the calling thread, in
one call of xgrammar's. Where masks have been slow (large classes of characters, many readings) they
are shared out to threads. A grammar that stays slow is found and fails its own request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from deepinfer.api.grammar import MaskJob
from deepinfer.errors import InvalidRequestError

from deepinfer_structured.matcher import Matcher
from deepinfer_structured.options import Options

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_WORTH_THREADS: Final = 0.002  # seconds of a batch; below, handing it out costs more than it saves


class Masks:
    """Fills batches, and remembers what they cost.

    Args:
        options: ``threads`` and ``fill_seconds``.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._alone: Any = None
        self._shared: Any = None
        self._row_seconds = 0.0
        self._suspicious = False

    def fill(self, jobs: Sequence[MaskJob], rows: NDArray[np.int32]) -> list[int | Exception]:
        """As ``GrammarBackend.fill``."""
        if not jobs:
            return []
        start = time.perf_counter()
        if self._suspicious:
            answer = [self._timed(job, rows) for job in jobs]
        else:
            answer = self._together(jobs, rows)
        seconds = time.perf_counter() - start
        self._suspicious = seconds > self._options.fill_seconds
        share = seconds / sum(1 + len(job.drafts) for job in jobs)
        self._row_seconds += (share - self._row_seconds) / 8
        return answer

    def _together(self, jobs: Sequence[MaskJob], rows: NDArray[np.int32]) -> list[int | Exception]:
        matchers = [cast("Matcher", job.grammar) for job in jobs]
        batch = self._batch(len(jobs))
        try:
            batch.batch_fill_next_token_bitmask(
                [matcher.inner for matcher in matchers], rows, [job.first for job in jobs]
            )
        except Exception:
            return [_alone(job, rows) for job in jobs]
        answer: list[int | Exception] = []
        for job, matcher in zip(jobs, matchers, strict=True):
            matcher.allow_ends(rows[job.first])
            answer.append(_drafts(matcher, job, rows) if job.drafts else 0)
        return answer

    def _batch(self, count: int) -> Any:
        """xgrammar's object for a batch of this size, with threads or without."""
        import xgrammar

        if self._row_seconds * count > _WORTH_THREADS and count > 1:
            if self._shared is None:
                self._shared = xgrammar.BatchGrammarMatcher(self._options.threads or "auto")
            return self._shared
        if self._alone is None:
            self._alone = xgrammar.BatchGrammarMatcher(1)
        return self._alone

    def _timed(self, job: MaskJob, rows: NDArray[np.int32]) -> int | Exception:
        start = time.perf_counter()
        answer = _alone(job, rows)
        seconds = time.perf_counter() - start
        if seconds <= self._options.fill_seconds * (1 + len(job.drafts)):
            return answer
        return InvalidRequestError(
            f"The grammar needs {seconds:.1f} s for a token; {self._options.fill_seconds:g} s are "
            "the most.",
            setting="so_args.schema",
            next_step="Write fewer alternatives that begin alike and less nested repetition.",
        )


def _alone(job: MaskJob, rows: NDArray[np.int32]) -> int | Exception:
    try:
        return job.grammar.fill(rows[job.first : job.first + 1 + len(job.drafts)], job.drafts)
    except Exception as why:
        return why


def _drafts(matcher: Matcher, job: MaskJob, rows: NDArray[np.int32]) -> int | Exception:
    try:
        mine = rows[job.first : job.first + 1 + len(job.drafts)]
        return matcher.fill_behind(mine, job.drafts)
    except Exception as why:
        return why
