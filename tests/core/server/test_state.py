"""Alive, ready, stalled, draining, dead; what the metrics and the log say of it."""

import json
import logging
import re
import threading
import time

import pytest
from deepinfer.api.plan import Delta, RequestMetrics, StepStats
from deepinfer.server.config import ServerConfig
from deepinfer.server.health import Stall
from deepinfer.server.metrics import Metrics, Spread
from deepinfer.server.service import Service

LONG = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "abc", "max_tokens": 3, "ignore_eos": True}


def metric(text, name):
    """The value of a sample."""
    lines = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    assert len(lines) == 1, (name, lines)
    return float(lines[0].rpartition(" ")[2])


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_stall_is_requests_without_steps():
    clock, open_ = Clock(), [0]
    metrics = Metrics(clock)
    stall = Stall(metrics, lambda: open_[0], 10, clock)
    clock.now = 1000
    assert stall.look() is None  # idle, however long
    stall.begins()
    open_[0] = 1
    clock.now += 9
    assert stall.look() is None
    clock.now += 2
    assert stall.look() == 11
    metrics.on_step(StepStats(step=1))
    assert stall.look() is None
    stall.begins()  # new ones do not hide that nothing moves
    clock.now += 11
    assert stall.look() == 11
    open_[0] = 0
    assert stall.look() is None
    clock.now += 1000
    stall.begins()
    open_[0] = 1
    assert stall.look() is None  # the old times are no stall of the new request


def test_ready_says_stalled_and_health_does_not(toy_server, slow, wait_for, monkeypatch):
    server = toy_server(slow(), stall_seconds=0.05)
    engine, go_on = server.engine, threading.Event()
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: go_on.wait(10) and step())
    asking = threading.Thread(target=lambda: server.post("/v1/generate", **SHORT))
    asking.start()
    wait_for(lambda: server.get("/ready").status == 503)
    assert server.get("/ready").json["status"] == "stalled"
    assert server.get("/health").status == 200
    assert metric(server.get("/metrics").text, "deepinfer_ready") == 0
    go_on.set()
    asking.join(10)
    wait_for(lambda: server.get("/ready").status == 200)


def test_a_dead_engine_is_not_alive(toy_server, wait_for):
    from deepinfer.testing.fake import FakeScript

    server = toy_server(FakeScript(fail_at=3))
    answer = server.post("/v1/generate", prompt="abc", ignore_eos=True)
    assert answer.status == 503
    assert server.get("/health").status == 503
    assert server.get("/ready").json["status"] == "dead"
    assert server.post("/v1/generate", **SHORT).status == 503


def test_a_poisoned_request_is_alone(toy_server):
    from deepinfer.testing.fake import FakeScript

    server = toy_server(FakeScript(poison=13))
    answer = server.post("/v1/generate", prompt=[13], max_tokens=3)
    assert (answer.status, answer.error["code"]) == (500, "model_fault")
    assert server.post("/v1/generate", prompt=[1], max_tokens=1, temperature=0).status == 200


def test_a_stream_that_breaks_says_why(toy_server):
    from deepinfer.testing.fake import FakeScript

    for path, body in {
        "/v1/generate": {"prompt": "abc", "ignore_eos": True},
        "/v1/messages": {
            "messages": [{"role": "user", "content": "abc"}],
            "max_tokens": 40,
            "temperature": 0,
        },
    }.items():
        server = toy_server(FakeScript(fail_at=4, jitter=0.02))
        events = server.post(path, stream=True, **body).events
        errors = [data for _, data in events if "error" in data]
        assert errors and "stopped" in json.dumps(errors[-1]), path


def test_loading_is_alive_and_not_ready():
    service = Service(ServerConfig())
    assert service.readiness().state == "loading"
    assert service.death() is None
    with pytest.raises(Exception, match="loading"):
        service.check_open()
    service.close()


