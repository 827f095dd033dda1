"""response_format, and grammars of models that think first."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
from deepinfer import SamplingParams
from deepinfer.chat import chat_format
from deepinfer.chat.interface import RenderedChat
from deepinfer.engine.reasoning import AfterReasoning
from deepinfer.errors import InvalidRequestError
from grammar_rig import ToyVocabulary, allowed, backend_for, spec

TALK = [{"role": "user", "content": "Name a city."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}},
    "required": ["city"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
MODEL = pytest.mark.model


@MODEL
def test_response_format_forces_the_answer(llm):
    params = SamplingParams(max_tokens=48, temperature=1.0, seed=3)
    for form in (FORMAT, {"type": "json_object"}):
        (output,) = llm.chat(TALK, params.model_copy(update={"n": 4}), response_format=form)
        for one in output.outputs:
            if one.finish_reason == "stop":
                value = json.loads(one.text)
                assert isinstance(value, dict)
                if form is FORMAT:
                    jsonschema.validate(value, SCHEMA)
            else:
                assert one.finish_reason == "length" and form is not FORMAT
    (free,) = llm.chat(TALK, params, response_format={"type": "text"})
    assert free.text == llm.chat(TALK, params)[0].text


@MODEL
@pytest.mark.parametrize(
    "form, words",
    [
        ({"type": "xml"}, "type of text, json_object, json_schema"),
        ({"type": "json_schema"}, "json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "cow"}}}, "cow|type"),
    ],
)
def test_a_bad_response_format_is_refused(llm, form, words):
    with pytest.raises(InvalidRequestError, match=words):
        llm.chat(TALK, SamplingParams(max_tokens=4), response_format=form)


@MODEL
def test_two_formats_are_one_too_many(llm):
    params = SamplingParams(so_args={"schema_type": "regex", "schema": "a"})
    with pytest.raises(InvalidRequestError, match="so_args and response_format"):
        llm.chat(TALK, params, response_format=FORMAT)


@MODEL
def test_the_grammar_begins_behind_the_reasoning(llm, monkeypatch):
    """A format whose answers begin with reasoning up to a mark of two tokens."""
    tokenizer = llm.get_tokenizer()
    mark = tokenizer.encode("\n\n", add_special_tokens=False)

    class Thinking:
        def render(self, messages, options):
            return RenderedChat(text="Think, then answer.", reasoning_end="\n\n")

    monkeypatch.setitem(llm.assembly._chat_formats, None, Thinking())
    bias = dict.fromkeys(mark, 6.0)
    params = SamplingParams(max_tokens=120, temperature=1.0, logit_bias=bias, n=6, seed=1)
    (output,) = llm.chat(TALK, params, response_format=FORMAT)
    answered = 0
    for one in output.outputs:
        _, found, answer = one.text.partition("\n\n")
        if one.finish_reason == "stop":
            answered += 1
            assert found
            jsonschema.validate(json.loads(answer), SCHEMA)
        else:
            assert one.finish_reason == "length"
        assert not set(one.token_ids) & tokenizer.stop_token_ids
    assert answered


@MODEL
@pytest.mark.parametrize("thinking", [True, False])
def test_thoughts_and_answer_have_their_own_channels(llm, monkeypatch, thinking):
    """DeepSeek's format, its marks spelt in the demo model's tokens (vllm 44012, 50948, 50938)."""
    pytest.importorskip("deepseek_recipe")
    tokenizer = llm.get_tokenizer()
    inner = chat_format(tokenizer, None, "DeepseekV41ForCausalLM")

    class Spelt:
        def render(self, messages, options):
            return replace(inner.render(messages, options), special_ranges=())

    monkeypatch.setitem(llm.assembly._chat_formats, None, Spelt())
    mark = tokenizer.encode("</think>", add_special_tokens=False)
    bias = dict.fromkeys(mark, 9.0) if thinking else {}  # a demo model knows nothing of it
    params = SamplingParams(max_tokens=100, temperature=1.0, logit_bias=bias, n=8, seed=1)
    (output,) = llm.chat(TALK, params, response_format=FORMAT, enable_thinking=thinking)
    answered = thought = spelt = 0
    for one in output.outputs:
        split = one.text.partition("</think>") if thinking else ("", "here", one.text)
        thoughts, found, answer = split
        assert (one.message.reasoning_content or "") == thoughts
        if not found:
            continue
        thought += bool(thoughts)
        spelt += "</think>" in answer  # inside a text, where it is no mark
        answered += one.finish_reason == "stop"
        assert one.message.content == answer
        if one.finish_reason == "stop":
            jsonschema.validate(json.loads(one.message.content), SCHEMA)
    assert answered >= 2 and bool(thought) is bool(spelt) is thinking


def after_reasoning(mark=(5, 6), ends=(0,)):
    inner = backend_for(ToyVocabulary(17)).compile(spec("regex", "(ab)+"), frozenset(ends))
    return AfterReasoning(inner, mark, ends)


def test_reasoning_is_open_but_for_the_end():
    grammar = after_reasoning()
    row = np.zeros((1, 1), np.int32)
    assert grammar.fill(row, []) == 0
    assert allowed(row, 17) == list(range(1, 17))
    assert grammar.accept([5, 5]) == 2 and not grammar.over
    assert grammar.accept([6, 1]) == 2 and grammar.over
    grammar.fill(row, [])
    assert allowed(row, 17) == [2, 4]


def test_drafts_cross_the_mark():
    """Rows before the mark are open, those behind it are the grammar's; an end is refused."""
    grammar = after_reasoning()
    grammar.accept([5])
    rows = np.zeros((6, 1), np.int32)
    assert grammar.fill(rows, [6, 3, 1, 9, 9]) == 3
    assert [allowed(row, 17) for row in rows[:4]] == [list(range(1, 17)), [1, 3], [0, 1, 3], [2, 4]]
    assert grammar.fill(rows, [4, 0, 1]) == 1
    assert not grammar.over and not grammar.done()
    twin = grammar.fork()
    assert twin.accept([6, 3, 0, 4]) == 3 and twin.done() and not grammar.over
