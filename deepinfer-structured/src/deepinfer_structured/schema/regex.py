"""Regular expressions of ECMA-262 (with its u flag) as automata; what is not regular is refused.

The whole grammar of patterns is read (ECMA-262, 22.2.1), so that nothing is taken for a literal
by mistake. A JSON Schema pattern is searched for; ``search=False`` matches the whole text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from deepinfer_structured.schema.automata import SIGMA, Automaton, Range, explore
from deepinfer_structured.schema.errors import UnsupportedSchemaError
from deepinfer_structured.schema.limits import remembered, spend

DIGIT: list[Range] = [(48, 57)]
WORD: list[Range] = [(48, 57), (65, 90), (95, 95), (97, 122)]
SPACE: list[Range] = [(9, 13), (32, 32), (160, 160), (0x1680, 0x1680), (0x2000, 0x200A)]
SPACE += [(0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]
LINE: list[Range] = [(10, 10), (13, 13), (0x2028, 0x2029)]
CLASSES = {"d": DIGIT, "w": WORD, "s": SPACE}
CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
LONG_NAMES = {"Letter": "L", "Lowercase_Letter": "Ll", "Uppercase_Letter": "Lu", "Mark": "M"}
LONG_NAMES |= {"Number": "N", "Decimal_Number": "Nd", "digit": "Nd", "Punctuation": "P"}
LONG_NAMES |= {"Symbol": "S", "Separator": "Z", "Other": "C", "punct": "P"}
CATEGORIES = (
    "L Lu Ll Lt Lm Lo M Mn Mc Me N Nd Nl No P Pc Pd Ps Pe Pi Pf Po S Sm Sc Sk So Z Zs Zl Zp"
)
SYNTAX = "^$\\.*+?()[]{}|/"
MAX_PARTS = 50_000


def inverse(ranges: Iterable[Range]) -> list[Range]:
    """All other code points."""
    out, taken = [], sorted(ranges)
    for low, high in SIGMA:
        for first, last in taken:
            if low <= last and first <= high:
                if first > low:
                    out.append((low, first - 1))
                low = last + 1
        if low <= high:
            out.append((low, high))
    return out


@remembered
def category(name: str) -> tuple[Range, ...]:
    """The code points of a Unicode general category, as this Python's tables have it."""
    out: list[Range] = []
    for low, high in SIGMA:
        for code in range(low, high + 1):
            if unicodedata.category(chr(code)).startswith(name):
                if out and out[-1][1] == code - 1:
                    out[-1] = (out[-1][0], code)
                else:
                    out.append((code, code))
    spend(100_000)
    return tuple(out)


@dataclass
class _Machine:
    """A nondeterministic automaton (Thompson 1968): free edges, edges on ranges, and anchors."""

    free: list[list[tuple[int, str]]] = field(default_factory=list)
    edges: list[list[tuple[Range, int]]] = field(default_factory=list)

    def new(self) -> int:
        spend()
        self.free.append([])
        self.edges.append([])
        return len(self.free) - 1

    def closure(self, states: Iterable[int], begin: bool, end: bool) -> set[int]:
        """What is reached without a character; ``^`` and ``$`` open at the ends of the text."""
        found = set(states)
        todo = list(found)
        while todo:
            for target, anchor in self.free[todo.pop()]:
                if target not in found and (
                    not anchor or (begin and anchor == "^") or (end and anchor == "$")
                ):
                    found.add(target)
                    todo.append(target)
        spend(len(found))
        return found


