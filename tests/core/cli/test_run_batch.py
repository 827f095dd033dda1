"""``deepinfer run-batch``: OpenAI's batch format."""

import json

import pytest


def ask(custom_id, url, **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


GOOD = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
USER = [{"role": "user", "content": "Hi"}]


def by_line(written):
    """Lines come in order of completion; ``id`` ends with the number of the line that asked."""
    return sorted(map(json.loads, written), key=lambda line: int(line["id"].rpartition("_")[2]))


def batch(shell, tmp_path, *lines):
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (tmp_path / "in.jsonl").write_text("\n".join(texts) + "\n")
    done = shell("run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out"))
    return done, by_line((tmp_path / "out").read_text().splitlines())


def test_chat_and_completions(shell, tmp_path):
    done, (one, two) = batch(
        shell,
        tmp_path,
        ask("a", "/v1/chat/completions", messages=USER, logprobs=True, top_logprobs=2, **GOOD),
        ask("b", "/v1/completions", prompt="Hello", n=2, **GOOD),
    )
    assert done.code == 0
    assert (one["custom_id"], one["response"]["status_code"], one["error"]) == ("a", 200, None)
    body = one["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["choices"][0]["finish_reason"] == "length"
    assert len(body["choices"][0]["logprobs"]["content"]) == 4
    assert body["usage"]["completion_tokens"] == 4
    assert len(two["response"]["body"]["choices"]) == 2
    assert isinstance(two["response"]["body"]["choices"][0]["text"], str)


def test_one_bad_line_does_not_lose_the_others(shell, tmp_path):
    done, written = batch(
        shell,
        tmp_path,
        ask("good", "/v1/completions", prompt="Hello", **GOOD),
        "{no json",
        ask("url", "/v1/embeddings", input="x"),
        ask("field", "/v1/completions", prompt="x", nonsense=1),
        ask("range", "/v1/chat/completions", messages=USER, temperature=-1),
        ask("empty", "/v1/completions", prompt=""),
        ask("role", "/v1/chat/completions", messages=[{"role": "nobody", "content": "x"}]),
        ask("shape", "/v1/completions", prompt="x", logit_bias={"a": 1}),
        ask(
            "shape", "/v1/chat/completions", messages=USER, response_format={"type": "json_schema"}
        ),
        "[1]",
        ask("last", "/v1/completions", prompt="World", **GOOD),
    )
    assert done.code == 1
    assert [w["response"]["status_code"] for w in written] == [200, *[400] * 9, 200]
    errors = [w["error"]["message"] for w in written if w["error"]]
    named = ("no JSON", "/v1/embeddings", "nonsense", "temperature", "empty", "nobody", "shape")
    for error, words in zip(errors, (*named, "json_schema.schema", "no body"), strict=True):
        assert words in error


def test_only_a_bad_line(shell, tmp_path):
    done, (line,) = batch(shell, tmp_path, ask("x", "/v1/completions", prompt=[9999]))
    assert done.code == 1 and "id 9999" in line["error"]["message"]


def test_lines_come_in_order_of_completion(shell, tmp_path):
    """``custom_id`` says which is which; blank lines count, and get none."""
    long = ask("long", "/v1/completions", prompt="Hello", **{**GOOD, "max_tokens": 200})
    short = ask("short", "/v1/completions", prompt="Hello", **GOOD)
    texts = [json.dumps(long), "", json.dumps(short), "{no json"]
    (tmp_path / "in.jsonl").write_text("\n".join(texts) + "\n")
    done = shell("run-batch", "-i", str(tmp_path / "in.jsonl"))
    written = [json.loads(line) for line in done.out.splitlines()]
    assert [w["custom_id"] for w in written] == [None, "short", "long"]
    assert [w["id"] for w in written] == [f"batch_req_{number}" for number in (4, 3, 1)]
    assert "line 4 is no JSON" in written[0]["error"]["message"]


def test_more_lines_than_are_held_at_once(shell, tmp_path):
    """Each is answered as alone, and those without a seed draw theirs in the order of lines."""
    bodies = [{"max_tokens": 1 + i % 5, "temperature": 1.0, "ignore_eos": True} for i in range(40)]
    lines = [ask(str(i), "/v1/completions", prompt="Hello", **b) for i, b in enumerate(bodies)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))

    def texts(*more):
        done = shell("run-batch", "-i", str(tmp_path / "in.jsonl"), "--batch-invariant", *more)
        written = by_line(done.out.splitlines())
        assert [w["custom_id"] for w in written] == [str(i) for i in range(40)]
        return [w["response"]["body"]["choices"][0]["text"] for w in written]

    assert texts("--max-num-seqs", "2") == texts()


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SAYS = {CHAT: {"messages": USER}, TEXT: {"prompt": "Hi"}}


