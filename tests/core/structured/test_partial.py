"""What a cut-off JSON text holds and lacks."""

from __future__ import annotations

import json

import pytest
from deepinfer.structured import BrokenTextError, Open, partial
from hypothesis import given
from hypothesis import strategies as st

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}},
    },
    "required": ["name", "parts"],
    "allOf": [{"required": ["id"]}],
    "$defs": {"part": {"type": "object", "required": ["x", "y~/"]}},
}


@given(value=values, indent=st.sampled_from([None, 1]), ascii=st.booleans())
def test_a_whole_text_is_complete(value, indent, ascii):
    found = partial(json.dumps(value, indent=indent, ensure_ascii=ascii))
    assert found.complete and found.value == value and found.open == ()


def within(part, whole):
    """Whether a value could be the beginning of another."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(k in whole and within(v, whole[k]) for k, v in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) <= len(whole) and all(map(within, part, whole))
    if isinstance(part, str) and isinstance(whole, str):
        return whole.startswith(part)
    return part is None or part == whole or isinstance(whole, int | float)


@given(value=values, cut=st.floats(0, 1), ascii=st.booleans())
def test_a_beginning_holds_a_part_and_closing_it_is_json(value, cut, ascii):
    """What is open, closed from the inside out, makes the text whole."""
    text = json.dumps(value, ensure_ascii=ascii)
    text = text[: int(cut * len(text))]
    found = partial(text)
    assert within(found.value, value)
    last = found.open[-1] if found.open else None
    if found.complete:
        assert json.loads(text) == found.value
        return
    if last.kind in ("object", "array"):
        text = text.rstrip(", ") + "".join(
            "}" if o.kind == "object" else "]" for o in found.open[::-1]
        )
        assert json.loads(text) == found.value


@pytest.mark.parametrize(
    "text, value, opens",
    [
        ("", None, [("", "value", ())]),
        ("  ", None, [("", "value", ())]),
        ('"ab\\u00', "ab", [("", "string", ())]),
        ('"ab\\ud83d', "ab", [("", "string", ())]),
        ("tru", None, [("", "literal", ())]),
        ("-", None, [("", "number", ())]),
        ("[1, 2", [1, 2], [("", "array", ()), ("/1", "number", ())]),
        ("[1.", [], [("", "array", ()), ("/0", "number", ())]),
        ("[1,", [1], [("", "array", ()), ("/1", "value", ())]),
        ('{"na', {}, [("", "object", ("name", "parts", "id")), ("", "key", ())]),
        ('{"name"', {}, [("", "object", ("parts", "id")), ("/name", "colon", ())]),
        ('{"name":', {}, [("", "object", ("parts", "id")), ("/name", "value", ())]),
        (
            '{"name": "Bo',
            {"name": "Bo"},
            [("", "object", ("parts", "id")), ("/name", "string", ())],
        ),
        ('{"name": "Bo",', {"name": "Bo"}, [("", "object", ("parts", "id")), ("", "key", ())]),
        (
            '{"id": 1, "parts": [{"x": 1}, {"y~/": [',
            {"id": 1, "parts": [{"x": 1}, {"y~/": []}]},
            [
                ("", "object", ("name",)),
                ("/parts", "array", ()),
                ("/parts/1", "object", ("x",)),
                ("/parts/1/y~0~1", "array", ()),
            ],
        ),
    ],
)
def test_what_is_open_is_named_with_its_path_and_its_required_keys(text, value, opens):
    found = partial(text, SCHEMA)
    assert not found.complete
    assert found.value == value
    assert found.open == tuple(Open(*one) for one in opens)


@pytest.mark.parametrize(
    "text, place",
    [("{1", 1), ("[1 2", 3), ('{"a" 1', 5), ("truth", 0), ("1 2", 2), ('"a\nb', 2), ("]", 0),
     ("01", 1), ("[1}", 2), ("nul l", 0), ('"\\x', 1), ("--", 0)],
)  # fmt: skip
def test_what_is_no_json_is_said_with_its_place(text, place):
    with pytest.raises(BrokenTextError, match=f"Character {place} "):
        partial(text)


def test_depth_and_odd_schemas_are_no_trouble():
    # Each open part has its path, so what is returned grows with the square of the depth.
    assert len(partial("[" * 5_000).open) == 5_000
    loop = {"$ref": "#", "required": ["a"], "allOf": [{"$ref": "#/allOf/0"}, {"$ref": "#/nowhere"}]}
    assert partial('{"b": 1', loop).open[0].required == ("a",)
    for odd in (True, [], {"properties": 3, "required": 1, "items": []}, {"$ref": "http://x"}):
        assert partial('{"a": [1', odd).open[0].required == ()
