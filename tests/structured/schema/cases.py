"""One case or more for each keyword: what is done about it, and texts that prove it.

The table of keywords in ``docs/structured-coverage.md`` is written from these, so it says nothing
that ``test_keywords.py`` has not checked. ``good`` and ``bad`` are JSON texts; ``schema`` is JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ENFORCED, REWRITTEN, REFUSED, IGNORED = "enforced", "rewritten", "refused", "annotation"


@dataclass(frozen=True)
class Case:
    """What happens to a keyword.

    Args:
        note: how it is enforced, or why it is refused; for the document.
        good: texts that the grammar has; all valid.
        bad: texts that it has not; all invalid.
        instead: of a refusal, what to write instead, as the error says it.
    """

    keyword: str
    status: str
    note: str
    schema: Any
    good: tuple[str, ...] = ()
    bad: tuple[str, ...] = ()
    instead: str = ""


def names(**more: Any) -> dict[str, Any]:
    """An object schema."""
    return {"type": "object", **more}


CASES = [
    Case("type", ENFORCED, "one type or a list; an `integer` is written without a point",
         {"type": ["integer", "null"]}, ("3", "-12", "null"), ("1.5", '"3"', "true", "03", "-0")),
    Case("enum", ENFORCED, "any JSON values; strings also with `\\u` escapes beyond ASCII",
         {"enum": ["да", 1, None, [1, {"a": 2}]]},
         ('"да"', '"\\u0434\\u0430"', "1", "null", '[1, {"a": 2}]', '[ 1,{"a":2} ]'),
         ('"нет"', "true", "2", "[1]", '[1, {"a": 2, "b": 1}]')),
    Case("const", ENFORCED, "as `enum`; 1.0 is 1, true is not",
         {"const": 1.0}, ("1",), ("true", '"1"', "2")),
    Case("multipleOf", ENFORCED,
         "exactly, in decimal; fewer digits where a step has hundreds of remainders",
         {"type": "number", "multipleOf": 0.1, "minimum": 0},
         ("0.3", "0.30", "7", "7.0"), ("0.35", "0.01", "-0.1")),
    Case("multipleOf", REFUSED,
         "a step with thousands of remainders, or hundreds without bounds beside it",
         {"multipleOf": 0.123456789}, instead="a smaller or rounder step"),
    Case("maximum", ENFORCED, "exactly, in decimal", {"type": "number", "maximum": 99.5},
         ("99.5", "99.50", "-100000", "0.001"), ("99.51", "100", "99.500001")),
    Case("exclusiveMaximum", ENFORCED, "exactly, in decimal",
         {"type": "integer", "exclusiveMaximum": 10}, ("9", "-10", "0"), ("10", "11", "9.5")),
    Case("minimum", ENFORCED, "exactly, in decimal", {"type": "integer", "minimum": -12},
         ("-12", "-9", "0", "100"), ("-13", "-100")),
    Case("exclusiveMinimum", ENFORCED, "exactly, in decimal",
         {"type": "number", "exclusiveMinimum": 0}, ("0.0000001", "1"), ("0", "0.0", "-1")),
    Case("maxLength", ENFORCED, "in code points; an escape counts as the character it stands for",
         {"type": "string", "maxLength": 2},
         ('""', '"ab"', '"\\n\\""', '"\\u00e9é"', '"\\ud83d\\ude00😀"'), ('"abc"', '"\\n\\n\\n"')),
    Case("minLength", ENFORCED, "in code points", {"type": "string", "minLength": 2},
         ('"ab"', '"\\\\\\""', '"😀é"'), ('"a"', '"\\u00e9"', '"😀"')),
    Case("pattern", ENFORCED, "searched for, as the standard says; ECMA-262 with its `u` flag",
         {"type": "string", "pattern": "b+$"}, ('"b"', '"abb"', '"\\nb"'), ('"ba"', '""')),
    Case("pattern", REFUSED, "look-around, back-references, `\\b`, flags, scripts in `\\p{…}`",
         {"pattern": "(?=a)b"}, instead="a pattern without it, or an enum"),
    Case("format", ENFORCED, "date, time, date-time, duration, email, hostname, ipv4, ipv6, "
         "json-pointer, uri, uuid; a subset of each, and nothing under `not`; all are annotations "
         "with `formats=\"annotate\"`",
         {"type": "string", "format": "date"}, ('"2024-02-29"',), ('"2023-02-29"', '"today"')),
    Case("format", REFUSED, "other formats, unless `formats=\"annotate\"`",
         {"format": "idn-email"}, instead="a pattern, or formats='annotate' if any string will do"),
    Case("prefixItems", ENFORCED, "item by item", {"type": "array", "prefixItems": [
         {"const": 1}, {"type": "string"}]}, ("[]", "[1]", '[1, "a", null]'), ("[2]", "[1, 2]")),
    Case("items", ENFORCED, "for all items behind `prefixItems`",
         {"type": "array", "prefixItems": [{}], "items": {"type": "integer"}},
         ("[]", '["a"]', '["a", 1, 2]'), ('["a", "b"]',)),
    Case("contains", ENFORCED, "by counting in the rules",
         {"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 5}},
         ("[1, 7]", "[5]"), ("[]", "[1, 2]")),
    Case("minContains", ENFORCED, "by counting in the rules",
         {"type": "array", "contains": {"const": 1}, "minContains": 2},
         ("[1, 0, 1]",), ("[1, 0]",)),
    Case("maxContains", ENFORCED, "by counting in the rules",
         {"type": "array", "contains": {"const": 1}, "maxContains": 1},
         ("[1]", "[0, 1]"), ("[1, 1]", "[0]")),
    Case("minItems", ENFORCED, "", {"type": "array", "minItems": 2},
         ("[1, 2]", "[1,2,3]"), ("[]", "[1]")),
    Case("maxItems", ENFORCED, "", {"type": "array", "maxItems": 1}, ("[]", "[1]"), ("[1, 2]",)),
    Case("uniqueItems", REWRITTEN, "to rules that know which of at most 8 scalars are used up",
         {"type": "array", "items": {"enum": [1, "a", True]}, "uniqueItems": True},
         ("[]", '["a", 1]', '[true, 1, "a"]'), ("[1, 1]", '["a", 1, "a"]')),
    Case("uniqueItems", REFUSED, "items of other kinds",
         {"type": "array", "uniqueItems": True},
         instead="an enum of at most 8 scalars for the items"),
    Case("properties", ENFORCED, "keys in schema order",
         names(properties={"a": {"type": "null"}, "b": {"type": "integer"}}),
         ("{}", '{"a": null, "b": 1}', '{"b":1}'), ('{"a": 1}', '{"b": "1"}')),
    Case("patternProperties", ENFORCED, "by splitting the keys that are not listed into regions",
         names(properties={"id": {}}, patternProperties={"^x-": {"type": "integer"}}),
         ('{"id": 0, "x-a": 1}', '{"x-b": 2}'), ('{"x-a": "1"}',)),
    Case("additionalProperties", ENFORCED,
         "absent means open by the standard; then only listed keys are written, see below",
         names(properties={"a": {}}, additionalProperties={"type": "null"}),
         ('{"a": 1, "b": null}', '{"c": null, "d": null}'), ('{"b": 1}', '{"a": 1, "ab": 0}')),
    Case("propertyNames", ENFORCED, "few names are listed, others are a region",
         names(propertyNames={"pattern": "^[ab]{1,2}$"}),
         ("{}", '{"a": 1, "bb": 2}'), ('{"c": 1}', '{"aaa": 1}')),
    Case("required", ENFORCED, "also of keys that are not in `properties`",
         names(properties={"a": {}}, required=["b"]), ('{"a": 1, "b": 2}', '{"b": 1}'),
         ("{}", '{"a": 1}')),
    Case("dependentRequired", REWRITTEN, "to two alternatives: without the key, or with all",
         names(properties={"a": {}, "b": {}}, dependentRequired={"a": ["b"]}),
         ("{}", '{"b": 1}', '{"a": 1, "b": 2}'), ('{"a": 1}',)),
    Case("dependentSchemas", REWRITTEN, "to two alternatives: without the key, or with the schema",
         names(properties={"a": {}, "b": {}}, dependentSchemas={"a": {"required": ["b"]}}),
         ("{}", '{"b": 1}', '{"a": 1, "b": 2}'), ('{"a": 1}',)),
    Case("minProperties", ENFORCED, "by counting in the rules",
         names(properties={"a": {}, "b": {}}, minProperties=2),
         ('{"a": 1, "b": 2}',), ("{}", '{"a": 1}')),
    Case("minProperties", REFUSED, "more keys than are listed, and one",
         names(minProperties=2),
         instead="the keys listed in properties, or minProperties of at most one more"),
    Case("maxProperties", ENFORCED, "by counting in the rules",
         names(properties={"a": {}, "b": {}}, maxProperties=1),
         ("{}", '{"a": 1}', '{"b": 1}'), ('{"a": 1, "b": 2}',)),
    Case("allOf", REWRITTEN, "merged into one", {"allOf": [names(properties={
         "a": {"minimum": 1}}, required=["a"]), names(properties={"a": {"type": "integer"}})]},
         ('{"a": 1}',), ('{"a": 0}', '{"a": "x"}', "{}", "1")),
    Case("anyOf", REWRITTEN, "to alternatives, each with what stands beside it",
         {"type": "integer", "anyOf": [{"maximum": 2}, {"minimum": 8}]}, ("1", "9"), ("5", '"a"')),
    Case("oneOf", REWRITTEN, "to alternatives without what they share",
         {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]},
         ("1", "2.5"), ("2", "3", "1.5")),
    Case("not", REWRITTEN, "by complement, exactly",
         names(properties={"a": {}, "b": {}}, **{"not": {"required": ["a", "b"]}}),
         ("{}", '{"a": 1}', '{"b": 1}'), ('{"a": 1, "b": 1}', "3")),
    Case("if", REWRITTEN, "with `then` and `else`: (if and then) or (not if and else)",
         names(properties={"k": {"enum": ["x", "y"]}, "v": {}}, required=["k", "v"], **{
             "if": {"properties": {"k": {"const": "x"}}},
             "then": {"properties": {"v": {"type": "integer"}}},
             "else": {"properties": {"v": {"type": "string"}}}}),
         ('{"k": "x", "v": 1}', '{"k": "y", "v": "a"}'),
         ('{"k": "x", "v": "a"}', '{"k": "y", "v": 1}')),
    Case("then", REWRITTEN, "with `if`; alone it says nothing", {"then": False, "type": "null"},
         ("null",), ("1",)),
    Case("else", REWRITTEN, "with `if`; alone it says nothing", {"else": False, "type": "null"},
         ("null",), ("1",)),
    Case("$ref", REWRITTEN, "with what stands beside it; recursion becomes recursive rules",
         names(properties={"v": {"$ref": "#/$defs/n", "minimum": 2}, "next": {"$ref": "#"}},
               required=["v"], **{"$defs": {"n": {"type": "integer"}}}),
         ('{"v": 2, "next": {"v": 3}}',), ('{"v": 1}', '{"v": 2, "next": {"v": "a"}}')),
    Case("$ref", REFUSED, "to a document that is not at hand; it may be given in "
         "`SchemaOptions.documents`", {"$ref": "https://example.com/schema"},
         instead="$defs in the schema, or the document in options"),
    Case("$ref", REFUSED, "to itself without a step into a member", {"$ref": "#"},
         instead="a reference inside a member"),
    Case("$dynamicRef", REWRITTEN, "resolved for each way in which it is reached",
         {"$id": "https://example.com/a", "$ref": "list", "$defs": {
             "number": {"$dynamicAnchor": "item", "type": "integer"},
             "list": {"$id": "list", "type": "array", "items": {"$dynamicRef": "#item"},
                      "$defs": {"any": {"$dynamicAnchor": "item"}}}}},
         ("[1, 2]",), ('["a"]',)),
    Case("$dynamicAnchor", ENFORCED, "see `$dynamicRef`; for `$ref` it is an `$anchor`",
         {"$ref": "#a", "$defs": {"x": {"$dynamicAnchor": "a", "type": "null"}}},
         ("null",), ("1",)),
    Case("$anchor", ENFORCED, "", {"$ref": "#a", "$defs": {"x": {"$anchor": "a", "type": "null"}}},
         ("null",), ("1",)),
    Case("$id", ENFORCED, "as the base of references",
         {"$ref": "b", "$defs": {"x": {"$id": "b", "type": "null"}}}, ("null",), ("1",)),
    Case("$defs", ENFORCED, "also as `definitions`",
         {"$ref": "#/definitions/x", "definitions": {"x": {"type": "null"}}}, ("null",), ("1",)),
    Case("$schema", ENFORCED, "2020-12, and 2019-09, draft 7 and 6 where they mean the same",
         {"$schema": "http://json-schema.org/draft-07/schema#", "type": "null"}, ("null",), ("1",)),
    Case("$schema", REFUSED, "other dialects", {"$schema": "https://example.com/own"},
         instead="the dialect of 2020-12, or no $schema"),
    Case("$vocabulary", REFUSED, "it belongs to a meta-schema",
         {"properties": {"a": {"$vocabulary": {}}}}, instead="no $vocabulary"),
    Case("unevaluatedProperties", REWRITTEN, "to alternatives that each tell what was evaluated",
         names(properties={"a": {}}, unevaluatedProperties=False, anyOf=[
             {"properties": {"b": {"const": 1}}, "required": ["b"]}, True]),
         ('{"a": 1, "b": 1}', '{"a": 1}'), ('{"b": 2}', '{"c": 1}')),
    Case("unevaluatedItems", REWRITTEN, "to alternatives that each tell what was evaluated",
         {"type": "array", "prefixItems": [{"const": 1}], "unevaluatedItems": False, "anyOf": [
             {"prefixItems": [True, {"const": 2}]}, True]},
         ("[1, 2]", "[1]", "[]"), ("[1, 3]", "[1, 2, 3]")),
    *[Case(keyword, IGNORED, "of OpenAPI" if keyword in ("example", "discriminator") else "",
           {"type": "null", keyword: value}, ("null",), ("1",))
      for keyword, value in {
          "title": "t", "description": "d", "default": 1, "examples": [2], "deprecated": True,
          "readOnly": True, "writeOnly": False, "$comment": "c", "contentEncoding": "base64",
          "contentMediaType": "text/plain", "contentSchema": {"type": "integer"},
          "example": 1, "discriminator": {"propertyName": "kind"}}.items()],
    Case("x-…", IGNORED, "any keyword that begins with x-", {"type": "null", "x-order": 3},
         ("null",), ("1",)),
    Case("dependencies", REFUSED, "of older drafts", {"dependencies": {"a": ["b"]}},
         instead="dependentRequired or dependentSchemas"),
    Case("additionalItems", REFUSED, "of older drafts", {"additionalItems": False},
         instead="prefixItems with items"),
    Case("$recursiveRef", REFUSED, "of older drafts", {"$recursiveRef": "#"},
         instead="$dynamicRef"),
    Case("nullable", REFUSED, "of OpenAPI 3.0", {"type": "string", "nullable": True},
         instead='a type list with "null", or anyOf with {"type": "null"}'),
    Case("others", REFUSED, "any keyword that the standard does not know", {"maxLenght": 3},
         instead="no such keyword, or x-… for a note"),
]  # fmt: skip
