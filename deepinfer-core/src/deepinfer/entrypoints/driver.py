"""The one thread that steps an engine, and how other threads talk to it.

Where you are: between the front doors (``LLM``, ``AsyncLLM``) and the brain. The engine is not
thread-safe and a step must not be torn: Ctrl-C is raised in the main thread at any bytecode, so
the main thread waits and never steps. Callers hand over requests with a :class:`Sink`; after each
step the sink gets all its deltas at once. An idle thread sleeps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from deepinfer.api.plan import Delta, Request
from deepinfer.errors import EngineClosedError, EngineDeadError, InvalidRequestError

if TYPE_CHECKING:
    from deepinfer.engine.engine import Engine

logger: Final = logging.getLogger(__name__)


class Sink(Protocol):
    """Where deltas go. Called on the engine's thread: quick, and never raising."""

    def put(self, deltas: list[Delta]) -> None:
        """News of one step, for requests of this sink."""
        ...

    def fail(self, error: Exception) -> None:
        """The engine is gone; nothing more will come."""
        ...


class Gate:
    """An event that is one C lock: Ctrl-C cannot strike it half taken, as it can an ``Event``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._open = False

    def open(self) -> None:
        """Let everybody through. By one thread only; again is harmless."""
        if not self._open:
            self._open = True
            self._lock.release()

    def wait(self, timeout: float = -1) -> bool:
        """Whether it is open, after at most ``timeout`` seconds (−1: no end)."""
        if not self._lock.acquire(timeout=timeout):
            return False
        self._lock.release()
        return True


class _Nobody:
    """Listens for the last delta of a request that its caller has left."""

    def put(self, deltas: list[Delta]) -> None: ...

    def fail(self, error: Exception) -> None: ...


class Driver:
    """Owns an engine and its thread. All methods may be called from any thread.

    The thread holds no reference to a front door, so a front door that is dropped can close it.
    It is a daemon: a process that forgets to close still ends.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # Always taken as ``with self._lock``: a C lock, so Ctrl-C cannot strike between the
        # taking and the block. ``with condition`` runs Python code there.
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._inbox: deque[Callable[[], None]] = deque()
        self._sinks: dict[str, Sink] = {}  # by request, until its last delta has come
        self._nobody = _Nobody()
        self._closing = False
        self._death: EngineDeadError | None = None
        self._pid = os.getpid()
        self._ended = Gate()  # the last that the thread does; an interrupted join forgets
        self._thread = threading.Thread(target=self._run, name="deepinfer-engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request], sink: Sink) -> None:
        """Queue requests; a request that the engine refuses ends as an ``error`` delta.

        Raises:
            InvalidRequestError: an id that still runs; nothing was queued then.
        """
        with self._lock:
            self.check()
            for request in requests:
                if request.id in self._sinks:
                    raise InvalidRequestError(
                        f"A request with the id {request.id!r} is still running.",
                        setting="request_id",
                    )
            self._sinks.update((request.id, sink) for request in requests)
            self._send(lambda: self._add(requests))

    def abort(self, ids: Iterable[str]) -> None:
        """End requests; unknown ids are ignored. Their last delta says ``abort``."""
        doomed = tuple(ids)
        with self._lock:
            if not self._closing:
                self._send(lambda: self._abort(doomed))

    def drop(self, ids: Iterable[str], *, wait: bool) -> None:
        """End requests that nobody listens to any more; ``wait`` until the engine let them go."""
        doomed = tuple(ids)
        with self._lock:
            if self._closing:
                return
            if not wait:
                self._send(lambda: self._drop(doomed))
                return
        with contextlib.suppress(EngineClosedError, EngineDeadError):
            self.ask(lambda _: self._drop(doomed))

    def ask(self, question: Callable[[Engine], Any]) -> Any:
        """Run a call on the engine between two steps and return its answer."""
        answer: list[Any] = []
        done = Gate()

        def run() -> None:
            try:
                answer.append((question(self._engine), None))
            except Exception as why:
                answer.append((None, why))
            done.open()

        self._send(run)
        while not done.wait(1.0):
            self.check()
        value, error = answer[0]
        if error is not None:
            raise error
        return value

    def check(self) -> None:
        """Raise if the engine is closed or dead."""
        if self._death is not None:
            raise EngineDeadError(
                self._death.message, next_step=self._death.next_step
            ) from self._death.__cause__
        if self._closing:
            raise EngineClosedError("This engine was closed.")
        if self._pid != os.getpid():
            raise EngineClosedError(
                f"This engine belongs to process {self._pid}; a fork has none of its threads.",
                next_step="Create an engine after the fork.",
            )

    @property
    def unfinished(self) -> int:
        """Requests that have not ended and that somebody waits for."""
        return sum(sink is not self._nobody for sink in tuple(self._sinks.values()))

    def knows(self, request_id: str) -> bool:
        """Whether the id is taken; one that was dropped is, for another step."""
        return request_id in self._sinks

    def close(self, timeout: float | None = None) -> None:
        """Finish the running step, end all requests, close the engine, stop the thread."""
        with self._lock:
            self._closing = True
            self._wake.notify()
        if self._thread is threading.current_thread():  # a garbage collection may run there
            return
        if self._pid == os.getpid() and self._thread.ident is not None:
            self._ended.wait(-1 if timeout is None else timeout)
        self._thread.join(timeout)

    def _send(self, command: Callable[[], None]) -> None:
        with self._lock:
            self.check()
            self._inbox.append(command)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._wait():
                self._obey()
                if self._engine.has_work():
                    self._deliver(_alive(self._engine.step()))
        except BaseException as why:
            self._die(why)
        try:
            self._shut()
        finally:
            self._ended.open()

    def _wait(self) -> bool:
        """Sleep until there is something to do; False when closing."""
        with self._lock:
            while not (self._closing or self._inbox or self._engine.has_work()):
                self._wake.wait()
            return not self._closing

    def _obey(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.id not in self._sinks:
                continue  # dropped before it got here
            try:
                self._engine.add(request)
            except Exception as why:
                self._deliver([Delta(request.id, finish="error", error=why)])

    def _abort(self, ids: Iterable[str]) -> None:
        for name in ids:
            self._engine.abort(name)

    def _drop(self, ids: Iterable[str]) -> None:
        for name in ids:
            if self._engine.abort(name):
                self._sinks[name] = self._nobody  # its last delta is on the way
            else:
                self._sinks.pop(name, None)

    def _deliver(self, deltas: Iterable[Delta]) -> None:
        news: dict[Sink, list[Delta]] = {}
        for delta in deltas:
            sink = self._sinks.get(delta.request_id)
            if sink is None:
                continue
            news.setdefault(sink, []).append(delta)
            if delta.finish is not None:
                del self._sinks[delta.request_id]
        for sink, part in news.items():
            try:
                sink.put(part)
            except Exception:
                logger.exception("A listener failed; its requests are ended.")
                self._drop([d.request_id for d in part])
                with contextlib.suppress(Exception):
                    sink.fail(EngineClosedError("What listened to this request failed."))

    def _die(self, why: BaseException) -> None:
        logger.error("The engine has stopped: %r", why, exc_info=why)
        death = why if isinstance(why, EngineDeadError) else _death_of(why)
        with self._lock:
            self._death = death
            self._closing = True

    def _shut(self) -> None:
        """Nothing runs any more: tell those who wait, give everything back."""
        gone = self._death or EngineClosedError("This engine was closed.")
        for sink in set(self._sinks.values()):
            try:
                sink.fail(gone)
            except Exception:  # its event loop has just closed, say
                logger.exception("A listener could not be told that the engine is gone.")
        self._sinks.clear()
        try:
            self._engine.close()
        except Exception:
            logger.exception("Closing the engine failed.")
        self._inbox.clear()  # who waits for an answer looks every second whether all is closed


def _alive(deltas: list[Delta]) -> list[Delta]:
    """The same deltas; raises if the engine says in them that it has died."""
    for delta in deltas:
        if isinstance(delta.error, EngineDeadError):
            raise delta.error
    return deltas


def _death_of(why: BaseException) -> EngineDeadError:
    death = EngineDeadError(
        f"The engine has stopped: {type(why).__name__}: {why}", next_step="Create a new engine."
    )
    death.__cause__ = why
    return death
