"""Document transformation: a text into a given type, long documents in pieces that are merged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field, field_validator

from deepinfer.recipes.interface import Ask, Options, json_answer, told
from deepinfer.recipes.pieces import pieces
from deepinfer.recipes.schemas import bounded, objections, schema_of


class Transformation(Options):
    """Fills a type from a document.

    A document of one piece is asked about once, under the type's own schema. Of a longer one each
    piece fills what it knows (scalars may be null, lists empty), and the pieces are merged: lists
    one behind the other without repetition, of scalars the first that is known. If the merged value
    is not valid, one more question makes it so, from what was found.

    Args:
        target: a pydantic model, a dataclass or the JSON schema of an object.
        instructions: what is wanted, in your words.
        chunk_words: the longest piece.
        max_text, max_items: bounds of texts and lists where the type has none, so that every
            answer ends.
    """

    name: ClassVar[str] = "transform"

    target: Any
    instructions: str = ""
    chunk_words: int = Field(default=600, ge=1)
    max_text: int = Field(default=200, ge=1)
    max_items: int = Field(default=16, ge=1)

    @field_validator("target")
    @classmethod
    def _object(cls, value: Any) -> Any:
        schema = schema_of(value)
        if schema.get("type") != "object" or not schema.get("properties"):
            raise ValueError("it must describe an object with properties")
        return schema

    def parts(self, text: str) -> Sequence[Ask]:
        """A question for each piece."""
        whole = bounded(self.target, self.max_text, self.max_items)
        found = pieces(text, self.chunk_words) or [text]
        schema = whole if len(found) == 1 else _partly(whole)
        return [Ask(told(self._system(), piece), json_answer(schema), piece) for piece in found]

    def problems(self, ask: Ask, answer: Any) -> Sequence[str]:
        """What the type says that its grammar cannot."""
        return objections(answer, ask.so_args["schema"])

    def merge(self, text: str, answers: Sequence[Any]) -> Any:
        """One value out of the pieces'."""
        merged = dict(answers[0])
        for answer in answers[1:]:
            merged = _joined(merged, answer)
        if len(answers) > 1:
            merged = {key: value for key, value in merged.items() if value is not None}
        return _cut(merged, bounded(self.target, self.max_text, self.max_items))

    def last(self, text: str, merged: Any) -> Ask | None:
        """Where the pieces leave something required open."""
        if not objections(merged, self.target):
            return None
        notes = json.dumps(merged, ensure_ascii=False)
        schema = bounded(self.target, self.max_text, self.max_items)
        return Ask(told(self._system(), f"What is known:\n{notes}"), json_answer(schema), notes)

    def _system(self) -> str:
        more = f" {self.instructions}" if self.instructions else ""
        return f"Fill in the fields from the text that follows.{more} Answer in JSON."


def _partly(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of what one piece knows."""
    fields = {key: _open(sub) for key, sub in schema["properties"].items()}
    return {**schema, "properties": fields, "required": list(fields)}


def _open(schema: Any) -> Any:
    if isinstance(schema, Mapping) and schema.get("type") == "array":
        return {key: value for key, value in schema.items() if key != "minItems"}
    return {"anyOf": [schema, {"type": "null"}]}


def _joined(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    merged = dict(one)
    for key, value in two.items():
        known = merged.get(key)
        if isinstance(known, list) and isinstance(value, list):
            merged[key] = known + [item for item in value if item not in known]
        elif known is None:
            merged[key] = value
    return merged


def _cut(merged: dict[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Lists no longer than the type allows."""
    for key, sub in schema["properties"].items():
        if isinstance(merged.get(key), list) and isinstance(sub, Mapping) and "maxItems" in sub:
            merged[key] = merged[key][: sub["maxItems"]]
    return merged