def test_drain_lets_the_running_end_and_refuses_new_ones(toy_server, slow, wait_for):
    server = toy_server(slow(jitter=0.005), drain_seconds=30)
    with server.opened("/v1/generate", **LONG) as stream:
        stream.readline()
        server.server.stop()
        wait_for(lambda: server.service.phase == "draining")
        assert server.get("/health").status == 200
        assert server.get("/ready").json["status"] == "draining"
        refused = server.post("/v1/generate", **SHORT)
        assert (refused.status, refused.error["code"]) == (503, "draining")
        assert "retry-after" in refused.headers
        rest = stream.read().decode()
    assert '"finish_reason": "length"' in rest
    server.thread.join(10)
    assert not server.thread.is_alive()


def test_drain_has_a_deadline(toy_server, slow):
    server = toy_server(slow(jitter=0.02), drain_seconds=0.2)
    with server.opened("/v1/generate", **{**LONG, "max_tokens": 4000}) as stream:
        stream.readline()
        began = time.monotonic()
        server.server.stop()
        rest = stream.read().decode()
    assert '"finish_reason": "abort"' in rest
    server.thread.join(10)
    assert 0.2 <= time.monotonic() - began < 5


def test_stopping_twice_is_stopping_now(toy_server, slow):
    server = toy_server(slow(jitter=0.02), drain_seconds=60)
    with server.opened("/v1/generate", **{**LONG, "max_tokens": 4000}) as stream:
        stream.readline()
        server.server.stop()
        time.sleep(0.1)
        server.server.stop()
        server.thread.join(15)
        assert not server.thread.is_alive()


def test_a_spread_is_a_histogram():
    spread = Spread((1.0, 2.0))
    for value, weight in ((0.5, 2), (1.0, 1), (1.5, 1), (9.0, 3)):
        spread.add(value, weight)
    (family,) = [spread.family("x", "about")]
    samples = {(s.name, s.labels.get("le")): s.value for s in family.samples}
    assert samples[("x_bucket", "1.0")] == 3
    assert samples[("x_bucket", "2.0")] == 4
    assert samples[("x_bucket", "+Inf")] == samples[("x_count", None)] == 7
    assert samples[("x_sum", None)] == pytest.approx(1 + 1 + 1.5 + 27)


def test_an_observer_knows_times_and_drafts():
    clock = Clock()
    metrics = Metrics(clock)
    times = {"arrival": 0.0, "first_scheduled": 0.2, "first_token": 0.7, "finished": 2.7}
    counts = {"prompt_tokens": 5, "output_tokens": 9, "cached_tokens": 2}
    drafts = {"drafted": 8, "verified": 6, "accepted": 4}
    metrics.on_finish(
        Delta("r", finish="stop", metrics=RequestMetrics(**times, **counts, **drafts))
    )
    for _ in range(3):
        metrics.on_step(StepStats(step=1, decode_rows=4, running=4))
        clock.now += 0.03
    text = metrics.text().decode()
    want = {
        "time_to_first_token_seconds_sum": 0.7,
        "queue_seconds_sum": 0.2,
        "prefill_seconds_sum": 0.5,
        "decode_seconds_sum": 2.0,
        "request_seconds_sum": 2.7,
        "inter_token_latency_seconds_sum": 2 * 4 * 0.03,
        "inter_token_latency_seconds_count": 8,
        "prompt_tokens_total": 5,
        "output_tokens_total": 9,
        "cached_prompt_tokens_total": 2,
        "draft_tokens_total": 8,
        "verified_draft_tokens_total": 6,
        "accepted_draft_tokens_total": 4,
    }
    for name, value in want.items():
        assert metric(text, f"deepinfer_{name}") == pytest.approx(value), name


def test_no_series_is_named_by_a_stranger(toy_server):
    """Methods and paths of a client's own, with and without a key: each would stay for ever."""
    server = toy_server(api_keys=("a-long-key",))
    for key in ("a-long-key", "another-key"):
        for name in ("FOO", "FOO-2", "get", "A" * 3000):
            for path in ("/health", "/v1/generate", f"/{name}"):
                server.ask(name, path, headers={"x-api-key": key})
    text = server.get("/metrics", headers={"x-api-key": "a-long-key"}).text
    labels = set(re.findall(r'method="([^"]*)",route="([^"]*)"', text))
    assert labels == {("other", route) for route in ("/health", "/v1/generate", "other")}


