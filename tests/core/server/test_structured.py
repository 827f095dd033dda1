"""Structured output over HTTP, in every dialect's own words, by the plugin and the demo model."""

import json

import pytest

pytest.importorskip("deepinfer_structured")
jsonschema = pytest.importorskip("jsonschema")

pytestmark = pytest.mark.model
SCHEMA = {
    "type": "object",
    "properties": {
        "category": {"type": "string", "enum": ["billing", "technical", "other"]},
        "urgency": {"type": "integer", "minimum": 1, "maximum": 5},
        "order_id": {"type": ["string", "null"], "maxLength": 8},
    },
    "required": ["category", "urgency", "order_id"],
    "additionalProperties": False,
}
RUSSIAN = "Обращение: не приходит код из СМС, заказ 48213. Ответ в JSON: "
TALK = [{"role": "user", "content": RUSSIAN}]
VLLM = {"json": SCHEMA}
RULE = {"schema_type": "json", "schema": SCHEMA}
FORMAT = {"type": "json_schema", "json_schema": {"name": "ticket", "schema": SCHEMA}}
FLAT = {"format": {"type": "json_schema", "name": "ticket", "schema": SCHEMA}}
WORDS = {
    "published": ("/v1/generate", {"prompt": RUSSIAN, "structured_output": RULE}),
    "so_args": ("/v1/completions", {"prompt": RUSSIAN, "so_args": RULE, "max_tokens": 200}),
    "vllm": ("/v1/completions", {"prompt": RUSSIAN, "structured_outputs": VLLM, "max_tokens": 200}),
    "openai": ("/v1/chat/completions", {"messages": TALK, "response_format": FORMAT}),
    "responses": ("/v1/responses", {"input": RUSSIAN, "text": FLAT}),
}  # fmt: skip


def text_of(answer):
    body = answer.json
    if "output" in body:
        return body["output"][0]["content"][0]["text"]
    if "choices" in body:
        (choice,) = body["choices"]
        return choice["text"] if "text" in choice else choice["message"]["content"]
    return body["text"]


@pytest.mark.parametrize("words", WORDS)
def test_a_schema_is_obeyed_in_every_dialect(demo_server, words):
    path, body = WORDS[words]
    for seed in range(3 if words == "published" else 1):
        more = {} if words == "responses" else {"seed": seed}
        answer = demo_server.post(path, temperature=1.0, **more, **body)
        assert answer.status == 200, answer.text
        jsonschema.validate(json.loads(text_of(answer)), SCHEMA)


def test_a_stream_obeys_too(demo_server):
    body = {"prompt": RUSSIAN, "structured_output": RULE, "seed": 4, "temperature": 1.0}
    whole = demo_server.post("/v1/generate", **body).json
    events = demo_server.post("/v1/generate", stream=True, **body).events
    text = "".join(data.get("text", "") for _, data in events if data != "[DONE]")
    assert text == whole["text"]
    jsonschema.validate(json.loads(text), SCHEMA)


REFUSED = [
    ({"type": "object", "properties": {"a": {"type": "strin"}}}, "/properties/a"),
    ({"properties": {"a": {"pattern": "(?<=x)y", "type": "string"}}}, "/properties/a"),
    ("no schema", ""),
]


@pytest.mark.parametrize("schema, where", REFUSED, ids=lambda v: str(v)[:40])
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_enforced_is_refused_with_its_place(demo_server, schema, where, stream):
    rule = {"schema_type": "json", "schema": schema}
    answer = demo_server.post("/v1/generate", prompt="x", structured_output=rule, stream=stream)
    assert answer.status == 400, answer.text
    assert where in answer.error["message"]
    assert answer.error["param"].startswith("structured_output"), answer.error
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    if isinstance(schema, dict):
        asked = demo_server.post("/v1/chat/completions", messages=TALK, response_format=form)
        assert asked.status == 400
        assert asked.error["param"].startswith("response_format"), asked.error


def test_a_cut_text_says_so(demo_server):
    body = {"prompt": RUSSIAN, "structured_output": RULE, "max_tokens": 3}
    assert demo_server.post("/v1/generate", **body).json["finish_reason"] == "length"


def test_metrics_count_grammars(demo_server):
    text = demo_server.get("/metrics").text
    assert "deepinfer_engine_grammar" in text
