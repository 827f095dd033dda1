"""The local executor: order, errors, sizes of the KV pool, and what it leaves behind."""

import gc
import logging
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
from deepinfer.api.plan import DECODE, Admit, BatchPlan, RowBlock, RowParams
from deepinfer.config import EngineConfig
from deepinfer.errors import ConfigError, EngineClosedError, KVCacheTooSmallError, UnsupportedError
from deepinfer.executors.local import LocalExecutor
from deepinfer.models.checkpoint import open_checkpoint
from deepinfer.models.source import resolve
from deepinfer.ops.backend import CPUDevice
from deepinfer.plugins import PluginManager, Wanted
from deepinfer.testing.tiny import write_tiny_checkpoint

NO_PAGES = np.zeros((0, 3), np.int32)
PAGE_BYTES = 16 * 3 * 2 * 2 * 16 * 4  # tokens · layers · (k, v) · heads · dim · float32


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


def config_of(tiny, **arguments):
    arguments = {"backend": "reference", "max_num_seqs": 4, **arguments}
    return EngineConfig.make(model=tiny, **arguments)


def resolution_of(config):
    raw = open_checkpoint(resolve(config.model)).config
    return PluginManager().resolve(Wanted.by(config, raw["architectures"]), config)


@pytest.fixture
def started(tiny):
    executor = LocalExecutor()
    config = config_of(tiny)
    facts = executor.start(config, resolution_of(config))
    yield executor, facts
    executor.close()


def first_plan(prompt=(5, 6, 7), limit=20, step=0):
    admit = Admit(1, np.array(prompt, np.int32), limit, 3, RowParams(len(prompt), temperature=0.0))
    rows = RowBlock(np.array([[1, 0, len(prompt), 1, 0]], np.int32))
    return BatchPlan(step, (admit,), rows, np.array([[1, 0, 3], [1, 1, 9]], np.int32))


def decode_plan(step):
    return BatchPlan(step, (), RowBlock(np.array([[1, DECODE, 1, 1, 0]], np.int32)), NO_PAGES)


def decode(executor, steps=8):
    """Everything queued before the first answer is looked at."""
    futures = []
    for step in range(steps):
        executor.forward(first_plan() if step == 0 else decode_plan(step))
        futures.append(executor.sample(step, None))
    return [int(f.result().tokens[0, 0]) for f in futures]


def test_a_decode_loop(started, tiny):
    executor, facts = started
    ids = decode(executor)
    assert facts.architecture == "LlamaForCausalLM" and facts.vocab_size == 320
    assert facts.dtype == "float32" and facts.backend == "reference" and facts.draft_len == 0
    assert facts.weight_bytes > 0 and facts.load_seconds > 0 and facts.max_model_len == 512
    again = [5, 6, 7]
    for step in range(8):  # one id at a time, each from a fresh run over the whole text
        executor.forward(first_plan(again, step=10 + step))
        again.append(int(executor.sample(10 + step, None).result().tokens[0, 0]))
    assert again[3:] == ids


def test_answers_and_calls(started):
    executor, facts = started
    assert executor.agree(None) is None
    decode(executor, 3)
    (memory,) = executor.call("memory")
    assert memory["kv"] == facts.num_pages * PAGE_BYTES and memory["weights"] > 0
    (profile,) = executor.call("profile")
    assert profile["steps"] == 3 and profile["forward"] > 0
    assert {"open", "weights", "kv", "total"} <= set(executor.startup)
    with pytest.raises(ConfigError, match="there are trace, memory, profile, ops"):
        executor.call("explode")
    executor.forward(decode_plan(3))
    future = executor.sample(3, None)
    future.result()
    assert future.done() and future.result() is future.result()


def test_an_error_travels_in_its_future_and_stays(started):
    executor, _ = started
    good = decode(executor, 2)
    assert len(good) == 2
    host = executor._host
    assert host is not None

    def broken(plan):
        raise RuntimeError("the device fell over")

    host.runner.forward, real = broken, host.runner.forward
    executor.forward(decode_plan(2))  # does not raise: it only queues
    future = executor.sample(2, None)
    with pytest.raises(RuntimeError, match="fell over"):
        future.result()
    assert future.done()
    host.runner.forward = real
    for again in (
        lambda: executor.forward(decode_plan(3)),
        lambda: executor.sample(3, None),
        lambda: executor.call("memory"),
    ):
        with pytest.raises(RuntimeError, match="fell over"):
            again()
    executor.close()


def test_an_error_in_sample_stays_too(started):
    executor, _ = started
    executor.forward(first_plan())
    assert executor._host is not None
    executor._host.runner.sample = lambda step, inputs: 1 / 0
    with pytest.raises(ZeroDivisionError):
        executor.sample(0, None).result()
    with pytest.raises(ZeroDivisionError):
        executor.forward(decode_plan(1))


def test_close_is_idempotent_and_final(tiny):
    executor = LocalExecutor()
    config = config_of(tiny)
    executor.start(config, resolution_of(config))
    executor.forward(first_plan())
    future = executor.sample(0, None)
    thread = executor._thread
    executor.close()
    executor.close()
    assert not thread.is_alive()
    assert future.result().counts.tolist() == [1], "what ran is waited for"
    with pytest.raises(EngineClosedError):
        executor.forward(decode_plan(1))
    with pytest.raises(EngineClosedError):
        executor.start(config, resolution_of(config))


