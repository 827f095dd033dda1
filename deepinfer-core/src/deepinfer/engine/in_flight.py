"""Steps on the device: :class:`InFlight`, the engine's side of the executor.

At most one step has begun and not been sampled, and one sampled step is on its way when the engine
returns: two where steps are so short that the host may come late with the next one. All waiting
happens here, so Ctrl-C finds nothing half done: what has begun or is on its way stays, and the
engine's next step goes on with it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from deepinfer.api.backend import OutputFuture
    from deepinfer.api.executor import Executor
    from deepinfer.api.plan import BatchPlan, RowInputs, StepOutput
    from deepinfer.engine.request import RequestState
    from deepinfer.engine.stats import Recorder

_T = TypeVar("_T")
_SHORT = 0.003  # seconds of a step: twice what the host takes for 64 requests with drafts, about
_SMOOTH = 8  # steps over which its length is smoothed
_NAP = 0.0005  # seconds between looks at a grammar or a transfer when nothing else can run


class InterruptedWaitError(BaseException):
    """Ctrl-C (or another BaseException, its cause) struck while the host waited."""


class Begun(NamedTuple):
    """A step whose first half runs: its plan, and the request of each row."""

    plan: BatchPlan
    planned: list[RequestState]


class InFlight:
    """What the device has been given and has not given back.

    Args:
        deep: two steps may be on their way.
    """

    def __init__(
        self,
        executor: Executor,
        recorder: Recorder,
        clock: Callable[[], float],
        deep: bool = False,
    ) -> None:
        self.begun: Begun | None = None
        self._executor = executor
        self._recorder = recorder
        self._clock = clock
        self._sampled: deque[tuple[list[RequestState], OutputFuture]] = deque()
        self._deep = deep
        self._length = 1.0  # seconds of a step, of late
        self._landed = 0.0  # when the last one did; 0: nothing was on its way behind it

    def __len__(self) -> int:
        """Sampled steps on their way."""
        return len(self._sampled)

    @property
    def depth(self) -> int:
        """Sampled steps to leave on their way."""
        return 2 if self._deep and self._length < _SHORT else 1

    def forward(self, plan: BatchPlan, planned: list[RequestState]) -> Begun:
        """Start the first half of a step."""
        self._executor.forward(plan)
        self.begun = Begun(plan, planned)
        return self.begun

    def sample(self, inputs: RowInputs | None) -> None:
        """Start the second half of the step that has begun.

        A short step is waited for until it is launched: what this thread does next would run in
        turns with the executor's, and make launching take up to three times as long, which the
        device waits for.
        """
        assert self.begun is not None
        plan, planned = self.begun
        answer = self._executor.sample(plan.step, inputs)
        self._sampled.append((planned, answer))
        self.begun = None
        launched = getattr(answer, "launched", None)
        if self.depth > 1 and launched is not None:
            self._patiently(launched)

    def take(self) -> tuple[list[RequestState], StepOutput]:
        """Wait for the oldest step: its requests, row by row, and what it produced."""
        out = self._patiently(self._sampled[0][1].result)
        planned, _ = self._sampled.popleft()
        now = self._clock()
        if self._landed:
            self._length += (now - self._landed - self._length) / _SMOOTH
        self._landed = now if self._sampled else 0.0
        return planned, out

    def nap(self) -> None:
        """Nothing can run, and something is on its way elsewhere."""
        self._patiently(lambda: time.sleep(_NAP))

    def abandon(self) -> None:
        """The device has failed: nothing comes back."""
        self._sampled.clear()
        self.begun = None

    def _patiently(self, wait: Callable[[], _T]) -> _T:
        start = self._clock()
        try:
            return wait()
        except Exception:
            raise
        except BaseException as why:
            raise InterruptedWaitError from why
        finally:
            self._recorder.stats.wait_seconds += self._clock() - start
