"""Grammar rules, and how they are written: in xgrammar's EBNF, with strings as JSON spells them."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from deepinfer_structured.schema.automata import (
    SIGMA,
    Automaton,
    Language,
    Range,
    Words,
    automaton,
    bounded,
    within,
)
from deepinfer_structured.schema.limits import limit, spend

Key = Hashable


@dataclass(frozen=True, slots=True)
class Ref:
    """What a rule produces."""

    key: Key


@dataclass(frozen=True, slots=True)
class Chars:
    """One code point in ranges."""

    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """What a rule produces, ``low`` to ``high`` times."""

    key: Key
    low: int
    high: int | None


Symbol = str | Ref | Chars | Repeat
Sequence_ = tuple[Symbol, ...]
BLOCK, GROUP = 64, 500
MOST_TIMES = 2**31 - 1
"""xgrammar counts in 32 bits, and would read 4294967298 as 2. No text is as long."""
SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
HEX: tuple[Range, ...] = ((48, 57), (65, 70), (97, 102))


@dataclass
class Rules:
    """The rules of a grammar by key; a rule without alternatives produces nothing."""

    most: int
    rules: dict[Key, list[Sequence_]] = field(default_factory=dict)
    machines: dict[Automaton, int] = field(default_factory=dict)

    def add(self, key: Key, alternatives: Iterable[Sequence_]) -> Ref:
        """Write a rule; one that is there already stays."""
        if key not in self.rules:
            if len(self.rules) >= self.most:
                raise limit(f"needs over {self.most} grammar rules", "a smaller or looser schema")
            self.rules[key] = []
            self.rules[key] = list(dict.fromkeys(alternatives))
            spend(5 + len(self.rules[key]))
        return Ref(key)

    def strings(self, language: Language, low: int = 0, high: int | None = None) -> list[Sequence_]:
        """The JSON texts of the strings of a language, of ``low`` to ``high`` code points."""
        high = None if high is not None and high > MOST_TIMES else high
        if isinstance(language, Words) and not language.negated:
            fitting = (w for w in sorted(language.words) if within(len(w), low, high))
            return self.grouped(sorted(text for word in fitting for text in spellings(word)))
        if language == Words(frozenset(), negated=True):
            return [('"', self.any_string(low, high))]
        machine = automaton(bounded(language, low, high))
        return [('"', self.walk(machine, quoted=True))]

    def any_string(self, low: int, high: int | None) -> Ref:
        """``low`` to ``high`` characters and the closing quote: a rule for each that is counted.

        A character and what follows it stand in one rule, never in two, and never repeated: a token
        of several characters stays inside the rule then, and xgrammar knows its mask beforehand.
        Otherwise each mask would try most of the vocabulary.
        """
        last = low if high is None else high
        if last > 2 * BLOCK:
            return self.long_string(low, high)
        for left in range(last + 1):  # characters that are still counted
            key = ("string", left, max(0, left - last + low), high is None)
            lines: list[Sequence_] = [('"',)] if last - left >= low else []
            if left or high is None:
                after = ("string", max(0, left - 1), max(0, left - 1 - last + low), high is None)
                lines += [(*line, Ref(after)) for line in self.characters(SIGMA)]
            self.add(key, lines)
        return Ref(("string", last, low, high is None))

    def long_string(self, low: int, high: int | None) -> Ref:
        """The same for large bounds: whole blocks of characters first, then the rest one by one."""
        key = ("long string", low, high)
        chars = self.characters(SIGMA)
        self.add(("block", 0), [()])
        for left in range(1, BLOCK + 1):
            self.add(("block", left), [(*line, Ref(("block", left - 1))) for line in chars])
        block, (least, low) = ("block", BLOCK), divmod(low, BLOCK)
        head = (Repeat(block, least, least),) if least else ()
        if high is None:
            return self.add(key, [(*head, self.any_string(low, None))])
        most, rest = divmod(high - least * BLOCK, BLOCK)
        lines: list[Sequence_] = []
        if most == 0:
            lines.append((*head, self.any_string(low, rest)))
        else:
            lines.append((*head, self.any_string(low, BLOCK - 1)))
            lines.append((*head, Repeat(block, most, most), self.any_string(0, rest)))
        if most > 1:
            lines.append((*head, Repeat(block, 1, most - 1), self.any_string(0, BLOCK - 1)))
        return self.add(key, lines)

    def texts(self, language: Language) -> list[Sequence_]:
        """The words of a language as they are."""
        if isinstance(language, Words) and not language.negated:
            return self.grouped(sorted(language.words))
        return [(self.walk(automaton(language), quoted=False),)]

    def grouped(self, texts: list[str], prefix: str = "") -> list[Sequence_]:
        """One of many texts, sorted, that begin with ``prefix``; written is what follows it.

        Tens of thousands of alternatives in one rule take xgrammar long, the more so where they
        begin alike: so they are split where they part.
        """
        if len(texts) <= GROUP:
            return [(text[len(prefix) :],) for text in texts]
        both = zip(texts[0], texts[-1], strict=False)
        part = next((i for i, (one, two) in enumerate(both) if one != two), len(texts[0]))
        groups: dict[str, list[str]] = {}
        for text in texts:
            groups.setdefault(text[: part + 1], []).append(text)
        lines: list[Sequence_] = []
        for start, group in groups.items():
            rest = self.add(("texts", start, *group), self.grouped(group, start))
            lines.append((start[len(prefix) :], rest))
        return lines

    def walk(self, machine: Automaton, quoted: bool) -> Ref:
        """A rule for each state: a character, then the state that it leads to.

        Of a JSON string the closing quote is part of it.
        """
        number = self.machines.setdefault(machine, len(self.machines))
        if len(machine.edges) > self.most:
            raise limit(f"needs over {self.most} grammar rules", "a smaller or looser schema")
        for state, edges in enumerate(machine.edges):
            grouped: dict[int, list[Range]] = {}
            for first, last, target in edges:
                grouped.setdefault(target, []).append((first, last))
            lines: list[Sequence_] = []
            for target, ranges in grouped.items():
                plain: list[Sequence_] = [(Chars(tuple(ranges)),)]
                chars = self.characters(tuple(ranges)) if quoted else plain
                lines += [(*char, Ref(("state", quoted, number, target))) for char in chars]
            end: Sequence_ = ('"',) if quoted else ()
            lines += [end] if state in machine.final else []
            self.add(("state", quoted, number, state), lines)
        return Ref(("state", quoted, number, 0))

    def characters(self, ranges: tuple[Range, ...]) -> list[Sequence_]:
        """One character of a JSON string; escaped where it must be, and a little where it may."""
        raw, lines = [], list[Sequence_]()
        for first, last in ranges:
            raw += [(max(first, a), min(last, b)) for a, b in ((32, 33), (35, 91), (93, 0x10FFFF))]
            for code in range(first, min(last, 92) + 1):
                if code < 32 or code in SHORT:
                    lines += [("\\" + SHORT[code],)] if code in SHORT else []
                    lines += [(f"\\u{code:04x}",)] if code < 32 else []
        raw = [(first, last) for first, last in raw if first <= last]
        rest = [(max(first, 0x80), last) for first, last in ranges if last >= 0x80]
        if rest == [(0x80, SIGMA[0][1]), SIGMA[1]]:  # all that is not ASCII
            lines.append(("\\u", self.unicode()))
            if ranges == SIGMA:
                hexadecimal = Chars(HEX)
                lines.append(("\\/",))
                lines.append(("\\u00", Chars(((48, 55),)), hexadecimal))
        plain: list[Sequence_] = [(Chars(tuple(raw)),)] if raw else []
        return plain + ([(self.add(("escapes", ranges), lines),)] if lines else [])

    def unicode(self) -> Ref:
        """Four hexadecimal digits that are no ASCII and no surrogate, or a pair of surrogates."""
        digit, tail = Chars(HEX), (Chars(HEX), Chars(HEX))
        most = Chars(((49, 57), (65, 67), (69, 70), (97, 99), (101, 102)))
        some, d = Chars(((49, 57), (65, 70), (97, 102))), Chars(((68, 68), (100, 100)))
        high, low = Chars(((56, 57), (65, 66), (97, 98))), Chars(((67, 70), (99, 102)))
        above = Chars(((56, 57), (65, 70), (97, 102)))
        lines: list[Sequence_] = [(most, digit, *tail), (d, Chars(((48, 55),)), *tail)]
        lines += [("0", some, *tail), ("00", above, digit), (d, high, *tail, "\\u", d, low, *tail)]
        return self.add("unicode", lines)

    def productive(self) -> set[Key]:
        """The rules that produce some text."""
        users: dict[Key, set[Key]] = {}
        for key, lines in self.rules.items():
            for symbol in (symbol for line in lines for symbol in line):
                if isinstance(symbol, Ref | Repeat):
                    users.setdefault(symbol.key, set()).add(key)
        done: set[Key] = set()
        todo = list(self.rules)
        while todo:
            key = todo.pop()
            if key not in done and any(_can(line, done) for line in self.rules[key]):
                done.add(key)
                todo.extend(users.get(key, ()))
        return done


def _can(line: Sequence_, done: set[Key]) -> bool:
    """Whether an alternative produces a text from rules that do."""
    for symbol in line:
        if isinstance(symbol, Ref) and symbol.key not in done:
            return False
        if isinstance(symbol, Repeat) and symbol.low and symbol.key not in done:
            return False
    return True


def spellings(word: str) -> list[str]:
    """A string in JSON: its characters as they are, or all beyond ASCII escaped."""
    return list(dict.fromkeys(json.dumps(word, ensure_ascii=ascii) for ascii in (False, True)))


def written(rules: Rules, root: Key) -> str:
    """The grammar from a rule on, without what produces nothing; rules used once stand in place."""
    done = rules.productive()
    nothing = {key for key in done if rules.rules[key] == [()]}
    kept = {
        key: [_without(line, done - nothing) for line in rules.rules[key] if _can(line, done)]
        for key in done
    }
    uses = _uses(kept, root)
    inline = {
        key
        for key, count in uses.items()
        if count == 1 and len(kept[key]) == 1 and key != root and not _refers(kept[key][0], key)
    }
    names = {root: "root"}
    for key in uses:
        if key not in inline:
            names.setdefault(key, f"r{len(names)}")
    return "".join(
        f"{name} ::= {' | '.join(_line(line, kept, inline, names) for line in kept[key])}\n"
        for key, name in names.items()
    )


def _without(line: Sequence_, done: set[Key]) -> Sequence_:
    """The alternative without what is, or must be, repeated zero times or empty."""
    return tuple(s for s in line if not isinstance(s, Ref | Repeat) or s.key in done)


def _refers(line: Sequence_, key: Key) -> bool:
    return any(isinstance(symbol, Ref) and symbol.key == key for symbol in line)


def _uses(kept: dict[Key, list[Sequence_]], root: Key) -> dict[Key, int]:
    """How often each rule that the root reaches is named; a repeated one counts as many."""
    uses: dict[Key, int] = {root: 1}
    todo = [root]
    while todo:
        for symbol in (symbol for line in kept[todo.pop()] for symbol in line):
            if isinstance(symbol, Ref | Repeat):
                if symbol.key not in uses:
                    todo.append(symbol.key)
                uses[symbol.key] = uses.get(symbol.key, 0) + (1 if isinstance(symbol, Ref) else 2)
    return uses


def _line(
    line: Sequence_, kept: dict[Key, list[Sequence_]], inline: set[Key], names: dict[Key, str]
) -> str:
    """One alternative; neighbouring texts become one literal."""
    out: list[str] = []
    text, todo = "", list(reversed(line))
    while todo:
        symbol = todo.pop()
        if isinstance(symbol, str):
            text += symbol
            continue
        if isinstance(symbol, Ref) and symbol.key in inline:
            todo.extend(reversed(kept[symbol.key][0]))
            continue
        if text:
            out.append(f'"{escaped(text)}"')
            text = ""
        out.append(_symbol(symbol, names))
    if text or not out:
        out.append(f'"{escaped(text)}"')
    return " ".join(out)


def _symbol(symbol: Ref | Chars | Repeat, names: dict[Key, str]) -> str:
    if isinstance(symbol, Ref):
        return names[symbol.key]
    if isinstance(symbol, Chars):
        ends = (
            escaped(chr(a)) + (f"-{escaped(chr(b))}" if b > a else "") for a, b in symbol.ranges
        )
        return f"[{''.join(ends)}]"
    if (symbol.low, symbol.high) == (0, None):
        return f"{names[symbol.key]}*"
    if symbol.low > MOST_TIMES:
        raise limit(f"counts to {symbol.low}, which no text reaches", "a smaller count")
    high = "" if symbol.high is None or symbol.high > MOST_TIMES else symbol.high
    return f"{names[symbol.key]}{{{symbol.low},{high}}}"


def escaped(text: str) -> str:
    """A text between quotes or brackets of xgrammar's EBNF."""
    return "".join(_escape(ord(char)) for char in text)


def _escape(code: int) -> str:
    if 32 <= code < 127 and chr(code) not in '"\\[]^-':
        return chr(code)
    if chr(code) in '"\\':
        return "\\" + chr(code)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
