"""Arrays: a branch as rules, item by item, with counters where some items must be counted."""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING

from deepinfer_structured.schema.automata import bounded, words_of
from deepinfer_structured.schema.branches import Branch, State, item, length
from deepinfer_structured.schema.errors import Unsupported
from deepinfer_structured.schema.formula import TRUE, At, Count, Unique
from deepinfer_structured.schema.limits import limit, spend
from deepinfer_structured.schema.write import Ref, Repeat, Sequence_

if TYPE_CHECKING:
    from deepinfer_structured.schema.compiler import Builder

Counts = tuple[int, ...]
MAX_UNIQUE = 8
MAX_POSITIONS = 2_000


class ArrayWriter:
    """Writes one branch.

    Args:
        state: what the array satisfies; names the rules and says where errors lie.
    """

    def __init__(self, builder: Builder, state: State, branch: Branch) -> None:
        self.builder, self.state, self.branch = builder, state, branch
        self.low, self.high = length(branch)
        counts = [a for a in branch if isinstance(a, Count) and a.literal != TRUE]
        self.counters = [atom for atom in counts if atom.high != 0]
        self.last = max([0, *(atom.start for atom in counts)])
        self.last = max([self.last, *(a.index + 1 for a in branch if isinstance(a, At))])
        self.key = builder.fresh()

    def write(self) -> Sequence_:
        """The array's text."""
        unique = next((atom for atom in self.branch if isinstance(atom, Unique)), None)
        values = None
        if unique and (self.high is None or self.high > 1):
            values = self.values(unique)
        if values is None and not self.counters:
            return ("[", self.plain(0))
        return ("[", self.counted(0, (0,) * len(self.counters), (), values))

    def value(self, index: int) -> Sequence_:
        """Any item at an index."""
        return (self.builder.value(item(self.branch, index)),)

    def before(self, index: int) -> Sequence_:
        """What stands before an item."""
        return (self.builder.space(),) if index == 0 else (",", self.builder.space())

    def end(self, index: int) -> Sequence_:
        """What stands behind the last of so many items."""
        return ("]",) if index == 0 else (self.builder.space(), "]")

    def plain(self, index: int) -> Ref:
        """From an index on, where nothing is counted but the length."""
        lines: list[Sequence_] = []
        open_ = self.high is None or index < self.high
        if index < self.last:
            if index >= self.low:
                lines.append(self.end(index))
            if open_:
                lines.append((*self.before(index), *self.value(index), self.plain_later(index + 1)))
            return self.builder.rules.add((self.key, index), lines)
        if index >= self.low and (index == 0 or not open_):
            lines.append(self.end(index))
        if open_:
            more = self.builder.rules.add(
                (self.key, "more"), [(*self.before(1), *self.value(self.last))]
            )
            first = int(index == 0)
            low = max(0, self.low - index - first)
            high = None if self.high is None else self.high - index - first
            start = (*self.before(0), *self.value(index)) if first else ()
            rest = (Repeat(more.key, low, high),) if high != 0 else ()
            lines.append((*start, *rest, *self.end(1)))
        return self.builder.rules.add((self.key, index), lines)

    def plain_later(self, index: int) -> Ref:
        """A reference to ``plain`` that is written afterwards: prefixes may be long."""
        self.builder.later.append(lambda: self.plain(index))
        return Ref((self.key, index))

    def counted_later(
        self, index: int, counts: Counts, used: tuple[int, ...], values: list[int] | None
    ) -> Ref:
        """A reference to ``counted`` that is written afterwards."""
        self.builder.later.append(lambda: self.counted(index, counts, used, values))
        return Ref((self.key, index, counts, used))

    def counted(
        self, index: int, counts: Counts, used: tuple[int, ...], values: list[int] | None
    ) -> Ref:
        """From an index on, with what the counters stand at and which values are used up.

        The index stops growing where nothing depends on it any more.
        """
        key = (self.key, index, counts, used)
        if key in self.builder.rules.rules:
            return Ref(key)
        if index > MAX_POSITIONS:
            what = f"counts items beyond the {MAX_POSITIONS}th"
            raise limit(what, "smaller minItems and maxItems", self.builder.path(self.state))
        lines: list[Sequence_] = []
        if index >= self.low and all(
            n >= atom.low for n, atom in zip(counts, self.counters, strict=True)
        ):
            lines.append(self.end(index))
        if self.high is None or index < self.high:
            top = max(self.last, self.low, self.high or 0, 1)
            for extra, after in self.steps(index, counts):
                for number, literal in enumerate(values or [TRUE]):
                    if number in used:
                        continue
                    state = item(self.branch, index) | extra | {literal}
                    if self.builder.algebra.empty(state - {TRUE}):
                        continue
                    taken = tuple(sorted((*used, number))) if values is not None else ()
                    rest = self.counted_later(min(index + 1, top), after, taken, values)
                    lines.append((*self.before(index), self.builder.value(state), rest))
        return self.builder.rules.add(key, lines)

    def steps(self, index: int, counts: tuple[int, ...]) -> list[tuple[State, tuple[int, ...]]]:
        """What the next item may satisfy besides, and the counters after it.

        Counters without an upper bound count only items that are said to satisfy the literal.
        """
        choices: list[list[tuple[int, int]]] = []
        for count, atom in zip(counts, self.counters, strict=True):
            if index < atom.start:
                choices.append([(TRUE, count)])
            elif atom.high is None:
                more = [(atom.literal, count + 1)] if count < atom.low else []
                choices.append([*more, (TRUE, count)])
            else:
                more = [(atom.literal, count + 1)] if count < atom.high else []
                choices.append([*more, (-atom.literal, count)])
        found = list(product(*choices))
        spend(10 * len(found) * (1 + len(choices)))
        return [(frozenset(t for t, _ in each), tuple(n for _, n in each)) for each in found]

    def values(self, unique: Unique) -> list[int] | None:
        """The constants that items are made of, for ``uniqueItems``; None: taken as loose."""
        algebra = self.builder.algebra
        found: dict[str, object] = {}
        for index in range(min(self.last, self.high or self.last) + 1):
            values = self.constants(item(self.branch, index))
            if values is None:
                what = f"items are not among at most {MAX_UNIQUE} constants"
                return self.refused(unique, what)
            found |= {json.dumps(value): value for value in values}
            if len(found) > MAX_UNIQUE:
                what = f"items have over {MAX_UNIQUE} possible values"
                return self.refused(unique, what)
        place = algebra.nodes.place(max(self.state, default=TRUE))
        return [algebra.nodes.constant(value, place) for value in found.values()]

    def refused(self, unique: Unique, what: str) -> list[int] | None:
        """Refuse ``uniqueItems``, or take it as loose."""
        instead = f"an enum of at most {MAX_UNIQUE} scalars for the items"
        self.builder.algebra.nodes.weaken(Unsupported(unique.path, "uniqueItems", what, instead))
        return None

    def constants(self, state: State) -> list[object] | None:
        """All values of a state, if they are few and scalar."""
        algebra = self.builder.algebra
        if any(algebra.branches(state, kind) for kind in ("array", "object")):
            return None
        out: list[object] = [
            *algebra.sets.of(state, "null").values,
            *sorted(algebra.sets.of(state, "boolean").values),
        ]
        texts = words_of(algebra.sets.of(state, "number").language, MAX_UNIQUE)
        if texts is None:
            return None
        out += [json.loads(text) for text in texts]
        for part in algebra.sets.of(state, "string").parts:
            words = words_of(bounded(*part), MAX_UNIQUE)
            if words is None:
                return None
            out += words
        return out