def test_metrics_count_what_happened(toy_server):
    server = toy_server()
    for _ in range(3):
        server.post("/v1/generate", **SHORT)
    server.post("/v1/generate", prompt="abc", nonsense=1)
    server.get("/nobody/knows/this")
    server.wait_idle()
    text = server.get("/metrics").text
    want = {
        'deepinfer_requests_finished_total{reason="length"}': 3,
        'deepinfer_http_requests_total{method="POST",route="/v1/generate",status="200"}': 3,
        'deepinfer_http_requests_total{method="POST",route="/v1/generate",status="400"}': 1,
        'deepinfer_http_requests_total{method="GET",route="other",status="404"}': 1,
        "deepinfer_output_tokens_total": 9,
        "deepinfer_prompt_tokens_total": 3,
        "deepinfer_time_to_first_token_seconds_count": 3,
        "deepinfer_requests_running": 0,
        "deepinfer_requests_waiting": 0,
        "deepinfer_engine_requests_total": 3,
        "deepinfer_engine_preemptions_total": 0,
        "deepinfer_kv_pages_free": 32,
        "deepinfer_kv_slots_free": 8,
        "deepinfer_ready": 1,
    }
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    for name, value in want.items():
        found = lines.get(name) or lines.get(_sorted(name))
        assert float(found) == value, name


def _sorted(name):
    """With its labels in the order in which they were declared."""
    for order in (("route", "method", "status"),):
        if "{" in name and "route" in name:
            head, _, rest = name.partition("{")
            labels = dict(part.split("=") for part in rest[:-1].split(","))
            return head + "{" + ",".join(f"{k}={labels[k]}" for k in order) + "}"
    return name


def test_the_access_log_tells_the_story(toy_server, slow, wait_for, caplog):
    caplog.set_level(logging.INFO, "deepinfer.server.access")
    server = toy_server(slow(), api_keys=("sk-secret-0123",))
    key = {"x-api-key": "sk-secret-0123", "x-request-id": "story"}
    server.post("/v1/generate", key, **SHORT)
    server.get("/version")

    def lines():
        return [json.loads(r.message) for r in caplog.records if r.name.endswith("access")]

    wait_for(lambda: len(lines()) == 2)
    story = next(line for line in lines() if line["request_id"] == "story")
    assert story["path"] == "/v1/generate" and story["status"] == 200
    assert story["key"] == "key1" and story["finish"] == ["length"]
    assert (story["prompt_tokens"], story["output_tokens"]) == (1, 3)
    assert story["id"].startswith("gen-") and story["seconds"] >= 0
    refused = next(line for line in lines() if line["request_id"] != "story")
    assert refused["status"] == 401
    assert "sk-secret" not in caplog.text


def test_who_left_is_logged_as_such(toy_server, slow, wait_for, caplog):
    caplog.set_level(logging.INFO, "deepinfer.server.access")
    server = toy_server(slow())
    with server.opened("/v1/generate", **LONG) as stream:
        stream.readline()
    server.wait_idle()

    def line():
        found = [r.message for r in caplog.records if r.name.endswith("access")]
        return json.loads(found[0]) if found else {}

    wait_for(lambda: line().get("status") == 499)
    assert line()["output_tokens"] > 0


def test_spans_of_a_request(toy_server, slow, wait_for):
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from deepinfer.server.tracing import OtelTracer
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    server = toy_server(slow(), tracer=OtelTracer(provider))
    answer = server.post("/v1/generate", **SHORT).json
    wait_for(lambda: len(exporter.get_finished_spans()) == 4)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    whole = spans["deepinfer.request"]
    assert whole.attributes["gen_ai.response.id"] == answer["id"]
    assert whole.attributes["gen_ai.usage.output_tokens"] == 3
    queue, prefill = spans["deepinfer.queue"], spans["deepinfer.prefill"]
    decode = spans["deepinfer.decode"]
    assert queue.end_time == prefill.start_time and prefill.end_time == decode.start_time
    assert all(s.parent.span_id == whole.context.span_id for s in (queue, prefill, decode))
    exporter.clear()
    with server.opened("/v1/generate", **LONG) as stream:
        stream.readline()
    wait_for(lambda: len(exporter.get_finished_spans()) == 1)
    assert exporter.get_finished_spans()[0].attributes["deepinfer.left_early"]
    provider.shutdown()
