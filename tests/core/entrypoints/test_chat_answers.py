"""Answers of conversations taken apart: messages of whole outputs, of streams, of many samples."""

import asyncio

import pytest
from deepinfer import SamplingParams
from deepinfer.chat import ChatMessage, ChatPiece, RenderedChat, ToolCall
from deepinfer.errors import InvalidRequestError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TALK = [{"role": "user", "content": "ab"}]


class AtTheC:
    """Reasoning up to the first c, then content; a call named after how the answer ended."""

    def __init__(self):
        self.said = False
        self.finish_reason = None

    def feed(self, text):
        before, c, after = text.partition("c") if not self.said else ("", "", text)
        self.said = self.said or bool(c)
        pieces = [ChatPiece("reasoning", before), ChatPiece("content", after)]
        return [piece for piece in pieces if piece.text]

    def finish(self, reason):
        self.finish_reason = "tool_calls"
        first = ChatPiece("tool_call", "{", 0, "id", reason)
        return [first, ChatPiece("tool_call", "}", 0)]


class Parsing:
    """Stands for a chat format that reads its model's answers."""

    def __init__(self):
        self.asked = []

    def render(self, messages, options):
        self.asked.append(options)
        return RenderedChat(text=messages[0]["content"], parser=AtTheC)


def expected(text, reason="length"):
    before, c, after = text.partition("c")
    said = after if c else None
    return ChatMessage(before or None, said or None, (ToolCall(0, reason, "{}"),))


@pytest.fixture
def llm(toy):
    llm = toy.llm()
    llm.assembly._chat_formats[None] = Parsing()
    return llm


def test_messages_of_whole_outputs(llm):
    (output,) = llm.chat(TALK, GREEDY)
    out = output.outputs[0]
    assert "c" in out.text
    assert out.message == expected(out.text)
    assert out.finish_reason == "tool_calls"
    assert llm.generate("ab", GREEDY)[0].outputs[0].message is None


def test_every_sample_has_its_own_parser(llm):
    params = SamplingParams(n=4, seed=3, max_tokens=10, ignore_eos=True)
    outs = llm.chat(TALK, params)[0].outputs
    assert len({out.text for out in outs}) > 1
    assert [out.message for out in outs] == [expected(out.text) for out in outs]


def test_special_tokens_stay_in_the_text_that_is_taken_apart(llm):
    forced = GREEDY.model_copy(update={"allowed_token_ids": (0,)})
    assert llm.chat(TALK, forced)[0].text == "<end>" * 12
    assert llm.generate("ab", forced)[0].text == ""
    with pytest.raises(InvalidRequestError, match="skip_special_tokens=True would take out"):
        llm.chat(TALK, SamplingParams(skip_special_tokens=True))


def test_without_text_there_is_nothing_to_take_apart(llm):
    out = llm.chat(TALK, GREEDY.model_copy(update={"detokenize": False}))[0].outputs[0]
    assert (out.message, out.finish_reason, len(out.token_ids)) == (None, "length", 12)


def test_wishes_reach_the_format(llm):
    tools = [{"type": "function"}]
    llm.chat(
        TALK,
        GREEDY,
        tools=tools,
        tool_choice="none",
        response_format={"type": "text"},
        reasoning_effort="low",
        enable_thinking=False,
        add_generation_prompt=False,
        chat_template_kwargs={"task": "title"},
    )
    (asked,) = llm.assembly._chat_formats[None].asked
    assert (asked.tools, asked.tool_choice, asked.response_format) == (
        tools,
        "none",
        {"type": "text"},
    )
    assert (asked.reasoning_effort, asked.thinking) == ("low", False)
    assert (asked.add_generation_prompt, asked.template_kwargs) == (False, {"task": "title"})


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final_only"])
def test_messages_of_streams(toy, kind):
    llm = toy.async_llm()
    llm.assembly._chat_formats[None] = Parsing()
    params = GREEDY.model_copy(update={"output_kind": kind})

    async def run():
        return [output.outputs[0] async for output in llm.chat(TALK, params, enable_thinking=True)]

    outs = asyncio.run(run())
    assert llm.assembly._chat_formats[None].asked[0].thinking is True
    if kind != "delta":
        assert outs[-1].message == expected(outs[-1].text)
        return
    text = "".join(out.text for out in outs)
    parts = [out.message for out in outs]
    whole = expected(text)
    assert "".join(m.reasoning_content or "" for m in parts) == (whole.reasoning_content or "")
    assert "".join(m.content or "" for m in parts) == (whole.content or "")
    assert [m.tool_calls for m in parts if m.tool_calls] == [whole.tool_calls]


def test_images_wait_for_an_engine_that_takes_them(llm):
    from deepinfer.chat import ChatImage

    class Seeing(Parsing):
        def render(self, messages, options):
            return RenderedChat(text="a", special_ranges=(), images=(ChatImage("here", b"x"),))

    llm.assembly._chat_formats[None] = Seeing()
    with pytest.raises(InvalidRequestError, match="here is an image"):
        llm.chat(TALK, GREEDY)
