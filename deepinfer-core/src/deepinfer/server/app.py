"""All routes of the server, put together: :func:`create_app`.

Where you are: the list of what a client can call. From outside to inside: access log, keys,
admission, routes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from deepinfer import __version__
from deepinfer.errors import DeepInferError
from deepinfer.server import tools
from deepinfer.server.access import Access
from deepinfer.server.auth import Auth, Keys
from deepinfer.server.errors import Refusal, error_response
from deepinfer.server.exchange import Dialect, answer, reply
from deepinfer.server.generate import Generate
from deepinfer.server.limits import Admission
from deepinfer.server.messages import Messages, count_tokens
from deepinfer.server.openai import Chat, Completions
from deepinfer.server.recipes import RecipeBody, Recipes
from deepinfer.server.responses import Responses
from deepinfer.server.schemas import ChatBody, CompletionBody, GenerateBody
from deepinfer.server.schemas_blocks import CountTokensBody, MessagesBody, ResponsesBody
from deepinfer.server.service import Service

_PAGE: Final = Path(__file__).parent / "page"
_FILES: Final = ("page.css", "page.js")
_SELF_ONLY: Final = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
_WRITERS: Final[Mapping[str, tuple[Dialect, type[BaseModel]]]] = {
    "/v1/generate": (Generate(), GenerateBody),
    "/v1/completions": (Completions(), CompletionBody),
    "/v1/chat/completions": (Chat(), ChatBody),
    "/v1/responses": (Responses(), ResponsesBody),
    "/v1/messages": (Messages(), MessagesBody),
}
_RECIPES: Final = "/v1/recipes"
_QUESTIONS: Final[Mapping[str, tuple[Callable[..., dict[str, Any]], type[BaseModel]]]] = {
    "/tokenize": (tools.tokenize, tools.TokenizeBody),
    "/detokenize": (tools.detokenize, tools.DetokenizeBody),
    "/v1/messages/count_tokens": (count_tokens, CountTokensBody),
}


def create_app(service: Service) -> ASGIApp:
    """The ASGI application of one service."""
    api = FastAPI(title="DeepInfer", version=__version__, docs_url=None, redoc_url=None)
    for path, (dialect, schema) in _WRITERS.items():
        _post(api, path, _writing(service, dialect), schema)
    for path, (question, schema) in _QUESTIONS.items():
        _post(api, path, _asking(service, question), schema)
    _post(api, "/abort_requests", _aborting(service), tools.AbortBody)
    recipes = Recipes(service)
    _post(api, _RECIPES, _replying(service, recipes.run), RecipeBody)
    _states(api, service, recipes)
    if service.config.page:
        _page(api)
    api.add_exception_handler(HTTPException, _http_error)
    api.add_exception_handler(Exception, _fault)
    api.openapi = _document(api)  # type: ignore[method-assign]
    admission = Admission(api, service, frozenset((*_WRITERS, *_QUESTIONS, _RECIPES)))
    known = frozenset(route.path for route in api.routes if hasattr(route, "path"))
    inner = Auth(admission, Keys(service.config.api_keys))
    return Access(_Named(inner, known), service.metrics)


class _Named:
    """Writes down which route a path is, for metrics: a stranger's paths would be without end."""

    def __init__(self, app: ASGIApp, paths: frozenset[str]) -> None:
        self._app = app
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in self._paths:
            scope["state"]["route"] = scope["path"]
        await self._app(scope, receive, send)


def _post(api: FastAPI, path: str, endpoint: Callable[..., Any], schema: type[BaseModel]) -> None:
    """A route whose body the endpoint reads itself; ``schema`` is what the document says of it."""
    shape = schema.model_json_schema(
        ref_template=f"#/components/schemas/{schema.__name__}.{{model}}"
    )
    inner = shape.pop("$defs", {})
    extra = {"requestBody": {"required": True, "content": {"application/json": {"schema": shape}}}}
    api.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        response_model=None,
        openapi_extra=extra,
        summary=(schema.__doc__ or "").split("\n")[0],
        responses={code: {"description": text} for code, text in _STATUSES.items()},
    )
    parts = api.state.schemas = getattr(api.state, "schemas", {})
    parts.update({f"{schema.__name__}.{name}": part for name, part in inner.items()})


