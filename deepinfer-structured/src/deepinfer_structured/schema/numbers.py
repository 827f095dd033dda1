"""Sets of numbers as automata over their shortest decimal spelling.

One spelling stands for each number: ``-?digits(.digits)?`` without leading zeros, trailing zeros
or ``-0``; so meets and complements of number sets are those of automata, exactly. How numbers may
be written is decided at the end, by ``spelled``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import partial
from typing import Any

from deepinfer_structured.schema.automata import (
    Automaton,
    Language,
    Words,
    automaton,
    complement,
    explore,
    join,
    meet,
    words_of,
)
from deepinfer_structured.schema.limits import SchemaOptions, limit, remembered

MINUS, POINT, ZERO = 45, 46, 48
MAX_REMAINDERS = 2_000
MAX_COUNTED = 3_000
Move = tuple[int, int, Any]


def exact(number: int | float) -> Decimal:
    """The number that a schema's literal stands for.

    A double with a fraction is what its shortest spelling says (0.1 is a tenth); one without is
    the integer that it holds, for that is what validators compare with.
    """
    if isinstance(number, float):
        number = int(number) if number.is_integer() else number
    return Decimal(number) if isinstance(number, int) else Decimal(repr(number))


def text(number: int | float) -> str:
    """Its shortest spelling."""
    value = exact(number)
    if value == value.to_integral_value(context=Context(prec=2000)):
        return str(int(value))
    return format(value, "f").rstrip("0")


def parts(number: Decimal) -> tuple[str, str]:
    """The digits before and behind the point, without zeros at the outer ends."""
    whole, _, rest = format(abs(number), "f").partition(".")
    return whole.lstrip("0"), rest.rstrip("0")


def _digits(step: Any, first: int = 0) -> Iterable[Move]:
    return ((ZERO + digit, ZERO + digit, step(digit)) for digit in range(first, 10))


@remembered
def numbers() -> Automaton:
    """Every spelling of a number."""

    def moves(at: str) -> Iterable[Move]:
        if at in ("start", "minus"):
            yield ZERO, ZERO, "zero" if at == "start" else "minus zero"
            yield ZERO + 1, ZERO + 9, "whole"
            if at == "start":
                yield MINUS, MINUS, "minus"
        elif at == "whole":
            yield ZERO, ZERO + 9, "whole"
        if at in ("zero", "minus zero", "whole"):
            yield POINT, POINT, "point"
        if at in ("point", "fraction"):
            yield ZERO, ZERO, "point"
            yield ZERO + 1, ZERO + 9, "fraction"

    return explore("start", moves, lambda at: at in ("zero", "whole", "fraction"))


@remembered
def compared(bound: int | float, signs: frozenset[int]) -> Language:
    """The numbers whose comparison with ``bound`` (-1, 0 or 1) is among ``signs``."""
    value = exact(bound)
    whole, rest = parts(value)
    # A state: is it negative; the place ("i" before the point, "f" behind it); digits seen there;
    # how the digits so far compare with those of the bound.
    State = tuple[bool | None, str, int, int]

    def moves(state: State) -> Iterable[Move]:
        negative, place, seen, sign = state
        if negative is None:
            yield MINUS, MINUS, (True, "i", 0, 0)
        if place == "i":
            yield POINT, POINT, (bool(negative), "f", 0, magnitude(seen, sign))
        yield from _digits(partial(digit, bool(negative), place, seen, sign))

    def magnitude(seen: int, sign: int) -> int:
        return sign if seen == len(whole) else (1 if seen > len(whole) else -1)

    def digit(negative: bool, place: str, seen: int, sign: int, value: int) -> State:
        digits = whole if place == "i" else rest
        if place == "i" and seen == 0 and value == 0:
            return negative, place, 0, 0
        if sign == 0 and (seen < len(digits) or place == "f"):
            other = int(digits[seen]) if seen < len(digits) else 0
            sign = (value > other) - (value < other)
        most = len(digits) + (place == "i")
        return negative, place, min(seen + 1, most), sign

    def final(state: State) -> bool:
        negative, place, seen, sign = state
        size = sign if place == "f" else magnitude(seen, sign)
        if size == 0 and len(rest) > (seen if place == "f" else 0):
            size = -1
        if value < 0:
            return (-size if negative else 1) in signs
        return (-1 if negative else size) in signs

    return meet(numbers(), explore((None, "i", 0, 0), moves, final))


@remembered
def multiples(step: int | float, path: str = "") -> Language:
    """The multiples of a positive number, exactly: 0.3 is one of 0.1."""
    whole, rest = parts(exact(step))
    modulus, places = int(whole + rest), len(rest)
    if modulus * (places + 1) > MAX_REMAINDERS and modulus > 1:
        reason = f"{step} needs over {MAX_REMAINDERS} automaton states"
        raise limit(reason, "a smaller or rounder step", path, "multipleOf")

    def moves(state: tuple[int, int | None]) -> Iterable[Move]:
        left, seen = state
        if left == 0 and seen is None:
            yield MINUS, MINUS, state
        if seen is None and places:
            yield POINT, POINT, (left, 0)
        if seen is None or seen < places:
            after = None if seen is None else seen + 1
            yield from _digits(lambda digit: ((left * 10 + digit) % modulus, after))

    def final(state: tuple[int, int | None]) -> bool:
        shift: int = 10 ** (places - (state[1] or 0))
        return state[0] * shift % modulus == 0

    return meet(numbers(), explore((0, None), moves, final))


@dataclass(frozen=True, slots=True)
class Numbers:
    """A set of numbers."""

    language: Language

    def __and__(self, other: Numbers) -> Numbers:
        return Numbers(meet(self.language, other.language))

    def __or__(self, other: Numbers) -> Numbers:
        return Numbers(join(self.language, other.language))

    def __invert__(self) -> Numbers:
        return Numbers(meet(numbers(), complement(self.language)))

    @property
    def empty(self) -> bool:
        """Whether it holds nothing."""
        return self.language.empty


@remembered
def _short(before: int | None, behind: int) -> Automaton:
    """Spellings with at most so many digits before (None: any) and behind the point."""

    def moves(state: tuple[str, int | None]) -> Iterable[Move]:
        place, left = state
        if place == "start":
            yield MINUS, MINUS, ("i", before)
        if place != "f" and behind:
            yield POINT, POINT, ("f", behind)
        if left != 0:
            after = None if left is None else left - 1
            yield ZERO, ZERO + 9, ("f" if place == "f" else "i", after)

    return explore(("start", before), moves, lambda state: True)


@remembered
def integers() -> Automaton:
    """The spellings without a point."""
    machine = multiples(1)
    assert isinstance(machine, Automaton)
    return machine


def spelled(language: Language, options: SchemaOptions) -> list[Language]:
    """How numbers of a set are written: digits bounded; trailing zeros where fractions may be."""
    whole = meet(language, integers())
    broken = meet(language, complement(integers()))
    most, behind = options.integer_digits, options.fraction_digits
    if broken.empty:
        out = [_bounded(whole, most, 0)]
    else:
        before = min(most, 15 - behind)
        out = [_bounded(whole, min(most, 15), 0)]
        out.append(_padded(_bounded(broken, before, behind), whole, before, behind))
    return [part for part in out if not part.empty]


def _bounded(language: Language, before: int, behind: int) -> Language:
    """The set with its digits bounded, wider only where nothing would be left.

    Narrower where a step has hundreds of remainders, for each digit is as many states; but never
    below six digits: then it is refused, as too many states.
    """
    if language.empty or words_of(language, 1000) is not None:
        return language
    room = MAX_COUNTED // len(automaton(language).edges)
    before = min(before, room) if room >= 6 else before
    while True:
        found = meet(language, _short(before, behind))
        if not found.empty:
            return found
        before, behind = before + 1, behind + bool(behind)


def _padded(broken: Language, whole: Language, before: int, behind: int) -> Language:
    """Fractions, and integers with a point, with zeros at their end up to the bound of digits."""
    words = words_of(broken, 1000) or []
    longest = max((len(word.partition(".")[2]) for word in words), default=0)
    padded = _joined_zeros(broken, meet(whole, _short(before, 0)))
    return meet(padded, _short(None, max(behind, longest)))


def _joined_zeros(broken: Language, whole: Language) -> Language:
    """``{w 0* : w in broken} + {w . 0+ : w in whole}``."""
    one, two = automaton(broken), automaton(whole)
    # A state: where each of both is (None: left it), and whether the last step padded with zeros.
    State = tuple[int | None, int | None, str]

    def moves(state: State) -> Iterable[Move]:
        left, right, tail = state
        for code in (MINUS, POINT, *range(ZERO, ZERO + 10)):
            to = (_step(one, left, code), _step(two, right, code), "")
            if code == POINT and right is not None and right in two.final:
                to = (to[0], None, "point")
            elif code == ZERO and (tail or (left is not None and left in one.final)):
                to = (to[0], None, "zeros")
            if to != (None, None, ""):
                yield code, code, to

    def final(state: State) -> bool:
        return (state[0] is not None and state[0] in one.final) or state[2] == "zeros"

    return explore((0, 0, ""), moves, final)


def _step(machine: Automaton, at: int | None, code: int) -> int | None:
    for first, last, target in machine.edges[at] if at is not None else ():
        if first <= code <= last:
            return target
    return None


def only(found: Iterable[int | float]) -> Numbers:
    """These numbers and no others."""
    return Numbers(Words(frozenset(text(number) for number in found)))
