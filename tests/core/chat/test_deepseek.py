"""DeepSeek's prompts: the recorded ones case by case, and what the recipe leaves to us."""

from __future__ import annotations

import base64
import builtins
import json
from pathlib import Path

import pytest
from deepinfer.chat import ChatOptions, TemplateFormat, chat_format, prompt_ids
from deepinfer.chat.deepseek import GENERATIONS, DeepseekFormat, Generation
from deepinfer.errors import InvalidRequestError, TokenizerError
from hypothesis import example, given
from hypothesis import strategies as st

recipe = pytest.importorskip("deepseek_recipe")

DATA = Path(__file__).parents[2] / "data"
GOLDEN = json.loads((DATA / "chat-encoding.json").read_text(encoding="utf-8"))
RECORDED = Generation("DeepseekV41Encoding", "DeepSeek-V4.1-Flash", "<｜image｜>")
V41 = DeepseekFormat(GENERATIONS["DeepseekV41ForCausalLM"], "tiny")
V4 = DeepseekFormat(GENERATIONS["DeepseekV4ForCausalLM"], "tiny")
HI = [{"role": "user", "content": "hi"}]
NOW = [{"type": "function", "function": {"name": "now"}}]
_ANY = st.characters(codec=None, exclude_categories=())
PNG = "data:image/png;base64,aGVsbG8="
BOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"


def options_of(request):
    """A recorded body (or Conversation) in our words."""
    thinking = request.get("thinking", {}).get("type", None)
    on = {"enabled": True, "disabled": False, None: request.get("thinking_mode")}[thinking]
    names = ("tools", "tool_choice", "response_format", "reasoning_effort")
    return ChatOptions(thinking=on, **{n: request[n] for n in names if n in request})


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_recorded_prompts(case):
    form = DeepseekFormat(RECORDED, "tiny")
    request = case["request"]
    if "error" in case:
        with pytest.raises(InvalidRequestError) as caught:
            form.render(request["messages"], options_of(request))
        why = caught.value.__cause__
        if request.get("api") != "Conversation":  # built directly, it fails in other words
            assert f"{type(why).__name__}: {why}" == case["error"]
        return
    found = form.render(request["messages"], options_of(request))
    assert found.text == case["prompt"]
    assert [list(r) for r in found.special_ranges] == case["special_ranges"]
    assert len(found.images) == case.get("image_count", 0)


def test_every_recorded_field_is_ours_to_honour():
    known = {"model", "messages", "tools", "tool_choice", "response_format", "reasoning_effort",
             "thinking", "thinking_mode", "api"}  # fmt: skip
    assert {key for case in GOLDEN["cases"] for key in case["request"]} <= known
    assert len(GOLDEN["cases"]) == 53


def text(messages=HI, form=V41, **wishes):
    return form.render(messages, ChatOptions(**wishes)).text


def test_generations_differ_in_their_tags():
    calls = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "now", "arguments": {"a": "д"}}}]},
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
    ]  # fmt: skip
    assert '<｜DSML｜ calls>\n<｜DSML｜ invoke name="now">' in text(calls, thinking=False)
    assert '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">' in text(calls, V4, thinking=False)
    assert 'string="true">д</' in text(calls, thinking=False)  # arguments given as an object
    assert text(calls, V4, thinking=False).startswith(f"{BOS}{USER}hi")


def test_thinking_in_either_spelling():
    plain = f"{BOS}{USER}hi{ASSISTANT}</think>"
    assert text(thinking=False) == plain
    for name in ("thinking", "enable_thinking"):
        assert text(template_kwargs={name: False}) == plain
    assert text(template_kwargs={"reasoning_effort": "low"}) == text(reasoning_effort="low")
    with pytest.raises(InvalidRequestError, match="given twice"):
        text(thinking=True, template_kwargs={"thinking": False})


def test_without_the_answers_opening():
    end = f"{BOS}{USER}hi"
    assert text(thinking=False, add_generation_prompt=False) == end
    answered = [*HI, {"role": "assistant", "content": "yo"}]
    assert text(answered, thinking=False, add_generation_prompt=False).endswith(
        "yo<｜end▁of▁sentence｜>"
    )
    rendered = V41.render(HI, ChatOptions(thinking=False, add_generation_prompt=False))
    assert rendered.parser is None
    assert [rendered.text[a:b] for a, b in rendered.special_ranges] == [BOS, USER]


