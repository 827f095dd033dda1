"""The repair loop, without a model: questions out, answers in, a result at the end.

``running`` drives it with an ``LLM`` or an ``AsyncLLM``; so both do the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from deepinfer.errors import InvalidRequestError, shown
from deepinfer.recipes.interface import Ask, Recipe, RecipeResult, Step


class Session:
    """One text on its way through a recipe.

    Args:
        recipe: the job.
        text: what it is about.
        max_repairs: how often one question may be asked again.
    """

    def __init__(self, recipe: Recipe, text: str, max_repairs: int) -> None:
        if not isinstance(text, str):
            raise InvalidRequestError(f"A recipe works on a text, not on {shown(text)}.")
        self._recipe = recipe
        self._text = text
        self._max_repairs = max_repairs
        self._steps: list[Step] = []
        self._parts = [_Part(ask) for ask in recipe.parts(text)]
        self._last: _Part | None = None
        self._merged: Any = None
        self._over = False
        self._advance()

    def open_parts(self) -> list[_Part]:
        """What waits for an answer now; empty when the result stands."""
        return [] if self._over else [part for part in self._all() if not part.done]

    def answer(self, part: _Part, text: str, finish: str | None) -> None:
        """Take the model's answer to a part's question."""
        value, problems = _decode(part.ask, text, finish)
        if not problems:
            problems = list(self._recipe.problems(part.ask, value))
        number = list(self._all()).index(part)
        self._steps.append(Step(number, part.attempt, text, tuple(problems)))
        part.take(text, value, problems, self._max_repairs)
        self._advance()

    def result(self) -> RecipeResult:
        """What the text came to. Only when no part is open."""
        assert self._over, "a question is still open"
        problems = tuple(problem for part in self._all() for problem in part.problems)
        if self._last is not None:  # the last question answers for all before it
            problems = tuple(self._last.problems)
        return RecipeResult(self._recipe.name, self._merged, problems, tuple(self._steps))

    def _all(self) -> Iterator[_Part]:
        yield from self._parts
        if self._last is not None:
            yield self._last

    def _advance(self) -> None:
        """When all parts are answered: merge them, ask what is left to ask, or end."""
        if any(not part.done for part in self._all()):
            return
        if self._last is not None:
            if self._last.value is not None:
                self._merged = self._last.value
            self._over = True
            return
        answers = [part.value for part in self._parts if part.value is not None]
        found = answers or not self._parts  # nothing to ask is nothing found, which has a value
        self._merged = self._recipe.merge(self._text, answers) if found else None
        ask = self._recipe.last(self._text, self._merged) if answers else None
        if ask is None:
            self._over = True
        else:
            self._last = _Part(ask)


class _Part:
    """A question with its repairs."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.messages = list(ask.messages)
        self.attempt = 0
        self.done = False
        self.value: Any = None
        self.problems: list[str] = []

    def take(self, text: str, value: Any, problems: list[str], most: int) -> None:
        self.value, self.problems = value, problems
        self.done = not problems or self.attempt >= most
        if not self.done:
            self.attempt += 1
            # Only the last answer is shown again, or a long repair would crowd out the text.
            self.messages = [
                *self.ask.messages,
                {"role": "assistant", "content": text},
                {"role": "user", "content": _again(problems)},
            ]


def _again(problems: list[str]) -> str:
    listed = "\n".join(f"- {problem}" for problem in problems)
    return f"That answer has problems:\n{listed}\nAnswer once more, without them."


def _decode(ask: Ask, text: str, finish: str | None) -> tuple[Any, list[str]]:
    """The answer's value, or why there is none."""
    if finish != "stop":
        return None, [f"The answer did not come to its end (finish_reason {finish!r})."]
    if not ask.is_json:
        return text, []
    try:
        return json.loads(text), []
    except ValueError as why:
        return None, [f"The answer is no JSON: {why}."]
