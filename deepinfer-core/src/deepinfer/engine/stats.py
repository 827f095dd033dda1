"""What the engine counts and whom it tells: :class:`Recorder`, with its :class:`Counters`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deepinfer.api.plan import StepStats

if TYPE_CHECKING:
    from deepinfer.api.observer import Observer
    from deepinfer.api.plan import BatchPlan, Delta
    from deepinfer.engine.scheduler import Scheduler

_log = logging.getLogger("deepinfer.engine")


@dataclass(slots=True)
class Counters:
    """Totals since the engine started. ``finished``: requests by finish reason.

    ``prompt_tokens`` were computed (recomputed ones too), ``cached_tokens`` were not;
    ``output_tokens`` are those of ended requests. The seconds are host time; ``wait_seconds`` the
    time that the host stood waiting for the device; ``mask_seconds`` of it filling masks.

    ``grammars`` were compiled (refused ones too) in ``grammar_seconds``, from submission to the
    queue and summed over requests; ``grammar_hits`` requests found theirs compiled.
    """

    steps: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    plan_seconds: float = 0.0
    collect_seconds: float = 0.0
    output_seconds: float = 0.0
    wait_seconds: float = 0.0
    device_seconds: float = 0.0
    mask_seconds: float = 0.0
    grammars: int = 0
    grammar_hits: int = 0
    grammar_seconds: float = 0.0
    finished: dict[str, int] = field(default_factory=dict)


_SUMMED = (
    "preemptions",
    "cached_tokens",
    "plan_seconds",
    "collect_seconds",
    "output_seconds",
    "wait_seconds",
    "device_seconds",
    "mask_seconds",
)


class Recorder:
    """Statistics of the step that runs (``stats``), the totals, and the observers."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.stats = StepStats()
        self.counters = Counters()
        self._observers = list(observers)

    def begin(self) -> None:
        """A step begins."""
        self.stats = StepStats()

    def planned(self, plan: BatchPlan, decodes: int) -> None:
        """What the step runs."""
        stats = self.stats
        stats.step, stats.rows, stats.decode_rows = plan.step, len(plan.rows), decodes
        stats.prefill_tokens = plan.shape - plan.draft_rows - decodes

    def end(self, scheduler: Scheduler) -> None:
        """The step is over: fill in where things stand, sum up, tell."""
        stats, counters = self.stats, self.counters
        stats.running, stats.waiting = len(scheduler.running), len(scheduler.waiting)
        stats.free_pages = scheduler.cache.pool.free
        stats.preemptions = scheduler.preemptions - counters.preemptions
        stats.cached_tokens = scheduler.cached_tokens - counters.cached_tokens
        counters.steps += stats.step > 0
        counters.prompt_tokens += stats.prefill_tokens
        for name in _SUMMED:
            setattr(counters, name, getattr(counters, name) + getattr(stats, name))
        if self._observers:
            self._tell(lambda observer: observer.on_step(stats))

    def finished(self, delta: Delta, output_tokens: int) -> None:
        """A request is over."""
        reason = str(delta.finish)
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1
        self.counters.output_tokens += output_tokens
        self.stats.finished.append(delta.request_id)
        if self._observers:
            self._tell(lambda observer: observer.on_finish(delta))

    def _tell(self, call: Callable[[Observer], None]) -> None:
        """Observers may not disturb a step: one that raises is logged once and dropped."""
        for observer in tuple(self._observers):
            try:
                call(observer)
            except Exception:
                _log.exception("An observer failed and is dropped: %r", observer)
                self._observers.remove(observer)
