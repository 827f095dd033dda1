"""What each route answers, over a socket, from a scripted device."""

import pytest
from deepinfer.server.schemas import Body

LONG = {"max_tokens": 12, "ignore_eos": True}
CHAT = [{"role": "user", "content": "abc"}]


@pytest.fixture
def server(toy_server):
    return toy_server()


def offline(server, prompt, **params):
    """The same request without HTTP, on an engine of its own."""
    from deepinfer import SamplingParams
    from deepinfer.entrypoints.llm import LLM
    from deepinfer.testing.fake import FakeExecutor, FakeScript

    assembly = server.llm.assembly
    executor = FakeExecutor(FakeScript())
    facts = executor.start()
    from deepinfer.engine.engine import Engine
    from deepinfer.entrypoints.assemble import Assembly

    engine = Engine(assembly.config, executor, facts, tokenizer=assembly.tokenizer)
    twin = Assembly(
        config=assembly.config,
        executor=executor,
        facts=facts,
        tokenizer=assembly.tokenizer,
        engine=engine,
        preparer=assembly.preparer,
    )
    with LLM.from_assembly(twin) as llm:
        return llm.generate([prompt], SamplingParams(**params))[0]


def test_generate_is_the_published_call(server):
    answer = server.post("/v1/generate", prompt="abc", temperature=0.7, seed=5, **LONG)
    assert answer.status == 200
    want = offline(server, "abc", temperature=0.7, seed=5, **LONG)
    assert answer.json["text"] == want.text
    assert answer.json["finish_reason"] == "length"
    assert answer.json["usage"]["completion_tokens"] == 12
    assert answer.json["usage"]["prompt_tokens"] == 1


ONCE = {
    "/v1/generate": {"prompt": "abc", "max_tokens": 3},
    "/v1/completions": {"prompt": "abc", "max_tokens": 3},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 3},
    "/v1/responses": {"input": "abc", "max_output_tokens": 3},
    "/v1/messages": {"messages": CHAT, "max_tokens": 3},
}


@pytest.mark.parametrize("path", ONCE)
@pytest.mark.parametrize("stream", [False, True])
def test_a_body_is_checked_once(server, monkeypatch, path, stream):
    checked, read = [], Body.read.__func__
    monkeypatch.setattr(
        Body, "read", classmethod(lambda cls, body: [checked.append(cls), read(cls, body)][1])
    )
    assert server.post(path, **ONCE[path], stream=stream).status == 200
    assert len(checked) == 1


def test_generate_without_a_length_runs_to_the_end(server):
    answer = server.post("/v1/generate", prompt="abc", ignore_eos=True, seed=1)
    assert answer.json["usage"]["total_tokens"] == server.llm.assembly.facts.max_model_len


def test_generate_takes_ids_and_several_samples(server):
    answer = server.post("/v1/generate", prompt=[1, 2], n=3, seed=1, logprobs=1, **LONG)
    outputs = answer.json["outputs"]
    assert [out["index"] for out in outputs] == [0, 1, 2]
    assert answer.json["text"] == outputs[0]["text"]
    want = offline(server, [1, 2], n=3, seed=1, logprobs=1, **LONG)
    assert [out["text"] for out in outputs] == [out.text for out in want.outputs]
    chosen = [lp["logprob"] for lp in outputs[2]["logprobs"]]
    assert sum(chosen) == pytest.approx(want.outputs[2].cumulative_logprob)


def test_generate_streams(server):
    whole = server.post("/v1/generate", prompt="abc", seed=3, **LONG).json
    events = server.post("/v1/generate", prompt="abc", seed=3, stream=True, **LONG).events
    *pieces, usage, done = [data for _, data in events]
    assert done == "[DONE]"
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert [p["finish_reason"] for p in pieces if p["finish_reason"]] == ["length"]
    assert usage["usage"]["completion_tokens"] == 12


PROMPTS = ["abc", ["abc", "x"], [1, 2, 3], [[1, 2], [3]]]