def _document(api: FastAPI) -> Callable[[], dict[str, Any]]:
    """The OpenAPI document with the parts of our bodies in it."""
    plain = api.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        parts = document.setdefault("components", {}).setdefault("schemas", {})
        parts.update(api.state.schemas)
        return document

    return openapi


_STATUSES: Final[Mapping[int | str, str]] = {
    400: "The body is wrong; `error.param` is the path of the field.",
    401: "A key is needed.",
    404: "Another model.",
    408: "The body did not arrive.",
    413: "The body is too large.",
    415: "The body is no JSON by its content type.",
    429: "Later; see `Retry-After`.",
    503: "Loading or shutting down.",
}


def _writing(service: Service, dialect: Dialect) -> Callable[..., Any]:
    async def endpoint(request: Request) -> Response:
        return await answer(request, service, dialect)

    return endpoint


def _asking(service: Service, question: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    async def job(body: dict[str, Any]) -> dict[str, Any]:
        return await service.in_thread(lambda: question(body, service))

    return _replying(service, job)


def _replying(service: Service, job: Callable[..., Any]) -> Callable[..., Any]:
    async def endpoint(request: Request) -> Response:
        return await reply(request, service, job)

    return endpoint


def _aborting(service: Service) -> Callable[..., Any]:
    async def job(body: dict[str, Any]) -> dict[str, Any]:
        wish = tools.AbortBody.read(body)
        if (wish.request_ids is None) is not bool(wish.abort_all):
            raise Refusal(
                400,
                "invalid_request",
                "Give either request_ids or abort_all=true.",
                param="request_ids",
            )
        return {"aborted": await service.abort(wish.request_ids)}

    return _replying(service, job)


def _states(api: FastAPI, service: Service, recipes: Recipes) -> None:
    """What can be asked without a body."""

    async def health() -> Response:
        """Alive: 200 unless the engine is dead. Loading, draining and stalled are alive."""
        dead = service.death()
        state = {"status": "ok"} if dead is None else {"status": "dead", "detail": dead}
        return JSONResponse(state, 200 if dead is None else 503)

    async def ready() -> Response:
        """Whether new requests are wanted here."""
        found = service.readiness()
        state = {"status": found.state, **({"detail": found.detail} if found.detail else {})}
        return JSONResponse(state, 200 if found.ready else 503)

    async def metrics() -> Response:
        """For Prometheus."""
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(service.metrics.text(), headers={"content-type": kind})

    async def models(request: Request) -> Response:
        """The names under which the model is served."""
        try:
            return JSONResponse(tools.models(service))
        except DeepInferError as why:
            return error_response(why, request.url.path)

    async def list_recipes(request: Request) -> Response:
        """The recipes that ``POST`` of the same path runs."""
        try:
            return JSONResponse(await recipes.list())
        except DeepInferError as why:
            return error_response(why, request.url.path)

    async def version() -> Response:
        """Of DeepInfer."""
        return JSONResponse(tools.version())

    routes = {"/health": health, "/ready": ready, "/metrics": metrics, "/version": version}
    api.add_api_route("/v1/models", models, methods=["GET"], response_model=None)
    api.add_api_route(_RECIPES, list_recipes, methods=["GET"], response_model=None)
    for path, endpoint in routes.items():
        api.add_api_route(path, endpoint, methods=["GET"], response_model=None)


def _page(api: FastAPI) -> None:
    async def index() -> Response:
        return FileResponse(_PAGE / "index.html", headers=_SELF_ONLY)

    api.add_api_route("/", index, methods=["GET"], include_in_schema=False)
    for name in _FILES:
        api.add_api_route(f"/{name}", _file(name), methods=["GET"], include_in_schema=False)


def _file(name: str) -> Callable[..., Any]:
    async def endpoint() -> Response:
        return FileResponse(_PAGE / name, headers=_SELF_ONLY)

    return endpoint


async def _fault(request: Request, why: Exception) -> Response:
    """Our own fault: said without its contents; ``Access`` logs them."""
    return error_response(why, request.url.path)


async def _http_error(request: Request, why: Exception) -> Response:
    """What the router says (no such route, another method) in our shape."""
    assert isinstance(why, HTTPException)
    code = {404: "no_such_route", 405: "method_not_allowed"}.get(why.status_code, "http")
    response = error_response(Refusal(why.status_code, code, str(why.detail)), request.url.path)
    for name, value in (why.headers or {}).items():
        response.headers[name] = value
    return response
