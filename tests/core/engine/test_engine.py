"""The loop: refusals, faults, ends, Ctrl-C, statistics, and what it costs."""

import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
from deepinfer.api.plan import BatchPlan, Request, RowBlock, StepOutput
from deepinfer.engine import in_flight
from deepinfer.errors import (
    DeviceLostError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    KVCacheTooSmallError,
    ModelFaultError,
    UnsupportedError,
)
from deepinfer.testing.fake import FakeExecutor, FakeScript
from deepinfer.testing.toy import ToyGrammar, ToyGrammarBackend


@pytest.mark.parametrize(
    "prompt, options, setting, words",
    [
        ((), {}, "prompt", "empty"),
        (range(70), {"limit": 90}, "max_model_len", "max_model_len=64"),
        ((1, 2), {"limit": 65}, "max_model_len", "65"),
        ((1, 2), {"limit": 2}, "max_model_len", "limit of 2"),
        ((1, 17), {}, "prompt_token_ids", "id 17 is outside the vocabulary (0 … 16)"),
        ((1, -1), {}, "prompt_token_ids", "id -1"),
    ],
)
def test_what_can_never_run_is_refused(lab, prompt, options, setting, words):
    engine = lab.engine()
    request = lab.request(prompt=(1,), **options)
    bad = Request("bad", tuple(prompt), request.sampling, request.row_params, 1, request.limit)
    with pytest.raises(InvalidRequestError, match="bad") as error:
        engine.add(bad)
    assert error.value.setting == setting and words in str(error.value)
    assert not engine.has_work()


def test_stop_texts_need_a_tokenizer(lab):
    engine = lab.engine(tokenizer=None)
    with pytest.raises(InvalidRequestError, match="stop texts need a tokenizer"):
        engine.add(lab.request(stop="a"))
    engine.add(lab.request())
    assert lab.run(engine)["r"][1].text == ""


def test_an_id_is_used_once_at_a_time(lab):
    engine = lab.engine()
    engine.add(lab.request("twin"))
    with pytest.raises(InvalidRequestError, match="twin"):
        engine.add(lab.request("twin"))
    lab.run(engine)
    engine.add(lab.request("twin"))


def test_a_cache_too_small_says_what_is_needed(lab):
    engine = lab.engine(FakeScript(num_pages=3))
    with pytest.raises(KVCacheTooSmallError, match="21 tokens need 6 pages") as error:
        engine.add(lab.request(max_tokens=16))
    assert error.value.setting == "kv_cache_memory"
    assert "Set kv_cache_memory to 192" in error.value.next_step  # 6 pages of 4 tokens of 8 bytes
    engine.add(lab.request(max_tokens=7))
    assert len(lab.run(engine)["r"][0]) == 7


@pytest.mark.parametrize("draft_len", [0, 2])
def test_a_fault_fails_its_own_request_only(lab, draft_len):
    engine = lab.engine(FakeScript(poison=16, draft_len=draft_len))
    engine.add(lab.request("good"))
    engine.add(lab.request("bad", (1, 2, 16)))
    engine.add(lab.request("stuck", allowed_token_ids=[0], min_tokens=3, ignore_eos=False))
    found = lab.run(engine)
    assert found["good"][1].finish in ("length", "error")
    for name, word in (("bad", "position 3"), ("stuck", "position 5")):
        last = found[name][1]
        assert last.finish == "error" and isinstance(last.error, ModelFaultError)
        assert word in str(last.error) and name in str(last.error)


@pytest.mark.parametrize("jitter", [None, 0.0])
def test_a_dead_device_ends_every_request(lab, jitter):
    engine = lab.engine(FakeScript(fail_at=3, jitter=jitter))
    engine.add(lab.request("a"))
    engine.add(lab.request("b"))
    found = lab.run(engine)
    for _, last in found.values():
        assert last.finish == "error" and isinstance(last.error, EngineDeadError)
        assert "planted failure of step 3" in str(last.error.__cause__)
    assert not engine.has_work()
    for call in (engine.step, lambda: engine.add(lab.request("c"))):
        with pytest.raises(EngineDeadError, match="planted failure") as error:
            call()
        assert isinstance(error.value.__cause__, RuntimeError)
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.step()


def test_a_device_that_says_what_to_do_is_quoted(lab, monkeypatch):
    engine = lab.engine(FakeScript())
    engine.add(lab.request("a"))
    lost = DeviceLostError("gpu:0 is lost.", next_step="Start the process again.")

    def forward(plan):
        raise lost

    monkeypatch.setattr(engine.executor, "forward", forward)
    ((_, last),) = lab.run(engine).values()
    assert str(last.error) == "The engine has stopped: gpu:0 is lost. Start the process again."
    assert last.error.__cause__ is lost


