"""Chat templates: rendering, the sandbox, and what bad messages are told."""

from __future__ import annotations

import json
import re

import pytest
from deepinfer.chat import ChatOptions, TemplateFormat, chat_format, check_messages
from deepinfer.errors import InvalidRequestError, TokenizerError

pytest.importorskip("jinja2")

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
HELLO = [{"role": "user", "content": "Hello"}]


class FakeTokenizer:
    name = "tiny"

    def __init__(self, **templates):
        self.special_tokens = {"bos_token": "<s>"}
        self.chat_templates = templates


def rendered(template, messages=HELLO, **wishes):
    form = TemplateFormat({"default": template}, {"bos_token": "<s>"}, "tiny")
    return form.render(messages, ChatOptions(**wishes)).text


def test_a_conversation():
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert rendered(CHATML, messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert rendered(CHATML, add_generation_prompt=False).endswith("Hello<|im_end|>\n")


def test_a_template_of_ones_own_wins():
    assert chat_format(FakeTokenizer(default="model's"), "own").render(HELLO).text == "own"
    assert chat_format(FakeTokenizer(default="model's")).render(HELLO).text == "model's"


def test_no_template_names_the_model_and_the_way_out():
    with pytest.raises(TokenizerError, match=r"tiny came without a chat template.*generate\(\)"):
        chat_format(FakeTokenizer())


def test_special_tokens_and_further_variables():
    template = "{{ bos_token }}{{ enable_thinking }}{{ eos_token }}"
    assert rendered(template, template_kwargs={"enable_thinking": False}) == "<s>False"


def test_variables_cannot_replace_the_messages():
    with pytest.raises(InvalidRequestError, match="does not know messages"):
        rendered("{{ messages|length }}", template_kwargs={"messages": []})


def test_wishes_that_the_template_has():
    assert rendered("{{ enable_thinking }}", thinking=False) == "False"
    assert rendered("{% if thinking is defined and thinking %}t{% endif %}", thinking=True) == "t"
    assert rendered("{{ reasoning_effort }}", reasoning_effort="low") == "low"
    assert rendered("{{ reasoning_effort }}", template_kwargs={"reasoning_effort": "low"}) == "low"
    assert rendered("{{ tools }}", tools=[{"a": 1}], tool_choice="none") == "None"
    assert rendered("{{ tools[0].a }}", tools=[{"a": 1}], tool_choice="auto") == "1"
    assert rendered("x", response_format={"type": "text"}) == "x"
    schema = {"type": "json_object"}
    assert rendered("x", response_format=schema, format_is_forced=True) == "x"


@pytest.mark.parametrize(
    "wish, named",
    [
        ({"thinking": False}, "enable_thinking"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"tools": [{"a": 1}]}, "tools"),
        ({"tools": [{"a": 1}], "tool_choice": "required"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"template_kwargs": {"enable_thinking": False}}, "enable_thinking"),
        ({"template_kwargs": {"colour": 1}}, "colour"),
    ],
)
def test_wishes_that_it_does_not_have_are_refused_by_name(wish, named):
    with pytest.raises(InvalidRequestError, match=f"of tiny does not know {named}") as caught:
        rendered("{{ messages|length }}", **wish)
    assert caught.value.setting == named


def test_a_wish_given_twice():
    with pytest.raises(InvalidRequestError, match="enable_thinking is given twice"):
        rendered("{{ enable_thinking }}", thinking=True, template_kwargs={"enable_thinking": False})


def test_tools_take_their_own_template_where_there_is_one():
    tool = {"type": "function", "function": {"name": "f", "description": "<é>"}}
    both = chat_format(FakeTokenizer(default="plain", tool_use="{{ tools[0]|tojson }}"))
    assert both.render(HELLO).text == "plain"
    shown = both.render(HELLO, ChatOptions(tools=[tool])).text
    assert json.loads(shown) == tool
    assert "<é>" in shown  # neither escaped for HTML nor for ASCII
    with pytest.raises(TokenizerError, match="no default chat template, only tool_use"):
        chat_format(FakeTokenizer(tool_use="x")).render(HELLO)


def test_no_tools_and_an_empty_list_are_the_same():
    template = "{{ 'yes' if tools else 'no' }}{{ tools is none }}"
    assert rendered(template) == rendered(template, tools=[]) == "noTrue"


