"""What a JSON text that was cut off still lacks: :func:`partial`.

A text that ends with ``finish_reason="length"`` under a grammar is the beginning of a valid one.
Nothing is guessed here: what is there is read, and what is open is named. Standard library only,
one pass over the text, and no recursion: a text may be nested as deep as it is long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn

Kind = Literal["object", "array", "string", "number", "literal", "value", "key", "colon"]

_BLANK: Final = re.compile(r"[ \t\n\r]*")
_STRING: Final = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
_BEGUN_ESCAPE: Final = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?$")
_HALF_PAIR: Final = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_BEGUN_NUMBER: Final = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*|(?:\.[0-9]+)?[eE][+-]?)?)?$")
_LITERALS: Final[Mapping[str, Any]] = {"true": True, "false": False, "null": None}
_VIEWS: Final = 32  # schemas that speak of one value and are looked at
_NOTHING: Final = object()


@dataclass(frozen=True, slots=True)
class Open:
    """Something that the text has begun and not ended, or that must come next.

    Attributes:
        path: JSON Pointer (RFC 6901) of the value that it belongs to; empty for the whole.
        kind: ``object``, ``array`` or ``string`` that are open; a ``number`` or a ``literal`` that
            is cut or may go on; a ``key``, ``colon`` or ``value`` that must come next.
        required: of an object, the keys that its schema requires and that are not there yet.
    """

    path: str
    kind: Kind
    required: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Partial:
    """What :func:`partial` found.

    Attributes:
        complete: the text is one JSON value, with blanks around it at most.
        value: what is there: strings as far as they go, keys without a value left out; None where
            nothing is.
        open: what is open, outermost first; empty where the text is complete.
    """

    complete: bool
    value: Any
    open: tuple[Open, ...]


class BrokenTextError(ValueError):
    """The text is the beginning of no JSON value."""


def partial(text: str, schema: Any = None) -> Partial:
    """Say of a cut-off JSON text what it holds and what is missing.

    Args:
        text: the output, from its first character.
        schema: its JSON schema, to name the required keys that are missing: ``properties``,
            ``additionalProperties``, ``items``, ``prefixItems``, ``allOf`` and a ``$ref`` inside
            the schema are followed.

    Raises:
        BrokenTextError: at which character the text stops being the beginning of JSON.
    """
    reader = _Reader(text, schema)
    reader.run()
    value = None if reader.value is _NOTHING else reader.value
    return Partial(not reader.open, value, tuple(reader.open))


@dataclass(slots=True)
class _Frame:
    """A container that is being read."""

    value: dict[str, Any] | list[Any]
    path: str
    views: list[Mapping[str, Any]]
    key: str = ""
    begun: set[str] = field(default_factory=set)

    def below(self) -> str:
        """The path of the member that is being read."""
        if isinstance(self.value, list):
            return f"{self.path}/{len(self.value)}"
        return f"{self.path}/{self.key.replace('~', '~0').replace('/', '~1')}"

    def put(self, value: Any) -> None:
        """A member, whole or cut."""
        if isinstance(self.value, list):
            self.value.append(value)
        else:
            self.value[self.key] = value

    def opened(self) -> Open:
        if isinstance(self.value, list):
            return Open(self.path, "array")
        wanted = dict.fromkeys(key for view in self.views for key in _required(view))
        return Open(self.path, "object", tuple(k for k in wanted if k not in self.begun))


class _Reader:
    """Reads one value; ``expects`` is what may come next at ``at``."""

    def __init__(self, text: str, schema: Any) -> None:
        self.text = text
        self.at = 0
        self.schema = schema
        self.stack: list[_Frame] = []
        self.expects = "value"
        self.value: Any = _NOTHING
        self.open: list[Open] = []

    def run(self) -> None:
        """To the end of the text."""
        steps = {
            "value": self._value,
            "first": self._first,
            "key": self._key,
            "colon": self._colon,
            "next": self._next,
        }
        while True:
            self.at = self._end(_BLANK)
            if self.at == len(self.text):
                break
            steps[self.expects]()
        if self.expects != "next" or self.stack:
            self._note_open()

    def _end(self, pattern: re.Pattern[str]) -> int:
        found = pattern.match(self.text, self.at)
        return self.at if found is None else found.end()

    def _note_open(self) -> None:
        """The containers, and what must come next; a cut scalar stands in ``open`` already."""
        cut, self.open = self.open, [frame.opened() for frame in self.stack]
        path = self.stack[-1].below() if self.stack else ""
        if not cut and self.expects in ("value", "colon"):
            cut = [Open(path, "value" if self.expects == "value" else "colon")]
        elif not cut and self.expects == "key":
            cut = [Open(self.stack[-1].path, "key")]
        self.open += cut

    # One token each.

    def _value(self) -> None:
        char = self.text[self.at]
        if char in "{[":
            self.at += 1
            self._enter({} if char == "{" else [])
        elif char == '"':
            self._scalar(*self._string(), "string")
        elif char == "-" or char.isdigit():
            self._scalar(*self._number(), "number")
        else:
            self._scalar(*self._literal(), "literal")

    def _enter(self, container: dict[str, Any] | list[Any]) -> None:
        frame = self.stack[-1] if self.stack else None
        path = frame.below() if frame else ""
        views = self._views([self.schema] if frame is None else _below(frame))
        self._place(container)
        self.stack.append(_Frame(container, path, views))
        self.expects = "first"

    def _place(self, value: Any) -> None:
        if self.stack:
            self.stack[-1].put(value)
        else:
            self.value = value

    def _scalar(self, value: Any, whole: bool, kind: Kind) -> None:
        path = self.stack[-1].below() if self.stack else ""
        if value is not _NOTHING:
            self._place(value)
        if not whole or (kind == "number" and self.at == len(self.text) and self.stack):
            self.open = [Open(path, kind)]
            self.expects = "value" if not whole else "next"
        else:
            self.expects = "next"

    def _first(self) -> None:
        """Behind an opening bracket: a member or the end."""
        if self.text[self.at] in "}]":
            self._close()
        elif isinstance(self.stack[-1].value, list):
            self._value()
        else:
            self._key()

    def _key(self) -> None:
        if self.text[self.at] != '"':
            self._broken("a key")
        key, whole = self._string()
        if whole:
            self.stack[-1].key = key
            self.stack[-1].begun.add(key)
            self.expects = "colon"
        else:
            self.expects = "key"

    def _colon(self) -> None:
        if self.text[self.at] != ":":
            self._broken("a colon")
        self.at += 1
        self.expects = "value"

    def _next(self) -> None:
        """Behind a value: the next member, or the end of its container."""
        if not self.stack:
            self._broken("the end")
        if self.text[self.at] != ",":
            return self._close()
        self.at += 1
        self.expects = "value" if isinstance(self.stack[-1].value, list) else "key"

    def _close(self) -> None:
        is_list = isinstance(self.stack[-1].value, list)
        if self.text[self.at] != ("]" if is_list else "}"):
            self._broken("a comma or the end of the " + ("array" if is_list else "object"))
        self.at += 1
        self.stack.pop()
        self.expects = "next"

    # Scalars: what is there (or nothing), and whether it is whole.

    def _string(self) -> tuple[str, bool]:
        start, end = self.at, self._end(_STRING)
        self.at = len(self.text)
        if self.text[end : end + 1] == '"':
            self.at = end + 1
            return json.loads(self.text[start : end + 1]), True
        if end < len(self.text) and not _BEGUN_ESCAPE.match(self.text, end):
            self.at = end
            self._broken("a character of a string")
        there = _HALF_PAIR.sub("", self.text[start:end])
        return json.loads(there + '"'), False

    def _number(self) -> tuple[Any, bool]:
        start, end = self.at, self._end(_NUMBER)
        if _BEGUN_NUMBER.match(self.text, start) and end < len(self.text):
            end = len(self.text)
            self.at = end
            return _NOTHING, False
        if end == start:
            self._broken("a number")
        self.at = end
        return _read_number(self.text[start:end]), True

    def _literal(self) -> tuple[Any, bool]:
        for word, value in _LITERALS.items():
            if self.text.startswith(word, self.at):
                self.at += len(word)
                return value, True
            if word.startswith(self.text[self.at :]):
                self.at = len(self.text)
                return _NOTHING, False
        self._broken("a value")

    def _broken(self, wanted: str) -> NoReturn:
        raise BrokenTextError(
            f"Character {self.at} is {self.text[self.at : self.at + 1]!r}, where {wanted} must be."
        )

    # The schema beside it.

    def _views(self, schemas: list[Any]) -> list[Mapping[str, Any]]:
        """All schemas that speak of a value, through ``allOf`` and local references."""
        found: list[Mapping[str, Any]] = []
        todo = list(reversed(schemas))
        while todo and len(found) < _VIEWS:
            schema = todo.pop()
            if not isinstance(schema, Mapping) or any(schema is known for known in found):
                continue
            found.append(schema)
            todo += [part for part in reversed(_list(schema.get("allOf")))]
            todo.append(self._target(schema.get("$ref")))
        return found

    def _target(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        place = self.schema
        for part in reference[1:].split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(place, list) and part.isdigit() and int(part) < len(place):
                place = place[int(part)]
            elif isinstance(place, Mapping):
                place = place.get(part)
            else:
                return None
        return place


def _read_number(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # more digits than an int is read from
        return float(text)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _required(view: Mapping[str, Any]) -> list[str]:
    return [key for key in _list(view.get("required")) if isinstance(key, str)]


def _below(frame: _Frame) -> list[Any]:
    """The schemas of the member that is being read."""
    found = []
    for view in frame.views:
        if isinstance(frame.value, list):
            place, prefix = len(frame.value), _list(view.get("prefixItems"))
            found.append(prefix[place] if place < len(prefix) else view.get("items"))
        else:
            known = view.get("properties")
            names = known if isinstance(known, Mapping) else {}
            found.append(names.get(frame.key, view.get("additionalProperties")))
    return found
