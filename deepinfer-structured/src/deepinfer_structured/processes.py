"""Work that must be able to be ended, in processes of its own: :class:`Processes`.

Started at the first use and kept, because a start costs seconds (xgrammar brings torch with it). A
process is killed when a task exceeds its time, and the next task starts another.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from queue import LifoQueue
from typing import IO, Any, Final, cast

from deepinfer.errors import EngineClosedError, PluginError

from deepinfer_structured import frames

_START_SECONDS: Final = 120.0
_BY_OWN_TIME: Final = hasattr(signal, "SIGPROF")
_PATIENCE: Final = 6.0 if _BY_OWN_TIME else 1.0  # of the clock, which runs on while others work
_CODE: Final = "import sys; sys.path[:] = {path!r}; from {module} import main; main()"


class TooSlowError(Exception):
    """The task had to be ended, and its process with it."""


class RefusedError(Exception):
    """The task was refused; the message says why."""


class Processes:
    """A few processes that take one task each at a time.

    Args:
        vocabulary: what a new process is told first, as xgrammar's serialised TokenizerInfo.
        count: processes at most.
    """

    def __init__(self, vocabulary: Callable[[], str], count: int = 2) -> None:
        self._vocabulary = vocabulary
        self._idle: LifoQueue[_Process | None] = LifoQueue()
        for _ in range(count):
            self._idle.put(None)  # a place for one that is not started yet
        self._lock = threading.Lock()
        self._running: set[_Process] = set()
        self._closed = False

    def run(self, kind: bytes, text: str, seconds: float) -> str:
        """Have a task done within so many seconds of its process's own time.

        Tasks that wait already come first.

        Raises:
            TooSlowError: it took longer, or the process died of it.
            RefusedError: with the process's own words.
            EngineClosedError: before the task was done.
        """
        process = self._idle.get()
        try:
            if process is None:
                process = self._start()
            answer = process.ask(kind, text, seconds)
        except BaseException as why:
            if process is not None:
                self._end(process)
            self._idle.put(None)
            if self._closed and isinstance(why, Exception):
                raise EngineClosedError("The engine is closed.") from None
            raise
        self._idle.put(process)
        if answer[0] == frames.REFUSAL:
            raise RefusedError(answer[1])
        return answer[1]

    def _start(self) -> _Process:
        with self._lock:
            if self._closed:
                raise EngineClosedError("The engine is closed.")
            process = _Process()
            self._running.add(process)
        try:
            kind, why = process.ask(frames.VOCABULARY, self._vocabulary(), _START_SECONDS)
        except (TooSlowError, RefusedError) as broken:
            kind, why = frames.REFUSAL, str(broken) or f"it took more than {_START_SECONDS:g} s"
        if kind == frames.REFUSAL:
            self._end(process)
            raise PluginError(f"The process that compiles grammars did not start: {why}.")
        return process

    def _end(self, process: _Process) -> None:
        with self._lock:
            self._running.discard(process)
        process.end()

    def close(self) -> None:
        """End all of them; tasks that run fail."""
        with self._lock:
            self._closed = True
            running, self._running = self._running, set()
        for process in running:
            process.end()


class _Process:
    def __init__(self) -> None:
        code = _CODE.format(path=sys.path, module="deepinfer_structured.child")
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._in = cast("IO[bytes]", self._process.stdin)
        self._out = cast("IO[bytes]", self._process.stdout)

    def ask(self, kind: bytes, text: str, seconds: float) -> tuple[bytes, str]:
        """One task; the process is dead if this raises."""
        late = threading.Event()

        def kill() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(seconds * _PATIENCE, kill)
        timer.daemon = True
        timer.start()
        try:
            frames.send(cast("Any", self._in), kind, f"{seconds}\n{text}")
            answer = frames.receive(cast("Any", self._out))
        except (OSError, ValueError):  # the pipe broke, or was closed
            answer = None
        finally:
            timer.cancel()
        if answer is None and (late.is_set() or self._ran_out()):
            raise TooSlowError
        if answer is None:
            raise RefusedError("its process died of it, for want of memory perhaps")
        return answer

    def _ran_out(self) -> bool:
        """Whether it ended by its own time."""
        return _BY_OWN_TIME and self._process.wait() == -signal.SIGPROF

    def end(self) -> None:
        """Kill it and wait for that; idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._in, self._out):
            try:
                pipe.close()
            except OSError:
                pass