@pytest.mark.parametrize("url", SAYS)
def test_no_field_is_passed_over(shell, tmp_path, url):
    """Each is honoured or its line is refused, and the refusal names it."""
    refused = {
        "model": "gpt-4",
        "stream": True,
        "store": True,
        "service_tier": "flex",
        "echo": True,
        "logprobs": 2 if url == CHAT else True,
        "top_logprobs": 2,
        "max_completion_tokens": 3,  # beside max_tokens=4
        "so_args": {"schema_type": "json_object"},  # beside the format below
        "prompt" if url == CHAT else "messages": "Hi",
        **({} if url == CHAT else {"tools": [{}], "chat_template": "x"}),
    }
    form = {"so_args": {"response_format": {"type": "text"}}}
    lines = [
        ask(name, url, **SAYS[url], **GOOD, **form.get(name, {}), **{name: value})
        for name, value in refused.items()
    ]
    beside = {**ask("beside", url, **SAYS[url]), "priority": 1}
    done, written = batch(shell, tmp_path, *lines, beside)
    assert done.code == 1
    for line in written:
        name = "priority" if line["custom_id"] == "beside" else line["custom_id"]
        assert line["response"]["status_code"] == 400
        assert name in line["error"]["message"]


@pytest.mark.parametrize("url", SAYS)
def test_fields_that_say_what_is_so_anyway(shell, tmp_path, tiny_model, url):
    fine = {"stream": False, "store": False, "service_tier": "auto", "user": "u", "metadata": {}}
    lines = [ask(m, url, model=m, **SAYS[url], **GOOD, **fine) for m in ("model", str(tiny_model))]
    lines.append(ask("null", url, model=None, stream=None, **SAYS[url], **GOOD))
    lines.append(ask("equal", url, max_completion_tokens=4, **SAYS[url], **GOOD))
    done, written = batch(shell, tmp_path, *lines)
    assert done.code == 0
    assert {line["response"]["body"]["model"] for line in written} == {"model"}


@pytest.mark.parametrize("url", SAYS)
def test_logprobs_of_the_prompt_are_written(shell, tmp_path, url):
    _, (line,) = batch(shell, tmp_path, ask("a", url, prompt_logprobs=2, **SAYS[url], **GOOD))
    body = line["response"]["body"]
    first, *others = body["prompt_logprobs"]
    assert first is None and len(others) + 1 == body["usage"]["prompt_tokens"]
    assert all({"logprob", "rank"} < set(c) for o in others for c in o.values())


@pytest.mark.parametrize("value", [10**400, -(10**400), 1e999, [[]], {"a": {}}, "x", [1, "a"]])
def test_a_value_of_any_kind_costs_only_its_line(shell, tmp_path, value):
    names = ("n", "temperature", "top_k", "seed", "stop", "logit_bias", "logprobs", "tools",
             "response_format", "messages", "chat_template", "min_tokens", "model")  # fmt: skip
    lines = [ask(name, CHAT, **{**SAYS[CHAT], "max_tokens": 2, name: value}) for name in names]
    _, written = batch(shell, tmp_path, *lines, ask("good", TEXT, prompt="Hi", **GOOD))
    assert [line["custom_id"] for line in written] == [*names, "good"]
    assert written[-1]["error"] is None
    assert all(line["response"]["status_code"] in (200, 400) for line in written)


def test_wishes_that_the_chat_template_does_not_have(shell, tmp_path):
    wishes = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    lines = [ask(name, CHAT, **SAYS[CHAT], **GOOD, **{name: v}) for name, v in wishes.items()]
    _, written = batch(shell, tmp_path, *lines)
    for line, name in zip(written, (*list(wishes)[:3], "enable_thinking"), strict=True):
        assert line["response"]["status_code"] == 400
        assert f"does not know {name}" in line["error"]["message"]


def test_an_answer_taken_apart_is_written_in_parts():
    from deepinfer.chat import ChatMessage, ToolCall
    from deepinfer.cli.run_batch import _choices, _Job
    from deepinfer.entrypoints.outputs import CompletionOutput, RequestOutput

    message = ChatMessage("Hm.", None, (ToolCall(0, "now", "{}", "c1"),))
    out = CompletionOutput(0, "raw", [1], finish_reason="tool_calls", message=message)
    job = _Job(1, "a", chat=True, result=RequestOutput("r", None, [1], [out], True))
    (choice,) = _choices(job)
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm.",
        "tool_calls": [call],
    }
    assert choice["finish_reason"] == "tool_calls"
