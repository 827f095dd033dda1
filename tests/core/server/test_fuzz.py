"""Bodies that nobody meant: never a 5xx, never a leak."""

import copy
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TALK = [
    {"role": "system", "content": "ab"},
    {"role": "user", "content": [{"type": "text", "text": "abc"}]},
    {"role": "assistant", "content": "x", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    ]},
    {"role": "tool", "tool_call_id": "c", "content": "a"},
]  # fmt: skip
GOOD = {
    "/v1/generate": {
        "prompt": "abc", "temperature": 0.5, "seed": 1, "max_tokens": 3, "n": 2, "stop": ["x"],
        "logprobs": 1, "top_k": 3, "stream": False, "logit_bias": {"1": 2.0},
        "structured_output": {"schema_type": "json", "schema": {"type": "object"}},
    },
    "/v1/completions": {
        "prompt": ["abc", "x"], "max_tokens": 3, "stream": True, "logprobs": 2, "echo": False,
        "stream_options": {"include_usage": True}, "bad_words": ["x"], "stop_token_ids": [3],
    },
    "/v1/chat/completions": {
        "messages": TALK, "max_completion_tokens": 3, "tools": [TOOL], "tool_choice": "none",
        "logprobs": True, "top_logprobs": 2, "response_format": {"type": "text"}, "user": "me",
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "abc"}]}],
        "max_output_tokens": 3, "stream": False, "text": {"format": {"type": "text"}},
        "reasoning": {"effort": None}, "metadata": {"a": "b"},
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}]}],
        "max_tokens": 3, "system": "ab", "stop_sequences": ["x"], "top_k": 2,
        "thinking": {"type": "adaptive"}, "metadata": {},
    },
    "/tokenize": {"messages": TALK, "tools": None},
    "/detokenize": {"tokens": [1, 2]},
    "/abort_requests": {"request_ids": ["a"]},
}  # fmt: skip
ODD = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**70, -(2**63) - 1, 0.5, -0.0, 1e308, "", "x", "é",
    "\x00", "\U0001f600", "ab" * 300, [], [[]], [None], {}, {"": 0}, {"type": "text"}, "data:,x",
    "json", [1, "a"], {"a": {"b": [{"c": None}]}},
]  # fmt: skip


def places(value, path=()):
    """Every place in a body."""
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield from places(inner, (*path, key))


def spoiled(body, draw):
    """The same body with one or two places changed, added or taken out."""
    body = copy.deepcopy(body)
    for _ in range(draw.choice((1, 1, 2))):
        path = draw.choice([p for p in places(body) if p])
        parent = body
        for key in path[:-1]:
            parent = parent[key]
        how = draw.random()
        if how < 0.65:
            parent[path[-1]] = copy.deepcopy(draw.choice(ODD))
        elif how < 0.8:
            del parent[path[-1]]
        elif isinstance(parent, dict):
            parent[draw.choice(("nonsense", "type", "schema", "name", "prefix"))] = draw.choice(ODD)
        else:
            parent.append(copy.deepcopy(draw.choice(ODD)))
        if not any(True for p in places(body) if p):
            break
    return body


@pytest.mark.parametrize("path", GOOD)
def test_spoiled_bodies_get_an_answer(toy_shared, path):
    draw = random.Random(path)
    statuses = set()
    for _ in range(80):
        body = spoiled(GOOD[path], draw)
        answer = toy_shared.ask("POST", path, body)
        assert answer.status < 500, (body, answer.text)
        statuses.add(answer.status)
        if answer.status >= 400:
            assert answer.error["message"], body
            param = answer.error["param"]
            assert param is None or re.fullmatch(r"[^\n]{1,200}", param), body
    assert 400 in statuses
    toy_shared.wait_idle()


@pytest.mark.slow
def test_a_thousand_requests_by_schemathesis(toy_server, tmp_path):
    """Good and malformed ones, made from the server's own document."""
    tool = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    if tool is None:
        pytest.skip("schemathesis is not installed")
    server = toy_server(max_tokens=8)
    done = subprocess.run(
        [
            *(tool, "run", f"{server.url}/openapi.json", "--mode", "all", "--phases", "fuzzing"),
            *("--max-examples", "120", "--seed", "1", "--checks", "not_a_server_error"),
            *("--request-timeout", "20"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    lines = [
        line for line in server.get("/metrics").text.splitlines() if "http_requests_total{" in line
    ]
    counts = {line.split('status="')[1][:3]: 0 for line in lines}
    for line in lines:
        counts[line.split('status="')[1][:3]] += float(line.rpartition(" ")[2])
    assert sum(counts.values()) >= 1000, counts
    assert not [status for status in counts if status >= "500"]
    server.wait_idle()
    print(json.dumps(counts))
