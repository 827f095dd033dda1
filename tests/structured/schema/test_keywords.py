"""Every keyword of JSON Schema 2020-12: enforced, rewritten or refused, as the document says."""

from __future__ import annotations

import json

import jsonschema
import pytest
from cases import CASES, IGNORED, REFUSED
from deepinfer_structured.schema import SchemaOptions, UnsupportedSchemaError, compile_schema
from deepinfer_structured.schema.resolve import KNOWN
from grammars import accepts, compiled


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.keyword}-{case.status}")
def test_case(case):
    """Good texts are of the grammar, bad ones are not, refusals say what to write instead."""
    if case.status == REFUSED:
        with pytest.raises(UnsupportedSchemaError) as caught:
            compile_schema(case.schema)
        assert caught.value.unsupported.instead == case.instead
        assert caught.value.unsupported.keyword in (case.keyword, *case.schema)
        return
    grammar = compiled(compile_schema(case.schema).ebnf)
    assert [text for text in case.good if not accepts(grammar, text)] == []
    assert [text for text in case.bad if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.good], ids=lambda case: f"{case.keyword}-{case.status}"
)
def test_case_means_what_the_standard_says(case):
    """The cases themselves, checked by jsonschema; only spellings may be bad and valid."""
    check = jsonschema.Draft202012Validator(
        case.schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    if case.keyword == "multipleOf":
        pytest.skip("jsonschema divides in binary")
    assert all(check.is_valid(json.loads(text)) for text in case.good)
    spelling = {"03", "-0"}
    assert not any(check.is_valid(json.loads(text)) for text in case.bad if text not in spelling)


def test_no_keyword_is_missing():
    """All keywords that the compiler knows have a case."""
    assert KNOWN - {"definitions"} <= {case.keyword for case in CASES}


@pytest.mark.parametrize("case", [c for c in CASES if c.status == IGNORED], ids=lambda c: c.keyword)
def test_annotations_change_nothing(case):
    """The grammar is the one without them."""
    bare = {name: value for name, value in case.schema.items() if name == "type"}
    assert compile_schema(case.schema).ebnf == compile_schema(bare).ebnf


LOOSE = [c for c in CASES if c.status == REFUSED and c.keyword in
         ("multipleOf", "pattern", "format", "uniqueItems", "minProperties")]  # fmt: skip


@pytest.mark.parametrize("case", LOOSE, ids=lambda case: case.keyword)
def test_loose_takes_the_larger_grammar_and_says_so(case):
    """With ``loose`` the keyword is listed instead of refused."""
    found = compile_schema(case.schema, SchemaOptions(loose=True))
    assert [what.keyword for what in found.loose] == [case.keyword]
    grammar = compiled(found.ebnf)
    for text in ('"any"', "[1, 1]", '{"a": 1, "b": 2}', "0.25"):
        if (
            "type" not in case.schema
            or text[0] == {"array": "[", "object": "{"}[case.schema["type"]]
        ):
            assert accepts(grammar, text), text
