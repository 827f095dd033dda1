"""The scheduling seam. Pure and quick; no clock of its own (``facts.now``). House section 7.3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class View(Protocol):
    """What a policy may see of a request."""

    @property
    def id(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def arrival(self) -> float: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def held_pages(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What stands before a step. ``max_tokens`` and ``max_rows`` are the engine's own limits."""

    now: float
    waiting: int
    running: int
    decoding: int
    free_pages: int
    max_tokens: int
    max_rows: int


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens of this step, prefill tokens among them, draft rows; each at most the engine's."""

    tokens: int
    prefill_tokens: int
    draft_rows: int = 0


class Policy(Protocol):
    """Who enters, who gives way, how much. Mechanism stays in ``Scheduler.plan``."""

    def order(self, waiting: Sequence[View]) -> Sequence[View]:
        """A permutation: the order of admission."""
        ...

    def victim(self, running: Sequence[View]) -> View:
        """Who gives its pages up; one of ``running`` (never empty)."""
        ...

    def budget(self, facts: StepFacts) -> Budget: ...
