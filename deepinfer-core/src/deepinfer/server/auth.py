"""API keys: where they come from, and who holds one."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from deepinfer.errors import ConfigError
from deepinfer.server.errors import Refusal, error_response

_OPEN: Final = ("/health",)
_LEAST: Final = 8


def read_keys(path: str) -> tuple[str, ...]:
    """One key a line; empty lines and those that begin with ``#`` are passed over.

    Raises:
        ConfigError: the file cannot be read or holds no key.
    """
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as why:
        raise ConfigError(
            f"The key file {path} cannot be read: {why}.", setting="api_key_file"
        ) from why
    keys = [line.strip() for line in lines]
    return checked_keys([k for k in keys if k and not k.startswith("#")], "api_key_file")


def keys_of(text: str) -> tuple[str, ...]:
    """The keys in a variable's text, separated by commas; refused where it is empty."""
    keys = [k.strip() for k in text.split(",")]
    return checked_keys([k for k in keys if k], "api_key_env")


def checked_keys(keys: Iterable[str], setting: str) -> tuple[str, ...]:
    """The same keys, if they can be sent as a header and are not trivially short.

    Raises:
        ConfigError: there is none, or one is no key. The message does not show it.
    """
    found = tuple(dict.fromkeys(keys))
    if not found:
        raise ConfigError(
            f"{setting} names no key, and a server without any would be open.", setting=setting
        )
    for number, key in enumerate(found, 1):
        if len(key) < _LEAST or not (key.isascii() and key.isprintable()) or " " in key:
            raise ConfigError(
                f"{setting}: key {number} must be at least {_LEAST} printable ASCII characters "
                "without spaces.",
                setting=setting,
            )
    return found


class Keys:
    """Tells whose key a request carries, in time that does not depend on the keys."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def holder(self, given: str | None) -> str | None:
        """A label of the key (``key1``, …); None if it is none of ours."""
        digest, found = _digest(given or ""), None
        for number, known in enumerate(self._digests, 1):  # all of them, whichever it is
            if hmac.compare_digest(digest, known) and given:
                found = f"key{number}"
        return found


class Auth:
    """Lets through who holds a key. ASGI middleware; ``/health`` is open.

    ``Authorization: Bearer KEY``, ``x-api-key: KEY`` (Anthropic's clients), or Basic with the key
    as password (browsers). ``scope["state"]["key"]`` gets the key's label, or the client's address
    where the server has no keys.
    """

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["key"] = (scope.get("client") or ("unknown",))[0]
        if self._keys and scope["path"] not in _OPEN:
            holder = self._keys.holder(_given(Headers(scope=scope)))
            if holder is None:
                refusal = Refusal(
                    401,
                    "invalid_api_key",
                    "This server needs an API key, and none of its own was given.",
                )
                await error_response(refusal, scope["path"])(scope, receive, send)
                return
            state["key"] = holder
        await self._app(scope, receive, send)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _given(headers: Headers) -> str | None:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return None
    return headers.get("x-api-key")