@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
def test_completions_take_every_kind_of_prompt(server, prompt):
    answer = server.post("/v1/completions", prompt=prompt, n=2, seed=4, **LONG)
    several = prompt if isinstance(prompt[0], str | list) and prompt != "abc" else [prompt]
    want = [
        out.text for one in several for out in offline(server, one, n=2, seed=4, **LONG).outputs
    ]
    choices = answer.json["choices"]
    assert [c["index"] for c in choices] == list(range(2 * len(several)))
    assert [c["text"] for c in choices] == want
    assert answer.json["usage"]["completion_tokens"] == 12 * len(want)


def test_completions_stream_every_choice(server):
    asked = {"prompt": ["abc", "x"], "n": 2, "seed": 4, **LONG}
    whole = server.post("/v1/completions", **asked).json
    options = {"include_usage": True}
    events = server.post("/v1/completions", stream=True, stream_options=options, **asked).events
    *pieces, last, done = [data for _, data in events]
    texts, ends = [""] * 4, [None] * 4
    for piece in pieces:
        assert piece["usage"] is None
        (choice,) = piece["choices"]
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] = choice["finish_reason"] or ends[choice["index"]]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert ends == ["length"] * 4
    assert (last["choices"], last["usage"], done) == ([], whole["usage"], "[DONE]")


def test_completions_logprobs_tile_the_text(server):
    asked = {"prompt": "abc", "seed": 4, "logprobs": 2, **LONG}
    choice = server.post("/v1/completions", **asked).json["choices"][0]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == 12
    assert all(len(top) <= 2 for top in logprobs["top_logprobs"])
    events = server.post("/v1/completions", stream=True, **asked).events
    parts = [d["choices"][0]["logprobs"] for _, d in events if d != "[DONE]"]
    parts = [part for part in parts if part]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [value for part in parts for value in part[name]] == logprobs[name]


def test_chat_answers_and_streams_the_same(server):
    asked = {"messages": CHAT, "seed": 2, "logprobs": True, "top_logprobs": 2, **LONG}
    (choice,) = server.post("/v1/chat/completions", **asked).json["choices"]
    content = choice["logprobs"]["content"]
    assert choice["message"]["role"] == "assistant"
    assert len(content) == 12
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert content[0]["bytes"] == list(
        server.llm.assembly.tokenizer.token_bytes(
            offline(server, "abc", seed=2, **LONG).outputs[0].token_ids[0]
        )
    )
    events = server.post("/v1/chat/completions", stream=True, **asked).events
    pieces = [data["choices"][0] for _, data in events if data != "[DONE]"]
    assert pieces[0]["delta"]["role"] == "assistant"
    text = "".join(piece["delta"].get("content") or "" for piece in pieces)
    assert text == choice["message"]["content"]
    streamed = [e for piece in pieces if piece["logprobs"] for e in piece["logprobs"]["content"]]
    assert streamed == content
    assert pieces[-1]["finish_reason"] == "length"


def test_parts_that_are_text_are_one_text(server):
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    joined = [{"role": "user", "content": "ab\n\nc"}]
    one = server.post("/tokenize", messages=[{"role": "user", "content": parts}])
    assert one.json["tokens"] == server.post("/tokenize", messages=joined).json["tokens"]


def test_messages_answer_and_stream_the_same(server):
    asked = {"messages": CHAT, "max_tokens": 12, "temperature": 0}
    whole = server.post("/v1/messages", **asked).json
    assert (whole["type"], whole["role"]) == ("message", "assistant")
    events = server.post("/v1/messages", stream=True, **asked).events
    assert all(name == data["type"] for name, data in events)
    assert events[0][0] == "message_start" and events[-1][0] == "message_stop"
    text = "".join(d["delta"]["text"] for n, d in events if n == "content_block_delta")
    assert [{"type": "text", "text": text}] == whole["content"]
    last = events[-2][1]
    assert last["delta"]["stop_reason"] == whole["stop_reason"]
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_a_stop_sequence_is_named(server):
    whole = server.post("/v1/messages", messages=CHAT, max_tokens=40, temperature=0).json
    text = whole["content"][0]["text"]
    stop = next(text[i : i + 2] for i in range(1, len(text)) if text.find(text[i : i + 2]) == i)
    cut = server.post(
        "/v1/messages", messages=CHAT, max_tokens=40, temperature=0, stop_sequences=[stop]
    ).json
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", stop)
    assert cut["content"][0]["text"] == text[: text.find(stop)]


