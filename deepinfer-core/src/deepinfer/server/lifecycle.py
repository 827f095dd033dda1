"""The server as a program: listen, load, serve, drain, close.

Where you are: the outermost file. Signals belong to this program and to no library: SIGTERM and
SIGINT begin a drain, a second one ends at once. Used as an object (tests, embedders), no signal is
touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Protocol

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from deepinfer.errors import ConfigError
from deepinfer.server.app import create_app
from deepinfer.server.service import Service

if TYPE_CHECKING:
    from deepinfer.entrypoints.async_llm import AsyncLLM

_log: Final = logging.getLogger("deepinfer.server")
_KEEP_ALIVE: Final = 15
_LOOK: Final = 0.05
_LAST_WORDS: Final = 5
"""Seconds for connections to end after the drain; what runs then has been ended."""
_UNREAD_SECONDS: Final = 60.0
"""A client that takes nothing in for so long has left; it would keep its place and its socket."""


class Listening(Protocol):
    """Told where the server listens, once."""

    def __call__(self, host: str, port: int) -> None: ...


class Server:
    """One listening server.

    Args:
        service: what it serves.
        host, port: where; port 0 takes a free one.

    Raises:
        ConfigError: the place is taken or none of ours.
    """

    def __init__(self, service: Service, host: str = "127.0.0.1", port: int = 0) -> None:
        self.service = service
        self._socket = _bound(host, port)
        self.host, self.port = self._socket.getsockname()[:2]
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                create_app(service),
                http=_Connection,
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=_LAST_WORDS,
            ),
            self.stop,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._force = False
        self.started = threading.Event()

    @property
    def url(self) -> str:
        """``http://host:port``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def stop(self) -> None:
        """Drain and end; called again, end at once. From any thread, or a signal handler."""
        if self._loop is None or self._stopping is None:
            return
        stopping = self._stopping
        self._force = self._force or stopping.is_set()
        with contextlib.suppress(RuntimeError):  # its loop is closed: it has ended
            self._loop.call_soon_threadsafe(stopping.set)

    async def serve(self) -> None:
        """Until :meth:`stop`. The engine stays open; it belongs to who opened it."""
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        accepting = asyncio.create_task(self._uvicorn.serve(sockets=[self._socket]))
        try:
            while not (self._uvicorn.started or accepting.done()):
                await asyncio.sleep(_LOOK / 10)
            self.started.set()
            waiting = asyncio.create_task(self._stopping.wait())
            await asyncio.wait({accepting, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            await self._drain()
        finally:
            self._uvicorn.should_exit = True
            await accepting
            self._socket.close()
            self.service.close()

    async def _drain(self) -> None:
        """Refuse new requests, wait for those inside, end what is left at the deadline."""
        service = self.service
        service.drain()
        _log.info("Draining: %d requests are inside.", service.limits.inside)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + service.config.drain_seconds
        while service.limits.inside and loop.time() < deadline and not self._force:
            await asyncio.sleep(_LOOK)
        if service.limits.inside:
            ended = await service.abort(None)
            _log.warning("The drain's time is over: %d requests are ended.", len(ended))
            last = loop.time() + _LAST_WORDS
            while service.limits.inside and loop.time() < last and not self._force:
                await asyncio.sleep(_LOOK)


class _Connection(AutoHTTPProtocol):  # type: ignore[valid-type, misc]
    """uvicorn's connection, broken off where its client has long read nothing.

    Closing is not enough: that waits until everything is sent.
    """

    _watch: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """All buffers up to the client are full."""
        super().pause_writing()
        self._look_again()

    def resume_writing(self) -> None:
        self._unwatched()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatched()
        super().connection_lost(exc)

    def _look_again(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._watch = self.loop.call_later(_UNREAD_SECONDS, self._look, unread)

    def _look(self, unread: int) -> None:
        if self.transport.get_write_buffer_size() < unread:  # slow, and there
            self._look_again()
        else:
            self.transport.abort()

    def _unwatched(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None


class _Uvicorn(uvicorn.Server):
    """Signals begin our drain; uvicorn would stop listening at once, and raise them again."""

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop = stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._stop()


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as why:
        listener.close()
        raise ConfigError(f"{host}:{port} cannot be listened on: {why}.", setting="port") from why
    return listener


def run(server: Server, load: Callable[[], AsyncLLM], tell: Listening) -> None:
    """The program: listen (``/health`` answers, ``/ready`` says loading), load, serve, close.

    Args:
        server: what listens.
        load: opens the engine; on a thread.
        tell: told once the model is served.

    Raises:
        DeepInferError: the engine could not be opened.
    """
    asyncio.run(_program(server, load, tell))


async def _program(server: Server, load: Callable[[], AsyncLLM], tell: Listening) -> None:
    serving = asyncio.create_task(server.serve())
    llm: Any = None
    try:
        loading = asyncio.create_task(asyncio.to_thread(load))
        await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
        llm = await loading  # a load cannot be broken off; what was stopped closes it again
        if not serving.done():
            server.service.attach(llm)
            tell(server.host, server.port)
        await serving
    finally:
        server.stop()
        server.stop()
        await asyncio.gather(serving, return_exceptions=True)
        if llm is not None:
            await llm.shutdown()
