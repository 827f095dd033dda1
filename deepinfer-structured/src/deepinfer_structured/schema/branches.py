"""Branches: conjunctions of atoms about the members of one array or object."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepinfer_structured.schema.automata import Language, Words, join
from deepinfer_structured.schema.formula import (
    META,
    NO,
    TRUE,
    All,
    And,
    At,
    Atom,
    Count,
    Formula,
    Or,
    Seen,
    Size,
    Some,
)  # fmt: skip
from deepinfer_structured.schema.limits import limit, spend

Branch = tuple[Atom, ...]
State = frozenset[int]
MAX_BRANCHES = 2_000


def negated(atom: Any) -> Formula:
    """The opposite of an atom, in atoms."""
    match atom:
        case All(names, literal):
            return NO if literal == TRUE else Some(names, -literal)
        case Some(names, literal):
            return All(names, -literal)
        case Size(low, high):
            few: Formula = Size(0, low - 1) if low else NO
            return Or((few, NO if high is None else Size(high + 1, None)))
        case At(index, literal):
            return And((At(index, -literal), Count(0, TRUE, index + 1, None)))
        case Count(start, literal, low, high):
            few = Count(start, literal, 0, low - 1) if low else NO
            return Or((few, NO if high is None else Count(start, literal, high + 1, None)))
    raise AssertionError(atom)


def single(names: Language) -> str | None:
    """The only name of a set, if it is finite and has one."""
    if isinstance(names, Words) and not names.negated and len(names.words) == 1:
        return next(iter(names.words))
    return None


class Claims:
    """What a branch claims about the keys of an object, by key.

    Args:
        alls: claims about the values of more than one key.
        wanted: demands for some key among several.
        needed: for each key that must be there, what is said of its value then.
    """

    def __init__(self, branch: Branch) -> None:
        self.alls: list[All] = []
        self.wanted: list[Some] = []
        self.needed: dict[str, set[int]] = {}
        self._one: dict[str, set[int]] = {}
        for atom in branch:
            if isinstance(atom, All | Some) and (name := single(atom.names)) is not None:
                where = self._one if isinstance(atom, All) else self.needed
                where.setdefault(name, set()).add(atom.literal)
            elif isinstance(atom, All):
                self.alls.append(atom)
            elif isinstance(atom, Some):
                self.wanted.append(atom)

    def child(self, name: str) -> State:
        """What the value of a key must satisfy."""
        out = {atom.literal for atom in self.alls if atom.names.accepts(name)}
        out |= self._one.get(name, set()) | self.needed.get(name, set())
        spend(1 + len(self.alls))
        return frozenset(out - {TRUE})


def size(branch: Branch) -> tuple[int, int | None]:
    """The bounds of the number of an object's keys."""
    return _bounds(atom for atom in branch if isinstance(atom, Size))


def length(branch: Branch) -> tuple[int, int | None]:
    """The bounds of an array's length."""
    return _bounds(a for a in branch if isinstance(a, Count) and a.literal == TRUE)


def _bounds(atoms: Iterable[Count | Size]) -> tuple[int, int | None]:
    low, high = 0, None
    for atom in atoms:
        low = max(low, atom.low)
        high = atom.high if high is None else min(high, high if atom.high is None else atom.high)
    return low, high


def item(branch: Branch, index: int) -> State:
    """What every item at an index must satisfy."""
    out = {atom.literal for atom in branch if isinstance(atom, At) and atom.index == index}
    for atom in branch:
        if isinstance(atom, Count) and atom.high == 0 and atom.literal != TRUE:
            out |= {-atom.literal} if index >= atom.start else set()
    spend(len(branch))
    return frozenset(out - {TRUE})


def evaluated(branch: Branch) -> Language:
    """The keys that a branch has evaluated."""
    out: Language = Words(frozenset())
    for atom in branch:
        if isinstance(atom, Seen):
            out = join(out, atom.names)
    return out


def pruned(branches: list[Branch]) -> list[Branch]:
    """Without those that another one already allows."""
    out = list(dict.fromkeys(branches))
    if len(out) > MAX_BRANCHES:
        raise limit(f"comes to over {MAX_BRANCHES} alternatives", "fewer or more distinct branches")
    if len(out) < 2:
        return out
    spend(sum(map(len, out)) + len(out) * len(out) // 2)
    sets = [frozenset(branch) for branch in out]
    sets.sort(key=len)
    kept: list[frozenset[Atom]] = []
    for atoms in sets:
        if not any(other < atoms and _marks(other) == _marks(atoms) for other in kept):
            kept.append(atoms)
    good = set(kept)
    return [branch for branch in out if frozenset(branch) in good]


def _marks(atoms: Iterable[Atom]) -> frozenset[Atom]:
    return frozenset(atom for atom in atoms if isinstance(atom, META))


def silent(branches: list[Branch]) -> list[Branch]:
    """Without marks: a subschema under ``not`` evaluates nothing."""
    return pruned([tuple(a for a in branch if not isinstance(a, META)) for branch in branches])
