"""Boolean algebra of subschemas: sets for scalars, disjunctive normal forms for the rest.

A *state* is a set of literals that all hold: what a value must satisfy. For a scalar type a state
is one set, computed exactly. For arrays and objects it is a list of *branches*, each a conjunction
of atoms about members; members are states again. Subschemas are finitely many, so states are, and
recursive schemas become recursive rules.

Everything here is exact, with two marks. ``exact`` asks for branches that tell which subschemas
hold, which ``unevaluated…`` needs. ``wide`` asks for a superset, which is what emptiness must be
judged on: formats, and in loose mode what is not enforced, count as anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from .automata import ALL_STRINGS, ANY, complement, meet
from .branches import (
    Branch,
    Claims,
    State,
    evaluated,
    item,
    length,
    negated,
    pruned,
    silent,
    size,
)  # fmt: skip
from .errors import Unsupported, UnsupportedSchemaError
from .formula import (
    FALSE,
    KINDS,
    META,
    SCALARS,
    TRUE,
    YES,
    All,
    And,
    Asked,
    At,
    Cases,
    Choice,
    Count,
    Formula,
    Is,
    Keys,
    Not,
    OneOf,
    Or,
    Rest,
    Scalars,
    Seen,
    SeenItems,
    Some,
    Unique,
    Unknown,
    Values,
    items_from,
)  # fmt: skip
from .keywords import UNIVERSES, Reader, constant, kind_of
from .limits import SchemaOptions, limit, spend
from .numbers import Numbers, numbers
from .resolve import Place, Schemas, escaped


@dataclass(frozen=True, slots=True)
class View:
    """How branches are asked for: of which type, and with which of the two marks."""

    kind: str
    exact: bool = False
    wide: bool = False

    def plain(self) -> View:
        """The same, not exact."""
        return View(self.kind, False, self.wide)


class _Again(Exception):
    """Whether a member can exist depends on what is being worked out."""


class Algebra:
    """The subschemas that a compilation has met, by number, and what they say.

    Numbers stand for a subschema at a place and the dynamic scope it was reached in, for a
    constant, or for a choice of literals.
    """

    def __init__(self, schemas: Schemas, options: SchemaOptions) -> None:
        self.schemas, self.options = schemas, options
        self.loose: dict[Unsupported, None] = {}
        self._nodes: list[Any] = [None, True]
        self._numbers: dict[Any, int] = {}
        self._memo: dict[Any, Any] = {}
        self._open: dict[Any, None] = {}
        self._false: list[Place] = []
        self.blamed: Place | None = None

    # Nodes.

    def node(self, place: Place, scope: tuple[str, ...] = ()) -> int:
        """The number of a subschema, reached from these resources."""
        if place.schema is True or place.schema == {}:
            return TRUE
        if place.schema is False:
            self._false.append(place)
            return FALSE
        if self.schemas.uses_dynamic and place.base not in scope:
            scope = (*scope, place.base)
        return self._number((place, scope), ("schema", place, scope))

    def constant(self, value: Any, place: Place) -> int:
        """The number of "equals this value"; the place is for errors."""
        key = json.dumps(value, sort_keys=True)
        return self._number(("constant", key), ("constant", value, place))

    def either(self, literals: Iterable[int]) -> int:
        """The number of "at least one of these"."""
        parts = tuple(sorted({literal for literal in literals if literal != FALSE}))
        if len(parts) < 2:
            return parts[0] if parts else FALSE
        return TRUE if TRUE in parts else self._number(("either", parts), ("either", parts, None))

    def _number(self, key: Any, node: Any) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self._nodes)
            self._nodes.append(node)
            if len(self._nodes) > self.options.max_nodes:
                raise limit(f"comes to over {self.options.max_nodes} subschemas", "a smaller one")
        return self._numbers[key]

    def place(self, literal: int) -> Place:
        """Where a literal comes from."""
        node = self._nodes[abs(literal)]
        if isinstance(node, tuple) and node[0] == "either":
            return self.place(node[1][0])
        found = next((x for x in node if isinstance(x, Place)), None) if node is not True else None
        return found or self.schemas.root

    def formula(self, number: int, kind: str) -> Formula:
        """What a subschema says about values of a type."""
        key = ("formula", number, kind)
        if key not in self._memo:
            self._memo[key] = self._read(number, kind)
        found: Formula = self._memo[key]
        return found

    def _read(self, number: int, kind: str) -> Formula:
        if number == TRUE:
            return YES
        name, what, more = self._nodes[number]
        if name == "either":
            return Or(tuple(Is(literal) for literal in what))
        if name == "schema":
            return Reader(self, what, more, kind).read()
        if kind in SCALARS:
            same = kind_of(what) == kind
            return Reader(self, more, (), kind).constants([what] if same else [])
        return constant(what, kind, lambda value: self.constant(value, more))

    def weaken(self, what: Unsupported) -> None:
        """Take note of what is not enforced; refuse it unless that was asked for."""
        if not self.options.loose:
            raise UnsupportedSchemaError.of(what)
        self.loose[what] = None

    def _once(self, key: Any, literal: int, compute: Any) -> Any:
        """Remember an answer; a question inside its own answer is a reference to itself.

        Unless the question was whether a member can exist: then it stays open (``_Again``).
        """
        if key not in self._memo:
            if key in self._open:
                later = list(self._open)[list(self._open).index(key) :]
                if any(other[0] == "empty" for other in later):
                    raise _Again
                what = "it leads back to itself without a step into a member"
                raise self.place(literal).refuse("$ref", what, "a reference inside a member")
            self._open[key] = None
            try:
                self._memo[key] = compute()
            finally:
                del self._open[key]
        return self._memo[key]

    # Scalars: sets.

    def scalar(self, state: State, kind: str, wide: bool = False) -> Scalars:
        """The scalars of a type that a state allows."""
        out = _everything(kind)
        for literal in sorted(state, key=abs):
            out &= self._literal_set(literal, kind, wide)
        return out

    def _literal_set(self, literal: int, kind: str, wide: bool) -> Scalars:
        def compute() -> Scalars:
            return self._set(self.formula(abs(literal), kind), kind, literal > 0, wide)

        return self._once(("set", literal, kind, wide), literal, compute)

    def _set(self, formula: Formula, kind: str, sign: bool, wide: bool) -> Scalars:
        """The set of a formula, or of its opposite."""
        every = _everything(kind)
        match formula:
            case And(parts) | Or(parts):
                sets = [self._set(part, kind, sign, wide) for part in parts]
                if isinstance(formula, And) == sign:
                    return _met(sets, every)
                return _joined(sets, ~every)
            case Not(part):
                return self._set(part, kind, not sign, wide)
            case Is(literal):
                return self._literal_set(literal if sign else -literal, kind, wide)
            case Rest(rest, _):
                return self._set(rest, kind, sign, wide)
            case Cases(test, then, other):
                yes, no = (self._literal_set(t, kind, wide) for t in (test, -test))
                then, other = (then, other) if sign else (-then, -other)
                first, last = (self._literal_set(t, kind, wide) for t in (then, other))
                return (yes & first) | (no & last)
            case OneOf(literals):
                return self._one_set(literals, kind, sign, wide)
            case Values(values, narrowed):
                if narrowed and (wide or not sign):
                    return every if wide else ~every
                return values if sign else ~values
            case Unknown(what):
                self.weaken(what)
                return every
        return every if sign else ~every

    def _one_set(self, literals: Iterable[int], kind: str, sign: bool, wide: bool) -> Scalars:
        """Exactly one, or its opposite, counting up: none so far, one, some, two or more."""
        none = _everything(kind)
        one = some = two = ~none
        for literal in literals:
            yes, no = (self._literal_set(t, kind, wide) for t in (literal, -literal))
            one, two = (one & no) | (none & yes), two | (some & yes)
            none, some = none & no, some | yes
        return one if sign else none | two

    # Arrays and objects: branches.

    def branches(self, state: State, kind: str, wide: bool = False) -> list[Branch]:
        """The ways in which an array or object can satisfy a state."""
        view = View(kind, wide=wide)
        return self._all(
            [self._literal_branches(literal, view) for literal in sorted(state, key=abs)], kind
        )

    def _literal_branches(self, literal: int, view: View) -> list[Branch]:
        def compute() -> list[Branch]:
            found = self._dnf(self.formula(abs(literal), view.kind), literal > 0, view)
            return found if literal > 0 else silent(found)

        found: list[Branch] = self._once(("dnf", literal, view), literal, compute)
        return found

    def _dnf(self, formula: Formula, sign: bool, view: View) -> list[Branch]:
        """The branches of a formula, or of its opposite."""
        match formula:
            case And(parts) | Or(parts) if isinstance(formula, And) == sign:
                return self._all([self._dnf(part, sign, view) for part in parts], view.kind)
            case Or(parts, apart) if sign and view.exact and not apart:
                return self._told_apart(parts, view)
            case And(parts) | Or(parts):
                return pruned([b for part in parts for b in self._dnf(part, sign, view)])
            case Not(part):
                return silent(self._dnf(part, not sign, view.plain()))
            case Is(literal):
                return self._literal_branches(literal if sign else -literal, view)
            case Cases():
                return self._cases(formula, sign, view)
            case OneOf(literals):
                return self._one_of(literals, view) if sign else self._not_one(literals, view)
            case Rest():
                return self._rest(formula, sign, view)
            case Keys(literal):
                return self._keys(literal, sign, view.wide)
            case Unknown(what):
                self.weaken(what)
                return [()]
        return self._atom(formula, sign, view)

    def _atom(self, atom: Any, sign: bool, view: View) -> list[Branch]:
        if isinstance(atom, META):
            kept = view.exact or isinstance(atom, Asked)
            return [] if not sign else [(atom,)] if kept else [()]
        if sign:
            return [] if self._contradicts((atom,), view.kind) else [(atom,)]
        if isinstance(atom, Unique):
            instead = "the allOf, oneOf or not around it spelled out"
            what = Unsupported(atom.path, "uniqueItems", "its opposite is not enforced", instead)
            self.weaken(what)
            return [()]
        return self._dnf(negated(atom), True, view.plain())

    def _keys(self, literal: int, sign: bool, wide: bool) -> list[Branch]:
        """``propertyNames``: no key is outside of a set, or some key is."""
        signed = frozenset([literal if sign else -literal])
        names = self.scalar(signed, "string", wide).language()
        if sign:
            return [(All(complement(names), FALSE),)]
        return [] if names.empty else [(Some(names, TRUE),)]

    def _told_apart(self, parts: tuple[Formula, ...], view: View) -> list[Branch]:
        """A choice, in branches that each tell which of the parts hold that evaluate something."""
        others: list[Branch] = []
        held: list[tuple[list[Branch], bool]] = [([()], False)]
        for part in parts:
            yes = self._dnf(part, True, view)
            if not any(isinstance(atom, META) for branch in yes for atom in branch):
                others += yes
                continue
            no = silent(self._dnf(part, False, view.plain()))
            held = [
                (self._cross(so_far, found, view.kind), known or found is yes)
                for so_far, known in held
                for found in (yes, no)
            ]
            held = [(so_far, known) for so_far, known in held if so_far]
        out = [branch for so_far, known in held if known for branch in so_far]
        for so_far, known in held:
            if not known:
                out += self._cross(so_far, others, view.kind)
        return pruned(out)

    def _cases(self, cases: Cases, sign: bool, view: View) -> list[Branch]:
        if sign and not view.exact and cases.then == cases.other == TRUE:
            return [()]
        out: list[Branch] = []
        for test, then in ((cases.test, cases.then), (-cases.test, cases.other)):
            one = self._literal_branches(test, view)
            out += self._cross(
                one, self._literal_branches(then if sign else -then, view), view.kind
            )
        return pruned(out)

    def _meeting(self, literals: tuple[int, ...], kind: str) -> set[tuple[int, int]]:
        """The pairs of literals, by place, that some value may satisfy both."""
        found = [self._literal_branches(literal, View(kind, wide=True)) for literal in literals]
        pairs = combinations([i for i, branches in enumerate(found) if branches], 2)
        return {(i, j) for i, j in pairs if self._cross(found[i], found[j], kind)}

    def _one_of(self, literals: tuple[int, ...], view: View) -> list[Branch]:
        meeting = self._meeting(literals, view.kind)
        out: list[Branch] = []
        for i, literal in enumerate(literals):
            found = self._literal_branches(literal, view)
            for j, other in enumerate(literals):
                if found and (min(i, j), max(i, j)) in meeting:
                    found = self._cross(
                        found, self._literal_branches(-other, view.plain()), view.kind
                    )
            out += found
        return pruned(out)

    def _not_one(self, literals: tuple[int, ...], view: View) -> list[Branch]:
        """None of them, or two."""
        view = view.plain()
        out = self._all([self._literal_branches(-literal, view) for literal in literals], view.kind)
        for i, j in self._meeting(literals, view.kind):
            one, two = (silent(self._literal_branches(literals[k], view)) for k in (i, j))
            out += self._cross(one, two, view.kind)
        return pruned(out)

    def _rest(self, rest: Rest, sign: bool, view: View) -> list[Branch]:
        exact, plain = View(view.kind, True, view.wide), view.plain()
        out = [] if sign else self._dnf(rest.rest, False, plain)
        for branch in self._dnf(rest.rest, True, exact):
            left, mark = self._left(branch, rest.literal, view.kind)
            if sign:
                more = self._dnf(And((left, mark)), True, exact)
                out += self._cross([branch], more, view.kind)
            else:
                out += self._cross(silent([branch]), self._dnf(left, False, plain), view.kind)
        return pruned(out if view.exact else [self._unmarked(branch) for branch in out])

    def _unmarked(self, branch: Branch) -> Branch:
        return tuple(atom for atom in branch if not isinstance(atom, Seen | SeenItems))

    def _left(self, branch: Branch, literal: int, kind: str) -> tuple[Formula, Formula]:
        """That what a branch has not evaluated satisfies a literal; and that now all is."""
        if kind == "object":
            names = complement(evaluated(branch))
            return YES if names.empty else All(names, literal), Seen(ANY)
        seen = [atom for atom in branch if isinstance(atom, SeenItems)]
        if any(atom.below is None for atom in seen):
            return YES, SeenItems(None)
        start = max((atom.below or 0 for atom in seen), default=0)
        either = self.either([literal, *(atom.literal for atom in seen)])
        return items_from(start, either), SeenItems(None)

    def _all(self, parts: list[list[Branch]], kind: str) -> list[Branch]:
        """All of them: those of one branch become one at once, the others multiply."""
        if not all(parts):
            return []
        sure = tuple(dict.fromkeys(atom for part in parts if len(part) == 1 for atom in part[0]))
        spend(len(sure))
        if sum(bool(part[0]) for part in parts if len(part) == 1) > 1:
            if self._contradicts(sure, kind):
                return []
        out: list[Branch] = [sure]
        for part in sorted((part for part in parts if len(part) > 1), key=len):
            out = self._cross(out, part, kind)
        return out

    def _cross(self, one: list[Branch], two: list[Branch], kind: str) -> list[Branch]:
        """Both: each branch with each, without those that contradict themselves."""
        out = []
        for left in one:
            for right in two:
                spend(10 + 3 * (len(left) + len(right)))
                branch = tuple(dict.fromkeys(left + right))
                if not (left and right and self._contradicts(branch, kind)):
                    out.append(branch)
        return pruned(out)

    # Emptiness, judged on supersets and to a bounded depth: "not empty" may be wrong, "empty" not.

    def empty(self, state: State) -> bool:
        """Whether no value satisfies a state, as far as can be seen quickly."""
        if FALSE in state or any(-literal in state for literal in state):
            return True
        key = ("empty", state)
        if key in self._memo:
            return bool(self._memo[key])
        if key in self._open or sum(k[0] == "empty" for k in self._open) > 3:
            return False
        self._open[key] = None
        try:
            self._memo[key] = all(self._none(state, kind) for kind in KINDS)
        except _Again:
            return False
        finally:
            del self._open[key]
        return bool(self._memo[key])

    def _none(self, state: State, kind: str) -> bool:
        if kind in SCALARS:
            return bool(self.scalar(state, kind, wide=True).empty)
        return not self.branches(state, kind, wide=True)

    def _contradicts(self, branch: Branch, kind: str) -> bool:
        return self._bad_object(branch) if kind == "object" else self._bad_array(branch)

    def _bad_object(self, branch: Branch) -> bool:
        claims, (low, high) = Claims(branch), size(branch)
        if high is not None and (low > high or len(claims.needed) > high):
            return True
        for name in claims.needed:
            if self.empty(claims.child(name)):
                self._blame(claims.child(name), f"/properties/{escaped(name)}")
                return True
        return any(
            some.literal == FALSE
            or any(
                a.literal == FALSE and meet(some.names, complement(a.names)).empty
                for a in claims.alls
            )
            for some in claims.wanted
        )

    def _bad_array(self, branch: Branch) -> bool:
        low, high = length(branch)
        if high is not None and low > high:
            return True
        for atom in branch:
            if not isinstance(atom, Count) or atom.literal == TRUE:
                continue
            room = None if high is None else high - atom.start
            if atom.high is not None and atom.low > atom.high:
                return True
            if atom.low and (atom.literal == FALSE or (room is not None and atom.low > room)):
                return True
        last = max((a.index + 1 for a in branch if isinstance(a, At)), default=0)
        last = max([last, *(a.start + 1 for a in branch if isinstance(a, Count))])
        for index in range(min(low, last)):
            if self.empty(item(branch, index)):
                self._blame(item(branch, index), "/items")
                return True
        return False

    def _blame(self, state: State, token: str) -> None:
        """Remember the first member that must be there and cannot: for the error, if it comes."""
        if self.blamed is None and state - {FALSE}:
            self.blamed = self.place(min(state - {FALSE}, key=abs))
        elif self.blamed is None:
            fitting = (place for place in self._false if place.pointer.endswith(token))
            self.blamed = next(fitting, None)


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