class _Parser:
    """Recursive descent; each method adds a part to the machine, from ``start``, and gives its end.

    A quantified part is read again for each copy that it needs.
    """

    def __init__(self, pattern: str, path: str, keyword: str) -> None:
        self.pattern, self.at, self.path, self.keyword = pattern, 0, path, keyword
        self.machine = _Machine()

    def refuse(self, what: str, instead: str) -> UnsupportedSchemaError:
        where = f"{what} (character {self.at} of the pattern)"
        return UnsupportedSchemaError(self.path, self.keyword, where, instead)

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.at)

    def take(self, text: str) -> bool:
        if self.peek(text):
            self.at += len(text)
            return True
        return False

    def next(self) -> str:
        if self.at >= len(self.pattern):
            raise self.refuse("ends too early", "a complete regular expression")
        self.at += 1
        return self.pattern[self.at - 1]

    def choice(self, start: int) -> int:
        end = self.machine.new()
        while True:
            at = start
            while self.at < len(self.pattern) and not (self.peek("|") or self.peek(")")):
                at = self.term(at)
            self.machine.free[at].append((end, ""))
            if not self.take("|"):
                return end

    def term(self, start: int) -> int:
        for anchor in "^$":
            if self.take(anchor):
                end = self.machine.new()
                self.machine.free[start].append((end, anchor))
                return end
        begin, start = self.at, self.fresh(start)
        once = self.atom(entry := self.fresh(start))
        after = self.at
        low, high = self.quantifier()
        if (low, high) == (1, 1):
            return once
        return self.repeat(start, entry, once, (begin, after), low, high)

    def fresh(self, start: int) -> int:
        """A state of its own behind ``start``, so that loops do not leak backwards."""
        state = self.machine.new()
        self.machine.free[start].append((state, ""))
        return state

    def repeat(
        self, start: int, entry: int, once: int, span: Range, low: int, high: int | None
    ) -> int:
        """Copies of a part that was read from ``span``, of which one lies at ``entry``."""
        free, resume = self.machine.free, self.at
        end = self.machine.new()
        if high == 0:
            free[start].clear()  # the part was read to check it; nothing may pass through it
            free[start].append((end, ""))
            return end
        if low == 0:
            free[start].append((end, ""))
        at, count = once, 1
        while count < max(low, high or low, 1):
            if count >= low:
                free[at].append((end, ""))
            self.at = span[0]
            entry = self.fresh(at)
            at, count = self.atom(entry), count + 1
            if len(free) > MAX_PARTS:
                raise self.refuse("repeats too much", "smaller counts, or minLength and maxLength")
        if high is None:
            free[at].append((entry, ""))
        free[at].append((end, ""))
        self.at = resume
        return end

    def quantifier(self) -> tuple[int, int | None]:
        low, found = 1, True
        high: int | None = 1
        if self.take("*"):
            low, high = 0, None
        elif self.take("+"):
            high = None
        elif self.take("?"):
            low = 0
        elif self.take("{"):
            low, high = self.counts()
        else:
            found = False
        if found:
            self.take("?")  # a lazy quantifier matches the same texts
            if self.at < len(self.pattern) and self.pattern[self.at] in "*+?{":
                raise self.refuse("a quantifier of a quantifier", "a group around the inner one")
        return low, high

    def counts(self) -> tuple[int, int | None]:
        body, closed, _ = self.pattern[self.at :].partition("}")
        first, comma, last = body.partition(",")
        good = all(not part or (part.isascii() and part.isdigit()) for part in (first, last))
        if not closed or not first or not good:
            raise self.refuse("a brace that is no count", "\\{ for the character")
        self.at += len(body) + 1
        low = int(first)
        high = low if not comma else int(last) if last else None
        if high is not None and high < low:
            raise self.refuse("counts out of order", "{least,most}")
        return low, high

    def atom(self, start: int) -> int:
        if self.take("("):
            return self.group(start)
        if self.take("["):
            return self.link(start, self.bracket())
        if self.take("."):
            return self.link(start, inverse(LINE))
        if self.take("\\"):
            return self.link(start, self.escape(inside=False))
        char = self.next()
        if char in "*+?{}])":
            raise self.refuse(f"a lone {char!r}", f"\\{char} for the character")
        return self.link(start, [(ord(char), ord(char))])

    def link(self, start: int, ranges: Iterable[Range]) -> int:
        end = self.machine.new()
        for first, last in ranges:
            parts = ((max(first, low), min(last, high)) for low, high in SIGMA)
            self.machine.edges[start] += [(part, end) for part in parts if part[0] <= part[1]]
        return end

    def group(self, start: int) -> int:
        if self.take("?"):
            if self.take("<") and not (self.peek("=") or self.peek("!")):
                while self.next() != ">":
                    pass
            elif not self.take(":"):
                named = "look-around" if self.pattern[self.at : self.at + 1] in "=!" else "flags"
                raise self.refuse(f"{named} in a group", "a pattern without it, or an enum")
        end = self.choice(start)
        if not self.take(")"):
            raise self.refuse("an open group", "the missing )")
        return end

    def bracket(self) -> list[Range]:
        negated, out = self.take("^"), list[Range]()
        while not self.take("]"):
            low = self.member()
            if self.peek("-") and self.pattern[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = self.member()
                if len(low) != 1 or len(high) != 1 or low[0][0] > high[0][0]:
                    raise self.refuse("a range that is none", "first-last, or \\- for a hyphen")
                low = [(low[0][0], high[0][0])]
            out += low
        return inverse(out) if negated else out

    def member(self) -> list[Range]:
        if self.take("\\"):
            return self.escape(inside=True)
        char = ord(self.next())
        return [(char, char)]

    def escape(self, inside: bool) -> list[Range]:
        char = self.next()
        if char.lower() in CLASSES:
            ranges = CLASSES[char.lower()]
            return ranges if char.islower() else inverse(ranges)
        if char in "pP":
            ranges = self.property()
            return ranges if char == "p" else inverse(ranges)
        code = self.character(char, inside)
        if 0xD800 <= code <= 0xDFFF:
            raise self.refuse("a lone surrogate", "a character")
        return [(code, code)]

    def character(self, char: str, inside: bool) -> int:
        if char in CONTROLS:
            return CONTROLS[char]
        if char == "0" and not self.pattern[self.at : self.at + 1].isdigit():
            return 0
        if char == "c" and self.pattern[self.at : self.at + 1].isascii():
            if (letter := self.next()).isalpha():
                return ord(letter) % 32
        elif char == "x":
            return self.hexadecimal(2)
        elif char == "u":
            return self.unicode()
        elif inside and char == "b":
            return 8
        elif char in SYNTAX or (char.isascii() and not char.isalnum()):
            return ord(char)
        named = {"b": "a word boundary", "B": "a word boundary", "k": "a back-reference"}
        what = "a back-reference" if char.isdigit() else named.get(char, "an unknown escape")
        raise self.refuse(f"{what} \\{char}", "a pattern without it, or an enum")

    def hexadecimal(self, digits: int) -> int:
        text = self.pattern[self.at : self.at + digits]
        if len(text) < digits or not all(c in "0123456789abcdefABCDEF" for c in text):
            raise self.refuse("a bad hexadecimal escape", "\\xHH, \\uHHHH or \\u{H}")
        self.at += digits
        return int(text, 16)

    def unicode(self) -> int:
        if self.take("{"):
            code = self.hexadecimal(max(1, self.pattern.find("}", self.at) - self.at))
            if not self.take("}") or code > 0x10FFFF:
                raise self.refuse("a bad code point", "\\u{H} up to 10FFFF")
            return code
        code = self.hexadecimal(4)
        if 0xD800 <= code < 0xDC00 and self.take("\\u"):
            low = self.hexadecimal(4)
            if 0xDC00 <= low < 0xE000:
                return 0x10000 + (code - 0xD800) * 0x400 + low - 0xDC00
        return code

    def property(self) -> list[Range]:
        name, closed, _ = self.pattern[self.at :].partition("}")
        short = name[1:].removeprefix("General_Category=").removeprefix("gc=")
        short = LONG_NAMES.get(short, short)
        if not (name.startswith("{") and closed and short in CATEGORIES.split()):
            raise self.refuse("a Unicode property that is no general category", "\\p{L} and alike")
        self.at += len(name) + 1
        return list(category(short))


@remembered
def regex(pattern: str, search: bool = True, path: str = "", keyword: str = "pattern") -> Automaton:
    """The texts that hold a match; with ``search=False`` those that are one.

    Raises:
        UnsupportedSchemaError: look-around, back-references, ``\\b``, flags, properties other than
            general categories, bad syntax; it names the construct and its place.
    """
    parser = _Parser(pattern, path, keyword)
    machine = parser.machine
    start = machine.new()
    end = parser.choice(parser.fresh(start))
    if parser.at < len(pattern):
        raise parser.refuse("a lone ')'", "\\) for the character")
    if search:
        for state in (start, end):
            machine.edges[state] += [(r, state) for r in SIGMA]
    return _determined(machine, start, end)


def _determined(machine: _Machine, start: int, end: int) -> Automaton:
    """Subset construction; a state is a set, and whether the text begins there."""
    State = tuple[frozenset[int], bool]

    def moves(state: State) -> list[tuple[int, int, State]]:
        reached = machine.closure(state[0], begin=state[1], end=False)
        edges = [edge for at in reached for edge in machine.edges[at]]
        cuts = sorted({r[0] for r, _ in edges} | {r[1] + 1 for r, _ in edges})
        targets: dict[int, set[int]] = {cut: set() for cut in cuts}
        place = {cut: i for i, cut in enumerate(cuts)}
        for (first, last), target in edges:
            for cut in cuts[place[first] : place[last + 1]]:
                targets[cut].add(target)
            spend()
        bounds = pairwise(cuts)
        return [(a, b - 1, (frozenset(targets[a]), False)) for a, b in bounds if targets[a]]

    def final(state: State) -> bool:
        return end in machine.closure(state[0], begin=state[1], end=True)

    return explore((frozenset([start]), True), moves, final)
