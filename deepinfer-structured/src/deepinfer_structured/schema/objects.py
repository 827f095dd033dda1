"""Objects: a branch as rules, key by key in schema order, then keys that are not listed."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from deepinfer_structured.schema.automata import Language, Words, complement, meet, words_of
from deepinfer_structured.schema.branches import Branch, Claims, State, size
from deepinfer_structured.schema.errors import Unsupported
from deepinfer_structured.schema.formula import FALSE, TRUE, All, Asked, Some
from deepinfer_structured.schema.limits import spend
from deepinfer_structured.schema.write import Ref, Repeat, Sequence_

if TYPE_CHECKING:
    from deepinfer_structured.schema.compiler import Builder

Region = tuple[Language, State, tuple[Some, ...]]
MAX_LISTED = 64


class ObjectWriter:
    """Writes one branch.

    Unlisted keys are split into *regions*, by what their values must satisfy. A region with few
    names is listed. A region in which a key with a certain value is
    demanded gives at most that one.
    Other regions repeat freely: a grammar cannot compare keys of any length, so one may come
    twice; either value is valid, and they count as a single key where ``minProperties`` counts.
    """

    def __init__(self, builder: Builder, state: State, branch: Branch) -> None:
        self.builder, self.state, self.branch = builder, state, branch
        self.claims = Claims(branch)
        self.wanted = tuple(self.claims.wanted)
        self.needed = self.claims.needed
        self.low, self.high = size(branch)
        self.key = builder.fresh()
        self.children: dict[str, State] = {}
        self.regions: list[Region] = []
        self.list_names()
        self.count_keys()

    def list_names(self) -> None:
        """Fill in the children of listed names, and the regions of the others."""
        names: dict[str, None] = {}
        claims: list[All | Some] = [a for a in self.branch if isinstance(a, All | Some)]
        for atom in claims:
            if isinstance(atom.names, Words) and (not atom.names.negated or atom.literal == FALSE):
                names.update(dict.fromkeys(sorted(atom.names.words)))
        order = self.builder.order(self.state)
        ordered = sorted(names, key=lambda name: order.get(name, len(order)))
        found = {name: self.claims.child(name) for name in ordered}
        empty = self.builder.algebra.empty
        self.children = {n: c for n, c in found.items() if n in self.needed or not empty(c)}
        for region in self.split(Words(frozenset(names), negated=True)):
            few = words_of(region[0], MAX_LISTED)
            if few is None:
                self.regions.append(region)
            for name in few or ():
                self.children[name] = self.claims.child(name)

    def split(self, others: Language) -> list[Region]:
        """The regions of the names that are not listed, as far as the options let them in."""
        policy = self.builder.options.additional_properties
        if policy == "never":
            return []
        asked = [atom.names for atom in self.branch if isinstance(atom, Asked)]
        short = self.low > len(self.children) or self.wanted
        if policy == "declared_only" and self.children and not short:
            pieces = [others]
            for names in asked:
                pieces = [meet(piece, complement(names)) for piece in pieces]
            others = meet(others, complement(pieces[0]))
        regions: list[Region] = [(others, frozenset(), ())]
        claims: list[All | Some] = [*self.claims.alls, *self.wanted]
        for atom in claims:
            if isinstance(atom.names, Words) and not atom.names.negated:
                continue
            out = []
            for names, state, hits in regions:
                spend(50)
                outside = (meet(names, complement(atom.names)), state, hits)
                inside = meet(names, atom.names)
                if isinstance(atom, Some):
                    out += [(inside, state, (*hits, atom)), outside]
                else:
                    out += [(inside, state | {atom.literal} - {TRUE}, hits), outside]
            empty = self.builder.algebra.empty
            regions = [r for r in out if not r[0].empty and not empty(r[1])]
        return [region for region in regions if not region[0].empty]

    def count_keys(self) -> None:
        """Decide whether keys must be counted, and whether they can be."""
        picky = [any(atom.literal != TRUE for atom in hits) for _, _, hits in self.regions]
        self.once = [region for region, yes in zip(self.regions, picky, strict=True) if yes]
        self.free = [region for region, yes in zip(self.regions, picky, strict=True) if not yes]
        sure = len(self.children) + len(self.once) + bool(self.free)
        if self.low > sure and self.free:
            path = f"{self.builder.path(self.state)}/minProperties"
            what = f"{self.low} keys that the schema does not list cannot be kept apart"
            instead = "the keys listed in properties, or minProperties of at most one more"
            self.builder.algebra.nodes.weaken(Unsupported(path, "minProperties", what, instead))
            self.low = sure
        if self.low <= len(self.needed):
            self.low = 0
        if self.high is not None and not self.free and self.high >= sure:
            self.high = None
        self.cap = self.high if self.high is not None else max(self.low, 1)

    def write(self) -> Sequence_:
        """The object's text."""
        return ("{", self.listed(0, 0, self.wanted))

    def before(self, count: int) -> Sequence_:
        """What stands before a key."""
        return (self.builder.space(),) if count == 0 else (",", self.builder.space())

    def member(self, names: Language, state: State) -> Sequence_:
        """A key and its value."""
        lines = self.builder.rules.strings(names)
        key = lines[0] if len(lines) == 1 else (self.builder.rules.add(("key", names), lines),)
        return (*key, ":", self.builder.space(), self.builder.value(state))

    def listed(self, index: int, count: int, wanted: tuple[Some, ...]) -> Ref:
        """From the listed key at an index on, with so many keys before it.

        ``wanted``: the demands for some key that are still open.
        """
        key = (self.key, index, count, wanted)
        if key in self.builder.rules.rules:
            return Ref(key)
        names = list(self.children)
        if index == len(names):
            return self.builder.rules.add(key, self.unlisted(0, count, wanted))
        name, lines = names[index], list[Sequence_]()
        if self.high is None or count < self.high:
            fitting = [atom for atom in wanted if atom.names.accepts(name)]
            for met in subsets(fitting):
                state = self.children[name] | {atom.literal for atom in met} - {TRUE}
                left = tuple(atom for atom in wanted if atom not in met)
                rest = self.later(index + 1, min(count + 1, self.cap), left)
                member = self.member(Words(frozenset([name])), state)
                lines.append((*self.before(count), *member, rest))
        if name not in self.needed:
            lines.append((self.later(index + 1, count, wanted),))
        return self.builder.rules.add(key, lines)

    def later(self, index: int, count: int, wanted: tuple[Some, ...]) -> Ref:
        """A reference to ``listed`` that is written afterwards: objects may be long."""
        self.builder.later.append(lambda: self.listed(index, count, wanted))
        return Ref((self.key, index, count, wanted))

    def demanded(
        self, first: int, count: int, region: Region, wanted: tuple[Some, ...]
    ) -> Sequence_:
        """A key that meets demands, and what follows it."""
        names, state, met = region
        left = tuple(atom for atom in wanted if atom not in met)
        after = min(count + 1, self.cap)
        key = (self.key, "once", first, after, left)
        if key not in self.builder.rules.rules:
            self.builder.rules.add(key, self.unlisted(first, after, left))
        return (*self.before(count), *self.member(names, state), Ref(key))

    def unlisted(self, first: int, count: int, wanted: tuple[Some, ...]) -> list[Sequence_]:
        """Behind the listed keys: those that are demanded, region by region, then any.

        ``first``: the next region that may give its only key; behind all of them, a key of a region
        that repeats has been written and may come again.
        """
        lines: list[Sequence_] = []
        room = None if self.high is None else self.high - count
        if room != 0:
            for i in range(first, len(self.once)):
                names, state, hits = self.once[i]
                for met in subsets([atom for atom in hits if atom in wanted])[1:]:
                    child = state | {atom.literal for atom in met} - {TRUE}
                    lines.append(self.demanded(i + 1, count, (names, child, met), wanted))
            for names, state, hits in self.free:
                if some := tuple(atom for atom in hits if atom in wanted):
                    region = (names, state, some)
                    lines.append(self.demanded(len(self.once) + 1, count, region, wanted))
        if wanted:
            return lines
        if count >= self.low:
            lines.append(("}",) if count == 0 else (self.builder.space(), "}"))
        fresh = first <= len(self.once)
        if self.free and room != 0 and count + fresh >= self.low:
            extra = self.builder.rules.add(
                (self.key, "extra"), [self.member(names, state) for names, state, _ in self.free]
            )
            more = self.builder.rules.add((self.key, "more"), [(*self.before(1), extra)])
            rest_: Sequence_ = (Repeat(more.key, 0, None if room is None else room - 1),)
            rest_ = rest_ if room != 1 else ()
            lines.append((*self.before(count), extra, *rest_, self.builder.space(), "}"))
        return lines


def subsets(atoms: list[Some]) -> list[tuple[Some, ...]]:
    """All subsets, the empty one first."""
    spend(2 ** len(atoms))
    return [each for n in range(len(atoms) + 1) for each in combinations(atoms, n)]