@pytest.mark.parametrize("task", ["query", "authority", "domain", "title", "read_url"])
def test_internal_tasks_take_the_place_of_the_opening(task):
    asked = ChatOptions(thinking=False, template_kwargs={"task": task})
    rendered = V41.render(HI, asked)
    assert rendered.text == f"{BOS}{USER}hi<｜{task}｜>"
    a, b = rendered.special_ranges[-1]
    assert rendered.text[a:b] == f"<｜{task}｜>"


def test_the_task_action_follows_the_opening():
    for on, mark in ((True, "<think>"), (False, "</think>")):
        found = text(thinking=on, template_kwargs={"task": "action"})
        assert found.endswith(f"{USER}hi{ASSISTANT}{mark}<｜action｜>")


IMAGE = {"type": "image_url", "image_url": {"url": PNG}}


@pytest.mark.parametrize(
    "messages, wishes, said",
    [
        (HI, {"template_kwargs": {"colour": 1}}, "does not know colour"),
        (HI, {"template_kwargs": {"task": "dance"}}, "task='dance' is unknown"),
        (HI, {"thinking": "yes"}, "thinking='yes' is no bool"),
        (HI, {"reasoning_effort": "huge"}, "unknown variant `huge`"),
        (HI, {"tool_choice": "required"}, "tool_choice='required' needs tools"),
        (HI, {"tools": NOW, "tool_choice": "required"}, "does not support this tool_choice"),
        (HI, {"tools": [{**NOW[0], "cache": 1}]}, r"tools\[0\] has 'cache'"),
        (HI, {"tools": 3}, "tools must be a list of functions, not int"),
        (HI, {"tools": ["now"]}, r"tools\[0\] must be a mapping, not str"),
        (HI, {"template_kwargs": ["task"]}, "chat_template_kwargs must be a mapping, not list"),
        (HI, {"tools": [{"type": "function"}]}, r"tools\[0\].function must be a mapping"),
        (HI, {"response_format": {"type": "regex", "regex": "a"}}, "must have a type of text"),
        (HI, {"response_format": {"type": "json_object", "x": 1}}, "response_format has 'x'"),
        ([{**HI[0], "name": "Ann"}], {}, r"messages\[0\] has 'name'"),
        ([*HI, {"role": "assistant", "content": "", "reasoning": "r"}], {}, "has 'reasoning'"),
        ([{"role": "user", "content": [{"type": "video"}]}], {}, r"content\[0\] has the type 'vid"),
        ([{"role": "user", "content": 3}], {}, "content of type int; a str or a list"),
        ([{"role": "user", "content": "<｜deepseek_image｜>"}], {}, "spells <｜deepseek_image｜>"),
        ([{"role": "user", "content": [{"type": "text", "text": "<｜deepseek_image｜>"}, IMAGE]}],
         {}, r"content\[0\] spells <｜deepseek_image｜>"),
        ([*HI, {"role": "assistant", "content": "y", "prefix": True}],
         {"template_kwargs": {"task": "title"}}, "task cannot be combined with a continued"),
        ([*HI, {"role": "assistant", "content": "y", "prefix": True}],
         {"add_generation_prompt": False}, "add_generation_prompt cannot be combined"),
    ],
)  # fmt: skip
def test_refused_by_name(messages, wishes, said):
    with pytest.raises(InvalidRequestError, match=said):
        text(messages, **wishes)


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"properties": value}
    return {"type": "object", **value}


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["type", "text", "image", "image_url", "url", "function", "name", "id",
                         "arguments", "schema", "json_schema"]) | st.text(max_size=4),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "tool", "system", "latest_reminder"]),
        "content": ODD,
        "tool_calls": ODD,
        "tool_call_id": ODD,
        "reasoning_content": ODD,
        "prefix": ODD,
    },
)


@given(st.lists(MESSAGE | ODD, max_size=3), ODD, ODD, ODD, ODD, ODD)
def test_whatever_comes_is_rendered_or_refused(talk, tools, choice, wish, effort, extra):
    try:
        options = ChatOptions(
            tools=tools,
            tool_choice=choice,
            response_format=wish,
            reasoning_effort=effort,
            template_kwargs=extra,
        )
        rendered = V41.render(talk, options)
    except InvalidRequestError:
        return
    assert all(rendered.text[a:b] for a, b in rendered.special_ranges)


@pytest.mark.parametrize("depth", [200, 100_000])
def test_schemas_nested_beyond_sense(depth):
    tool = {"type": "function", "function": {"name": "f", "parameters": nested(depth)}}
    with pytest.raises(InvalidRequestError, match="refuses this conversation"):
        text(tools=[tool])


