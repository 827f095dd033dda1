"""on_unsupported="validate": what no grammar enforces is looked at when the text has ended."""

from __future__ import annotations

import time

import pytest
from deepinfer import SamplingParams
from deepinfer.errors import InvalidRequestError
from deepinfer_structured.validation import first_violation
from grammar_rig import ToyVocabulary, backend_for, spec

ENDS = frozenset({0})
LOOKS_BEHIND = {"type": "string", "pattern": "^a(?!b)", "maxLength": 4}
NO_B = {"type": "string", "pattern": "^(?!.*b)", "maxLength": 8}


def test_a_schema_that_is_enforced_whole_is_not_looked_at_again():
    one = backend_for(ToyVocabulary(17))
    asked = spec("json", {"type": "boolean"}, on_unsupported="validate")
    assert not one.compile(asked, ENDS).unproven()


def test_what_is_not_enforced_is_refused_unless_validation_is_wanted():
    one = backend_for(ToyVocabulary(17))
    with pytest.raises(InvalidRequestError, match="pattern"):
        one.check(spec("json", LOOKS_BEHIND))
    matcher = one.compile(spec("json", LOOKS_BEHIND, on_unsupported="validate"), ENDS)
    assert matcher.unproven() and matcher.fork().unproven()


@pytest.mark.parametrize(
    "schema, text, words",
    [
        (LOOKS_BEHIND, '"ac"', None),
        (LOOKS_BEHIND, '"ab"', "does not match"),
        ({"items": {"minimum": 3}}, "[4, 2]", "/1: 2 is less than"),
        ({"format": "date"}, '"2026-02-31"', "date"),
        ({}, "{", "no JSON"),
        ({"$ref": "https://example.org/x"}, "1", "cannot be validated"),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "maximum": 3,
          "exclusiveMaximum": True}, "3", "3"),
    ],
)  # fmt: skip
def test_violations_are_said_with_their_place(schema, text, words):
    found = first_violation(schema, text)
    assert (found is None) == (words is None)
    assert words is None or words in found


@pytest.mark.model
def test_a_text_that_breaks_its_schema_ends_as_a_violation(llm):
    """Every text is checked here too: none that is broken is called finished, and the other way."""
    rule = {"schema_type": "json", "schema": NO_B, "on_unsupported": "validate"}
    bias = llm.get_tokenizer().encode("b", add_special_tokens=False)[0]
    wishes = [
        SamplingParams(
            so_args=rule, max_tokens=24, temperature=1.5, seed=i, logit_bias={bias: 40.0 * (i % 2)}
        )
        for i in range(16)
    ]
    ends = set()
    for output in llm.generate(["A word: "] * 16, wishes):
        (one,) = output.outputs
        assert output.error is None
        ends.add(one.finish_reason)
        broken = first_violation(NO_B, one.text)
        if one.finish_reason == "schema_violation":
            assert one.stop_reason == broken
        else:
            assert one.finish_reason == "stop" and broken is None, one
    assert ends == {"stop", "schema_violation"}
    finished = llm.get_metrics()["counters"].finished
    assert finished["schema_violation"] >= 1


def test_a_validation_without_end_is_ended(demo_tokenizer):
    """Python's regular expressions go back and forth for ever on this one."""
    one = backend_for(demo_tokenizer, compile_seconds=1.0)
    asked = spec("json", {"pattern": "^(?=(a+)+$)", "type": "string"}, on_unsupported="validate")
    matcher = one.compile(asked, ENDS)
    text = demo_tokenizer.encode(f'"{"a" * 40}b"', add_special_tokens=False)
    assert matcher.accept(text) == len(text) and matcher.done()
    start = time.perf_counter()
    with pytest.raises(InvalidRequestError, match="more than 1 s to validate"):
        matcher.violation()
    assert time.perf_counter() - start < 60
    again = one.compile(asked, ENDS)
    again.accept(demo_tokenizer.encode('"aaa"', add_special_tokens=False))
    assert again.violation() is None  # by a new process
