"""``deepinfer run-batch``: OpenAI's batch format."""

import json


def ask(custom_id, url, **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **body}}


GOOD = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
USER = [{"role": "user", "content": "Hi"}]


def batch(shell, tmp_path, *lines):
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (tmp_path / "in.jsonl").write_text("\n".join(texts) + "\n")
    done = shell("run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out"))
    return done, [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]


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
    named = ("no JSON", "/v1/embeddings", "nonsense", "temperature", "empty", "nobody")
    for error, words in zip(errors, (*named, "shape", "shape", "no body"), strict=True):
        assert words in error


def test_only_a_bad_line(shell, tmp_path):
    done, (line,) = batch(shell, tmp_path, ask("x", "/v1/completions", prompt=[9999]))
    assert done.code == 1 and "id 9999" in line["error"]["message"]
