"""What users report about structured output elsewhere, one test each."""

from __future__ import annotations

import json
import random
import time

import pytest
from deepinfer_structured.schema import SchemaOptions, UnsupportedSchemaError, compile_schema
from grammars import accepts, compiled, walk


def grammar_of(schema, **options):
    return compiled(compile_schema(schema, SchemaOptions(**options)).ebnf)


INVALID = {
    "allOf of two": ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, ['"x"', "2", "{}"], ["3"]),
    "uniqueItems": (
        {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, ["[1, 1]"], ["[2, 1]"]),
    "not": ({"not": {"type": "string"}}, ['"x"'], ["1", "{}"]),
    "if then": (
        {"type": "integer", "if": {"minimum": 5}, "then": {"multipleOf": 5}}, ["6"], ["10", "3"]),
    "overlapping oneOf": (
        {"oneOf": [{"type": "integer"}, {"maximum": 1}]}, ["1"], ["2", "0.5"]),
    "dependentRequired": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        ['{"a": 1}'], ['{"a": 1, "b": 1}', '{"b": 1}']),
    "beside $ref": (
        {"$ref": "#/$defs/i", "minimum": 3, "$defs": {"i": {"type": "integer"}}}, ["2"], ["3"]),
    "anyOf of required": (
        {"type": "object", "properties": {"a": {}, "b": {}},
         "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ["{}"], ['{"a": 1}', '{"b": 1}', '{"a": 1, "b": 2}']),
    "duplicate keys": (
        {"type": "object", "properties": {"a": {"type": "integer"}}}, ['{"a": 1, "a": 2}'],
        ['{"a": 1}']),
    "lone surrogate": ({"type": "string"}, ['"\\ud800"', '"\\udc00\\ud800"'], ['"\\ud83d\\ude00"']),
    "required without declaration": ({"type": "object", "required": ["a"]}, ["{}"], ['{"a": 1}']),
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID)
def test_accepted_elsewhere_although_forbidden(name):
    schema, bad, good = INVALID[name]
    grammar = grammar_of(schema)
    assert [text for text in bad if accepts(grammar, text)] == []
    assert [text for text in good if not accepts(grammar, text)] == []


VALID = {
    "undeclared keys of an open map": ({"type": "object"}, ['{"any": 1, "key": [2]}']),
    "pattern is a search": ({"type": "string", "pattern": "b"}, ['"abc"']),
    "patternProperties are searched": (
        {"type": "object", "patternProperties": {"b": {"type": "integer"}}}, ['{"abc": 1}']),
    "propertyNames are searched": (
        {"type": "object", "propertyNames": {"pattern": "b"}}, ['{"abc": 1}']),
    "a Unicode category": ({"type": "string", "pattern": "^\\p{L}+$"}, ['"éЖ中"']),
    "escapes beside lengths": (
        {"type": "string", "minLength": 3, "maxLength": 3},
        ['"\\n\\"\\\\"', '"\\u00e9ab"', '"\\u0061bc"']),
    "\\u of enum values": ({"enum": ["Ошибка"]}, [json.dumps("Ошибка"), '"Ошибка"']),
    "a space in a const object": ({"const": {"a": 1}}, ['{"a": 1}', '{"a":1}']),
    "enum in other scripts": (
        {"enum": ["中文", "हिन्दी", "עברית"]}, ['"中文"', '"हिन्दी"', '"עברית"']),
    "number ranges": (
        {"type": "integer", "minimum": -105, "maximum": 1050}, ["-105", "-99", "0", "999", "1050"]),
    "optional first key": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"]}, ['{"b": 1}']),
}  # fmt: skip


@pytest.mark.parametrize("name", VALID)
def test_rejected_elsewhere_although_allowed(name):
    schema, good = VALID[name]
    grammar = grammar_of(schema)
    assert [text for text in good if not accepts(grammar, text)] == []


def test_integer_ranges_are_exact():
    """Every bound against every number near it (xgrammar 661, 662, 667)."""
    rng = random.Random(0)
    for _ in range(25):
        low, high = sorted(rng.randint(-(10 ** rng.randint(0, 4)), 10**4) for _ in range(2))
        grammar = grammar_of({"type": "integer", "minimum": low, "exclusiveMaximum": high + 1})
        near = {n + d for n in (low, high, 0, 10, -10, 100, 1000) for d in (-1, 0, 1)}
        assert {n for n in near if accepts(grammar, str(n))} == {
            n for n in near if low <= n <= high
        }


def test_left_out_spellings():
    """What is not written although it is valid, as documented."""
    schema = {"type": "object", "properties": {"a": {"type": "number"}, "b": {}}}
    grammar = grammar_of(schema)
    for text in ('{"b": 1, "a": 1}', '{"a": 1e0}', '{"c": 1}', '{"a" : 1}', '{"\\u0061": 1}'):
        json.loads(text)
        assert not accepts(grammar, text), text
    assert accepts(grammar_of(schema, additional_properties="allow"), '{"a": 1, "c": 1}')


@pytest.mark.parametrize("most", [0, 1, 16])
def test_white_space_is_bounded(most):
    """No model loops in it (vllm 38696, 40080, 13260; sglang 8250)."""
    grammar = grammar_of({"type": "array", "items": {"type": "null"}}, max_whitespace=most)
    assert accepts(grammar, "[null,null]")
    assert accepts(grammar, "[null, null]") == (most > 0)
    assert accepts(grammar, "[\n  null\n]") == (most > 1)
    assert not accepts(grammar, "[null," + " " * 2 + "null]")
    assert accepts(grammar, "[\n" + " " * 15 + "null]") == (most == 16)
    assert not accepts(grammar, "[\n" + " " * 16 + "null]")


def test_digits_are_bounded():
    integer, number = grammar_of({"type": "integer"}), grammar_of({"type": "number"})
    assert accepts(integer, "9" * 18) and not accepts(integer, "9" * 19)
    assert accepts(number, "0." + "9" * 7) and not accepts(number, "0." + "9" * 8)
    few = grammar_of({"type": "number"}, integer_digits=3)
    assert accepts(few, "999") and accepts(few, "999.5") and not accepts(few, "1000.5")
    assert not accepts(few, "1000")
    assert accepts(grammar_of({"const": 10**30}), str(10**30))
    assert accepts(grammar_of({"minimum": 10**30, "type": "integer"}), str(10**30))
    assert accepts(grammar_of({"exclusiveMinimum": 0, "maximum": 1e-10}), "0.0000000001")


def test_doubles_keep_the_bounds():
    """A text whose double is the bound itself would be invalid for whoever parses doubles."""
    grammar = grammar_of({"type": "number", "exclusiveMaximum": 0.3})
    rng = random.Random(1)
    for _ in range(50):
        text = walk(grammar, rng)
        assert text is None or json.loads(text) < 0.3


REFUSED = {
    "remote $ref": ({"$ref": "https://example.com/x"}, "/$ref", "$ref"),
    "false": ({"properties": {"a": False}, "required": ["a"], "type": "object"},
              "/properties/a", "schema"),
    "empty enum": ({"enum": []}, "", "schema"),
    "minimum above maximum": ({"type": "object", "required": ["n"], "properties": {
        "n": {"type": "integer", "minimum": 3, "maximum": 2}}}, "/properties/n", "schema"),
    "contradiction after merging": (
        {"allOf": [{"type": "string"}, {"type": "integer"}]}, "", "schema"),
    "unknown type": ({"items": {"type": "int"}}, "/items/type", "type"),
    "pure cycle": ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
                   "/$defs/a/$ref", "$ref"),
    "missing $ref": ({"items": {"$ref": "#/$defs/no"}}, "/items/$ref", "$ref"),
    "look-behind": ({"items": {"pattern": "(?<=a)b"}}, "/items/pattern", "pattern"),
    "back-reference": ({"pattern": "(a)\\1"}, "/pattern", "pattern"),
    "word boundary": ({"pattern": "\\bword"}, "/pattern", "pattern"),
    "flag": ({"pattern": "(?i)a"}, "/pattern", "pattern"),
    "misspelt keyword": ({"properties": {"a/b": {"minlength": 3}}},
                         "/properties/a~1b/minlength", "minlength"),
    "no schema at all": ([1], "", "schema"),
    "a set": ({"enum": {1, 2}}, "", "schema"),
    "infinite": ({"const": float("inf")}, "", "schema"),
    "surrogate": ({"const": "\ud800"}, "", "schema"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_property_and_a_way_out(name):
    """Not "failed to parse grammar" (llama.cpp 26596)."""
    schema, path, keyword = REFUSED[name]
    with pytest.raises(UnsupportedSchemaError) as caught:
        compile_schema(schema)
    what = caught.value.unsupported
    assert (what.path, what.keyword) == (path, keyword)
    assert what.reason and what.instead
    assert what.reason in str(caught.value) and what.instead in str(caught.value)
    assert caught.value.code == "unsupported_schema"


def test_empty_schema_is_any_json():
    """vllm 52011."""
    grammar = grammar_of({})
    for text in ("null", "[]", '{"a": [1, {"b": "c"}]}', '"\\n"', "-1.5"):
        assert accepts(grammar, text)
    for text in ("", "nul", "[1,]", "{1: 2}", '"\n"', "01", "+1", "NaN", "'a'"):
        assert not accepts(grammar, text)


def nested(depth, step):
    schema = {"type": "integer"}
    for level in range(depth):
        schema = step(schema, level)
    return schema


def one_of(schema, level):
    return {"oneOf": [schema, {"type": "object", "properties": {f"k{level}": schema}}]}


def member(schema, level):
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


HOSTILE = {
    "oneOf nested 11": nested(11, one_of),
    "enum of 20,000": {"enum": [f"value {i}" for i in range(20_000)]},
    "not an enum of 20,000": {"not": {"enum": [f"value {i}" for i in range(20_000)]}},
    "{0,100000}": {"type": "string", "pattern": "^a{0,100000}$"},
    "maxLength 100000": {"type": "string", "maxLength": 100_000},
    "minItems 100000": {"type": "array", "minItems": 100_000},
    "nested counts": {"pattern": "^(((a{0,99}){0,99}){0,99}){0,99}$"},
    "exponential pattern": {"type": "string", "pattern": "a.{40}$"},
    "500 nested objects": nested(500, member),
    "150 nested objects": nested(150, member),
    "1000 properties": {"properties": {f"p{i}": {"type": "integer"} for i in range(1000)}},
    "60 tagged alternatives": {"oneOf": [
        {"type": "object", "properties": {"kind": {"const": f"k{i}"}}, "required": ["kind"]}
        for i in range(60)]},
    "12 overlapping alternatives": {"unevaluatedProperties": False, "anyOf": [
        {"properties": {f"k{i}": {"type": "integer"}}} for i in range(12)]},
    "five counters": {"type": "array", "allOf": [
        {"contains": {"multipleOf": n}, "minContains": 3, "maxContains": 9}
        for n in (2, 3, 5, 7, 11)]},
    "a long chain of references": {"$ref": "#/$defs/d0", "$defs": {
        f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2000)} | {"d2000": {}}},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_end(name):
    """Compiled or refused, in bounded time (vllm 54003; xgrammar 207)."""
    start = time.process_time()
    try:
        found = compile_schema(HOSTILE[name])
        assert found.ebnf.count("\n") <= SchemaOptions().max_rules
    except UnsupportedSchemaError as error:
        assert error.unsupported.instead
    assert time.process_time() - start < 30  # about 3 s on an idle machine


@pytest.mark.parametrize("count", [2**31 + 1, 2**32 + 2, 2**53 - 1, 2**64 + 2])
def test_no_count_is_read_as_another(count):
    """xgrammar keeps counts in 32 bits: 4294967298 would be 2."""
    ones = {"type": "array", "items": {"const": 1}}
    for schema, texts in (
        ({**ones, "maxItems": count}, ["[]", "[1,1,1]", f"[{','.join('1' * 40)}]"]),
        ({"type": "string", "maxLength": count}, ['""', '"aaa"', f'"{"a" * 400}"']),
        ({"type": "object", "maxProperties": count, "required": ["a"]}, ['{"a":1}']),
    ):
        grammar = grammar_of(schema)
        assert all(accepts(grammar, text) for text in texts), schema
    for schema in ({**ones, "minItems": count}, {**ones, "prefixItems": [{}], "minItems": count}):
        with pytest.raises(UnsupportedSchemaError, match="counts to"):
            grammar_of(schema)
    try:
        grammar = grammar_of({"type": "string", "minLength": count})
    except UnsupportedSchemaError:
        return
    assert not any(accepts(grammar, f'"{"a" * n}"') for n in (0, 2, 3, 64, 66, 128, 200))
