"""JSON from strangers: text all through, and no deeper than the rest can walk.

Where you are: before a line of ``run-batch`` or a body of an HTTP request is looked at.
"""

from __future__ import annotations

import json
from typing import Any, Final

from deepinfer.errors import InvalidRequestError

_DEEPEST: Final = 200
"""Levels of JSON: far more than anybody means, far fewer than writing it out again can take."""


def as_text(text: str, what: str) -> str:
    """The text itself.

    Raises:
        InvalidRequestError: bytes of it are no UTF-8; ``what`` says where it stands.
    """
    at = _lone(text)
    if at is None:
        return text
    raise InvalidRequestError(
        f"{what} is no UTF-8 text: byte 0x{ord(text[at]) & 0xFF:02x} after {at} characters.",
        next_step="Give a text file, saved as UTF-8.",
    )


def as_json(line: str, what: str) -> Any:
    """The value that a line of JSON holds: text all through, and not too deep.

    Raises:
        InvalidRequestError: it holds none; ``what`` says where it stands.
    """
    try:
        value = json.loads(as_text(line, what))
    except RecursionError:
        raise _too_deep(what) from None
    except json.JSONDecodeError as why:  # its own line number would count from ``what``
        raise InvalidRequestError(
            f"{what} is no JSON: {why.msg} at character {why.pos + 1}."
        ) from None
    except ValueError as why:  # a number of thousands of digits
        raise InvalidRequestError(f"{what} is no JSON: {why}.") from None
    _walk(value, what)
    return value


def _walk(value: Any, what: str) -> None:
    left = [(value, 1)]
    while left:
        item, depth = left.pop()
        if isinstance(item, str):
            at = _lone(item)
            if at is not None:
                raise InvalidRequestError(
                    f"{what} holds \\u{ord(item[at]):04x}, half of a surrogate pair, which is no "
                    "text.",
                    next_step="Write both halves, or the character itself.",
                )
        elif isinstance(item, dict | list):
            if depth > _DEEPEST:
                raise _too_deep(what)
            parts = [*item, *item.values()] if isinstance(item, dict) else item
            left.extend((part, depth + 1) for part in parts)


def _too_deep(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{what} is nested deeper than {_DEEPEST} levels.")


def _lone(text: str) -> int | None:
    """Where the first character stands that UTF-8 cannot write."""
    try:
        text.encode()
    except UnicodeEncodeError as why:
        return why.start
    return None