def test_an_idle_replica_can_run_an_empty_plan(lab):
    """``agree`` may answer with a plan although this replica has none."""

    class Lockstep(FakeExecutor):
        empty = 0

        def agree(self, plan):
            if plan is None and self.empty < 2:
                self.empty += 1
                rows = RowBlock(np.zeros((0, 5), np.int32))
                return BatchPlan(900 + self.empty, (), rows, np.zeros((0, 3), np.int32))
            return plan

    executor = Lockstep(FakeScript())
    engine = lab.engine(executor=executor)
    engine.add(lab.request(stop_token_ids=range(1, 17), max_tokens=9))
    assert lab.run(engine)["r"][1].finish == "stop"
    assert executor.empty == 2


def test_abort_anywhere(lab):
    engine = lab.engine(config={"max_num_seqs": 1})
    assert not engine.abort("nobody")
    engine.add(lab.request("runs"))
    engine.add(lab.request("waits"))
    engine.step()
    assert engine.abort("waits") and engine.abort("runs") and not engine.abort("runs")
    found = lab.run(engine)
    assert {last.finish for _, last in found.values()} == {"abort"}
    assert engine.counters.finished == {"abort": 2}


def test_close_ends_everything_and_may_be_called_twice(lab):
    before = threading.active_count()
    engine = lab.engine(FakeScript(jitter=0.001))
    for i in range(12):
        engine.add(lab.request(f"r{i}"))
    for _ in range(3):
        engine.step()
    engine.close()
    engine.close()
    assert engine.cache.pool.free == engine.cache.pool.num_pages
    assert threading.active_count() == before
    with pytest.raises(EngineClosedError):
        engine.add(lab.request("late"))
    assert not engine.has_work()


class Ctrl(FakeExecutor):
    """Raises KeyboardInterrupt once, while the host waits."""

    waits = 0
    strike = 4

    def sample(self, step, inputs):
        return Struck(self, super().sample(step, inputs))


class Struck:
    def __init__(self, owner, answer):
        self.owner, self.answer = owner, answer

    def result(self):
        self.owner.waits += 1
        if self.owner.waits == self.owner.strike:
            raise KeyboardInterrupt
        return self.answer.result()


@pytest.mark.parametrize("structured", [None, 4])
def test_ctrl_c_loses_nothing(lab, structured):
    found = []
    for strike in (0, 4, 5):
        executor = Ctrl(FakeScript())
        executor.strike = strike
        engine = lab.engine(executor=executor, grammar_backend=ToyGrammarBackend(17))
        for i in range(3):
            engine.add(lab.request(f"r{i}", seed=i, structured=structured))
        try:
            early = lab.run(engine)
        except KeyboardInterrupt:
            early = {}
            assert strike
        lab.run(engine)
        assert engine.counters.finished == {"length": 3}
        found.append((sum(len(ids) for ids, _ in early.values()), engine.counters.output_tokens))
    assert found[0][0] == found[0][1] == found[1][1] == found[2][1]


def test_a_structured_request_needs_a_plugin(lab):
    engine = lab.engine()
    with pytest.raises(UnsupportedError, match="deepinfer-structured"):
        engine.add(lab.request(structured=4))


def test_grammars_are_compiled_beside_the_steps(lab):
    may_go = threading.Event()

    class Slow(ToyGrammarBackend):
        def compile(self, spec, ends):
            may_go.wait(10)
            return super().compile(spec, ends)

    engine = lab.engine(grammar_backend=Slow(17))
    engine.add(lab.request("plain", max_tokens=3))
    for name, modulus in (("slow", 4), ("refused", 1), ("gone", 4)):
        engine.add(lab.request(name, structured=modulus))
    found = {}
    while "plain" not in found:
        found.update({d.request_id: d for d in engine.step() if d.finish})
    assert engine.abort("gone")
    may_go.set()
    found.update({name: last for name, (_, last) in lab.run(engine).items()})
    assert found["slow"].finish == "length" and found["gone"].finish == "abort"
    assert found["refused"].finish == "error" and "modulus 1" in str(found["refused"].error)


