"""What is refused, with which status, naming which field; and that nothing is left of it."""

import json

import pytest

USER = [{"role": "user", "content": "abc"}]
PIXEL = "data:image/png;base64,AAAA"
GENERATE, TEXT, CHAT = "/v1/generate", "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"

# route, body, the field's path
WRONG = [
    (GENERATE, {}, "prompt"),
    (GENERATE, {"prompt": ""}, "prompt"),
    (GENERATE, {"prompt": 5}, "prompt"),
    (GENERATE, {"prompt": "abc", "nonsense": 1}, "nonsense"),
    (GENERATE, {"prompt": "abc", "temperature": -1}, "temperature"),
    (GENERATE, {"prompt": "abc", "temperature": "1"}, "temperature"),
    (GENERATE, {"prompt": "abc", "seed": 1, "seq_seed": 2}, None),
    (GENERATE, {"prompt": "abc", "max_tokens": 0}, "max_tokens"),
    (GENERATE, {"prompt": [1, 99]}, "prompt"),
    (GENERATE, {"prompt": [-1]}, "prompt[0]"),
    (
        GENERATE,
        {"prompt": "abc", "structured_output": {"schema": {}}},
        "structured_output.schema_type",
    ),
    (
        GENERATE,
        {"prompt": "abc", "structured_output": {"schema_type": "yaml"}},
        "structured_output.schema_type",
    ),
    (
        GENERATE,
        {
            "prompt": "abc",
            "structured_output": {"schema_type": "regex", "schema": "a"},
            "so_args": {"schema_type": "regex", "schema": "b"},
        },
        "structured_output",
    ),
    (GENERATE, {"prompt": "a" * 500}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": ["abc", ""]}, "prompt[1]"),
    (TEXT, {"prompt": "abc", "echo": True}, "echo"),
    (TEXT, {"prompt": "abc", "best_of": 3}, "best_of"),
    (TEXT, {"prompt": "abc", "suffix": "x"}, "suffix"),
    (TEXT, {"prompt": "abc", "logprobs": True}, "logprobs"),
    (TEXT, {"prompt": "abc", "logit_bias": {"a": 1}}, "logit_bias.a"),
    (TEXT, {"prompt": "abc", "stream_options": {"x": 1}}, "stream_options.x"),
    (TEXT, {"prompt": "abc", "n": 1000}, "n"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [*USER, {"role": "user", "content": 5}]}, "messages[1].content"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "extra": 1}]}, "messages[0].extra"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]},
        "messages[0].content[0].b",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "messages[0].content[0]",
    ),
    (
        CHAT,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}],
                }
            ]
        },
        "messages[0].content[0].image_url.url",
    ),
    (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]}
            ]
        },
        "messages[0].content[0]",
    ),
    (CHAT, {"messages": [{"role": "assistant", "content": "x", "prefix": True}]}, "messages[0]"),
    (CHAT, {"messages": USER, "chat_template": "{{ 1 }}"}, "chat_template"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"nobody": 1}}, "nobody"),
    (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {"messages": USER, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    (CHAT, {"messages": USER, "tool_choice": "sometimes"}, "tool_choice"),
    (CHAT, {"messages": USER, "reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs"),
    (
        CHAT,
        {"messages": USER, "max_tokens": 2, "max_completion_tokens": 3},
        "max_completion_tokens",
    ),
    (
        CHAT,
        {"messages": USER, "response_format": {"type": "json_schema"}},
        "response_format.json_schema",
    ),
    (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, "response_format"),
    (RESPONSES, {}, "input"),
    (RESPONSES, {"input": "abc", "previous_response_id": "x"}, "previous_response_id"),
    (RESPONSES, {"input": "abc", "background": True}, "background"),
    (RESPONSES, {"input": "abc", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        "input[0].content[0]",
    ),
    (RESPONSES, {"input": "abc", "reasoning": {"effort": "high"}}, "reasoning.effort"),
    (MESSAGES, {"messages": USER}, "max_tokens"),
    (MESSAGES, {"messages": [{"role": "system", "content": "x"}], "max_tokens": 3}, "messages[0]"),
    (
        MESSAGES,
        {"messages": [*USER, {"role": "assistant", "content": "a"}], "max_tokens": 3},
        "messages[1]",
    ),
    (MESSAGES, {"messages": USER, "max_tokens": 3, "tool_choice": {"type": "any"}}, "tool_choice"),
    (
        MESSAGES,
        {"messages": USER, "max_tokens": 3, "tools": [{"name": "f"}]},
        "tools[0].input_schema",
    ),
    (
        MESSAGES,
        {"messages": USER, "max_tokens": 3, "thinking": {"type": "enabled"}},
        "thinking.type",
    ),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "abc", "messages": USER}, "prompt"),
    ("/tokenize", {"prompt": "abc", "tools": []}, "tools"),
    ("/detokenize", {"tokens": [99]}, "tokens[0]"),
    ("/detokenize", {}, "tokens"),
    ("/abort_requests", {}, "request_ids"),
    ("/abort_requests", {"request_ids": ["a"], "abort_all": True}, "request_ids"),
]


@pytest.mark.parametrize("path, body, param", WRONG, ids=lambda v: str(v)[:60])
def test_a_wrong_field_is_named(toy_shared, path, body, param):
    answer = toy_shared.post(path, **body)
    assert answer.status == 400, answer.text
    error = answer.error
    assert error["param"] == param, error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert (answer.json.get("type") == "error") is path.startswith(MESSAGES)
    toy_shared.wait_idle()


FIELDS = [
    ("/properties/a", {"structured_output": {}}, "structured_output.schema/properties/a"),
    ("/", {"so_args": {}}, "so_args.schema"),
    ("/a", {"response_format": {}}, "response_format.json_schema.schema/a"),
    ("/a", {"text": {"format": {}, "x": 1}}, "so_args.schema/a"),
    ("/a", {"text": {"format": {"type": "json_schema"}}}, "text.format.schema/a"),
    ("so_args", {"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ("so_args.schema", {"structured_outputs": {"json": {}}}, "structured_outputs.json"),
    ("max_tokens", {"max_output_tokens": 3}, "max_output_tokens"),
    ("max_model_len", {"messages": []}, "messages"),
    ("messages[1].content", {"messages": [{}]}, "messages[1].content"),
    ("messages[1]", {"messages": [{}], "system": "x"}, "messages"),
    ("messages[1]", {"messages": [{"content": [{"type": "tool_result"}]}]}, "messages"),
    ("messages[0]", {"input": "x"}, "input"),
    ("temperature", {}, "temperature"),
    ("labels", {"recipe": "classify", "options": {"labels": 1}}, "options.labels"),
    ("labels.0", {"recipe": "classify", "options": {"labels": [1]}}, "options.labels.0"),
    ("classify", {"recipe": "classify", "text": "x"}, "options"),
    ("/a", {"recipe": "transform", "options": {"target": {}}}, "options.target/a"),
    ("/", {"recipe": "classify", "options": {"fields": {}}}, "options.fields"),
    ("max_model_len", {"recipe": "ner", "text": "x"}, "text"),
    ("so_args", {"recipe": "ner", "text": "x"}, "recipe"),
    ("hue", {"recipe": "ner", "text": "x", "hue": 1}, "hue"),
    (None, {}, None),
]


@pytest.mark.parametrize("setting, body, path", FIELDS, ids=str)
def test_the_librarys_names_become_the_clients(setting, body, path):
    from deepinfer.server.fields import client_path

    assert client_path(setting, body) == path


@pytest.mark.parametrize("path", [GENERATE, TEXT, CHAT, RESPONSES])
def test_a_grammar_without_a_backend_is_refused_by_name(toy_shared, path):
    schema = {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {
        GENERATE: {"prompt": "abc", "structured_output": {"schema_type": "json", "schema": schema}},
        TEXT: {"prompt": "abc", "so_args": {"schema_type": "json", "schema": schema}},
        CHAT: {"messages": USER, "response_format": form},
        RESPONSES: {
            "input": "abc",
            "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
        },
    }[path]
    for stream in (False, True):
        answer = toy_shared.post(path, stream=stream, **body)
        assert answer.status == 400, answer.text
        assert "grammar" in answer.error["message"] or "so_args" in answer.error["message"]


RAW = [
    (b"", 400),
    (b"{", 400),
    (b"[]", 400),
    (b"null", 400),
    (b'"x"', 400),
    (b"\xff\xfe", 400),
    (b'{"prompt": "\\ud800"}', 400),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400),
    (b'{"prompt": "a", "temperature": NaN}', 400),
    (b'{"prompt": "a", "temperature": Infinity}', 400),
    (b'{"prompt": "a", "logit_bias": {"99999999999999999999": 1}}', 400),
    (b'{"prompt": "a", "stop_token_ids": [99999999999999999999999]}', 400),
]


@pytest.mark.parametrize("raw, status", RAW, ids=lambda v: str(v)[:40])
def test_bodies_that_are_none(toy_shared, raw, status):
    for path in (GENERATE, CHAT, MESSAGES):
        answer = toy_shared.ask("POST", path, raw)
        assert answer.status == status, answer.text
        assert answer.error["message"]


@pytest.mark.parametrize("path", [GENERATE, TEXT, CHAT, RESPONSES, MESSAGES, "/tokenize"])
def test_a_key_twice_is_refused_by_its_path(toy_shared, path):
    """One of the two would be dropped in silence."""
    top = toy_shared.ask("POST", path, b'{"prompt": "a", "seed": 1, "prompt": "b"}')
    inside = b'{"messages": [{"role": "user", "content": "a"}, {"role": "user", "role": "x"}]}'
    for answer, param in (
        (top, "prompt"),
        (toy_shared.ask("POST", path, inside), "messages[1].role"),
    ):
        assert (answer.status, answer.error["param"]) == (400, param), answer.text
        assert "once" in answer.error["message"]


def test_another_type_of_body(toy_shared):
    answer = toy_shared.ask("POST", GENERATE, b"prompt=x", {"content-type": "text/plain"})
    assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    "method, path, status",
    [("GET", "/nowhere", 404), ("GET", GENERATE, 405), ("POST", "/v1/models", 405)],
)
def test_routes_that_are_none(toy_shared, method, path, status):
    answer = toy_shared.ask(method, path, b"{}" if method == "POST" else None)
    assert answer.status == status
    assert answer.error["code"] in ("no_such_route", "method_not_allowed")


def test_another_model_is_not_found(toy_shared):
    for path in (GENERATE, TEXT, CHAT, RESPONSES, MESSAGES):
        body = {"model": "gpt", "prompt": "a", "messages": USER, "input": "a", "max_tokens": 2}
        keys = {GENERATE: ("prompt",), TEXT: ("prompt",), CHAT: ("messages",)}.get(
            path, ("input",) if path == RESPONSES else ("messages", "max_tokens")
        )
        answer = toy_shared.post(path, **{k: body[k] for k in (*keys, "model")})
        assert (answer.status, answer.error["param"]) == (404, "model")
        assert answer.error["code"] == "model_not_found"


def test_one_bad_request_harms_no_other(toy_server, slow):
    server = toy_server(slow())
    asked = {"prompt": "abc", "max_tokens": 60, "ignore_eos": True, "stream": True, "seed": 1}
    alone = server.post(GENERATE, **{**asked, "stream": False}).json["text"]
    with server.opened(GENERATE, **asked) as stream:
        for path, body, _ in WRONG:
            server.post(path, **body)
        rest = stream.read().decode()
    pieces = [json.loads(line[6:]) for line in rest.splitlines() if line.startswith("data: {")]
    assert "".join(piece.get("text", "") for piece in pieces) == alone


def test_what_a_stranger_broke_is_not_shown(toy_server, wait_for, monkeypatch, caplog):
    server = toy_server()

    def broken(*_):
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(server.service, "open", broken)
    answer = server.post(GENERATE, prompt="abc")
    assert answer.status == 500
    assert "secret" not in answer.text
    assert answer.error["code"] == "internal"
    wait_for(lambda: "secret" in caplog.text)  # the log has it
