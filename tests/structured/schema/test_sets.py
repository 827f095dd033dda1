"""Sets of strings and numbers: automata against Python's re, Decimal and plain sets."""

from __future__ import annotations

import datetime
import ipaddress
import json
import random
import re
import uuid
from decimal import Decimal
from itertools import product

import pytest
from deepinfer_structured.schema import UnsupportedSchemaError, compile_choice, compile_regex
from deepinfer_structured.schema.automata import (
    ALL_STRINGS,
    Strings,
    Words,
    automaton,
    bounded,
    complement,
    join,
    meet,
    words_of,
)  # fmt: skip
from deepinfer_structured.schema.formats import FORMATS
from deepinfer_structured.schema.limits import SchemaOptions
from deepinfer_structured.schema.numbers import compared, exact, multiples, numbers, spelled, text
from deepinfer_structured.schema.regex import regex
from grammars import accepts, compiled, walk
from hypothesis import given, settings
from hypothesis import strategies as st

QUIET = settings(deadline=None, max_examples=80)
WORDS = ["".join(word) for n in range(6) for word in product("abc", repeat=n)]
PIECES = st.recursive(
    st.sampled_from(["a", "b", "c", ".", "[ab]", "[^a]", "^", "$", "\\w", "(?:)"]),
    lambda inner: (
        st.tuples(inner, inner).map("".join)
        | st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})")
        | st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{0}", "{1,}?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        )
    ),
    max_leaves=6,
)


@QUIET
@given(PIECES)
def test_patterns_are_searched_as_by_re(pattern):
    """``$`` of Python also matches before a last newline; no word here has one."""
    machine = regex(pattern)
    assert [w for w in WORDS if machine.accepts(w) != bool(re.search(pattern, w))] == []


@QUIET
@given(PIECES)
def test_whole_matches_as_by_re(pattern):
    machine = regex(pattern, False)
    assert [w for w in WORDS if machine.accepts(w) != bool(re.fullmatch(pattern, w))] == []


@QUIET
@given(st.lists(PIECES, min_size=2, max_size=2), st.integers(0, 3), st.integers(0, 4))
def test_algebra_of_languages(patterns, low, high):
    """Meets, joins, complements and bounds, word by word."""
    one, two = (regex(pattern) for pattern in patterns)
    some = Words(frozenset(WORDS[::7]))
    both, either = meet(one, two), join(one, complement(two))
    outside, short = meet(complement(some), one), bounded(one, low, high)
    for word in WORDS:
        first, second, third = one.accepts(word), two.accepts(word), word in some.words
        assert both.accepts(word) == (first and second)
        assert either.accepts(word) == (first or not second)
        assert outside.accepts(word) == (first and not third)
        assert short.accepts(word) == (first and low <= len(word) <= high)


@QUIET
@given(st.lists(st.tuples(PIECES, st.integers(0, 3), st.none() | st.integers(0, 4)), max_size=2))
def test_algebra_of_strings_with_bounds(parts):
    """The opposite of a union of bounded languages; and emptiness."""
    found = Strings(tuple((regex(p, False), low, high) for p, low, high in parts))
    language, other = found.language(), (~found).language()
    for word in WORDS:
        assert language.accepts(word) != other.accepts(word)
    assert (found & ~found).empty
    assert found.empty == automaton(language).empty
    assert not ALL_STRINGS.empty


NUMBERS = sorted(
    {*range(-130, 131), *(n / 10 for n in range(-130, 131)), *(n / 1000 for n in range(-30, 31))}
    | {10**20, -(10**20), 12345.678, 0.1 + 0.2, 1e-7}
)


@QUIET
@given(st.sampled_from(NUMBERS), st.sets(st.sampled_from([-1, 0, 1]), min_size=1))
def test_comparisons_are_exact(bound, signs):
    machine = automaton(compared(bound, frozenset(signs)))
    for number in NUMBERS:
        one, two = exact(number), exact(bound)
        assert machine.accepts(text(number)) == (((one > two) - (one < two)) in signs), number