def test_count_tokens_counts_what_a_message_would_cost(server):
    counted = server.post("/v1/messages/count_tokens", messages=CHAT, system="ab").json
    asked = server.post("/v1/messages", messages=CHAT, system="ab", max_tokens=1, temperature=0)
    assert counted["input_tokens"] == asked.json["usage"]["input_tokens"]


def test_responses_answer_and_stream_the_same(server):
    asked = {"input": "abc", "max_output_tokens": 12, "temperature": 0}
    whole = server.post("/v1/responses", **asked).json
    events = server.post("/v1/responses", stream=True, **asked).events
    assert all(name == data["type"] for name, data in events)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    text = "".join(d["delta"] for n, d in events if n == "response.output_text.delta")
    assert text == whole["output"][0]["content"][0]["text"]
    last = events[-1][1]["response"]
    assert last["output"][0]["content"] == whole["output"][0]["content"]
    assert (last["status"], last["usage"]) == (whole["status"], whole["usage"])


def test_models_version_tokens(server):
    names = [model["id"] for model in server.get("/v1/models").json["data"]]
    assert names == ["toy", "toy-path"]
    assert server.get("/version").json["version"]
    tokens = server.post("/tokenize", prompt="abcab", return_token_strs=True).json
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert server.post("/detokenize", tokens=tokens["tokens"]).json["prompt"] == "abcab"


@pytest.mark.parametrize("name", ["toy", "toy-path", None])
def test_the_model_has_its_names(server, name):
    body = {} if name is None else {"model": name}
    assert server.post("/v1/generate", prompt="abc", **body, **LONG).status == 200


def test_served_names_stand_in_their_place(toy_server):
    server = toy_server(served_names=("mine", "yours"))
    assert [m["id"] for m in server.get("/v1/models").json["data"]] == ["mine", "yours"]
    assert server.post("/v1/generate", prompt="abc", model="yours", **LONG).json["model"] == "mine"
    assert server.post("/v1/generate", prompt="abc", model="toy", **LONG).status == 404


def test_a_path_is_understood_and_not_shown(toy_server, tmp_path):
    server = toy_server()
    config = server.llm.assembly.config
    server.llm.assembly.config = config.model_copy(update={"model": str(tmp_path)})
    assert server.post("/v1/generate", prompt="abc", model=str(tmp_path), **LONG).status == 200
    assert str(tmp_path) not in server.get("/v1/models").text
    assert str(tmp_path) not in server.post("/v1/generate", prompt="abc", model="gpt").text


def test_two_servers_of_a_process_share_nothing(toy_server):
    one, two = toy_server(), toy_server()
    one.post("/v1/generate", prompt="abc", **LONG)
    assert 'deepinfer_requests_finished_total{reason="length"} 1.0' in one.get("/metrics").text
    assert 'reason="length"' not in two.get("/metrics").text
    one.stop()
    assert two.post("/v1/generate", prompt="abc", **LONG).status == 200


def test_harmless_fields_are_listed(server):
    answer = server.post("/v1/chat/completions", messages=CHAT, user="me", store=True, **LONG)
    assert answer.headers["x-deepinfer-ignored"] == "user, store"
    assert "x-deepinfer-ignored" not in server.post("/v1/generate", prompt="abc", **LONG).headers


def test_a_request_id_comes_back(server):
    mine = server.post("/v1/generate", {"x-request-id": "mine-1"}, prompt="abc", **LONG)
    assert mine.headers["x-request-id"] == "mine-1"
    forged = server.post("/v1/generate", {"x-request-id": "a b"}, prompt="abc", **LONG)
    assert forged.headers["x-request-id"] != "a b"


def test_abort_ends_a_stream_with_its_reason(toy_server, slow):
    import json

    server = toy_server(slow())
    body = {"prompt": "abc", "stream": True, "ignore_eos": True, "max_tokens": 4000}
    with server.opened("/v1/generate", **body) as stream:
        first = json.loads(stream.readline().decode().removeprefix("data: "))
        assert server.post("/abort_requests", request_ids=[first["id"], "other"]).json == {
            "aborted": [first["id"]]
        }
        rest = stream.read().decode()
    assert '"finish_reason": "abort"' in rest
    server.wait_idle()
