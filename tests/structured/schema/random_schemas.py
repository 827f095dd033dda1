"""Random schemas over few names and values, so that keywords meet and contradict each other."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NAMES = st.sampled_from("abcd")
VALUES = st.sampled_from(
    [0, 1, 2, -3, 1.5, "", "a", "ab", "é", True, False, None, [], [1, 2], {}, {"a": 1}]
)
PATTERNS = st.sampled_from(["a", "^a", "b$", "^[ab]+$", "^.$", "a|b", "\\d", "^(?:ab|c)*$"])
SMALL = st.integers(0, 3)
TYPES = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])
SCALAR = {
    "type": TYPES | st.lists(TYPES, min_size=1, max_size=3, unique=True),
    "enum": st.lists(VALUES, min_size=1, max_size=4),
    "const": VALUES,
    "multipleOf": st.sampled_from([1, 2, 3, 0.5]),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        st.sampled_from([0, 1, 5, -2, 2.5, 0.1]),
    ),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), SMALL),
    **dict.fromkeys(("minProperties", "maxProperties", "minContains", "maxContains"), SMALL),
    "pattern": PATTERNS,
    "format": st.sampled_from(["date", "ipv4", "uuid", "time"]),
    "uniqueItems": st.booleans(),
    "required": st.lists(NAMES, max_size=2, unique=True),
    "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2), max_size=2),
    "$ref": st.sampled_from(["#/$defs/x", "#/$defs/y", "#"]),
}
ONE = ["items", "contains", "additionalProperties", "propertyNames", "not", "if", "then", "else"]
ONE += ["unevaluatedItems", "unevaluatedProperties"]
MANY = ["allOf", "anyOf", "oneOf", "prefixItems"]


def objects(fields: dict[str, st.SearchStrategy[Any]], most: int) -> st.SearchStrategy[Any]:
    """Some of the fields, in any order."""
    return st.lists(
        st.sampled_from(sorted(fields)), min_size=1, max_size=most, unique=True
    ).flatmap(lambda names: st.fixed_dictionaries({name: fields[name] for name in names}))


def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas around schemas."""
    lists = st.lists(inner, min_size=1, max_size=3)
    fields = SCALAR | dict.fromkeys(ONE, inner) | dict.fromkeys(MANY, lists)
    fields |= {"properties": st.dictionaries(NAMES, inner, min_size=1, max_size=3)}
    fields |= {"patternProperties": st.dictionaries(PATTERNS, inner, min_size=1, max_size=2)}
    fields |= {"dependentSchemas": st.dictionaries(NAMES, inner, min_size=1, max_size=2)}
    return objects(fields, 4)


LEAVES = st.booleans() | objects(SCALAR, 2)
SCHEMAS = st.builds(
    lambda schema, x, y: {**schema, "$defs": {"x": x, "y": y}},
    larger(st.recursive(LEAVES, larger, max_leaves=6)),
    LEAVES,
    larger(LEAVES),
)
