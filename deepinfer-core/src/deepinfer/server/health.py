"""Is it alive, is it ready, is it stuck: three questions with three answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from deepinfer.server.metrics import Metrics

Phase = Literal["loading", "serving", "draining"]


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether new requests are wanted, and why not."""

    ready: bool
    state: str
    detail: str = ""


class Stall:
    """Notices that requests run and no step ends.

    Args:
        metrics: knows when the last step ended.
        unfinished: how many requests the engine has.
        seconds: how long may pass without a step.
        clock: seconds.
    """

    def __init__(
        self,
        metrics: Metrics,
        unfinished: Callable[[], int],
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._unfinished = unfinished
        self._seconds = seconds
        self._clock = clock
        self._busy_since: float | None = None

    def begins(self) -> None:
        """A request is about to be handed to the engine."""
        if not self._unfinished():
            self._busy_since = self._clock()

    def look(self) -> float | None:
        """Seconds since anything moved if that is too long, else None."""
        now, since = self._clock(), self._busy_since
        if since is None or not self._unfinished():
            return None
        moved = max(since, self._metrics.last_step or since)
        return now - moved if now - moved > self._seconds else None
