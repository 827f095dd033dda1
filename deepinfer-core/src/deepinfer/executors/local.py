"""Everything in the caller's process: one thread that obeys the brain in order.

Where you are: the near side of ``api.executor``. ``forward`` and ``sample`` only queue; the thread
loads the model, runs the plans first in, first out, and is the only one that touches tensors. An
error of a step travels in that step's future, and whatever is asked afterwards raises it again.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from deepinfer.errors import EngineClosedError

if TYPE_CHECKING:
    from deepinfer.api.backend import OutputFuture
    from deepinfer.api.executor import ModelFacts
    from deepinfer.api.plan import BatchPlan, RowInputs, StepOutput
    from deepinfer.config import EngineConfig
    from deepinfer.resolution import Resolution
    from deepinfer.worker.host import Host

_JOIN_AT_EXIT = 10.0


class _Task(NamedTuple):
    """``fatal``: after an error of it nothing else runs."""

    run: Callable[[], Any]
    answer: Future[Any] | None
    fatal: bool


class LocalExecutor:
    """An :class:`api.executor.Executor` for one device. Owned by one thread at a time.

    Attributes:
        startup: seconds of each phase of ``start``.
    """

    def __init__(self) -> None:
        self.startup: dict[str, float] = {}
        self._host: Host | None = None
        self._closed = False
        self._trouble = _Trouble()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        # The thread knows the queue, not the executor: one that is dropped ends its thread.
        self._thread = threading.Thread(
            target=_obey,
            args=(self._tasks, self._trouble),
            name="deepinfer-device",
            daemon=True,
        )
        # First, so that a Ctrl-C while the thread starts leaves somebody who ends it.
        self._end = weakref.finalize(self, _stop, self._tasks, self._thread)
        self._thread.start()

    def start(self, config: EngineConfig, resolution: Resolution) -> ModelFacts:
        """Load the model and size the KV pool."""
        from deepinfer.worker.host import Host

        began = time.perf_counter()
        self._host = self._ask(lambda: Host.open(config, resolution))
        self.startup = dict(self._host.startup, total=time.perf_counter() - began)
        return self._host.facts

    def agree(self, plan: BatchPlan | None) -> BatchPlan | None:
        """One replica agrees with itself."""
        return plan

    def forward(self, plan: BatchPlan) -> None:
        """Queue the first half of a step."""
        host = self._running()
        self._tasks.put(_Task(lambda: host.runner.forward(plan), None, True))

    def sample(self, step: int, inputs: RowInputs | None) -> OutputFuture:
        """Queue the second half; the future answers when the device has."""
        host = self._running()
        answer: Future[OutputFuture] = Future()
        self._tasks.put(_Task(lambda: host.runner.sample(step, inputs), answer, True))
        return _Output(answer)

    def call(self, method: str, *args: Any) -> list[Any]:
        """``trace`` with a recorder or None, ``memory``, ``profile``, ``ops``; see ``Host``."""
        host = self._running()
        return [self._ask(lambda: host.call(method, *args))]

    def close(self) -> None:
        """Wait for what runs, free the model, end the thread. Idempotent."""
        if not self._closed:
            self._closed = True
            host, self._host = self._host, None
            if host is not None:
                self._tasks.put(_Task(host.close, None, False))
            self._end.detach()
            self._tasks.put(None)
        _join(self._thread, None)  # again after an interrupted first call

    def _running(self) -> Host:
        self._check()
        assert self._host is not None, "start() comes first"
        return self._host

    def _check(self) -> None:
        if self._closed:
            raise EngineClosedError("This executor was closed.")
        if self._trouble.error is not None:
            raise self._trouble.error

    def _ask(self, task: Callable[[], Any]) -> Any:
        self._check()
        answer: Future[Any] = Future()
        self._tasks.put(_Task(task, answer, False))
        return answer.result()


class _Trouble:
    """The first error of a step; after it nothing runs."""

    def __init__(self) -> None:
        self.error: BaseException | None = None


class _Output:
    """A step's answer: first from the thread, then from the device."""

    def __init__(self, answer: Future[OutputFuture]) -> None:
        self._answer = answer

    def done(self) -> bool:
        """Whether ``result()`` returns (or raises) at once."""
        if not self._answer.done():
            return False
        return self._answer.exception() is not None or self._answer.result().done()

    def launched(self) -> None:
        """Wait until the device has been given the whole step, or never will be."""
        self._answer.exception()

    def result(self) -> StepOutput:
        """Wait for the step; raises what went wrong in it."""
        return self._answer.result().result()


def _obey(tasks: queue.SimpleQueue[_Task | None], trouble: _Trouble) -> None:
    """The thread: tasks in order until told to stop."""
    import torch

    with torch.inference_mode():
        while (task := tasks.get()) is not None:
            _run(task, trouble)
            del task  # what it holds must not outlive it here


def _run(task: _Task, trouble: _Trouble) -> None:
    try:
        if trouble.error is not None and task.fatal:
            raise trouble.error
        result = task.run()
    except BaseException as why:
        if task.fatal:  # noted first, so that whoever sees the answer sees that it stays
            trouble.error = trouble.error or why
        if task.answer is not None:
            task.answer.set_exception(why)
    else:
        if task.answer is not None:
            task.answer.set_result(result)


def _stop(tasks: queue.SimpleQueue[_Task | None], thread: threading.Thread) -> None:
    """End the thread behind what is queued. A garbage collection may call this on any thread."""
    tasks.put(None)
    _join(thread, _JOIN_AT_EXIT)


def _join(thread: threading.Thread, patience: float | None) -> None:
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(patience)