def test_whether_an_answer_begins_with_reasoning():
    def first(messages=HI, **wishes):
        return V41.render(messages, ChatOptions(**wishes)).reasoning_end == "</think>"

    assert first() and not first(thinking=False)
    assert not first(template_kwargs={"task": "title"})
    said = {"role": "assistant", "content": "So", "prefix": True}
    assert not first([*HI, said])
    assert first([*HI, {**said, "content": "", "reasoning_content": "r"}])


def test_a_forced_call_has_no_place_for_a_task():
    with pytest.raises(InvalidRequestError, match="task cannot be combined"):
        text(tools=NOW, tool_choice="required", thinking=False, template_kwargs={"task": "title"})


def parts(*content):
    return [{"role": "user", "content": list(content)}]


def test_images_in_every_dress(tmp_path):
    dresses = [
        {"type": "image_url", "image_url": {"url": PNG}},
        {"type": "image_url", "image_url": PNG},
        {"type": "image", "image": b"raw"},
        {"type": "image", "image": tmp_path / "a.png"},
        {"type": "image", "image": str(tmp_path / "b.png")},
        {"type": "image_url", "image_url": {"url": "file:///x/a%20b.png", "detail": "auto"}},
        {"type": "image_url", "image_url": {"url": "data:,a%20b"}},
        {"type": "image_url", "image_url": {"url": PNG.replace("data", "DATA")}},
        {"type": "image_url", "image_url": {"url": PNG.replace("base64", "BASE64")}},
    ]
    found = V41.render(parts(*dresses), ChatOptions(thinking=False))
    assert [(i.data, i.path) for i in found.images] == [
        (b"hello", None),
        (b"hello", None),
        (b"raw", None),
        (None, tmp_path / "a.png"),
        (None, tmp_path / "b.png"),
        (None, Path("/x/a b.png")),
        (b"a b", None),
        (b"hello", None),
        (b"hello", None),
    ]
    assert found.text.count("<｜deepseek_image｜>") == 9
    assert found.images[2].where == "messages[0].content[2]"


def test_images_of_results_come_in_the_order_of_the_calls():
    def call(name):
        return {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}

    def result(name):
        part = {"type": "image", "image": name.encode()}
        return {"role": "tool", "tool_call_id": name, "content": [part]}

    talk = [*HI, {"role": "assistant", "content": "", "tool_calls": [call("f"), call("g")]}]
    found = V41.render([*talk, result("g"), result("f")])
    assert [image.data for image in found.images] == [b"f", b"g"]


@pytest.mark.parametrize(
    "part, said",
    [
        ({"type": "image_url", "image_url": {"url": "https://x/y.png"}}, "fetches nothing"),
        ({"type": "image_url", "image_url": {"url": PNG, "detail": "low"}}, "detail='low'"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}, "not base64"),
        ({"type": "image_url", "image_url": {"url": "HTTPS://x/y.png"}}, "fetches nothing"),
        ({"type": "image_url", "image_url": {"url": "data:image/png"}}, "without data"),
        ({"type": "image", "image": 3}, "holds int"),
        ({"type": "image", "image": b"x", "size": 3}, "has 'size'"),
    ],
)
def test_images_that_cannot_be(part, said):
    with pytest.raises(InvalidRequestError, match=said):
        V41.render(parts(part))


@given(st.sampled_from(("", "image/png", ";base64", "image/png;base64")), st.text(_ANY))
@example(";base64", "é")
@example(";base64", "\ud800")
@example("", "\ud800")
def test_any_data_url_is_bytes_or_refused(head, body):
    try:
        (image,) = V41.render(parts({"type": "image", "image": f"data:{head},{body}"})).images
    except InvalidRequestError as why:
        assert why.setting == "messages[0].content[0]"
    else:
        assert isinstance(image.data, bytes)


def test_a_lost_image_is_named_in_short():
    (image,) = V41.render(parts({"type": "image", "image": "iVBORw0K" * 9999})).images
    with pytest.raises(InvalidRequestError, match="cannot be read: 'iVBORw0K") as why:
        image.read()
    assert len(str(why.value)) < 400


def test_reading_what_was_given(tmp_path):
    (tmp_path / "a.png").write_bytes(b"pixels")
    for dress, found in ((tmp_path / "a.png", b"pixels"), (b"raw", b"raw"), (PNG, b"hello")):
        (image,) = V41.render(parts({"type": "image", "image": dress})).images
        assert image.read() == found
    for lost in (tmp_path / "b.png", str(tmp_path), "a\0b"):
        (image,) = V41.render(parts({"type": "image", "image": lost})).images
        with pytest.raises(InvalidRequestError, match=r"content\[0\] names an image that cannot"):
            image.read()


