"""What a recipe is, and what it comes to. First stop in this room; ``session`` runs one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from deepinfer.structured.spec import as_tuple, explain

Texts = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
"""An option that is a list of texts."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One question to the model.

    ``so_args``: what :class:`deepinfer.sampling_params.StructuredSpec` takes. ``source``: the piece
    of the document that it is about. ``is_json``: the answer is decoded before it is checked.
    """

    messages: tuple[Mapping[str, str], ...]
    so_args: Mapping[str, Any]
    source: str = ""
    is_json: bool = True


class Recipe(Protocol):
    """A job. Stateless: several texts are worked on at once."""

    name: ClassVar[str]

    def parts(self, text: str) -> Sequence[Ask]:
        """The questions that a text comes to: one, or one for each piece of a long document.

        Raises:
            InvalidRequestError: the text or an option cannot be honoured.
        """
        ...

    def problems(self, ask: Ask, answer: Any) -> Sequence[str]:
        """What is wrong with an answer, in sentences that help to answer better; empty if fine."""
        ...

    def merge(self, text: str, answers: Sequence[Any]) -> Any:
        """One value out of the parts' answers (those without an answer are left out)."""
        ...

    def last(self, text: str, merged: Any) -> Ask | None:
        """A question that the merged value still needs: its answer is then the result."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """One answer: to which part, at which attempt (0 is the first), and what was wrong with it."""

    part: int
    attempt: int
    answer: str
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RecipeResult:
    """What a text came to.

    ``value`` is None if no part got an answer. ``problems``: what is still wrong after the last
    repair; ``steps`` tell everything that was tried.
    """

    recipe: str
    value: Any
    problems: tuple[str, ...] = ()
    steps: tuple[Step, ...] = field(default=(), repr=False)

    @property
    def valid(self) -> bool:
        """Nothing is left to object to."""
        return not self.problems

    @property
    def repairs(self) -> int:
        """Answers that were asked for again."""
        return sum(step.attempt > 0 for step in self.steps)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        steps = [
            {"part": s.part, "attempt": s.attempt, "answer": s.answer, "problems": list(s.problems)}
            for s in self.steps
        ]
        return {
            "recipe": self.recipe,
            "value": self.value,
            "valid": self.valid,
            "problems": list(self.problems),
            "repairs": self.repairs,
            "steps": steps,
        }


class Options(BaseModel):
    """Base of recipes whose fields are their options: frozen, closed, with errors of ours."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: ClassVar[str] = ""

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            found = explain(f"Recipe {self.name}", error)
            found.setting = found.setting or self.name  # all options together are wrong
            raise found from None

    def problems(self, ask: Ask, answer: Any) -> Sequence[str]:
        """Nothing: the grammar has said it all."""
        return ()

    def merge(self, text: str, answers: Sequence[Any]) -> Any:
        """The only answer."""
        return answers[0] if answers else None

    def last(self, text: str, merged: Any) -> Ask | None:
        """No further question."""
        return None


def told(
    system: str, user: str, examples: Sequence[tuple[str, Any]] = ()
) -> tuple[Mapping[str, str], ...]:
    """The messages of a question; ``examples`` stand before it as turns that were answered."""
    turns: list[Mapping[str, str]] = [{"role": "system", "content": system}]
    for asked, answer in examples:
        said = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    return (*turns, {"role": "user", "content": user})


def json_answer(schema: Any) -> Mapping[str, Any]:
    """``so_args`` of an answer under a JSON schema."""
    return {"schema_type": "json", "schema": schema}
