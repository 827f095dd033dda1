"""Who has to wait: rate and concurrency of a key, and the server's own queue.

Where you are: ASGI middleware in front of the routes that make text. A request is let in before its
body is read and counted until its last byte is sent, whatever happens between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from starlette.types import ASGIApp, Receive, Scope, Send

from deepinfer.server.config import ServerConfig
from deepinfer.server.errors import Refusal, error_response

if TYPE_CHECKING:
    from deepinfer.server.service import Service

_KEYS: Final = 4096
_MINUTE: Final = 60.0


class Limits:
    """Counts requests by key. One event loop only.

    Args:
        config: the limits.
        clock: seconds.
    """

    def __init__(self, config: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = config.requests_per_minute
        self._most = config.max_concurrency_per_key
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}  # tokens left and when, oldest first
        self._inside: dict[str, int] = {}

    @property
    def inside(self) -> int:
        """Requests that were let in and have not ended."""
        return sum(self._inside.values())

    @contextmanager
    def admit(self, key: str, capacity: int) -> Iterator[None]:
        """Count a request while the block runs; at most ``capacity`` of all keys may.

        Raises:
            Refusal: 429, with the seconds after which it may work.
        """
        mine = self._inside.get(key, 0)
        if self.inside >= capacity:
            raise queue_full()
        if self._most is not None and mine >= self._most:
            raise Refusal(
                429,
                "concurrency_limit",
                f"{mine} requests of this key are running and {self._most} may.",
                retry_after=1,
            )
        self._spend(key)
        self._inside[key] = mine + 1
        try:
            yield
        finally:
            left = self._inside[key] - 1
            if left:
                self._inside[key] = left
            else:
                del self._inside[key]

    def _spend(self, key: str) -> None:
        """Take one of the tokens, of which a minute brings ``rate``; they pile up to as many."""
        if self._rate is None:
            return
        now, full = self._clock(), float(self._rate)
        tokens, then = self._buckets.get(key, (full, now))
        tokens = min(full, tokens + (now - then) * self._rate / _MINUTE)
        if tokens < 1:
            raise Refusal(
                429,
                "rate_limit",
                f"This key may send {self._rate} requests a minute.",
                retry_after=(1 - tokens) * _MINUTE / self._rate + 0.5,
            )
        self._buckets.pop(key, None)
        if len(self._buckets) >= _KEYS:
            del self._buckets[next(iter(self._buckets))]  # who has been away longest
        self._buckets[key] = tokens - 1, now


def queue_full() -> Refusal:
    """What a request is told that may not even wait."""
    return Refusal(
        429, "queue_full", "All places of this server are taken, waiting ones too.", retry_after=1
    )


class Admission:
    """Lets requests in that make text. ASGI middleware around the routes in ``paths``."""

    def __init__(self, app: ASGIApp, service: Service, paths: frozenset[str]) -> None:
        self._app = app
        self._service = service
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        service = self._service
        try:
            service.check_open()
            admitted = service.limits.admit(scope["state"]["key"], service.capacity)
            admitted.__enter__()
        except Refusal as why:
            await error_response(why, scope["path"])(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            admitted.__exit__(None, None, None)
