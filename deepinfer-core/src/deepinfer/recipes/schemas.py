"""Schemas out of what people have: pydantic models, dataclasses, JSON schemas; bounded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from deepinfer.errors import InvalidRequestError, UnsupportedError, shown

_FREE_TEXT: Final = ("enum", "const", "format", "maxLength", "pattern")
_INSIDE: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONE: Final = ("items", "additionalProperties", "if", "then", "else", "not", "contains")


def schema_of(target: Any) -> dict[str, Any]:
    """The JSON schema of a pydantic model, a dataclass, a TypedDict or of a schema itself.

    Raises:
        InvalidRequestError: it describes no JSON.
    """
    if isinstance(target, Mapping):
        return dict(target)
    from pydantic import TypeAdapter

    try:
        schema: dict[str, Any] = TypeAdapter(target).json_schema()
    except Exception as why:
        raise InvalidRequestError(
            f"target={shown(target)} has no JSON schema: {why}.",
            setting="target",
            next_step="Give a pydantic model, a dataclass or a JSON schema.",
        ) from why
    # A type that holds itself is only a reference to its definition.
    at = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    named = schema.get("$defs", {}).get(at)
    return schema if named is None else {**named, "$defs": schema["$defs"]}


def bounded(schema: Any, max_text: int, max_items: int) -> Any:
    """The same schema, narrowed so that every answer ends.

    Free texts without a bound get ``maxLength``, lists without one ``maxItems``: a model that
    rambles then still comes to an end inside its context.
    """
    if not isinstance(schema, Mapping):
        return schema
    narrow = dict(schema)
    kinds = narrow.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds or []
    if "string" in kinds and not any(key in narrow for key in _FREE_TEXT):
        narrow["maxLength"] = max(max_text, narrow.get("minLength", 0))
    if "array" in kinds and "maxItems" not in narrow:
        narrow["maxItems"] = max(max_items, narrow.get("minItems", 0))
    for key in _INSIDE:
        if isinstance(narrow.get(key), Mapping):
            inside = narrow[key].items()
            narrow[key] = {name: bounded(sub, max_text, max_items) for name, sub in inside}
    for key in _LISTS:
        if isinstance(narrow.get(key), list):
            narrow[key] = [bounded(sub, max_text, max_items) for sub in narrow[key]]
    for key in _ONE:
        if key in narrow:
            narrow[key] = bounded(narrow[key], max_text, max_items)
    return narrow


def objections(value: Any, schema: Any) -> list[str]:
    """What a JSON schema has against a value, at most five sentences with their paths."""
    try:
        from jsonschema.validators import validator_for
    except ImportError:
        raise UnsupportedError(
            "This recipe checks its answers with jsonschema, which is not installed.",
            setting="jsonschema",
            next_step='Install "deepinfer-core[recipes]".',
        ) from None
    checker = validator_for(schema)(schema)
    found = sorted(checker.iter_errors(value), key=lambda e: list(map(str, e.absolute_path)))
    return [f"{_where(e.absolute_path)}: {e.message[:200]}." for e in found[:5]]


def _where(path: Any) -> str:
    return "/".join(map(str, path)) or "The answer"
