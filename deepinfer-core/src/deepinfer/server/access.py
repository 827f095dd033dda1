"""The access log: a line of JSON for each request, with the id that the client got.

Where you are: the outermost layer. What routes learn of a request (its model's tokens, how it
ended) they write into ``scope["state"]["access"]``.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deepinfer.server.errors import error_response

if TYPE_CHECKING:
    from deepinfer.server.metrics import Metrics

log: Final = logging.getLogger("deepinfer.server.access")
_failures: Final = logging.getLogger("deepinfer.server")
_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_GONE: Final = 499


class Access:
    """Gives each request an id (the client's ``x-request-id`` if it is one), times and logs it.

    What escapes from a route is logged with its trace and answered with 500.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, sent = time.monotonic(), _Sent(send, _id_of(Headers(scope=scope)))
        state = scope.setdefault("state", {})
        access: MutableMapping[str, Any] = state.setdefault("access", {})
        state["request_id"] = sent.request_id
        try:
            await self._app(scope, receive, sent)
        except Exception as why:
            _failures.exception("Request %s failed.", sent.request_id)
            access["error"] = type(why).__name__
            if sent.status is None:
                await error_response(why, scope["path"])(scope, receive, sent)
        finally:
            seconds = time.monotonic() - began
            status = access.pop("status", None) or sent.status or _GONE
            self._metrics.http(state.get("route", "other"), scope["method"], status, seconds)
            line = {
                "request_id": sent.request_id,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": round(seconds, 4),
                "key": state.get("key"),
                **access,
            }
            log.info("%s", json.dumps(line, ensure_ascii=False))


class _Sent:
    """Passes a response on, with its request's id; remembers the status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self.request_id
        await self._send(message)


def _id_of(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _ID.fullmatch(given) else uuid.uuid4().hex
