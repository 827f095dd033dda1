"""Classification: a text into labels, or into the fields of a type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

from pydantic import Field, field_validator, model_validator

from deepinfer.recipes.interface import Ask, Options, Texts, json_answer, told
from deepinfer.recipes.schemas import bounded, objections, schema_of

SUPPORT_TICKET: Final = {
    "type": "object",
    "properties": {
        "category": {"enum": ["billing", "technical", "account", "delivery", "other"]},
        "priority": {"type": "integer", "minimum": 1, "maximum": 5},
        "product": {"type": ["string", "null"], "maxLength": 60},
    },
    "required": ["category", "priority", "product"],
    "additionalProperties": False,
}
"""Fields of a support ticket: what ``fields="support-ticket"`` stands for."""


class Classification(Options):
    """Which of the labels fits a text; or, with ``fields``, all fields of a type at once.

    Args:
        labels: the classes. The value is then ``{"label": …}``.
        multiple: several may fit; the value is then ``{"labels": […]}``, without repetition, in
            the order of ``labels``.
        fields: in place of ``labels``: a pydantic model, a dataclass, a JSON schema, or
            ``"support-ticket"``.
        instructions: what the classes mean, in your words.
        examples: (text, answer) pairs that are shown to the model first.
        max_text: the longest free text among the fields, in characters.
    """

    name: ClassVar[str] = "classify"

    labels: Texts = ()
    multiple: bool = False
    fields: Any = None
    instructions: str = ""
    examples: tuple[tuple[str, Any], ...] = ()
    max_text: int = Field(default=200, ge=1)

    @field_validator("labels")
    @classmethod
    def _apart(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError("a label stands there twice")
        return value

    @model_validator(mode="after")
    def _one(self) -> Classification:
        if bool(self.labels) == (self.fields is not None):
            raise ValueError("give labels or fields, and not both")
        if self.multiple and self.fields is not None:
            raise ValueError("multiple belongs to labels")
        return self

    def parts(self, text: str) -> Sequence[Ask]:
        """One question."""
        shown = [(self._question(asked), answer) for asked, answer in self.examples]
        messages = told(self._system(), self._question(text), shown)
        return [Ask(messages, json_answer(self._schema()), text)]

    def problems(self, ask: Ask, answer: Any) -> Sequence[str]:
        """What the type says that its grammar cannot."""
        return objections(answer, ask.so_args["schema"])

    def merge(self, text: str, answers: Sequence[Any]) -> Any:
        """The answer; several labels in the order in which they were given."""
        if not self.multiple:
            return answers[0]
        return {"labels": [label for label in self.labels if answers[0][label]]}

    def _schema(self) -> dict[str, Any]:
        if self.fields is not None:
            target = SUPPORT_TICKET if self.fields == "support-ticket" else schema_of(self.fields)
            schema: dict[str, Any] = bounded(target, self.max_text, 16)
            return schema
        if self.multiple:  # a yes or no for each: no repetition, no order, no endless list
            return _closed({label: {"type": "boolean"} for label in self.labels})
        return _closed({"label": {"enum": list(self.labels)}})

    def _system(self) -> str:
        what = "fill in the fields of" if self.fields is not None else "classify"
        more = f" {self.instructions}" if self.instructions else ""
        return f"You {what} texts and answer in JSON.{more}"

    def _question(self, text: str) -> str:
        """The labels stand behind the text, where even a small model still sees them."""
        if not self.labels:
            return text
        ask = "Which of these fit" if self.multiple else "Which of these fits best"
        return f"Text: {text}\n\n{ask}: {', '.join(self.labels)}?"


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
