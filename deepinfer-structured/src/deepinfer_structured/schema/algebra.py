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

from dataclasses import dataclass
from itertools import combinations
from typing import Any

from deepinfer_structured.schema.automata import ANY, complement, meet
from deepinfer_structured.schema.branches import (
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
from deepinfer_structured.schema.errors import Unsupported
from deepinfer_structured.schema.formula import (
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
    Count,
    Formula,
    Is,
    Keys,
    Not,
    OneOf,
    Or,
    Rest,
    Seen,
    SeenItems,
    Some,
    Unique,
    Unknown,
    items_from,
)  # fmt: skip
from deepinfer_structured.schema.limits import SchemaOptions, spend
from deepinfer_structured.schema.nodes import Again, Nodes
from deepinfer_structured.schema.resolve import Place, Schemas, escaped
from deepinfer_structured.schema.scalars import Sets


@dataclass(frozen=True, slots=True)
class View:
    """How branches are asked for: of which type, and with which of the two marks."""

    kind: str
    exact: bool = False
    wide: bool = False

    def plain(self) -> View:
        """The same, not exact."""
        return View(self.kind, False, self.wide)


class Algebra:
    """States, and what they come to.

    Args:
        blamed: the first member found that must be there and cannot, for the error if it comes.
    """

    def __init__(self, schemas: Schemas, options: SchemaOptions) -> None:
        self.nodes = Nodes(schemas, options)
        self.sets = Sets(self.nodes)
        self.blamed: Place | None = None

    def branches(self, state: State, kind: str, wide: bool = False) -> list[Branch]:
        """The ways in which an array or object can satisfy a state."""
        view = View(kind, wide=wide)
        return self._all(
            [self._literal_branches(literal, view) for literal in sorted(state, key=abs)], kind
        )

    def _literal_branches(self, literal: int, view: View) -> list[Branch]:
        def compute() -> list[Branch]:
            found = self._dnf(self.nodes.formula(abs(literal), view.kind), literal > 0, view)
            return found if literal > 0 else silent(found)

        found: list[Branch] = self.nodes.once(("dnf", literal, view), literal, compute)
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
                self.nodes.weaken(what)
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
            self.nodes.weaken(what)
            return [()]
        return self._dnf(negated(atom), True, view.plain())

    def _keys(self, literal: int, sign: bool, wide: bool) -> list[Branch]:
        """``propertyNames``: no key is outside of a set, or some key is."""
        signed = frozenset([literal if sign else -literal])
        names = self.sets.of(signed, "string", wide).language()
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
        either = self.nodes.either([literal, *(atom.literal for atom in seen)])
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
        if key in self.nodes.memo:
            return bool(self.nodes.memo[key])
        if key in self.nodes.open or sum(k[0] == "empty" for k in self.nodes.open) > 3:
            return False
        self.nodes.open[key] = None
        try:
            self.nodes.memo[key] = all(self._none(state, kind) for kind in KINDS)
        except Again:
            return False
        finally:
            del self.nodes.open[key]
        return bool(self.nodes.memo[key])

    def _none(self, state: State, kind: str) -> bool:
        if kind in SCALARS:
            return bool(self.sets.of(state, kind, wide=True).empty)
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
            self.blamed = self.nodes.place(min(state - {FALSE}, key=abs))
        elif self.blamed is None:
            fitting = (place for place in self.nodes.false if place.pointer.endswith(token))
            self.blamed = next(fitting, None)
