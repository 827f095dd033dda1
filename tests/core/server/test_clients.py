"""The official clients of OpenAI and Anthropic against the demo model."""

import json

import pytest

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

pytestmark = pytest.mark.model
TALK = [{"role": "user", "content": "What is the capital of France?"}]
FIXED = {"temperature": 0.8, "seed": 11, "max_tokens": 24}


@pytest.fixture
def gpt(demo_server):
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(demo_server):
    with anthropic.Anthropic(base_url=demo_server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def offline(demo_server, demo_gguf):
    """The same model in the same mode without a server."""
    from deepinfer import LLM

    with LLM(str(demo_gguf), max_model_len=512, batch_invariant=True, max_num_seqs=16) as llm:
        yield llm


def chat_text(offline, **params):
    from deepinfer import SamplingParams

    return offline.chat([TALK], SamplingParams(**params))[0].outputs[0].text


def test_openai_lists_models(gpt):
    assert "smol" in [model.id for model in gpt.models.list()]


def test_openai_chat_equals_the_library(gpt, offline):
    answer = gpt.chat.completions.create(model="smol", messages=TALK, **FIXED)
    (choice,) = answer.choices
    assert choice.message.content == chat_text(offline, **FIXED)
    assert choice.message.role == "assistant"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_openai_chat_streams_with_usage(gpt, offline):
    stream = gpt.chat.completions.create(
        model="smol",
        messages=TALK,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
        **FIXED,
    )
    text, logprobs, usage, ends = "", [], None, []
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            logprobs += choice.logprobs.content if choice.logprobs else []
            ends += [choice.finish_reason] if choice.finish_reason else []
    assert text == chat_text(offline, **FIXED)
    assert len(logprobs) == usage.completion_tokens
    assert bytes(b for entry in logprobs for b in entry.bytes).decode().startswith(text)
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)
    assert len(ends) == 1


def test_openai_completions(gpt, offline):
    from deepinfer import SamplingParams

    answer = gpt.completions.create(
        model="smol", prompt=["The sea is", "Once"], n=2, logprobs=1, **FIXED
    )
    want = [
        out.text
        for output in offline.generate(["The sea is", "Once"], SamplingParams(n=2, **FIXED))
        for out in output.outputs
    ]
    assert [choice.text for choice in answer.choices] == want
    assert len(answer.choices[0].logprobs.tokens) == len(answer.choices[0].logprobs.token_logprobs)


def test_openai_bias_and_stop(gpt, demo_server):
    only = demo_server.post("/tokenize", prompt=" yes").json["tokens"][0]
    answer = gpt.chat.completions.create(
        model="smol",
        messages=TALK,
        max_completion_tokens=3,
        logit_bias={str(only): 100},
        stop=["nothing"],
    )
    assert answer.choices[0].message.content == " yes yes yes"


def test_openai_responses(gpt, offline):
    asked = {"model": "smol", "input": TALK, "max_output_tokens": 24}
    answer = gpt.responses.create(**asked, temperature=0)
    want = chat_text(offline, temperature=0, max_tokens=24)
    assert answer.output_text == want
    kinds, text, last = [], "", None
    for event in gpt.responses.create(**asked, temperature=0, stream=True):
        kinds.append(event.type)
        text += event.delta if event.type == "response.output_text.delta" else ""
        last = event
    assert text == last.response.output_text == want
    assert kinds[:2] == ["response.created", "response.in_progress"]
    with gpt.responses.stream(**asked, temperature=0) as stream:
        assert stream.get_final_response().output_text == want


def test_openai_errors_have_their_classes(gpt):
    ask = gpt.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        ask(model="gpt-9", messages=TALK)
    assert missing.value.body["code"] == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        ask(model="smol", messages=TALK, temperature=-1)
    assert (wrong.value.param, wrong.value.code) == ("temperature", "invalid_request")
    with pytest.raises(openai.BadRequestError) as extra:
        ask(model="smol", messages=TALK, extra_body={"nonsense": 1})
    assert extra.value.param == "nonsense"


def test_openai_leaves_a_stream(gpt, demo_server):
    stream = gpt.chat.completions.create(
        model="smol",
        messages=TALK,
        stream=True,
        max_tokens=400,
        extra_body={"ignore_eos": True},
    )
    next(stream)
    stream.close()
    demo_server.wait_idle()


def test_anthropic_messages(claude, offline):
    asked = {"model": "smol", "messages": TALK, "max_tokens": 24}
    answer = claude.messages.create(**asked, extra_body={"temperature": 0})
    want = chat_text(offline, temperature=0, max_tokens=24)
    assert answer.content[0].text == want
    used = answer.usage
    assert used.input_tokens + used.cache_read_input_tokens > 10 and used.output_tokens > 1
    with claude.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
        assert "".join(stream.text_stream) == want
        final = stream.get_final_message()
    assert final.content[0].text == want
    assert final.stop_reason == answer.stop_reason
    assert final.usage.output_tokens == used.output_tokens


def test_anthropic_blocks_system_and_count(claude):
    parts = [{"type": "text", "text": "Say hello.", "cache_control": {"type": "ephemeral"}}]
    asked = {
        "model": "smol",
        "system": "You are short.",
        "messages": [{"role": "user", "content": parts}],
    }
    counted = claude.messages.count_tokens(**asked).input_tokens
    used = claude.messages.create(**asked, max_tokens=2).usage
    assert used.input_tokens + used.cache_read_input_tokens == counted


def test_anthropic_errors_have_their_classes(claude):
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(model="claude", messages=TALK, max_tokens=3)
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(
            model="smol",
            messages=TALK,
            max_tokens=3,
            extra_body={"nonsense": 1},
        )


def test_a_third_hangs_up_bit_equal_to_offline(demo_server, offline):
    """Streams of the real model in company, a third of which leave, against the library alone."""
    import random
    import threading

    from deepinfer import SamplingParams

    prompts = [f"Number {i}. The quick brown fox" for i in range(12)]
    fixed = {"temperature": 1.0, "max_tokens": 20, "ignore_eos": True}
    want = [
        offline.generate([p], SamplingParams(seed=i, **fixed))[0].text
        for i, p in enumerate(prompts)
    ]
    draw, got = random.Random(5), {}
    leaving = {i for i in range(12) if draw.random() < 1 / 3}

    def client(i):
        body = {"prompt": prompts[i], "seed": i, "stream": True, **fixed}
        with demo_server.opened("/v1/generate", **body) as stream:
            if i in leaving:
                stream.readline()
                return
            lines = stream.read().decode().splitlines()
        pieces = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        got[i] = "".join(piece.get("text", "") for piece in pieces)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert leaving and got == {i: text for i, text in enumerate(want) if i not in leaving}
    demo_server.wait_idle()
