"""Compilation: caches, limits, hostile grammars, what is refused and where."""

from __future__ import annotations

import re
import threading
import time

import numpy as np
import pytest
from deepinfer.errors import ConfigError, EngineClosedError, InvalidRequestError
from grammar_rig import ToyVocabulary, allowed, backend_for, spec
from hypothesis import given, settings
from hypothesis import strategies as st

ENDS = frozenset({0})
AMBIGUOUS = 'root ::= ([^a]{1,50} | [^b]{1,50} | "é"{2,50}){1,50}'  # xgrammar takes minutes
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def backend(**options):
    return backend_for(ToyVocabulary(17), **options)


SHARED = backend(compile_seconds=10.0)  # a process of its own costs seconds


def first_mask(matcher, size=17):
    row = np.zeros((1, -(-size // 32)), np.int32)
    matcher.fill(row, [])
    return allowed(row, size)


# Caches.


def test_a_compiled_spec_is_ready_at_once_and_equal_specs_share_it():
    one = backend()
    asked = spec("regex", "(ab)+")
    assert one.ready(asked, ENDS) is None
    matcher = one.compile(asked, ENDS)
    matcher.accept([1])
    ready = one.ready(spec("regex", "(ab)+"), frozenset())
    assert ready is not None and first_mask(ready) == first_mask(one.compile(asked, ENDS))
    for other in (spec("regex", "(ab)*"), spec("choice", ["(ab)+"]), spec("json", SCHEMA)):
        assert one.ready(other, ENDS) is None


@pytest.mark.parametrize(
    "more", [{"max_whitespace": 0}, {"max_digits": 3}, {"on_unsupported": "validate"}]
)
def test_settings_are_part_of_what_is_cached(more):
    one = backend()
    one.compile(spec("json", SCHEMA), ENDS)
    assert one.ready(spec("json", SCHEMA, **more), ENDS) is None


def test_equal_specs_that_come_together_are_compiled_once(monkeypatch):
    one, made = backend(), []
    right = type(one)._compile

    def slow(self, source, kind):
        made.append(kind)
        time.sleep(0.2)
        return right(self, source, kind)

    monkeypatch.setattr(type(one), "_compile", slow)
    threads = [
        threading.Thread(target=one.compile, args=(spec("regex", "a+"), ENDS)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == ["regex"]


def test_the_memory_cache_is_bounded_and_forgets_the_least_recent():
    one = backend(cache_bytes=60_000)
    for number in range(100):
        one.compile(spec("regex", f"a{{{number + 1}}}"), ENDS)
        assert one.ready(spec("regex", "a{1}"), ENDS) is not None, number  # used all the time
        assert one._compiled.nbytes <= 60_000
    assert len(one._compiled) < 100 and one.ready(spec("regex", "a{2}"), ENDS) is None


def test_a_grammar_larger_than_the_cache_still_works():
    one = backend(cache_bytes=0)
    assert first_mask(one.compile(spec("regex", "ab"), ENDS)) == [1, 3]
    assert one.ready(spec("regex", "ab"), ENDS) is None


def test_the_disk_cache_outlives_an_engine_and_other_vocabularies(tmp_path, monkeypatch):
    asked = spec("regex", "(ab)+x")
    first_mask(backend(folder=tmp_path, disk_cache=True).compile(asked, ENDS))
    (file,) = tmp_path.iterdir()
    two = backend(folder=tmp_path, disk_cache=True)
    monkeypatch.setattr(two, "_compile", None)  # nobody compiles
    assert first_mask(two.compile(asked, ENDS)) == [1, 3]
    file.write_text("{broken", "utf-8")
    three = backend(folder=tmp_path, disk_cache=True)
    assert first_mask(three.compile(asked, ENDS)) == [1, 3]
    backend_for(ToyVocabulary(34), folder=tmp_path, disk_cache=True).compile(asked, ENDS)
    assert len(list(tmp_path.iterdir())) == 2
    backend(folder=tmp_path / "off").compile(asked, ENDS)
    assert not (tmp_path / "off").exists()


# What is refused.


@pytest.mark.parametrize(
    "kind, rule, words",
    [
        ("json", {"type": "strin"}, ["type"]),
        ("json", {"properties": {"a": {"pattern": "(?=b)"}}}, ["/properties/a", "pattern"]),
        ("json", {"type": "array", "unevaluatedItems": 3}, ["unevaluatedItems"]),
        ("regex", "(a", ["regex"]),
        ("regex", r"(a)\1", ["regex"]),
    ],
)
def test_a_bad_spec_is_refused_at_submission_by_path_and_reason(kind, rule, words):
    with pytest.raises(InvalidRequestError) as error:
        backend().check(spec(kind, rule))
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    "rule, word",
    [
        ("root ::= undefined", "undefined"),
        ('start ::= "a"', "root"),
        ('root ::= "a', 'quote|"|literal'),
        ("root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "[Nn]est"),
        ('root ::= "a" | ', "refused: at line 1, column 16: Expect element, but got the end"),
        ("root ::= Token(99)", r"refused: Token id 99 .* out of the vocabulary range"),
    ],
)
def test_foreign_grammars_are_refused_in_xgrammars_words(rule, word):
    """But not with the places and conditions of its own source."""
    with pytest.raises(InvalidRequestError, match=word) as error:
        SHARED.compile(spec("ebnf", rule), ENDS)
    assert re.search(r"\.cc|\.h:|cpp|/|Check failed|\d\d:\d\d", str(error.value)) is None


@pytest.mark.parametrize("count", ["2147483648", "4294967298", f"{2**64 + 2}", "9" * 5000])
@pytest.mark.parametrize("braces", ["{%s}", "{1,%s}", "{%s,}", "{ 1 , %s }"])
def test_a_count_that_xgrammar_would_read_as_another_is_refused(count, braces):
    rule = 'root ::= "a"' + braces % count + ' "b"'
    tag = {"type": "structural_tag", "format": {"type": "grammar", "grammar": rule}}
    for kind, each in (("ebnf", rule), ("structural_tag", tag)):
        with pytest.raises(InvalidRequestError, match="counts to"):
            backend().check(spec(kind, each))


def test_counts_are_looked_for_where_a_grammar_has_them():
    rule = 'root ::= "{9999999999}" [{9999999999}] "\\"{9999999999}" # {9999999999}'
    backend().check(spec("ebnf", rule))


def test_a_tag_holds_no_number_that_xgrammar_would_read_as_another():
    text = {"type": "const_string", "value": "a"}
    form = {"type": "repeat", "min": 1, "max": 2**32 + 2, "content": text}
    with pytest.raises(InvalidRequestError, match="/format/max"):
        backend().check(spec("structural_tag", {"type": "structural_tag", "format": form}))


@pytest.mark.parametrize("kind, rule", [("regex", "\ud800"), ("ebnf", 'root ::= "\ud800"')])
def test_half_of_a_surrogate_pair_is_no_text(kind, rule):
    """It would be written as another character."""
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": rule}}
    for each in ((kind, rule), ("choice", ["a", rule]), ("structural_tag", tag)):
        with pytest.raises(InvalidRequestError, match="surrogate"):
            spec(*each)


def test_no_tokenizer_is_said_at_submission():
    from deepinfer.api.grammar import GrammarContext
    from grammar_rig import XGrammarBackend

    context = GrammarContext(tokenizer=None, vocab_size=10, cache_dir=None)
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        XGrammarBackend(context).check(spec("regex", "a"))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"max_whitespac": 1}, "no such option"),
        ({"max_digits": 0, "formats": "maybe"}, "max_digits=0.*formats='maybe'"),
        ({"disk_cache": 1}, "true or false"),
        ({"cache_bytes": True}, "a number"),
    ],
)
def test_wrong_options_are_named(options, words):
    with pytest.raises(ConfigError, match=words):
        backend(**options)


# Hostile grammars: an error, soon, and nobody else waits for it.


def test_a_grammar_that_never_compiles_costs_its_time_and_its_process(demo_tokenizer):
    one = backend_for(demo_tokenizer, compile_seconds=1.0)
    one.compile(spec("ebnf", 'root ::= "a"'), ENDS)  # a process is there
    found = []

    def foreign():
        with pytest.raises(InvalidRequestError, match="more than 1 s to compile"):
            one.compile(spec("ebnf", AMBIGUOUS), ENDS)
        found.append(True)

    thread = threading.Thread(target=foreign)
    thread.start()
    start = time.perf_counter()
    one.compile(spec("regex", "ab"), ENDS)
    assert time.perf_counter() - start < 1.0 and thread.is_alive()
    thread.join(30)
    assert found
    start = time.perf_counter()
    with pytest.raises(InvalidRequestError, match="more than 1 s"):  # remembered
        one.compile(spec("ebnf", AMBIGUOUS), ENDS)
    assert time.perf_counter() - start < 0.1
    one.compile(spec("ebnf", 'root ::= "ab"'), ENDS)  # by a new process


def test_closing_does_not_wait_for_a_grammar_that_never_compiles(demo_tokenizer):
    one = backend_for(demo_tokenizer, compile_seconds=600.0)
    one.compile(spec("ebnf", 'root ::= "a"'), ENDS)
    errors = []

    def foreign():
        try:
            one.compile(spec("ebnf", AMBIGUOUS), ENDS)
        except EngineClosedError as why:  # and not that its process died of it
            errors.append(why)

    thread = threading.Thread(target=foreign)
    thread.start()
    time.sleep(0.3)
    start = time.perf_counter()
    one.close()
    thread.join(10)
    assert errors and time.perf_counter() - start < 5
    with pytest.raises(EngineClosedError):
        one.compile(spec("ebnf", 'root ::= "b"'), ENDS)
    one.close()


@pytest.mark.parametrize("task", ["ebnf", "validation"])
def test_what_another_process_refuses_is_blamed_on_the_right_thing(monkeypatch, task):
    from deepinfer_structured.processes import RefusedError

    def refuse(kind, text, seconds):
        raise RefusedError("it needs too much memory")

    one = backend()
    monkeypatch.setattr(one._processes, "run", refuse)
    with pytest.raises(InvalidRequestError) as error:
        if task == "ebnf":
            one.compile(spec("ebnf", 'root ::= "a"'), ENDS)
        else:
            one._validator(spec("json", SCHEMA, on_unsupported="validate"))(b"1")
    said = {"ebnf": "This ebnf is refused", "validation": "The text cannot be validated"}
    assert str(error.value).startswith(said[task])


def nested(kind, depth):
    schema = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema} if kind == "items" else {kind: [schema]}
    return schema