def test_tojson_takes_what_templates_give_it():
    assert rendered("{{ {'b': 1, 'a': 2}|tojson(indent=2, sort_keys=true) }}") == (
        '{\n  "a": 2,\n  "b": 1\n}'
    )


def test_arguments_of_tool_calls_become_objects():
    def call(arguments):
        function = {"name": "f", "arguments": arguments}
        return [*HELLO, {"role": "assistant", "content": None, "tool_calls": [
            {"type": "function", "function": function}]}]  # fmt: skip

    template = "{{ messages[-1].tool_calls[0].function.arguments.city }}"
    messages = call('{"city": "Paris"}')
    assert rendered(template, messages) == "Paris"
    assert messages == call('{"city": "Paris"}')  # the caller's messages stay as they were
    assert rendered("{{ messages[-1].tool_calls[0].function.arguments }}", call("{oh")) == "{oh"


def test_the_environment_that_templates_are_written_for():
    assert re.fullmatch(r"\d{4}", rendered("{{ strftime_now('%Y') }}"))
    assert (
        rendered("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}")
        == "1"
    )
    assert rendered("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c") == "abHelloc"
    assert rendered("{% if true %}\n    x\n  {% endif %}\ny") == "    x\ny"


def test_a_template_may_refuse():
    with pytest.raises(InvalidRequestError, match=r"template of tiny refuses.*must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="refuses these messages"):
        rendered("{{ messages[0].content + 1 }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ range(10**9)|length }}",
        "{{ 1 // 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({}) }}",
        "{{ messages.__init__.__globals__ }}",
        "{% set x = messages[0].update({'a': 1}) %}",
    ],
)
def test_the_sandbox_holds(template):
    with pytest.raises(InvalidRequestError):
        rendered(template)


def test_a_broken_template_names_its_line():
    with pytest.raises(TokenizerError, match="template of tiny is not valid: line 2"):
        rendered("{% if x %}\n{% oops %}")


@pytest.mark.parametrize(
    "messages, said",
    [
        ([], "messages is empty"),
        ("hello", "must be a list of messages, not str"),
        ({"role": "user"}, "must be a list of messages, not dict"),
        (3, "must be a list of messages, not int"),
        (["hello"], r"messages\[0\] must be a mapping"),
        ([*HELLO, {"content": "x"}], r"messages\[1\] has no role"),
        ([{"role": "bot", "content": "x"}], r"messages\[0\] has the unknown role 'bot'"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\] has the unknown role"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": None}], r"messages\[0\] has no content"),
        ([{"role": "assistant", "content": None}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 3}], r"messages\[0\] has content of type int"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content of type list.*Join"),
    ],
)
def test_bad_messages_are_named(messages, said):
    with pytest.raises(InvalidRequestError, match=said) as caught:
        check_messages(messages)
    assert caught.value.setting.startswith("messages")


def test_transformers_renders_the_same():
    transformers = pytest.importorskip("transformers")
    tk = pytest.importorskip("tokenizers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tk.Tokenizer(tk.models.BPE({"a": 0}, [])), bos_token="<s>"
    )
    tool = {"type": "function", "function": {"name": "f", "description": "<é>"}}
    templates = [CHATML, "{{ bos_token }}{{ tools|tojson(indent=4) }}{{ messages|tojson }}"]
    for template, tools in zip(templates, (None, [tool]), strict=True):  # CHATML knows no tools
        expected = theirs.apply_chat_template(
            HELLO, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        assert rendered(template, tools=tools) == expected


@pytest.mark.model
def test_the_demo_model_renders_the_recorded_prompts(demo_tokenizer, smollm2_golden):
    form = chat_format(demo_tokenizer)
    for case in smollm2_golden["cases"]:
        text = form.render([{"role": "user", "content": case["prompt"]}]).text
        assert text == case["templated_text"]
        assert demo_tokenizer.encode(text, add_special_tokens=False) == case["input_ids"]


def test_an_image_is_named():
    content = [{"type": "text", "text": "x"}, {"type": "image", "image": b"y"}]
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].content\[1\] is an image"):
        check_messages([{"role": "user", "content": content}])
