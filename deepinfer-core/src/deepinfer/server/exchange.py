"""One HTTP exchange: body in, answer or stream out, and a client that may leave at any moment.

Where you are: between Starlette and a dialect. While a request runs, somebody listens for the
client's departure, in streams and in plain answers alike.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from deepinfer.entrypoints.json_text import as_json
from deepinfer.errors import DeepInferError, InvalidRequestError
from deepinfer.server.errors import Refusal, client_gone, error_response, status_of
from deepinfer.server.fields import client_path
from deepinfer.server.service import Asked, Run, Service, last_of

if TYPE_CHECKING:
    from deepinfer.entrypoints.outputs import RequestOutput

_log: Final = logging.getLogger("deepinfer.server")
_T = TypeVar("_T")
_SSE: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_IGNORED: Final = "x-deepinfer-ignored"
_HEADER_BYTES: Final = 2048


class Writer(Protocol):
    """Makes one request's answer in a dialect."""

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The answer in one piece."""
        ...

    def begin(self) -> list[str]:
        """What a stream opens with, as lines of server-sent events."""
        ...

    def news(self, number: int, output: RequestOutput) -> list[str]:
        """What came of prompt ``number``."""
        ...

    def end(self) -> list[str]:
        """What a stream closes with."""
        ...

    def failed(self, error: BaseException) -> list[str]:
        """What a stream says that breaks off."""
        ...


class Dialect(Protocol):
    """One way of asking."""

    prefix: str

    def asked(self, body: dict[str, Any], service: Service) -> Asked:
        """The body in our words; on a thread. Raises what is wrong with it."""
        ...


async def answer(request: Request, service: Service, dialect: Dialect) -> Response:
    """Read, run and answer one request for text."""

    async def work(raw: bytes) -> Response:
        return await _work(request, service, dialect, raw)

    return await _while_there(request, service, work)


async def reply(
    request: Request,
    service: Service,
    job: Callable[[dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]],
) -> Response:
    """Read and answer one request of another kind: an object in, an object out."""

    async def work(raw: bytes) -> Response:
        body = await service.in_thread(lambda: body_of(raw))
        return JSONResponse(await _in_their_words(job(body), body))

    return await _while_there(request, service, work)


async def _while_there(
    request: Request,
    service: Service,
    work: Callable[[bytes], Coroutine[Any, Any, Response]],
) -> Response:
    """Do the work on a body as long as its client is there, and say what went wrong."""
    try:
        raw = await read_body(request, service.config.max_body_bytes, service.config.body_seconds)
        return await unless_gone(request.receive, work(raw))
    except _GoneError:
        request.state.access["status"] = 499
        return client_gone()
    except DeepInferError as why:
        request.state.access["error"] = why.code
        return error_response(why, request.url.path)


async def _work(request: Request, service: Service, dialect: Dialect, raw: bytes) -> Response:
    body = await service.in_thread(lambda: body_of(raw))
    return await _in_their_words(_run(request, service, dialect, body), body)


async def _in_their_words(work: Coroutine[Any, Any, _T], body: dict[str, Any]) -> _T:
    """The work; what it is refused with names the client's own fields."""
    try:
        return await work
    except DeepInferError as why:
        placed = _placed(why, body)
        if placed is why:
            raise
        raise placed from why


async def _run(
    request: Request, service: Service, dialect: Dialect, body: dict[str, Any]
) -> Response:
    run_id = f"{dialect.prefix}{uuid.uuid4().hex}"

    def opened() -> tuple[Run, Writer]:
        run = service.open(run_id, dialect.asked(body, service))
        return run, run.asked.writer(run)

    run, writer = await service.in_thread(opened)
    headers = _warnings(run.asked.ignored)
    outputs = service.outputs(run)
    if run.asked.stream:
        # The first news comes before the status does: what is refused gets its own status.
        first = await anext(outputs)
        return EventStream(_talk(writer, first, outputs), headers, run, request)
    try:
        async with aclosing(outputs):
            whole = writer.whole(await last_of(outputs))
    finally:
        note(request, run)
    return JSONResponse(whole, headers=headers)


