"""Objects that are told of steps and requests, by plain method call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from deepinfer.api.plan import Delta, StepStats


class Observer(Protocol):
    """An exception in an observer is logged once and the observer is dropped."""

    def on_step(self, stats: StepStats) -> None: ...

    def on_finish(self, delta: Delta) -> None: ...