@pytest.mark.parametrize("method", ["fill", "accept"])
def test_a_broken_matcher_fails_its_own_request(lab, method):
    class Broken(ToyGrammar):
        pass

    def fail(self, *_):
        raise ZeroDivisionError("planted")

    setattr(Broken, method, fail)
    backend = ToyGrammarBackend(17)
    backend.grammar = Broken
    engine = lab.engine(grammar_backend=backend)
    engine.add(lab.request("plain"))
    engine.add(lab.request("broken", structured=4))
    found = lab.run(engine)
    assert found["plain"][1].finish == "length"
    assert isinstance(found["broken"][1].error, ZeroDivisionError)


def test_a_broken_grammar_backend_fails_those_who_need_it(lab):
    class Broken(ToyGrammarBackend):
        def fill(self, jobs, rows):
            raise ZeroDivisionError("planted")

    engine = lab.engine(grammar_backend=Broken(17))
    for name, structured in (("plain", None), ("one", 4), ("two", 5)):
        engine.add(lab.request(name, structured=structured))
    found = lab.run(engine)
    assert found["plain"][1].finish == "length"
    assert all(isinstance(found[n][1].error, ZeroDivisionError) for n in ("one", "two"))


def test_statistics_and_observers(lab, caplog):
    class Watch:
        def __init__(self):
            self.steps, self.ends = [], []

        def on_step(self, stats):
            self.steps.append(stats)

        def on_finish(self, delta):
            self.ends.append(delta)

    class Faulty(Watch):
        def on_step(self, stats):
            raise ValueError("planted")

    watch = Watch()
    engine = lab.engine(observers=[Faulty(), watch])
    for i in range(3):
        engine.add(lab.request(f"r{i}", max_tokens=5))
    lab.run(engine)
    counters = engine.counters
    assert (counters.requests, counters.output_tokens, counters.finished) == (3, 15, {"length": 3})
    assert counters.prompt_tokens + counters.cached_tokens == 15
    assert sum(s.prefill_tokens + s.decode_rows for s in watch.steps) == counters.prompt_tokens + 12
    assert counters.steps == max(s.step for s in watch.steps)
    assert [d.request_id for d in watch.ends] == ["r0", "r1", "r2"]
    assert len([r for r in caplog.records if "observer" in r.message]) == 1
    metrics = watch.ends[0].metrics
    assert metrics.first_scheduled <= metrics.first_token <= metrics.finished
    assert (metrics.prompt_tokens, metrics.output_tokens) == (5, 5)


def test_the_brain_needs_no_torch():
    code = (
        "import sys, deepinfer.engine.engine, deepinfer.testing.fake; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_host_time_of_a_step(lab):
    """The acceptance limit is 1 ms at 64 rows; benchmarks/host_overhead.py shows about 0.25."""

    class Instant(FakeExecutor):
        def forward(self, plan):
            self.plan = plan

        def sample(self, step, inputs):
            import numpy as np

            emits = self.plan.rows.array[:, 3].astype(np.int32)
            answer = Future()
            answer.set_result(StepOutput(step, np.ones((len(emits), 1), np.int32), emits))
            return answer

    script = FakeScript(num_pages=64 * 8, page_size=16, max_model_len=128, max_num_seqs=64)
    engine = lab.engine(executor=Instant(script), clock=time.thread_time)
    for i in range(64):
        engine.add(lab.request(f"r{i}", max_tokens=100))
    for _ in range(20):
        engine.step()
    spent = []
    for _ in range(50):
        engine.step()
        stats = engine.stats
        assert stats.decode_rows == 64
        spent.append(stats.plan_seconds + stats.collect_seconds + stats.output_seconds)
    assert sorted(spent)[25] < 0.001


@pytest.mark.parametrize("short", [True, False])
def test_short_steps_are_waited_for_until_they_are_launched(lab, monkeypatch, short):
    """The threads of brain and device take turns otherwise; where steps are long, none waits."""
    monkeypatch.setattr(in_flight, "_SHORT", 1e9 if short else 0.0)
    waited = []

    class Answer(Future):
        def launched(self):
            waited.append(self.step)

    class Executor(FakeExecutor):
        def start(self, *args):
            return replace(super().start(*args), graph_rows=64)

        def sample(self, step, inputs):
            answer = Answer()
            answer.step = step
            answer.set_result(super().sample(step, inputs).result())
            return answer

    engine = lab.engine(executor=Executor(FakeScript()))
    for i in range(3):
        engine.add(lab.request(f"r{i}", max_tokens=9))
        engine.step()
    lab.run(engine)
    assert waited == (list(range(1, 1 + len(waited))) if short else [])
    assert len(waited) > 9 or not short