def _placed(error: DeepInferError, body: dict[str, Any]) -> DeepInferError:
    """The same error with the client's own path. A copy: one error may belong to many requests."""
    path = client_path(error.setting, body)
    if path == error.setting or isinstance(error, Refusal):
        return error
    return Refusal(status_of(error), error.code, str(error), param=path)


async def _talk(
    writer: Writer,
    first: tuple[int, RequestOutput],
    outputs: AsyncGenerator[tuple[int, RequestOutput], None],
) -> AsyncGenerator[str, None]:
    async with aclosing(outputs):
        try:
            yield "".join((*writer.begin(), *writer.news(*first)))
            async for number, output in outputs:
                said = "".join(writer.news(number, output))
                if said:
                    yield said
            yield "".join(writer.end())
        except Exception as why:
            if not isinstance(why, DeepInferError):
                _log.exception("A stream failed.")
            yield "".join(writer.failed(why))


def note(request: Request, run: Run) -> None:
    """What the access log says of a request that ran."""
    request.state.access.update(
        id=run.id,
        prompt_tokens=run.usage.prompt,
        output_tokens=run.usage.output,
        cached_tokens=run.usage.cached,
        finish=run.finishes,
    )


class EventStream(Response):
    """Server-sent events; ends with the client."""

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        headers: dict[str, str],
        run: Run,
        request: Request,
    ) -> None:
        super().__init__(headers={**_SSE, **headers}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events
        self._run = run
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._stream(send))
        except (_GoneError, OSError):
            self._request.state.access["status"] = 499
        finally:
            await self._events.aclose()
            note(self._request, self._run)

    async def _stream(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        async with aclosing(self._events) as events:
            async for text in events:
                part = {"body": text.encode(), "more_body": True}
                await send({"type": "http.response.body", **part})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _GoneError(Exception):
    """The client hung up."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Do the work; if the client hangs up first, stop it and raise."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_departure(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _GoneError
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, most: int, seconds: float) -> bytes:
    """A request's body, JSON by its type, no larger than ``most`` bytes.

    Raises:
        Refusal: 413 before more is read, 415 for another type, 408 if it does not arrive.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise Refusal(
            415,
            "unsupported_media_type",
            "A body is JSON: send 'content-type: application/json'.",
        )
    told = request.headers.get("content-length", "0")
    if told.isdigit() and int(told) > most:
        raise _too_large(most)
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for part in _parts(request.receive):
                size += len(part)
                if size > most:
                    raise _too_large(most)
                parts.append(part)
    except TimeoutError:
        raise Refusal(
            408, "body_timeout", f"The body did not arrive within {seconds:g} s."
        ) from None
    return b"".join(parts)


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _GoneError
        yield message.get("body", b"")
        more = message.get("more_body", False)


def body_of(raw: bytes) -> dict[str, Any]:
    """The object that a body holds.

    Raises:
        InvalidRequestError: it holds none.
    """
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as why:
        raise InvalidRequestError(
            f"The body is no UTF-8 text: byte 0x{raw[why.start]:02x} at {why.start}."
        ) from None
    body = as_json(text, "The body")
    if not isinstance(body, dict):
        raise InvalidRequestError("The body is no JSON object.")
    return body


def _too_large(most: int) -> Refusal:
    return Refusal(413, "body_too_large", f"The body is larger than {most} bytes.")


def _warnings(ignored: tuple[str, ...]) -> dict[str, str]:
    """Which fields changed nothing."""
    text = ", ".join(ignored).encode("ascii", "replace").decode()[:_HEADER_BYTES]
    return {_IGNORED: text} if ignored else {}


def event(data: Any, name: str | None = None) -> str:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"data: {text}\n\n" if name is None else f"event: {name}\ndata: {text}\n\n"
