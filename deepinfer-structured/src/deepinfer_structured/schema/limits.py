"""Settings and limits of the compiler: how a text may be spelled, and how much work is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar

from deepinfer_structured.schema.errors import UnsupportedSchemaError

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class SchemaOptions:
    """How a schema is compiled.

    Args:
        loose: take the closest larger grammar for what cannot be enforced, and list it.
        max_whitespace: between two tokens: 0 none, 1 at most one space, n one space or a newline
            and up to n - 1 spaces or tabs.
        integer_digits: most digits of a number without a fraction, unless the schema needs more.
        fraction_digits: most digits behind the point; a number with a fraction then has at most
            ``15 - fraction_digits`` before it, so that IEEE doubles keep different texts apart.
        additional_properties: which keys may be written that the schema does not list.
            ``declared_only``: none where it lists some, except those that it speaks of
            (``additionalProperties`` written out, ``patternProperties``); ``allow``: all that the
            standard allows; ``never``: none at all.
        formats: ``assert`` enforces the formats of ``formats.py``; ``annotate`` ignores them all.
        documents: other schema documents by URI, for references that leave the schema.
        max_bytes, max_depth, max_nodes, max_rules, max_work: of the schema as JSON, of its nesting,
            of subschemas, of grammar rules, and of elementary steps (about a million a second).
    """

    loose: bool = False
    max_whitespace: int = 16
    integer_digits: int = 18
    fraction_digits: int = 7
    additional_properties: Literal["declared_only", "allow", "never"] = "declared_only"
    formats: Literal["assert", "annotate"] = "assert"
    documents: Mapping[str, Any] = field(default_factory=dict)
    max_bytes: int = 1_000_000
    max_depth: int = 200
    max_nodes: int = 20_000
    max_rules: int = 4_000
    max_work: int = 2_000_000


class Work:
    """Counts steps and raises when they are used up, so that hostile input ends.

    Holds what ``remembered`` functions have answered, too: both go with the compilation.
    """

    def __init__(self, most: int) -> None:
        self.left = most
        self.memo: dict[tuple[Any, ...], Any] = {}

    def spend(self, steps: int = 1) -> None:
        """Take steps off; beyond the limit the schema is refused."""
        self.left -= steps
        if self.left < 0:
            raise limit("takes too many steps", "a smaller schema, or a larger max_work")


_WORK: ContextVar[Work] = ContextVar("deepinfer_structured_work")


@contextmanager
def working(most: int) -> Iterator[None]:
    """Count the steps of everything inside; each compilation has its own count."""
    token = _WORK.set(Work(most))
    try:
        yield
    finally:
        _WORK.reset(token)


def spend(steps: int = 1) -> None:
    """Steps of the compilation that runs here; outside of any they are not counted."""
    work = _WORK.get(None)
    if work is not None:
        work.spend(steps)


def remembered(function: Callable[P, R]) -> Callable[P, R]:
    """Answer the same question once in a compilation; arguments are positional and hashable."""

    @wraps(function)
    def ask(*args: P.args, **kwargs: P.kwargs) -> R:
        work = _WORK.get(None)
        if work is None:
            return function(*args, **kwargs)
        key = (function, *args)
        if key not in work.memo:
            work.memo[key] = function(*args, **kwargs)
        answer: R = work.memo[key]
        return answer

    return ask


def limit(reason: str, instead: str, path: str = "", keyword: str = "schema") -> Exception:
    """The error for what is too large."""
    return UnsupportedSchemaError(path, keyword, reason, instead)
