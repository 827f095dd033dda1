"""Who has to wait, for how long, and who may not come in at all."""

import contextlib
import json
import threading

import pytest
from deepinfer.errors import ConfigError
from deepinfer.server.config import ServerConfig
from deepinfer.server.errors import Refusal
from deepinfer.server.limits import Limits

LONG = {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "abc", "max_tokens": 2}


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def spend(limits, key="me", times=1):
    for _ in range(times):
        with limits.admit(key, 10**6):
            pass


def test_a_minute_brings_as_many_as_the_rate_says():
    clock = Clock()
    limits = Limits(ServerConfig(requests_per_minute=6), clock)
    spend(limits, times=6)
    with pytest.raises(Refusal) as why:
        spend(limits)
    assert why.value.status == 429
    assert why.value.retry_after == pytest.approx(10.5)
    spend(limits, "another")
    clock.now += why.value.retry_after
    spend(limits)
    with pytest.raises(Refusal):
        spend(limits)
    clock.now += 3600
    spend(limits, times=6)
    with pytest.raises(Refusal):
        spend(limits)


def test_what_is_refused_costs_nothing():
    clock = Clock()
    limits = Limits(ServerConfig(requests_per_minute=2, max_concurrency_per_key=1), clock)
    with limits.admit("me", 10):
        for _ in range(5):
            with pytest.raises(Refusal, match="of this key"):
                spend(limits)
    spend(limits)


def test_keys_without_end_do_not_pile_up():
    clock = Clock()
    limits = Limits(ServerConfig(requests_per_minute=1), clock)
    for number in range(10_000):
        clock.now += 0.001
        spend(limits, f"k{number}")
    assert len(limits._buckets) <= 4096
    assert not limits._inside


def test_the_count_is_right_after_a_failure():
    limits = Limits(ServerConfig())
    with contextlib.suppress(ValueError), limits.admit("me", 1):
        raise ValueError
    with limits.admit("me", 1):
        assert limits.inside == 1
        with pytest.raises(Refusal, match="places"):
            limits.admit("other", 1).__enter__()
    assert limits.inside == 0


@pytest.mark.parametrize("name", ["max_queue", "max_n", "stall_seconds", "requests_per_minute"])
def test_limits_that_are_none(name):
    with pytest.raises(ConfigError, match=name):
        ServerConfig(**{name: 0})


def test_a_full_queue_says_so(toy_server, slow, wait_for):
    server = toy_server(slow(max_num_seqs=1), max_queue=1)
    with contextlib.ExitStack() as stack, server.opened("/v1/generate", **LONG) as one:
        one.readline()
        second = threading.Thread(
            target=lambda: server.post("/v1/generate", prompt="abc", max_tokens=1)
        )
        second.start()
        stack.callback(second.join, 10)
        wait_for(lambda: server.llm.get_num_unfinished_requests() == 2)
        answer = server.post("/v1/generate", **SHORT)
        assert (answer.status, answer.error["code"]) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        assert server.get("/health").status == 200
    server.wait_idle()
    assert server.post("/v1/generate", **SHORT).status == 200


def test_samples_count_not_requests(toy_server, slow):
    server = toy_server(slow(max_num_seqs=2), max_queue=2)
    with server.opened("/v1/generate", **LONG) as stream:
        stream.readline()
        assert server.post("/v1/completions", prompt="abc", n=4).status == 429
        assert server.post("/v1/completions", prompt="abc", n=5).status == 400
    server.wait_idle()


def test_large_bodies_are_not_read(toy_server):
    server = toy_server(max_body_bytes=1000)
    told = server.post("/v1/generate", prompt="a" * 2000)
    assert (told.status, told.error["code"]) == (413, "body_too_large")
    connection = server.connect()
    try:  # in chunks, which tell no length
        parts = (b'{"prompt": "' + b"a" * 500 for _ in range(10))
        connection.request(
            "POST", "/v1/generate", parts, {"content-type": "application/json"}, encode_chunked=True
        )
        assert connection.getresponse().status == 413
    finally:
        connection.close()
    assert server.post("/v1/generate", **SHORT).status == 200


def test_lengths_are_bounded(toy_server):
    server = toy_server(max_tokens=5)
    asked = {"prompt": "abc", "ignore_eos": True}
    refused = server.post("/v1/generate", **asked, max_tokens=6)
    assert (refused.status, refused.error["param"]) == (400, "max_tokens")
    assert server.post("/v1/generate", **asked).json["usage"]["completion_tokens"] == 5


def test_a_key_has_its_own_concurrency(toy_server, slow):
    keys = ("key-one-1", "key-two-2")
    server = toy_server(slow(), api_keys=keys, max_concurrency_per_key=1)
    one, two = ({"authorization": f"Bearer {key}"} for key in keys)
    connection = server.connect()
    try:
        head = {"content-type": "application/json", **one}
        connection.request("POST", "/v1/generate", json.dumps(LONG), head)
        response = connection.getresponse()
        response.readline()
        refused = server.post("/v1/generate", one, **SHORT)
        assert (refused.status, refused.error["code"]) == (429, "concurrency_limit")
        assert server.post("/v1/generate", two, **SHORT).status == 200
        response.close()
    finally:
        connection.close()
    server.wait_idle()
    assert server.post("/v1/generate", one, **SHORT).status == 200
