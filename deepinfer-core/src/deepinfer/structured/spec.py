"""What a text must obey, as a request says it: :class:`StructuredSpec`.

Where you are: below ``sampling_params``. Everything that needs no grammar is checked here; what can
be enforced is the grammar plugin's to say, at submission.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, Self, get_origin

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.errors import (
    PydanticInvalidForJsonSchema,
    PydanticSchemaGenerationError,
    PydanticUserError,
)

from deepinfer.errors import InvalidRequestError, shown


class Frozen(BaseModel):
    """Frozen, closed, and with errors of ours that name the field."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise explain(type(self).__name__, error) from None

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other values, which are checked like the first ones."""
        if not update:
            return super().model_copy(deep=deep)
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**given, **update})


def as_tuple(value: Any) -> tuple[Any, ...]:
    """For pydantic: a list of anything; a text is none."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise ValueError("expected a list")
    return tuple(value)


def explain(owner: str, error: ValidationError) -> InvalidRequestError:
    """Every field that is wrong, in one error of ours."""
    lines, first = [], None
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"])
        first = first or where or None
        if item["type"] == "extra_forbidden":
            lines.append(f"{where}: no such parameter")
        else:
            reason = item["msg"].removeprefix("Value error, ")
            given = f"={shown(item['input'])}" if where and item["type"] != "missing" else ""
            lines.append(f"{where}{given}: {reason}" if where else reason)
    return InvalidRequestError(f"{owner}: {'; '.join(lines).rstrip('.')}.", setting=first)


class StructuredSpec(Frozen):
    """What the text must obey: one type and its rule. Compiled by a grammar plugin.

    Args:
        schema_type: what ``schema`` is.
        schema: for ``json`` a JSON schema (as an object or as its text), a pydantic model or
            another type that pydantic knows; for ``regex`` a pattern that the whole text matches;
            for ``ebnf`` a grammar with a rule ``root``; for ``choice`` texts of which one is
            written; for ``structural_tag`` tags with their contents; nothing for ``json_object``.
        on_unsupported: what of a JSON schema no grammar enforces is refused (``refuse``), or the
            closest larger grammar is enforced and the text is validated at its end
            (``validate``), which may then finish as ``schema_violation``.
        max_whitespace: most blanks in a row between JSON's tokens; None takes the plugin's bound.
        max_digits: most digits in a row of a JSON number; None takes the plugin's bound.
    """

    schema_type: Literal["json", "regex", "ebnf", "choice", "json_object", "structural_tag"]
    rule: Any = Field(default=None, alias="schema")
    on_unsupported: Literal["refuse", "validate"] = "refuse"
    max_whitespace: int | None = Field(default=None, ge=0, le=64)
    max_digits: int | None = Field(default=None, ge=1, le=400)

    @model_validator(mode="after")
    def _as_data(self) -> StructuredSpec:
        """The rule as plain data of its own, which nobody can change behind the engine's back."""
        rule = _RULES[self.schema_type](self.rule)
        if self.schema_type != "json":  # a schema's own check says where
            _check_text(rule)
        object.__setattr__(self, "rule", rule)
        return self


def _json_schema(rule: Any) -> Any:
    if isinstance(rule, str):
        try:
            return json.loads(rule, object_pairs_hook=_each_once)
        except (ValueError, RecursionError) as why:
            raise ValueError(f"schema is no JSON: {why}") from None
    if not isinstance(rule, Mapping | bool | None) and (
        isinstance(rule, type) or get_origin(rule) is not None or isinstance(rule, TypeAdapter)
    ):
        rule = _schema_of_type(rule)
    if not isinstance(rule, Mapping | bool):
        raise ValueError(f"schema must be a JSON schema or a type, not {type(rule).__name__}")
    return _copied(rule)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of two rules under one key one would be dropped in silence."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {shown(key)} stands there twice")
        found[key] = value
    return found


def _schema_of_type(rule: Any) -> Any:
    try:
        return (rule if isinstance(rule, TypeAdapter) else TypeAdapter(rule)).json_schema()
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema, PydanticUserError) as why:
        raise ValueError(f"schema is a type that pydantic makes no schema of: {why}") from None


def _copied(rule: Any) -> Any:
    """The same as JSON has it; a mapping's order stays, for it orders the text."""
    try:
        return json.loads(json.dumps(rule, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as why:
        raise ValueError(f"schema is no JSON: {why}") from None


def _text_rule(rule: Any) -> str:
    if not isinstance(rule, str):
        raise ValueError(f"schema must be a text, not {type(rule).__name__}")
    return rule


def _choices(rule: Any) -> tuple[str, ...]:
    choices = as_tuple(rule)
    if not choices or not all(isinstance(text, str) and text for text in choices):
        raise ValueError("schema must be a list of texts, none of them empty")
    return choices


def _check_text(rule: Any) -> None:
    """Refuse what no text can be: it would be written as another character."""
    try:
        json.dumps(rule, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("schema holds half of a surrogate pair, which is no text") from None


def _nothing(rule: Any) -> None:
    if rule is not None and rule != {} and rule is not True:
        raise ValueError("json_object takes no schema; the type json does")


def _tag(rule: Any) -> Any:
    if isinstance(rule, str):
        return _json_schema(rule)
    if not isinstance(rule, Mapping):
        raise ValueError(f"schema must be an object, not {type(rule).__name__}")
    return _copied(rule)


_RULES: Final[Mapping[str, Callable[[Any], Any]]] = {
    "json": _json_schema,
    "regex": _text_rule,
    "ebnf": _text_rule,
    "choice": _choices,
    "json_object": _nothing,
    "structural_tag": _tag,
}


class StructuredOutputsParams(Frozen):
    """``SamplingParams.so_args`` in the words that users of vLLM know; exactly one is given."""

    json_: Any = Field(default=None, alias="json")
    regex: Any = None
    choice: Any = None
    grammar: Any = None
    json_object: bool | None = None
    structural_tag: Any = None

    def so_args(self) -> dict[str, Any]:
        """The same as ``so_args`` has it."""
        given = {
            _SPELLED.get(name, name): getattr(self, name)
            for name in type(self).model_fields
            if getattr(self, name) not in (None, False)
        }
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs names {', '.join(given) or 'nothing'}; give one of json, "
                "regex, choice, grammar, json_object, structural_tag"
            )
        ((kind, rule),) = given.items()
        return {"schema_type": kind, "schema": None if kind == "json_object" else rule}


_SPELLED: Final = {"json_": "json", "grammar": "ebnf"}
