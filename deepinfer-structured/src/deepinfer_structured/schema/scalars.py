"""Scalars: what a state allows of a scalar type is one set, computed exactly.

``wide`` asks for a superset, on which emptiness is judged: formats, and in loose mode what is not
enforced, count as anything.
"""

from __future__ import annotations

from collections.abc import Iterable

from deepinfer_structured.schema.automata import ALL_STRINGS
from deepinfer_structured.schema.branches import State
from deepinfer_structured.schema.formula import (
    And,
    Cases,
    Choice,
    Formula,
    Is,
    Not,
    OneOf,
    Or,
    Rest,
    Scalars,
    Unknown,
    Values,
)  # fmt: skip
from deepinfer_structured.schema.keywords import UNIVERSES
from deepinfer_structured.schema.nodes import Nodes
from deepinfer_structured.schema.numbers import Numbers, numbers


class Sets:
    """The scalars that states allow."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes

    def of(self, state: State, kind: str, wide: bool = False) -> Scalars:
        """The scalars of a type that a state allows."""
        out = _everything(kind)
        for literal in sorted(state, key=abs):
            out &= self._literal(literal, kind, wide)
        return out

    def _literal(self, literal: int, kind: str, wide: bool) -> Scalars:
        def compute() -> Scalars:
            return self._formula(self.nodes.formula(abs(literal), kind), kind, literal > 0, wide)

        return self.nodes.once(("set", literal, kind, wide), literal, compute)

    def _formula(self, formula: Formula, kind: str, sign: bool, wide: bool) -> Scalars:
        """The set of a formula, or of its opposite."""
        every = _everything(kind)
        match formula:
            case And(parts) | Or(parts):
                sets = [self._formula(part, kind, sign, wide) for part in parts]
                if isinstance(formula, And) == sign:
                    return _met(sets, every)
                return _joined(sets, ~every)
            case Not(part):
                return self._formula(part, kind, not sign, wide)
            case Is(literal):
                return self._literal(literal if sign else -literal, kind, wide)
            case Rest(rest, _):
                return self._formula(rest, kind, sign, wide)
            case Cases(test, then, other):
                yes, no = (self._literal(t, kind, wide) for t in (test, -test))
                then, other = (then, other) if sign else (-then, -other)
                first, last = (self._literal(t, kind, wide) for t in (then, other))
                return (yes & first) | (no & last)
            case OneOf(literals):
                return self._one_of(literals, kind, sign, wide)
            case Values(values, narrowed):
                if narrowed and (wide or not sign):
                    return every if wide else ~every
                return values if sign else ~values
            case Unknown(what):
                self.nodes.weaken(what)
                return every
        return every if sign else ~every

    def _one_of(self, literals: Iterable[int], kind: str, sign: bool, wide: bool) -> Scalars:
        """Exactly one, or its opposite, counting up: none so far, one, some, two or more."""
        none = _everything(kind)
        one = some = two = ~none
        for literal in literals:
            yes, no = (self._literal(t, kind, wide) for t in (literal, -literal))
            one, two = (one & no) | (none & yes), two | (some & yes)
            none, some = none & no, some | yes
        return one if sign else none | two


def _everything(kind: str) -> Scalars:
    if kind == "number":
        return Numbers(numbers())
    return ALL_STRINGS if kind == "string" else Choice(UNIVERSES[kind], UNIVERSES[kind])


def _met(sets: Iterable[Scalars], out: Scalars) -> Scalars:
    for each in sets:
        out &= each
    return out


def _joined(sets: Iterable[Scalars], out: Scalars) -> Scalars:
    for each in sets:
        out |= each
    return out
