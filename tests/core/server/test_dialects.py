"""Anthropic's and OpenAI's newer dialect against DeepSeek's own converters, in and out."""

import json

import pytest
from deepinfer.api.plan import RequestMetrics
from deepinfer.chat.deepseek_parser import DeepseekParser
from deepinfer.chat.interface import ChatMessage, MessageBuilder, ToolCall
from deepinfer.entrypoints.outputs import CompletionOutput, RequestOutput
from deepinfer.sampling_params import SamplingParams
from deepinfer.server import messages, responses
from deepinfer.server.messages import MessagesWriter
from deepinfer.server.responses import ResponsesWriter
from deepinfer.server.schemas_blocks import MessagesBody, ResponsesBody
from deepinfer.server.service import Asked, Run, Usage

recipe = pytest.importorskip("deepseek_recipe")

MODEL = "DeepSeek-V4.1-Flash"
TOOL = {"name": "f", "description": "adds", "parameters": {"type": "object"}}
CALLS = (
    "\n\n<｜DSML｜tool_calls>\n"
    '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
ANSWERS = [
    ["I think", " so</think>Hello", " world"],
    ["no</think>", "Hello"],
    ["yes</think>I call", CALLS],
    ["only thought"],
]

MESSAGES = {
    "model": MODEL,
    "max_tokens": 50,
    "system": [{"type": "text", "text": "Be kind."}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "calling"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "42"}],
        },
    ],
    "tools": [{"name": "f", "description": "adds", "input_schema": {"type": "object"}}],
}
RESPONSES = {
    "model": MODEL,
    "max_output_tokens": 50,
    "instructions": "Be kind.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {"type": "function_call", "call_id": "t1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "t1", "output": "42"},
    ],
    "tools": [{"type": "function", **TOOL}],
}


def converted(kind, body):
    spelled = recipe.ConversionOptions().with_special_tokens(recipe.SpecialTokens())
    return kind(body).convert(spelled)


def prompt_of(conversation):
    return recipe.DeepseekV41Encoding().render_conversation(conversation).prompt


def chat_prompt(talk, tools):
    functions = [{"type": "function", "function": tool} for tool in tools]
    body = {"model": MODEL, "messages": talk, "tools": functions}
    return prompt_of(converted(recipe.ChatCompletionRequest, body).conversation)


def test_messages_become_the_same_prompt():
    said = MessagesBody.read(MESSAGES).said()
    want = prompt_of(converted(recipe.MessagesRequest, MESSAGES).conversation)
    assert chat_prompt(messages.conversation(said), [TOOL]) == want
    (tool,) = messages.options(said).tools
    assert tool["function"] == TOOL


def test_items_become_the_same_prompt():
    said = ResponsesBody.read(RESPONSES).said()
    want = prompt_of(converted(recipe.ResponsesRequest, RESPONSES).conversation)
    assert chat_prompt(responses.conversation(said), [TOOL]) == want


def test_choices_and_pictures():
    body = {
        **MESSAGES,
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "disabled"},
    }
    options = messages.options(MessagesBody.read(body).said())
    assert options.tool_choice == {"type": "function", "function": {"name": "f"}}
    assert options.thinking is False
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    picture = {"role": "user", "content": [{"type": "image", "source": source}]}
    said = MessagesBody.read({"messages": [picture], "max_tokens": 3}).said()
    (part,) = messages.conversation(said)[0]["content"]
    assert part == {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def ours(kind, request, body, pieces, reason):
    """Events of our writer, fed with what the library's parser makes of the pieces."""
    parser = DeepseekParser(recipe, request)

    def make(run):
        if kind is recipe.MessagesRequest:
            return MessagesWriter(run, "model")
        return ResponsesWriter(run, ResponsesBody.read(body), "model")

    asked = Asked(params=SamplingParams(), writer=make)
    run = Run("id_1", asked, (), Usage(prompt=7, output=5))
    writer = asked.writer(run)
    text = "".join(writer.begin())
    for i, piece in enumerate((*pieces, None)):
        builder = MessageBuilder()
        builder.add(parser.finish(reason) if piece is None else parser.feed(piece))
        out = CompletionOutput(0, message=builder.message())
        if i == len(pieces):
            out.finish_reason = parser.finish_reason or reason
        metrics = RequestMetrics(0.0)
        text += "".join(writer.news(0, RequestOutput("r", None, [], [out], False, None, metrics)))
    text += "".join(writer.end())
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def theirs(kind, request, pieces, reason):
    stream = recipe.StreamProcessor(
        kind.chunk_generator(request, "id_1", "model"), request.parsing_options
    )
    events = [*stream.push(recipe.InferenceChunk.ready())]
    for piece in pieces:
        events += stream.push(recipe.InferenceChunk.text(piece))
    ends = recipe.InferenceFinishReason
    end = ends.Stop if reason == "stop" else ends.Length
    events += [*stream.push(recipe.InferenceChunk.finish(end)), *stream.finish()]
    return [json.loads(event.to_json()) for event in events]


def shape(events):
    """Types in order; runs of the same delta are one, and how often a ping comes is free."""
    kinds = []
    for event in events:
        kind = (event["type"], event.get("index", event.get("output_index")))
        if kind[0] != "ping" and (not kinds or kinds[-1] != kind):
            kinds.append(kind)
    return kinds


def said(events):
    """All texts, by where they belong."""
    found = {}
    for event in events:
        if "delta" in event and event["type"] != "message_delta":
            place = event.get("index", event.get("output_index"))
            delta = event["delta"]
            if isinstance(delta, dict):
                delta = delta.get("text") or delta.get("thinking") or delta.get("partial_json", "")
            found[place] = found.get(place, "") + delta
    return found


@pytest.mark.parametrize("pieces", ANSWERS, ids=lambda p: p[0][:9])
@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("kind", [recipe.MessagesRequest, recipe.ResponsesRequest])
def test_streams_have_the_shape_of_deepseeks_own(kind, pieces, reason):
    body = MESSAGES if kind is recipe.MessagesRequest else RESPONSES
    mine = ours(kind, converted(kind, body), body, pieces, reason)
    other = theirs(kind, converted(kind, body), pieces, reason)
    assert shape(mine) == shape(other)
    assert said(mine) == said(other)
    ends = [(e.get("delta") or {}).get("stop_reason") for e in mine if e["type"] == "message_delta"]
    want = [
        (e.get("delta") or {}).get("stop_reason") for e in other if e["type"] == "message_delta"
    ]
    assert ends == want


def test_broken_arguments_are_shown_as_they_are():
    asked = Asked(params=SamplingParams(), writer=lambda run: MessagesWriter(run, "m"))
    run = Run("id_1", asked, ())
    call = ToolCall(0, "f", '{"a": ', "c1")
    out = CompletionOutput(0, message=ChatMessage(None, None, (call,)), finish_reason="length")
    answer = asked.writer(run).whole([RequestOutput("r", None, [], [out], True)])
    assert answer["content"][0]["input"] == {"raw": '{"a": '}
    assert answer["stop_reason"] == "max_tokens"
