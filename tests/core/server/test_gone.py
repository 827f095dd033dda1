"""Clients that leave: nothing of them stays, and nobody else notices."""

import asyncio
import gc
import json
import random
import socket
import threading
import time

import pytest

LONG = {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True}


def raw(server, path, body, buffer=None):
    """A request on a bare socket; the caller hangs up when it likes."""
    data = json.dumps(body).encode()
    sock = socket.socket()
    sock.settimeout(10)
    if buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.connect((server.server.host, server.server.port))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    sock.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return sock


ASKED = {
    "/v1/generate": LONG,
    "/v1/completions": {**LONG, "prompt": ["abc", "x"], "n": 2},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "abc"}],
        "max_tokens": 4000,
        "ignore_eos": True,
    },
    "/v1/responses": {"input": "abc", "max_output_tokens": 4000, "temperature": 1.0},
    "/v1/messages": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 4000},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ASKED)
def test_everything_is_free_soon_after_a_client_left(toy_server, slow, wait_for, path, stream):
    # A vocabulary whose end is rarely drawn, so that nothing ends by itself meanwhile.
    server = toy_server(slow(jitter=0.02))
    sock = raw(server, path, {**ASKED[path], "stream": stream})
    wait_for(lambda: server.llm.get_num_unfinished_requests() > 0)
    if stream:
        assert b"200 OK" in sock.recv(4096)
    sock.close()
    left = time.monotonic()
    server.wait_idle(2)
    assert time.monotonic() - left < 1.0


def test_a_client_that_leaves_while_it_waits_in_the_queue(toy_server, slow, wait_for):
    server = toy_server(slow(max_num_seqs=1))
    with server.opened("/v1/generate", **LONG, stream=True) as stream:
        stream.readline()
        sock = raw(server, "/v1/generate", LONG)
        wait_for(lambda: server.llm.get_num_unfinished_requests() == 2)
        sock.close()
        wait_for(lambda: server.llm.get_num_unfinished_requests() == 1)
    server.wait_idle()


def test_a_client_that_leaves_in_the_middle_of_its_body(toy_server, wait_for):
    server = toy_server()
    sock = socket.create_connection((server.server.host, server.server.port), 10)
    head = b"POST /v1/generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    sock.sendall(head + b'content-length: 100\r\n\r\n{"prompt"')
    wait_for(lambda: server.service.limits.inside == 1)
    sock.close()
    server.wait_idle()


def test_a_body_that_never_arrives_has_its_time(toy_server):
    server = toy_server(body_seconds=0.1)
    with socket.create_connection((server.server.host, server.server.port), 10) as sock:
        head = b"POST /v1/generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        sock.sendall(head + b'content-length: 100\r\n\r\n{"prompt"')
        assert b" 408 " in sock.recv(4096)
    server.wait_idle()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_reads_nothing_loses_its_connection(
    toy_server, slow, wait_for, monkeypatch, stream
):
    """And with it its place and its pages. Another one may be slow as long as it reads."""
    monkeypatch.setattr("deepinfer.server.lifecycle._UNREAD_SECONDS", 1.0)
    server = toy_server(slow(jitter=None), max_concurrency_per_key=2)
    # Small buffers in the kernel, so that those of the connection fill up.
    server.server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    connections = server.server._uvicorn.server_state.connections
    body = {**LONG, "max_tokens": 2000, "logprobs": 5, "stream": stream}
    with raw(server, "/v1/generate", body, 4096), raw(server, "/v1/generate", body, 4096) as reads:
        wait_for(lambda: len(connections) == 2)

        def one_is_left():
            time.sleep(0.005)
            assert reads.recv(1024)
            return len(connections) == 1

        wait_for(one_is_left, 20)
        wait_for(lambda: server.service.limits.inside == stream)  # a whole answer is written
        later = time.monotonic() + 1.3
        wait_for(lambda: one_is_left() and time.monotonic() > later)
        assert len(connections) == 1
    server.wait_idle()
    wait_for(lambda: not connections)
    assert server.post("/v1/generate", prompt="abc", max_tokens=2).status == 200


def test_a_third_hangs_up_and_the_others_do_not_notice(toy_server, slow):
    """Random departures among streams of which the rest must equal what they are alone."""
    server = toy_server(slow(jitter=0.002, max_num_seqs=8))
    draw = random.Random(3)
    asked = {"max_tokens": 40, "ignore_eos": True, "temperature": 1.0}
    want = {
        seed: server.post("/v1/generate", prompt="abc", seed=seed, **asked).json["text"]
        for seed in range(24)
    }
    wrong, leave = [], {seed: draw.random() < 1 / 3 for seed in want}

    def client(seed):
        body = {"prompt": "abc", "seed": seed, "stream": True, **asked}
        with server.opened("/v1/generate", **body) as stream:
            if leave[seed]:
                for _ in range(draw.randrange(1, 20)):
                    stream.readline()
                return
            answer = stream.read().decode()
        lines = [line[6:] for line in answer.splitlines() if line.startswith("data: {")]
        text = "".join(json.loads(line).get("text", "") for line in lines)
        if text != want[seed]:
            wrong.append((seed, text, want[seed]))

    for _ in range(2):
        clients = [threading.Thread(target=client, args=(seed,)) for seed in want]
        for each in clients:
            each.start()
        for each in clients:
            each.join(60)
        server.wait_idle()
    assert sum(leave.values()) >= 5
    assert not wrong
    assert server.service.metrics._finished.get("abort", 0) > 0


def test_no_task_is_left_behind(toy_server, slow, wait_for):
    server = toy_server(slow())
    loop = server.server._loop

    def tasks():
        return len(asyncio.all_tasks(loop))

    server.post("/v1/generate", prompt="abc", max_tokens=2)
    wait_for(lambda: server.idle())
    before = tasks()
    for stream in (False, True):
        for _ in range(5):
            sock = raw(server, "/v1/completions", {**ASKED["/v1/completions"], "stream": stream})
            wait_for(lambda: server.llm.get_num_unfinished_requests() > 0)
            sock.close()
            server.wait_idle()
    gc.collect()
    wait_for(lambda: tasks() <= before)
    assert not server.llm._streams


def test_one_huge_request_does_not_stall_the_others(toy_server, slow, monkeypatch):
    """Preparing takes long on a thread; the loop answers meanwhile."""
    server = toy_server(slow(jitter=None))
    preparer = server.llm.assembly.preparer
    prepare, begun, go_on = preparer.prepare, threading.Event(), threading.Event()

    def long_for_some(name, prompt, *rest):
        if prompt == "x":
            begun.set()
            assert go_on.wait(10)
        return prepare(name, prompt, *rest)

    monkeypatch.setattr(preparer, "prepare", long_for_some)
    huge = threading.Thread(target=lambda: server.post("/v1/generate", prompt="x", max_tokens=1))
    huge.start()
    assert begun.wait(5)
    try:
        assert server.post("/v1/generate", prompt="abc", max_tokens=3).status == 200
        assert server.get("/health").status == 200
    finally:
        go_on.set()
        huge.join(10)