def test_close_before_start():
    executor = LocalExecutor()
    executor.close()
    assert not executor._thread.is_alive()


def test_dropping_it_ends_the_thread_and_frees_the_model(tiny):
    executor = LocalExecutor()
    config = config_of(tiny)
    executor.start(config, resolution_of(config))
    decode(executor, 2)
    assert executor._host is not None
    thread, model = executor._thread, weakref.ref(executor._host.runner._rig.model)
    del executor
    gc.collect()
    thread.join(10)
    gc.collect()
    assert not thread.is_alive() and model() is None


FORGETFUL = """
import sys
from deepinfer.config import EngineConfig
from deepinfer.executors.local import LocalExecutor
from deepinfer.plugins import PluginManager, Wanted
config = EngineConfig.make(model=sys.argv[1], backend="reference", max_num_seqs=2)
resolution = PluginManager().resolve(Wanted.by(config, ["LlamaForCausalLM"]), config)
executor = LocalExecutor()
executor.start(config, resolution)
print("started")
"""


def test_an_interpreter_that_forgets_to_close_still_ends(tiny):
    done = subprocess.run(
        [sys.executable, "-c", FORGETFUL, tiny], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\n", "")


def test_two_side_by_side_and_no_torch_setting_touched(tiny, started):
    before = (torch.get_num_threads(), torch.get_default_dtype(), torch.is_inference_mode_enabled())
    one, _ = started
    two = LocalExecutor()
    config = config_of(tiny, num_threads=1)
    two.start(config, resolution_of(config))
    try:
        assert decode(one) == decode(two)
    finally:
        two.close()
    after = (torch.get_num_threads(), torch.get_default_dtype(), torch.is_inference_mode_enabled())
    assert before == after


def test_a_failed_start_closes_cleanly(tiny, tmp_path):
    executor = LocalExecutor()
    config = config_of(tiny, page_size=7)
    with pytest.raises(ConfigError, match="page_size=7"):
        executor.start(config, resolution_of(config))
    executor.close()
    assert threading.active_count() >= 1 and not executor._thread.is_alive()


def start(tiny, **arguments):
    executor = LocalExecutor()
    config = config_of(tiny, **arguments)
    try:
        return executor.start(config, resolution_of(config))
    finally:
        executor.close()


def test_what_a_device_says_of_its_time_is_among_the_times(tiny, monkeypatch):
    """Of the start, and again of all so far."""
    spent = {"kernels compiled": 2.0}
    monkeypatch.setattr(CPUDevice, "seconds", spent, raising=False)
    executor, config = LocalExecutor(), config_of(tiny)
    executor.start(config, resolution_of(config))
    assert executor.startup["kernels compiled"] == 2.0
    spent["kernels compiled"] = 3.0
    assert executor.call("profile")[0]["kernels compiled"] == 3.0
    executor.close()


def test_kv_memory_as_given(tiny):
    assert start(tiny, kv_cache_memory=40 * PAGE_BYTES + 5).num_pages == 40


def test_kv_memory_by_need(tiny):
    """Four texts of 512 tokens need less than there is."""
    facts = start(tiny)
    assert facts.num_pages == 4 * 512 // 16


def test_a_small_pool_shortens_the_context(tiny, caplog):
    with caplog.at_level(logging.INFO, "deepinfer"):
        facts = start(tiny, kv_cache_memory=5 * PAGE_BYTES)
    assert facts.max_model_len == 80 and facts.num_pages == 5
    assert "max_model_len is 80, not the model's 512" in caplog.text


def test_a_pool_that_cannot_hold_what_was_asked_for(tiny):
    with pytest.raises(KVCacheTooSmallError) as caught:
        start(tiny, kv_cache_memory=5 * PAGE_BYTES, max_model_len=100)
    assert caught.value.setting == "kv_cache_memory"
    for part in (f"kv_cache_memory={5 * PAGE_BYTES}", f"{7 * PAGE_BYTES}", "80"):
        assert part in str(caught.value)


def test_a_pool_of_nothing(tiny):
    with pytest.raises(KVCacheTooSmallError):
        start(tiny, kv_cache_memory=100)


def test_more_kv_memory_than_there_is(tiny):
    with pytest.raises(ConfigError, match=r"kv_cache_memory=1\d+ is more than the \d+ bytes"):
        start(tiny, kv_cache_memory=10**18)


@pytest.mark.parametrize("part, setting", [("KVPool", "kv_cache_memory"),
                                           ("SlotTable", "max_num_seqs")])  # fmt: skip
@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
def test_memory_that_is_free_and_cannot_be_had(tiny, monkeypatch, part, setting, kind):
    def full(*args):
        raise kind("no room")

    monkeypatch.setattr(f"deepinfer.worker.host.{part}", full)
    with pytest.raises(ConfigError, match=f"{setting} asks for memory .*: no room") as caught:
        start(tiny)
    assert caught.value.setting == setting


def test_longer_than_the_model(tiny):
    with pytest.raises(ConfigError, match="max_model_len=600 is longer than the model's own 512"):
        start(tiny, max_model_len=600)


def test_dtypes(tiny):
    assert start(tiny, dtype="bfloat16").dtype == "bfloat16"


def test_what_the_backend_lacks_is_refused(tiny):
    config = config_of(tiny)
    broken = config.model_copy(update={"dtype": "float32", "quantization": "int3"})
    executor = LocalExecutor()
    with pytest.raises(UnsupportedError):
        executor.start(broken, resolution_of(config))
    executor.close()
