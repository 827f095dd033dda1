"""Regular languages over code points: automata with ranges on their edges, and sets of words.

Code points are Unicode scalar values: a lone surrogate is no character, so no language holds one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from deepinfer_structured.schema.limits import limit, remembered, spend

Range = tuple[int, int]
Edge = tuple[int, int, int]
SIGMA: tuple[Range, ...] = ((0, 0xD7FF), (0xE000, 0x10FFFF))
MAX_STATES = 6_000
SMALLER = "a simpler pattern, closer bounds, a smaller or rounder step"
State = TypeVar("State", bound=Hashable)


@dataclass(frozen=True)
class Automaton:
    """A deterministic automaton; state 0 starts, an edge that is not there rejects.

    Args:
        edges: for each state ``(first, last, target)``, in order and apart.
        final: the states that accept.
    """

    edges: tuple[tuple[Edge, ...], ...]
    final: frozenset[int]

    @cached_property
    def _hash(self) -> int:
        return hash((self.edges, self.final))

    def __hash__(self) -> int:
        return self._hash

    def accepts(self, text: str) -> bool:
        """Whether it holds this word."""
        at = 0
        for char in text:
            for first, last, target in self.edges[at]:
                if first <= ord(char) <= last:
                    at = target
                    break
            else:
                return False
        return at in self.final

    @cached_property
    def empty(self) -> bool:
        """Whether it holds nothing; automata are trimmed, so any final state is reached."""
        return not self.final


@dataclass(frozen=True, slots=True)
class Words:
    """Finitely many words, or all but finitely many: large enums never become automata."""

    words: frozenset[str]
    negated: bool = False

    @property
    def empty(self) -> bool:
        """Whether it holds nothing."""
        return not self.words and not self.negated

    def accepts(self, text: str) -> bool:
        """Whether it holds this word."""
        return (text in self.words) != self.negated


Language = Automaton | Words
Part = tuple[Language, int, int | None]
ANY = Words(frozenset(), negated=True)
NONE = Words(frozenset())


def explore(
    start: State, moves: Callable[[State], Iterable[tuple[int, int, State]]],
    final: Callable[[State], bool],
) -> Automaton:  # fmt: skip
    """The smallest automaton of a machine given by its steps.

    Args:
        moves: ``(first, last, next)`` from a state; ranges apart, in any order.
    """
    number: dict[State, int] = {start: 0}
    queue, edges = deque([start]), []
    while queue:
        state, out = queue.popleft(), []
        for first, last, after in sorted(moves(state), key=lambda move: move[0]):
            if after not in number:
                number[after] = len(number)
                queue.append(after)
                if len(number) > MAX_STATES:
                    raise limit(f"needs over {MAX_STATES} automaton states", SMALLER)
            out.append((first, last, number[after]))
        spend(3 + 3 * len(out))
        edges.append(out)
    return _smallest(edges, {at for state, at in number.items() if final(state)})


def _smallest(edges: Sequence[Sequence[Edge]], final: set[int]) -> Automaton:
    """Drop what leads nowhere, join states that cannot be told apart (Moore 1956)."""
    back: dict[int, list[int]] = {}
    for at, out in enumerate(edges):
        for edge in out:
            back.setdefault(edge[2], []).append(at)
    alive, todo = set(final), list(final)
    while todo:
        for before in back.get(todo.pop(), ()):
            if before not in alive:
                alive.add(before)
                todo.append(before)
    states = [at for at in range(len(edges)) if at in alive]
    group = {at: int(at in final) for at in states}
    count = 0
    while True:
        seen: dict[tuple[int, tuple[Edge, ...]], int] = {}
        signed = {at: (group[at], joined(edges[at], group)) for at in states}
        spend(3 * len(states))
        group = {at: seen.setdefault(signed[at], len(seen)) for at in states}
        if len(seen) == count:
            break
        count = len(seen)
    return _numbered(edges, final, group)


def _numbered(edges: Sequence[Sequence[Edge]], final: set[int], group: dict[int, int]) -> Automaton:
    """The automaton of the groups, numbered in the order in which they are met."""
    if 0 not in group:
        return Automaton(((),), frozenset())
    example = {label: at for at, label in reversed(group.items())}
    number, queue, out = {group[0]: 0}, deque([group[0]]), []
    while queue:
        line = []
        for first, last, label in joined(edges[example[queue.popleft()]], group):
            if label not in number:
                number[label] = len(number)
                queue.append(label)
            line.append((first, last, number[label]))
        out.append(tuple(line))
    accepting = {number[label] for label in number if example[label] in final}
    return Automaton(tuple(out), frozenset(accepting))


def joined(edges: Iterable[Edge], group: dict[int, int]) -> tuple[Edge, ...]:
    """Edges to groups instead of states; neighbours with one target become one edge."""
    out: list[Edge] = []
    for first, last, target in edges:
        if target not in group:
            continue
        label = group[target]
        if out and out[-1][2] == label and out[-1][1] + 1 == first:
            out[-1] = (out[-1][0], last, label)
        else:
            out.append((first, last, label))
    return tuple(out)


@remembered
def automaton(language: Language) -> Automaton:
    """The same language as an automaton."""
    if isinstance(language, Automaton):
        return language
    if language.negated:
        return complement_of(automaton(Words(language.words)))
    tree: list[dict[str, int]] = [{}]
    final = set()
    for word in sorted(language.words):
        at = 0
        for char in word:
            if char not in tree[at]:
                tree[at][char] = len(tree)
                tree.append({})
            at = tree[at][char]
        final.add(at)
    moves = [sorted((ord(c), ord(c), to) for c, to in out.items()) for out in tree]
    return explore(0, lambda at: moves[at], lambda at: at in final)


def complement_of(machine: Automaton) -> Automaton:
    """All other words."""

    def moves(at: int) -> list[Edge]:
        out, gap = list(machine.edges[at]) if at >= 0 else [], []
        for low, high in SIGMA:
            for first, last, _ in out:
                if low <= last and first <= high:
                    if first > low:
                        gap.append((low, first - 1, -1))
                    low = last + 1
            if low <= high:
                gap.append((low, high, -1))
        return out + gap

    return explore(0, moves, lambda at: at not in machine.final)


def _product(one: Automaton, two: Automaton) -> Automaton:
    def moves(pair: tuple[int, int]) -> Iterable[tuple[int, int, tuple[int, int]]]:
        left, right = one.edges[pair[0]], two.edges[pair[1]]
        i = j = 0
        while i < len(left) and j < len(right):
            first, last = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
            if first <= last:
                yield first, last, (left[i][2], right[j][2])
            if left[i][1] < right[j][1]:
                i += 1
            else:
                j += 1

    return explore((0, 0), moves, lambda pair: pair[0] in one.final and pair[1] in two.final)


@remembered
def meet(one: Language, two: Language) -> Language:
    """What both hold."""
    if isinstance(two, Words) and not isinstance(one, Words):
        one, two = two, one
    if isinstance(one, Words):
        if not one.negated:
            return Words(frozenset(word for word in one.words if two.accepts(word)))
        if not one.words:
            return two
        if isinstance(two, Words):
            return meet(two, one) if not two.negated else Words(one.words | two.words, True)
    return _product(automaton(one), automaton(two))


@remembered
def complement(language: Language) -> Language:
    """What it does not hold."""
    if isinstance(language, Words):
        return Words(language.words, not language.negated)
    return complement_of(language)


def join(one: Language, two: Language) -> Language:
    """What either holds."""
    if isinstance(one, Words) and isinstance(two, Words) and not (one.negated or two.negated):
        return Words(one.words | two.words)
    return complement(meet(complement(one), complement(two)))


def bounded(language: Language, low: int, high: int | None) -> Language:
    """Its words of ``low`` to ``high`` code points."""
    if low == 0 and high is None:
        return language
    if isinstance(language, Words) and not language.negated:
        return Words(frozenset(word for word in language.words if within(len(word), low, high)))
    machine, cap = automaton(language), low if high is None else high

    def moves(state: tuple[int, int]) -> Iterable[tuple[int, int, tuple[int, int]]]:
        at, length = state
        if high is None or length < high:
            for first, last, after in machine.edges[at]:
                yield first, last, (after, min(length + 1, cap))

    return explore((0, 0), moves, lambda state: state[0] in machine.final and state[1] >= low)


def within(count: int, low: int, high: int | None) -> bool:
    """Whether a count keeps two bounds."""
    return count >= low and (high is None or count <= high)


def words_of(language: Language, most: int) -> list[str] | None:
    """All its words in order, or None when there are more than ``most``."""
    if isinstance(language, Words):
        few = not language.negated and len(language.words) <= most
        return sorted(language.words) if few else None
    found: list[str] = []
    queue: deque[tuple[int, str]] = deque([(0, "")])
    while queue:
        at, text = queue.popleft()
        if at in language.final:
            found.append(text)
        for first, last, after in language.edges[at]:
            if last - first >= most or len(queue) > most or len(text) > 400:
                return None
            queue.extend((after, text + chr(code)) for code in range(first, last + 1))
        if len(found) > most:
            return None
    return found


@dataclass(frozen=True, slots=True)
class Strings:
    """A set of strings: a union of languages, each with bounds on the length in code points.

    The bounds stand beside the automaton, for ``maxLength: 100000`` would be as many states.
    """

    parts: tuple[Part, ...]

    def __and__(self, other: Strings) -> Strings:
        out = []
        for one, low, high in self.parts:
            for two, least, most in other.parts:
                spend(10)
                top = min((b for b in (high, most) if b is not None), default=None)
                out.append((meet(one, two), max(low, least), top))
        return Strings(tuple(dict.fromkeys(part for part in out if _inhabited(part))))

    def __or__(self, other: Strings) -> Strings:
        return Strings(tuple(dict.fromkeys(self.parts + other.parts)))

    def __invert__(self) -> Strings:
        out = ALL_STRINGS
        for language, low, high in self.parts:
            others: list[Part] = [(complement(language), 0, None)]
            others += [(ANY, 0, low - 1)] if low else []
            others += [(ANY, high + 1, None)] if high is not None else []
            out &= Strings(tuple(others))
        return out

    @property
    def empty(self) -> bool:
        """Whether it holds nothing."""
        return not any(_inhabited(part) for part in self.parts)

    def language(self) -> Language:
        """The same as one language, its bounds counted out."""
        out: Language = NONE
        for part in self.parts:
            out = join(out, bounded(*part))
        return out


ALL_STRINGS = Strings(((ANY, 0, None),))


def _inhabited(part: Part) -> bool:
    """Whether a word of the language has such a length."""
    language, low, high = part
    if language.empty or (high is not None and low > high):
        return False
    if isinstance(language, Words):
        if not language.negated:
            return any(within(len(word), low, high) for word in language.words)
        return high != 0 or "" not in language.words  # no set of words fills a length of 1 or more
    at, length, met = frozenset([0]), 0, set[frozenset[int]]()
    while at and (high is None or length <= high):
        if length >= low and (high is None or at & language.final):
            return True  # trimmed: from any state some word goes on to its end
        if length >= low and at in met:
            return False
        if length >= low:
            met.add(at)
        at = frozenset(edge[2] for state in at for edge in language.edges[state])
        length += 1
        spend(len(at))
    return False
