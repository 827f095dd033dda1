"""What a subschema says about values of one type, as a formula over a few kinds of atoms.

A *literal* is the number of a subschema, or minus it for "not this subschema". Atoms speak of the
members of an array or object by literals only, so formulas are flat and recursion is no trouble.
The atoms are closed under negation (``branches.negated``): that is what makes ``not``, ``oneOf``
and ``if`` exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepinfer_structured.schema.automata import Language, Strings
from deepinfer_structured.schema.errors import Unsupported
from deepinfer_structured.schema.numbers import Numbers

TRUE, FALSE = 1, -1
SCALARS = ("null", "boolean", "number", "string")
KINDS = (*SCALARS, "array", "object")


@dataclass(frozen=True, slots=True)
class Choice:
    """A set of constants: of null, or of the two booleans."""

    values: frozenset[Any]
    universe: frozenset[Any]

    def __and__(self, other: Choice) -> Choice:
        return Choice(self.values & other.values, self.universe)

    def __or__(self, other: Choice) -> Choice:
        return Choice(self.values | other.values, self.universe)

    def __invert__(self) -> Choice:
        return Choice(self.universe - self.values, self.universe)

    @property
    def empty(self) -> bool:
        """Whether it holds nothing."""
        return not self.values


Scalars = Any  # Choice | Numbers | Strings: three classes with the same operators, never mixed


@dataclass(frozen=True, slots=True)
class Values:
    """Scalars in a set; ``narrowed``: the set may be too small (a format)."""

    values: Choice | Numbers | Strings
    narrowed: bool = False


@dataclass(frozen=True, slots=True)
class All:
    """All values of an object whose key is in ``names`` satisfy a literal."""

    names: Language
    literal: int


@dataclass(frozen=True, slots=True)
class Some:
    """Some key in ``names`` is there, with a value that satisfies a literal."""

    names: Language
    literal: int


@dataclass(frozen=True, slots=True)
class Keys:
    """All keys satisfy a literal, as strings."""

    literal: int


@dataclass(frozen=True, slots=True)
class Size:
    """An object has so many keys."""

    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class At:
    """The item at an index, if there is one, satisfies a literal."""

    index: int
    literal: int


@dataclass(frozen=True, slots=True)
class Count:
    """Of the items from index ``start``, so many satisfy a literal; TRUE from 0 is the length."""

    start: int
    literal: int
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Unique:
    """No two items are equal."""

    path: str


@dataclass(frozen=True, slots=True)
class Seen:
    """No claim: these keys have been evaluated, in the sense of ``unevaluatedProperties``."""

    names: Language


@dataclass(frozen=True, slots=True)
class SeenItems:
    """No claim: the items below an index (None: all), or those of a literal, are evaluated."""

    below: int | None
    literal: int = FALSE


@dataclass(frozen=True, slots=True)
class Asked:
    """No claim: the schema speaks of these keys itself, though it does not list them."""

    names: Language


@dataclass(frozen=True, slots=True)
class Unknown:
    """A claim that is not enforced."""

    what: Unsupported


@dataclass(frozen=True, slots=True)
class And:
    """All of them."""

    parts: tuple[Formula, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """At least one of them; ``apart``: never two."""

    parts: tuple[Formula, ...]
    apart: bool = False


@dataclass(frozen=True, slots=True)
class Not:
    """Its opposite."""

    part: Formula


@dataclass(frozen=True, slots=True)
class Is:
    """The value satisfies a literal as a whole."""

    literal: int


@dataclass(frozen=True, slots=True)
class OneOf:
    """Exactly one of the literals."""

    literals: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cases:
    """If, then, else."""

    test: int
    then: int
    other: int


@dataclass(frozen=True, slots=True)
class Rest:
    """``rest`` holds, and what it has not evaluated satisfies a literal."""

    rest: Formula
    literal: int


META = (Seen, SeenItems, Asked)
Atom = Values | All | Some | Keys | Size | At | Count | Unique | Seen | SeenItems | Asked | Unknown
Formula = Atom | And | Or | Not | Is | OneOf | Cases | Rest
YES, NO = And(()), Or(())


def items_from(start: int, literal: int) -> Formula:
    """All items from an index satisfy a literal."""
    if literal == TRUE:
        return YES
    return Count(0, TRUE, 0, start) if literal == FALSE else Count(start, -literal, 0, 0)
