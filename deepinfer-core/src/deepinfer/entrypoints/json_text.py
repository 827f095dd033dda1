"""JSON from strangers: text all through, no key twice, and no deeper than the rest can walk.

Where you are: before a line of ``run-batch`` or a body of an HTTP request is looked at.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, Final

from deepinfer.errors import InvalidRequestError, shown

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
    """The value that a line of JSON holds: text all through, no key twice, and not too deep.

    Raises:
        InvalidRequestError: it holds none; ``what`` says where it stands. Of a key that stands
            twice, ``setting`` is the path.
    """
    repeated: list[tuple[dict[str, Any], str]] = []

    def as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            count = Counter(key for key, _ in pairs)
            repeated.append((found, next(key for key, times in count.items() if times > 1)))
        return found

    try:
        value = json.loads(as_text(line, what), object_pairs_hook=as_object)
    except RecursionError:
        raise _too_deep(what) from None
    except json.JSONDecodeError as why:  # its own line number would count from ``what``
        raise InvalidRequestError(
            f"{what} is no JSON: {why.msg} at character {why.pos + 1}."
        ) from None
    except ValueError as why:  # a number of thousands of digits
        raise InvalidRequestError(f"{what} is no JSON: {why}.") from None
    _walk(value, what)
    if repeated:  # the last one is in no other that is repeated, so it is in the value
        place, key = repeated[-1]
        path = f"{_path_to(place, value)}.{key}".removeprefix(".")
        raise InvalidRequestError(
            f"{what} has {shown(path)} more than once.",
            setting=path,
            next_step="Write each key of an object once.",
        )
    return value


def _path_to(place: object, value: Any) -> str:
    """Where an object lies in a value, as ``messages[0].content``."""
    above: dict[int, tuple[Any, str]] = {}  # the object or list around it, and the step into it
    left = [value]
    while left and left[-1] is not place:
        item = left.pop()
        for step, part in item.items() if isinstance(item, dict) else enumerate(item):
            if isinstance(part, dict | list):
                above[id(part)] = item, f".{step}" if isinstance(item, dict) else f"[{step}]"
                left.append(part)
    steps = []
    while place is not value:
        place, step = above[id(place)]
        steps.append(step)
    return "".join(reversed(steps)).removeprefix(".")


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