HOSTILE = [
    nested("items", 2000),
    nested("allOf", 500),
    nested("oneOf", 150),
    {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"},
    {"type": "string", "pattern": "(a|a)*(a|aa)*b{1,500}c{1,500}"},
    {"type": "string", "maxLength": 10**9},
    {"type": "array", "items": {"enum": list(range(300))}, "uniqueItems": True},
    {"enum": [f"value{i}" for i in range(20_000)]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"multipleOf": 1e-300, "type": "number"},
    {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
]


@pytest.mark.parametrize("rule", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_schemas_are_answered_within_seconds(rule):
    """Compiled or refused by name; the check on the caller's thread is the quick part."""
    one = backend(compile_seconds=5.0)
    start = time.process_time()
    try:
        asked = spec("json", rule)
        one.check(asked)
        one.compile(asked, ENDS)
    except InvalidRequestError as why:
        assert len(str(why)) < 600
    assert time.process_time() - start < 20


@settings(max_examples=40, deadline=None)
@given(st.text(alphabet='root ::="ab[]()*+?{}|^-\\0123456789\n,', max_size=60))
def test_random_grammars_compile_or_are_refused(text):
    try:
        matcher = SHARED.compile(spec("ebnf", "root ::= " + text), ENDS)
    except InvalidRequestError:
        return
    first_mask(matcher)


def test_a_grammar_that_becomes_slow_fails_its_own_request(monkeypatch):
    from deepinfer.api.grammar import MaskJob

    one = backend(fill_seconds=0.05)
    slow, quick = (one.compile(spec("regex", "ab"), ENDS) for _ in range(2))

    class Slow:
        def __init__(self, inner):
            self.inner = inner

        def fill_next_token_bitmask(self, rows, index):
            time.sleep(0.1)
            return self.inner.fill_next_token_bitmask(rows, index)

        def is_completed(self):
            return self.inner.is_completed()

    slow.inner = Slow(slow.inner)
    rows = np.zeros((2, 1), np.int32)
    jobs = [MaskJob(slow, 0), MaskJob(quick, 1)]
    assert one.fill(jobs, rows) == [0, 0]  # once may be anybody's fault
    answer = one.fill(jobs, rows)
    assert isinstance(answer[0], InvalidRequestError) and answer[1] == 0
    assert "s for a token" in str(answer[0])