def test_v4_sees_no_images():
    with pytest.raises(InvalidRequestError, match=r"content\[0\] is an image, which this model"):
        V4.render(parts(IMAGE))


class FakeTokenizer:
    name = "tiny"
    chat_templates = {"default": "{{ messages|length }}"}  # noqa: RUF012
    special_tokens = {}  # noqa: RUF012


def test_which_models_get_it():
    for architecture in GENERATIONS:
        form = chat_format(FakeTokenizer(), architecture=architecture)
        assert isinstance(form, DeepseekFormat)
    for template, architecture in (("x", "DeepseekV41ForCausalLM"), (None, "LlamaForCausalLM")):
        form = chat_format(FakeTokenizer(), template, architecture)
        assert isinstance(form, TemplateFormat)


def test_a_missing_package_names_the_extra(monkeypatch):
    real = builtins.__import__

    def missing(name, *rest):
        if name == "deepseek_recipe":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(TokenizerError, match=r"deepinfer-core\[deepseek\]"):
        chat_format(FakeTokenizer(), architecture="DeepseekV41ForCausalLM")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A vocabulary that has the format's special tokens and, plainly, all bytes."""
    return byte_tokenizer(tmp_path_factory.mktemp("vocabulary"))


def byte_tokenizer(folder):
    tokenizers = pytest.importorskip("tokenizers")
    from deepinfer.tokenizer import Tokenizer, TokenizerParts

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, [])
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    inner.decoder = tokenizers.decoders.ByteLevel()
    marks = (BOS, "<｜end▁of▁sentence｜>", "<｜System｜>", USER, ASSISTANT, "<｜latest_reminder｜>",
             "<｜deepseek_image｜>")  # fmt: skip
    added = [tokenizers.AddedToken(mark, special=True) for mark in marks]
    added += [tokenizers.AddedToken(mark) for mark in ("<think>", "</think>", "｜DSML｜")]
    inner.add_tokens(added)
    inner.save(str(folder / "tokenizer.json"))
    return Tokenizer(inner, TokenizerParts(name="bytes"))


def test_typed_special_tokens_stay_plain_text(tokenizer):
    typed = "print </think>, ｜DSML｜ and <｜end▁of▁sentence｜>"
    rendered = V41.render([{"role": "user", "content": typed}], ChatOptions(thinking=False))
    plain = tokenizer.encode_plain(typed)
    assert len(plain) == len(typed.encode())  # a token a byte: nothing special among them
    begin, user, assistant, closed = map(tokenizer.token_to_id, (BOS, USER, ASSISTANT, "</think>"))
    assert prompt_ids(rendered, tokenizer) == [begin, user, *plain, assistant, closed]


@pytest.mark.parametrize("name", ["typed_special_tokens", "tool_call_and_result", "chinese",
                                  "latest_reminder", "assistant_prefix_thinking"])  # fmt: skip
def test_ids_are_those_of_the_recipes_own_encoder(tokenizer, name, tmp_path):
    byte_tokenizer(tmp_path)
    request = next(case["request"] for case in GOLDEN["cases"] if case["name"] == name)
    theirs = recipe.DeepseekV41Encoding().with_tokenizer(
        recipe.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    )
    converted = recipe.ChatCompletionRequest(request).convert(recipe.ConversionOptions())
    ours = V41.render(request["messages"], options_of(request))
    assert prompt_ids(ours, tokenizer) == theirs.encode(converted.conversation)


def test_an_image_takes_as_many_positions_as_it_has_tokens(tokenizer):
    rendered = V41.render(parts(IMAGE, {"type": "text", "text": "a"}, IMAGE))
    ids = prompt_ids(rendered, tokenizer, [3, 5])
    image = tokenizer.token_to_id("<｜deepseek_image｜>")
    runs = "".join("i" if i == image else "." for i in ids).strip(".")
    assert runs == "iii.....iiiii"  # between them two newlines, a and two newlines
    assert base64.b64decode(PNG.partition(",")[2]) == rendered.images[0].data


def test_a_vocabulary_without_the_marks(tokenizer):
    with pytest.raises(TokenizerError, match="bytes has no token '<｜title｜>'"):
        prompt_ids(V41.render(HI, ChatOptions(template_kwargs={"task": "title"})), tokenizer)
