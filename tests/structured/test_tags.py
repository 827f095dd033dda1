"""Structural tags: free text, marks that are text or special tokens, contents under our schemas."""

from __future__ import annotations

import json

import numpy as np
import pytest
from deepinfer.errors import InvalidRequestError
from grammar_rig import allowed, backend_for, spec

CALL = {"type": "object", "properties": {"q": {"type": "integer", "minimum": 3}}, "required": ["q"]}


@pytest.fixture(scope="module")
def backend(demo_tokenizer):
    return backend_for(demo_tokenizer, eos=frozenset({2}), compile_seconds=30.0)


def tag(form):
    return spec("structural_tag", {"type": "structural_tag", "format": form})


def triggered(content, **more):
    one = {"type": "tag", "begin": "<call=f>", "content": content, "end": "</call>"}
    return tag({"type": "triggered_tags", "triggers": ["<call="], "tags": [one], **more})


def masks(matcher, tokenizer, text):
    """Feed a text; the mask behind it, or None where it is refused on the way."""
    size = tokenizer.vocab_size
    for token in tokenizer.encode(text, add_special_tokens=False):
        row = np.zeros((1, -(-size // 32)), np.int32)
        matcher.fill(row, [])
        if token not in allowed(row, size):
            return None
        matcher.accept([token])
    row = np.zeros((1, -(-size // 32)), np.int32)
    matcher.fill(row, [])
    return allowed(row, size)


def test_a_call_inside_free_text_obeys_its_schema(backend, demo_tokenizer):
    asked = triggered({"type": "json_schema", "json_schema": CALL})
    for text, right in (
        ('I call <call=f>{"q": 7}</call> now.', True),
        ('I call <call=f>{"q": 2}</call>', False),
        ('<call=g>{"q": 7}</call>', False),
        ("no call", True),
    ):
        found = masks(backend.compile(asked, frozenset({2})), demo_tokenizer, text)
        assert (found is not None) == right, text
        assert not right or 2 in found  # the text may end outside a call
    inside = masks(backend.compile(asked, frozenset({2})), demo_tokenizer, '<call=f>{"q"')
    assert inside and not set(inside) & demo_tokenizer.special_ids


def test_a_text_without_its_call_may_not_end(backend, demo_tokenizer):
    asked = triggered({"type": "json_schema", "json_schema": CALL}, at_least_one=True)
    first = masks(backend.compile(asked, frozenset({2})), demo_tokenizer, "")
    assert first and 2 not in first
    done = masks(backend.compile(asked, frozenset({2})), demo_tokenizer, '<call=f>{"q": 7}</call>')
    assert 2 in done


def test_the_end_of_a_text_is_no_free_text(backend, demo_tokenizer):
    """Free text lets no special token pass, and the one that ends the text waits for the tag."""
    one = {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}
    found = masks(backend.compile(tag(one), frozenset({2})), demo_tokenizer, "<a>hello")
    assert found and not set(found) & demo_tokenizer.special_ids


def test_marks_may_be_special_tokens(backend, demo_tokenizer):
    start = {"type": "token", "token": "<|im_start|>"}
    end = {"type": "token", "token": demo_tokenizer.token_to_id("<file_sep>")}
    asked = tag(
        {
            "type": "tag",
            "begin": start,
            "content": {"type": "regex", "pattern": "[ab]+"},
            "end": end,
        }
    )
    matcher = backend.compile(asked, frozenset({2}))
    assert masks(matcher, demo_tokenizer, "") == [demo_tokenizer.token_to_id("<|im_start|>")]
    matcher.accept([demo_tokenizer.token_to_id("<|im_start|>")])
    found = masks(matcher, demo_tokenizer, "ab")
    assert end["token"] in found and 2 not in found
    assert matcher.accept([end["token"]]) == 1 and matcher.done()


def test_the_older_spelling(backend, demo_tokenizer):
    old = {
        "structures": [{"begin": "<call=f>", "schema": CALL, "end": "</call>"}],
        "triggers": ["<call="],
    }
    matcher = backend.compile(spec("structural_tag", json.dumps(old)), frozenset({2}))
    assert masks(matcher, demo_tokenizer, 'x <call=f>{"q": 7}</call>') is not None
    assert (
        masks(
            backend.compile(spec("structural_tag", old), frozenset({2})),
            demo_tokenizer,
            "<call=f>[",
        )
        is None
    )


LOOKS_AHEAD = {"properties": {"a": {"pattern": "(?=a)"}}}
TEXT = {"type": "any_text"}


@pytest.mark.parametrize(
    "form, words",
    [
        (None, "must read"),
        ({"type": "json_schema", "json_schema": LOOKS_AHEAD}, "/format/json_schema/properties/a"),
        ({"type": "json_schema", "json_schema": CALL, "style": "qwen_xml"}, "only plain JSON"),
        ({"type": "json_schema", "json_schema": CALL, "any_order": True}, "only plain JSON"),
        ({"type": "regex", "pattern": "(a"}, "/format/pattern"),
        (
            {
                "type": "tag",
                "begin": {"type": "token", "token": "<x>"},
                "content": TEXT,
                "end": "x",
            },
            "/format/begin/token: the vocabulary has no token '<x>'",
        ),
    ],
)
def test_bad_tags_are_refused_at_submission(backend, form, words):
    with pytest.raises(InvalidRequestError, match=words):
        backend.check(tag(form))


def test_what_xgrammar_refuses_is_said(backend):
    with pytest.raises(InvalidRequestError) as error:
        backend.compile(tag({"type": "no_such_format"}), frozenset())
    said = "This structural_tag is refused: Format type not recognized: no_such_format."
    assert str(error.value) == said