@QUIET
@given(st.sampled_from([1, 2, 3, 7, 10, 25, 0.5, 0.1, 0.01, 1.5, 0.75]))
def test_multiples_are_exact(step):
    machine = automaton(multiples(step))
    for number in NUMBERS:
        if abs(number) < 10**15:
            assert machine.accepts(text(number)) == (exact(number) % exact(step) == 0), number


@pytest.mark.parametrize("step", [7, 60, 365, 997])
def test_multiples_are_not_narrowed_to_a_few(step):
    """Six digits at least, or a refusal that says what to do."""
    from deepinfer_structured.schema import compile_schema

    bounds = {"minimum": 0, "maximum": 5000}
    grammar = compiled(compile_schema({"type": "integer", "multipleOf": step} | bounds).ebnf)
    assert all(accepts(grammar, str(n)) == (n % step == 0) for n in range(0, 5001, 1 + step // 9))
    try:
        grammar = compiled(compile_schema({"type": "integer", "multipleOf": step}).ebnf)
    except UnsupportedSchemaError as error:
        assert step == 997 and error.unsupported.reason.startswith("needs over")
    else:
        assert accepts(grammar, str(999_999 // step * step))


def test_one_spelling_for_each_number():
    machine = numbers()
    for bad in ("", "-", "00", "-0", "1.", ".5", "1.50", "+1", "1e3", "0x1", "1,5"):
        assert not machine.accepts(bad), bad
    for number in NUMBERS:
        assert machine.accepts(text(number)) and Decimal(text(number)) == exact(number)


def test_written_numbers_are_json_and_of_the_set():
    """Zeros at the end are spellings of the same number."""
    language = meet(numbers(), compared(0.25, frozenset([0, 1])))
    for part in spelled(language, SchemaOptions()):
        machine, rng = automaton(part), random.Random(0)
        for _ in range(200):
            at, out = 0, ""
            while not (at in machine.final and rng.random() < 0.4) and machine.edges[at]:
                first, last, at = rng.choice(machine.edges[at])
                out += chr(rng.randint(first, last))
            if at in machine.final:
                assert json.loads(out) >= 0.25 and len(out) <= 20


CHECKS = {
    "date": datetime.date.fromisoformat,
    "date-time": lambda t: datetime.datetime.fromisoformat(t.replace("Z", "+00:00")),
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_what_they_say(name):
    """Random texts of each, read by Python's own parsers where there are any; jsonschema's else."""
    import jsonschema

    grammar, rng = compiled(compile_regex(FORMATS[name]).ebnf), random.Random(name)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    found = [found for _ in range(40) if (found := walk(grammar, rng)) is not None]
    assert len(set(found)) > 5
    for each in found:
        assert checker.conforms(each, name), each
        if name in CHECKS:
            CHECKS[name](each)


REFUSED = ["(?=a)", "(?!a)", "(?<=a)b", "(?<!a)b", "(a)\\1", "\\k<n>", "\\bx", "\\Bx", "(?i)a"]
REFUSED += [
    "\\p{Script=Latin}",
    "a{2",
    "a{3,1}",
    "[z-a]",
    "(",
    ")",
    "a**",
    "*",
    "\\",
    "[a",
    "\\ud800",
]
REFUSED += ["\\a", "\\Z", "a{100000}", "(?P<n>a)", "\\x4", "\\u{110000}", "{1}", "a++"]


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_is_not_regular_is_refused_by_name(pattern):
    with pytest.raises(UnsupportedSchemaError) as caught:
        compile_regex(pattern)
    assert caught.value.unsupported.instead


ECMA = {
    "\\d": ("7", "٧"), "\\w": ("_", "é"), "\\s": ("\ufeff", "\u200b"), "\\S": ("a", "\u2029"),
    ".": ("😀", "\u2028"), "[^]": ("\n", ""), "[^\\d]": ("x", "5"), "\\u{1F600}": ("😀", "?"),
    "\\ud83d\\ude00": ("😀", "?"), "\\cA": ("\x01", "A"), "\\x41": ("A", "B"), "\\0": ("\0", "0"),
    "[\\b]": ("\b", "b"), "\\/": ("/", "\\"), "[\\-a]": ("-", "b"), "[a-]": ("-", "b"),
    "(?<n>a)": ("a", "n"), "\\p{Lu}": ("Ä", "ä"), "\\P{L}": ("1", "x"), 
    "[\\u0000-\\uffff]": ("\uffff", "😀"),
    "a$|b": ("a", "c"),
}  # fmt: skip


@pytest.mark.parametrize("pattern", ECMA)
def test_dialect(pattern):
    """ECMA-262 with its u flag, character by character."""
    good, bad = ECMA[pattern]
    machine = regex(pattern, False)
    assert machine.accepts(good) and not machine.accepts(bad)
    assert not any(first <= 0xD800 <= last for out in machine.edges for first, last, _ in out)


def test_regex_and_choice_as_grammars():
    """Whole matches, and the choices as they are."""
    grammar = compiled(compile_regex('a"\\\\[\\]^-]+\\n?').ebnf)
    assert accepts(grammar, 'a"\\]^-\n') and not accepts(grammar, 'xa"\\]')
    texts = ['say "да"', "a\\b", "line\nline", "😀", "a-b]^"]
    grammar = compiled(compile_choice(texts).ebnf)
    assert all(accepts(grammar, text) for text in texts)
    assert not any(accepts(grammar, text) for text in ("", "say", "a\\b ", "no"))
    for bad in ([], [""], "", [1]):
        with pytest.raises(UnsupportedSchemaError):
            compile_choice(bad)


def test_large_enums_are_split_where_they_part():
    """Word by word, with and without each other's prefixes."""
    from deepinfer_structured.schema import compile_schema

    rng = random.Random(0)
    words = sorted({"".join(rng.choices('abé\n"', k=rng.randint(0, 7))) for _ in range(4000)})
    kept = set(words[::2])
    assert len(kept) > 900
    grammar = compiled(compile_schema({"enum": sorted(kept)}).ebnf)
    assert {word for word in words if accepts(grammar, json.dumps(word))} == kept
    one, two = ([f"{a}{n}" for a in pair for n in range(700)] for pair in ("ab", "ac"))
    two += [f"a{n}x" for n in range(700)]
    both = compiled(compile_schema({"prefixItems": [{"enum": one}, {"enum": two}]}).ebnf)
    assert accepts(both, '["b7", "c7"]') and accepts(both, '["a699", "a699x"]')
    assert not any(accepts(both, text) for text in ('["c7", "c7"]', '["a1", "b1"]', '["7", "a1"]'))
    grammar = compiled(compile_choice(sorted(kept - {""})).ebnf)
    assert {word for word in words if accepts(grammar, word)} == kept - {""}


def test_escapes_only_where_the_class_has_all_characters():
    """``\\uXXXX`` stands for any character beyond ASCII only if all of them are allowed."""
    from deepinfer_structured.schema import compile_schema

    inside = compiled(compile_schema({"type": "string", "pattern": "^[^\\ue000-\\uf8ff]$"}).ebnf)
    assert accepts(inside, '"é"') and not accepts(inside, '"\\ue001"')
    assert not accepts(inside, '"\ue001"')
    any_ = compiled(compile_schema({"type": "string", "pattern": "^[^a]$"}).ebnf)
    assert accepts(any_, '"\\u00e9"') and not accepts(any_, '"\\u0061"')


def test_few_words_are_listed():
    assert words_of(regex("^(?:a|b){1,2}$"), 10) == ["a", "b", "aa", "ab", "ba", "bb"]
    assert words_of(regex("^a*$"), 10) is None and words_of(regex("a"), 10) is None
