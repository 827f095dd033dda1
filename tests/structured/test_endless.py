"""Grammars that no text ends, and those that stop half way, are refused by name."""

from __future__ import annotations

import math
import re

import pytest
import xgrammar
from deepinfer.errors import InvalidRequestError
from deepinfer_structured.endless import endless_rules
from grammar_rig import ToyVocabulary, backend_for, spec
from hypothesis import given, settings
from hypothesis import strategies as st


def endless(ebnf):
    return endless_rules(str(xgrammar.Grammar.from_ebnf(ebnf)))


CASES = {
    "root ::= root": ["root"],
    "root ::= a\na ::= b\nb ::= a": ["root", "a", "b"],
    'root ::= "a" root': ["root"],
    'root ::= "a" root | "b"': [],
    'root ::= root "a" | "b"': [],
    'root ::= "a" | x\nx ::= x': ["x"],
    'root ::= "a" x*\nx ::= "b" x': ["x"],
    'root ::= x{2,3}\nx ::= "a" x?': [],
    'root ::= "a"\nlost ::= lost': [],  # nobody asks for it
    'root ::= "root ::= x" "\\"|(" [\\]|"x(] # x ::= x\nx ::= x': [],
    'root ::= TagDispatch(("<a>", x))\nx ::= x': ["x"],
    'root ::= TagDispatch(("<a>", x))\nx ::= "b"': [],
    'root ::= "a" (= "x" root)\n': [],
    "root ::= Token(3) ExcludeToken(5, 6)": [],
    'root ::= ""': [],
}


@pytest.mark.parametrize("ebnf", CASES)
def test_rules_without_an_end_are_found(ebnf):
    assert endless(ebnf) == CASES[ebnf]


NAMES = ("root", "a-1", "b.c", "d_")


def rule_bodies():
    leaf = st.one_of(
        st.sampled_from(['"x"', '"|("', "[a-z\\]]", "[^\\n]", '""']).map(
            lambda text: ("text", text)
        ),
        st.sampled_from(NAMES).map(lambda name: ("rule", name)),
    )

    def wider(inner):
        some = st.lists(inner, min_size=1, max_size=3)
        times = st.sampled_from(["?", "*", "+", "{0,3}", "{2}", "{1,130}"])
        return st.one_of(
            some.map(lambda parts: ("row", parts)),
            some.map(lambda parts: ("any", parts)),
            st.tuples(st.just("times"), st.tuples(inner, times)),
        )

    return st.recursive(leaf, wider, max_leaves=6)


def written(body):
    kind, what = body
    if kind in ("text", "rule"):
        return what
    if kind == "times":
        return f"({written(what[0])}){what[1]}"
    return "(" + {"row": " ", "any": " | "}[kind].join(map(written, what)) + ")"


def shortest(body, known):
    """Characters of a shortest text, given those of the rules; infinite where there is none."""
    kind, what = body
    if kind == "text":
        return 0 if what == '""' else 1
    if kind == "rule":
        return known[what]
    if kind == "times":
        least = {"?": 0, "*": 0, "+": 1}.get(what[1]) if what[1] in "?*+" else int(what[1][1])
        return shortest(what[0], known) * least if least else 0
    return {"row": sum, "any": min}[kind](shortest(part, known) for part in what)


def named(body):
    kind, what = body
    if kind in ("text", "rule"):
        return {what} & set(NAMES)
    return set().union(*(named(part) for part in (what[:1] if kind == "times" else what)))


@settings(max_examples=300, deadline=None)
@given(st.tuples(*(rule_bodies() for _ in NAMES)))
def test_it_agrees_with_the_length_of_shortest_texts(bodies):
    rules = dict(zip(NAMES, bodies, strict=True))
    known = dict.fromkeys(NAMES, math.inf)
    for _ in range(len(NAMES) + 1):
        known = {name: shortest(body, known) for name, body in rules.items()}
    reach = {"root"}
    for _ in NAMES:
        reach |= set().union(*(named(rules[name]) for name in reach))
    found = endless("\n".join(f"{name} ::= {written(body)}" for name, body in rules.items()))
    assert {name for name in found if name in NAMES} == {n for n in reach if known[n] == math.inf}


@pytest.fixture(scope="module")
def backend():
    backend = backend_for(ToyVocabulary(17), compile_seconds=10.0)
    yield backend
    backend.close()


def test_what_kills_the_compiler_kills_no_engine(backend):
    """Its process dies of it, and the next grammar gets another one."""
    fatal = "root ::= b\nb ::= (b){0,3}"
    with pytest.raises(InvalidRequestError, match="This ebnf is refused: its process died of it"):
        backend.compile(spec("ebnf", fatal), frozenset({0}))
    backend.compile(spec("ebnf", 'root ::= "b"'), frozenset({0}))


@pytest.mark.parametrize(
    "kind, rule, words",
    [
        ("ebnf", "root ::= root", "This ebnf is refused: no text of its rule 'root' ever ends."),
        ("ebnf", 'root ::= "a" | x\nx ::= "b" x', "no text of its rule 'x' ever ends."),
        ("ebnf", "root ::= []", "no token may follow the 0 that"),
        ("ebnf", 'root ::= "a" []', "no token may follow the 1 that"),
        ("tag", {"type": "grammar", "grammar": 'root ::= "a" root'}, "structural_tag is refused"),
    ],
)
def test_they_are_refused_before_anything_is_generated(backend, kind, rule, words):
    if kind == "tag":
        kind, rule = "structural_tag", {"type": "structural_tag", "format": rule}
    with pytest.raises(InvalidRequestError, match=re.escape(words)) as error:
        backend.compile(spec(kind, rule), frozenset({0}))
    assert error.value.setting == "so_args.schema"
