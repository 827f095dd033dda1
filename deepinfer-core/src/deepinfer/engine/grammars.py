"""Grammars before and behind a request's steps: compiled while it waits, asked when it ended.

``engine.py`` hands over a structured request; what is compiled already enters the queue at once,
the rest is compiled on threads beside the steps. Where a spec is enforced only in part, the text
that has ended is looked at on these threads too, and the request's last delta waits for it.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from deepinfer.api.plan import FinishReason
from deepinfer.engine.reasoning import AfterReasoning
from deepinfer.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from deepinfer.api.grammar import Grammar, GrammarBackend
    from deepinfer.api.plan import Delta, Request
    from deepinfer.engine.request import RequestState
    from deepinfer.engine.stats import Counters

_THREADS = 16  # most of them wait: for a process that compiles, or for one another


class Grammars:
    """The matchers of all open requests that are not running yet or not judged yet.

    Args:
        backend: compiles; None refuses every structured request.
        counters: where compilations are counted.
        clock: seconds.
    """

    def __init__(
        self, backend: GrammarBackend | None, counters: Counters, clock: Callable[[], float]
    ) -> None:
        self._backend = backend
        self._counters = counters
        self._clock = clock
        self._pool: ThreadPoolExecutor | None = None
        self._compiling: dict[RequestState, tuple[Future[Grammar], float]] = {}
        self._judging: list[tuple[Future[str | None], Delta]] = []

    @property
    def busy(self) -> bool:
        """Something here will come to an end without a step."""
        return bool(self._compiling or self._judging)

    @property
    def judging(self) -> bool:
        """A last delta still waits to be judged."""
        return bool(self._judging)

    def check(self, request: Request) -> None:
        """Refuse a structured request if nothing here can enforce it."""
        if request.structured is not None and self._backend is None:
            raise UnsupportedError(
                f"Request {request.id}: structured output needs a grammar plugin, and none is "
                "loaded.",
                setting="so_args",
                next_step="pip install deepinfer-structured",
            )

    def start(self, r: RequestState) -> bool:
        """Give a request its matcher now (True), or begin to compile it (``compiled`` follows)."""
        assert self._backend is not None
        spec, ends = r.request.structured, r.output.ends
        grammar = self._backend.ready(spec, ends)
        if grammar is not None:
            self._counters.grammar_hits += 1
            r.grammar = _behind_reasoning(grammar, r)
            return True
        work = self._threads().submit(self._backend.compile, spec, ends)
        self._compiling[r] = work, self._clock()
        return False

    def compiled(self) -> list[tuple[RequestState, Exception | None]]:
        """Requests whose grammar is ready, or why it is refused."""
        answer: list[tuple[RequestState, Exception | None]] = []
        for r in [r for r, (work, _) in self._compiling.items() if work.done()]:
            work, began = self._compiling.pop(r)
            self._counters.grammars += 1
            self._counters.grammar_seconds += self._clock() - began
            try:
                r.grammar = _behind_reasoning(work.result(), r)
                answer.append((r, None))
            except Exception as why:
                answer.append((r, why))
        return answer

    def forget(self, r: RequestState) -> None:
        """The request has ended; what is being compiled for it is dropped."""
        work = self._compiling.pop(r, None)
        if work is not None:
            work[0].cancel()

    def judge(self, r: RequestState, delta: Delta) -> bool:
        """Whether this last delta has to wait; ``judged`` gives it back then."""
        ended = delta.finish == FinishReason.STOP and not isinstance(delta.stop_reason, str)
        grammar = r.grammar
        if not ended or grammar is None or not grammar.unproven():
            return False
        self._judging.append((self._threads().submit(grammar.violation), delta))
        return True

    def judged(self) -> list[Delta]:
        """Last deltas with what was found."""
        over = [(work, delta) for work, delta in self._judging if work.done()]
        self._judging = [entry for entry in self._judging if not entry[0].done()]
        return [_verdict(work, delta) for work, delta in over]

    def unjudged(self, error: Exception) -> list[Delta]:
        """The last deltas that still wait, as errors: nobody will judge them."""
        waiting, self._judging = self._judging, []
        return [replace(d, finish=FinishReason.ERROR, error=error) for _, d in waiting]

    def close(self) -> None:
        """Wait for the threads, whose work the backend cuts short."""
        if self._backend is not None:
            self._backend.close()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="deepinfer-grammar")
        return self._pool


def _behind_reasoning(grammar: Grammar, r: RequestState) -> Grammar:
    mark = r.request.reasoning_end
    return AfterReasoning(grammar, mark, r.output.ends) if mark else grammar


def _verdict(work: Future[str | None], delta: Delta) -> Delta:
    try:
        broken = work.result()
    except Exception as why:
        return replace(delta, finish=FinishReason.ERROR, error=why)
    if broken is None:
        return delta
    return replace(delta, finish=FinishReason.SCHEMA_VIOLATION, stop_reason=broken)
