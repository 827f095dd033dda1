"""What a client is told when something goes wrong: status, code, the field's path.

Where you are: every refusal of the server ends here, as OpenAI's error object, or as Anthropic's on
``/v1/messages``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import JSONResponse

from deepinfer.errors import (
    ConfigError,
    DeepInferError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    TokenizerError,
)

_TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_CLIENT_GONE: Final = 499


class Refusal(DeepInferError):
    """A request that ends with a status of its own.

    Args:
        status: the HTTP status.
        code: a short name for programs.
        message: for people.
        param: the path of the field at fault.
        retry_after: seconds, for 429 and 503.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, setting=param)
        self.status = status
        self.code = code
        self.retry_after = retry_after


def status_of(error: BaseException) -> int:
    """400 for what the caller can mend, 503 where no engine is left, 500 for our own faults."""
    if isinstance(error, Refusal):
        return error.status
    if isinstance(error, InvalidRequestError | ConfigError | TokenizerError):
        return 400
    if isinstance(error, EngineDeadError | EngineClosedError):
        return 503
    return 500


def error_body(error: BaseException, anthropic: bool = False) -> dict[str, Any]:
    """The JSON of an error in the shape of the dialect."""
    status = status_of(error)
    known = isinstance(error, DeepInferError)
    # What a stranger's exception says may hold paths and contents; the log has it.
    message = str(error) if known else "The server failed to answer this request."
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    code = error.code if isinstance(error, DeepInferError) else "internal"
    param = error.setting if isinstance(error, DeepInferError) else None
    inner = {"message": message, "type": kind, "param": param, "code": code}
    return {"type": "error", "error": inner} if anthropic else {"error": inner}


def error_response(error: BaseException, path: str) -> JSONResponse:
    """A response for an error on ``path``."""
    headers = {}
    if isinstance(error, Refusal) and error.retry_after is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after)))
    if status_of(error) == 401:
        headers["www-authenticate"] = 'Basic realm="deepinfer", charset="UTF-8"'
    body = error_body(error, anthropic=speaks_anthropic(path))
    return JSONResponse(body, status_of(error), headers)


def speaks_anthropic(path: str) -> bool:
    """Whether a route's clients expect Anthropic's errors."""
    return path.startswith("/v1/messages")


def client_gone() -> JSONResponse:
    """For the log only: nobody is left to read it."""
    return JSONResponse(None, _CLIENT_GONE)
