"""Rules of a grammar from which no text is ever finished: :func:`endless_rules`.

``root ::= "a" root`` writes on until a limit cuts it, ``root ::= root`` cannot begin; xgrammar
compiles both. A rule is *productive* if one of its alternatives needs productive rules only
(Hopcroft, Motwani, Ullman, "Introduction to Automata Theory", 7.1.1).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

_TOKEN: Final = re.compile(
    r'(?P<text>"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\])|(?P<name>[A-Za-z_][\w.-]*)'
    r"|(?P<sign>::=|\(=|[(|)])|\{(?P<least>\d+)[^}]*\}",
    re.DOTALL,
)


@dataclass(slots=True)
class _Rule:
    """``ways``: the rules that each alternative needs. ``near``: all rules that it names."""

    ways: list[set[str]] = field(default_factory=lambda: [set()])
    near: set[str] = field(default_factory=set)


def endless_rules(ebnf: str) -> list[str]:
    """Rules in reach of the first one that derive no text.

    Args:
        ebnf: a grammar as xgrammar prints it, where an alternative is a plain sequence.
    """
    rules = _read(ebnf)
    left = {(name, i): set(way) for name, r in rules.items() for i, way in enumerate(r.ways)}
    users: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for place, needed in left.items():
        for name in needed:
            users[name].append(place)
    productive = {name for (name, _), needed in left.items() if not needed}
    ready = list(productive)
    while ready:
        name = ready.pop()
        for place in users[name]:
            left[place].discard(name)
            if not left[place] and place[0] not in productive:
                productive.add(place[0])
                ready.append(place[0])
    return [name for name in _in_reach(rules) if name not in productive]


def _in_reach(rules: dict[str, _Rule]) -> Iterator[str]:
    seen = set(list(rules)[:1])
    ready = list(seen)
    while ready:
        near = rules[ready.pop()].near - seen
        seen |= near
        ready += near
    return (name for name in rules if name in seen)


def _read(ebnf: str) -> dict[str, _Rule]:
    """The rules by name, in order."""
    found: dict[str, _Rule] = {}
    tokens = [(m.lastgroup, m[0], m["least"]) for m in _TOKEN.finditer(ebnf)]
    rule, depth, previous = _Rule(), 0, ""
    aside: list[int] = []  # depths of what is no part of an alternative
    for (kind, text, _), (_, after, times) in pairwise([*tokens, ("", "", None)]):
        if kind == "name" and after == "::=":
            rule = found.setdefault(text, _Rule())
        elif text in ("(", "(="):
            depth += 1
            if text == "(=" or previous == "name":  # a look ahead; a call as TagDispatch(…)
                aside.append(depth)
        elif text == ")":
            if aside[-1:] == [depth]:
                aside.pop()
            depth -= 1
        elif text == "|" and depth == 1:
            rule.ways.append(set())
        elif kind == "name" and after != "(":
            rule.near.add(text)
            if not aside and times != "0":
                rule.ways[-1].add(text)
        previous = kind if kind == "name" else ""
    for rule in found.values():  # what a call is given may be other than rules
        rule.near &= found.keys()
    return found
