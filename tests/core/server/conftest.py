"""A server on a real socket: a scripted device for most, the demo model where text matters."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from deepinfer.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.entrypoints.assemble import Assembly, assemble
from deepinfer.entrypoints.async_llm import AsyncLLM
from deepinfer.entrypoints.inputs import Preparer
from deepinfer.server.config import ServerConfig
from deepinfer.server.lifecycle import Server
from deepinfer.server.metrics import Metrics
from deepinfer.server.service import Service
from deepinfer.testing.fake import FakeExecutor, FakeScript
from deepinfer.testing.toy import ToyTokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
JSON = {"content-type": "application/json"}


class NamedTokenizer(ToyTokenizer):
    """What a server asks beside what an engine asks."""

    name = "toy"
    chat_templates = {"default": TEMPLATE}  # noqa: RUF012
    special_tokens = {}  # noqa: RUF012

    def encode(self, text, add_special_tokens=True):
        """What its vocabulary lacks is an ``x``, so that any text can be sent."""
        known = "".join(c if c in "abcx \n" else "x" for c in text)
        try:
            return super().encode(known, add_special_tokens)
        except StopIteration:
            return super().encode(known.replace("c", "x"), add_special_tokens)

    def id_to_token(self, token_id):
        return self.token_bytes(token_id).decode(errors="replace")


def toy_llm(metrics, script, seed=0, **config):
    executor, tokenizer = FakeExecutor(script), NamedTokenizer()
    settings = EngineConfig(model="toy-path", max_num_seqs=script.max_num_seqs, seed=seed, **config)
    facts = executor.start()
    engine = Engine(settings, executor, facts, tokenizer=tokenizer, observers=[metrics])
    assembly = Assembly(
        config=settings,
        executor=executor,
        facts=facts,
        tokenizer=tokenizer,
        engine=engine,
        preparer=Preparer(facts, tokenizer, frozenset({0}), seed),
    )
    return AsyncLLM.from_assembly(assembly)


class Answer(SimpleNamespace):
    """Status, headers (lower case) and body of a response."""

    @property
    def json(self):
        return json.loads(self.text)

    @property
    def error(self):
        return self.json["error"]

    @property
    def events(self):
        """Of a stream: (name, data) each."""
        found = []
        for block in self.text.split("\n\n"):
            lines = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
            if "data" in lines:
                data = lines["data"]
                found.append((lines.get("event"), data if data == "[DONE]" else json.loads(data)))
        return found


class Running:
    """A server that runs on a thread of its own."""

    def __init__(self, service, llm):
        self.service, self.llm = service, llm
        self.server = Server(service)
        self.url = self.server.url
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve()))
        self.thread.start()
        assert self.server.started.wait(10)

    def connect(self, timeout=120):
        return http.client.HTTPConnection(self.server.host, self.server.port, timeout=timeout)

    def ask(self, method, path, body=None, headers=()):
        """One request; ``body`` is bytes or what becomes JSON."""
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = self.connect()
        try:
            connection.request(method, path, raw, {**JSON, **dict(headers)})
            response = connection.getresponse()
            found = {k.lower(): v for k, v in response.getheaders()}
            return Answer(status=response.status, headers=found, text=response.read().decode())
        finally:
            connection.close()

    def post(self, path, headers=(), **body):
        return self.ask("POST", path, body, headers)

    def get(self, path, headers=()):
        return self.ask("GET", path, None, headers)

    @contextmanager
    def opened(self, path, **body):
        """A stream that the caller reads, or leaves."""
        connection = self.connect()
        try:
            connection.request("POST", path, json.dumps(body), JSON)
            response = connection.getresponse()
            try:
                yield response
            finally:
                response.close()
        finally:
            connection.close()

    @property
    def engine(self):
        return self.llm.assembly.engine

    def idle(self):
        """Whether nothing of any request is left: in the engine, in the server."""
        engine = self.engine
        return (
            self.llm.get_num_unfinished_requests() == 0
            and not self.service.running
            and self.service.limits.inside == 0
            and not engine.has_work()
            and len(engine.cache.slots) == self.llm.assembly.config.max_num_seqs
        )

    def wait_idle(self, seconds=5.0):
        wait_for(self.idle, seconds)
        assert self.engine.cache.pool.free == self.llm.assembly.facts.num_pages

    def stop(self):
        self.server.stop()
        self.thread.join(30)
        assert not self.thread.is_alive()


def wait_for(condition, seconds=5.0):
    """Until the condition holds; fails after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.005)


def toy_running(script=None, engine=(), tracer=None, **config):
    metrics = Metrics()
    more = {} if tracer is None else {"tracer": tracer}
    service = Service(ServerConfig(**{"drain_seconds": 0, **config}), metrics, **more)
    llm = toy_llm(metrics, script or FakeScript(), **dict(engine))
    service.attach(llm)
    return Running(service, llm)


@pytest.fixture(scope="module")
def toy_shared():
    """One server for a module whose tests leave nothing behind."""
    running = toy_running()
    yield running
    running.stop()
    running.llm.close()


@pytest.fixture
def toy_server():
    """``toy_server(script=…, **server_config)``: a server on a scripted device."""
    made = []

    def start(*args, **kwargs):
        made.append(toy_running(*args, **kwargs))
        return made[-1]

    yield start
    for running in made:
        running.stop()
        running.llm.close()


def slow_script(**changes):
    """Steps of some milliseconds, and room for long texts."""
    given = {"jitter": 0.01, "num_pages": 2048, "max_model_len": 4096, **changes}
    return FakeScript(**given)


@pytest.fixture(name="wait_for")
def wait_for_fixture():
    return wait_for


@pytest.fixture
def slow():
    return slow_script


@pytest.fixture(scope="session")
def demo_server(demo_gguf):
    """The demo model behind a socket, in invariant mode."""
    metrics = Metrics()
    service = Service(ServerConfig(drain_seconds=0, served_names=("smol",)), metrics)
    config = EngineConfig(
        model=str(demo_gguf), max_model_len=512, batch_invariant=True, max_num_seqs=16
    )
    llm = AsyncLLM.from_assembly(assemble(config, [metrics]))
    service.attach(llm)
    running = Running(service, llm)
    yield running
    running.stop()
    llm.close()
