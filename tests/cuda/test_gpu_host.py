"""On a GPU: the host never waits inside a step, whatever its rows ask for."""

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import cuda_engine
    from deepinfer.entrypoints import assemble

    monkeypatch.setattr(assemble, "_grammar_backend", lambda *_: cuda_engine.Masks(320))
    yield cuda_engine
    del sys.modules["cuda_engine"]


def test_no_step_waits_for_the_device(bench, tmp_path):
    from deepinfer import LLM, SamplingParams
    from deepinfer.testing.tiny import write_tiny_checkpoint

    model = str(write_tiny_checkpoint(tmp_path / "tiny"))
    common = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    with LLM(model, backend="cuda", max_num_seqs=16, kv_cache_memory="64MiB") as llm:
        params = [SamplingParams(**common | wish) for wish in bench.WISHES.values()] * 3
        prompts = [{"prompt_token_ids": list(range(5, 40 + i))} for i in range(len(params))]
        waits = []
        llm.generate(prompts, params)  # kernels and graphs are made
        with bench.watched(waits):
            outputs = llm.generate(prompts, params)
    assert all(out.error is None for out in outputs)
    assert waits == []


def test_a_wait_would_be_seen(bench, monkeypatch):
    import torch
    from deepinfer.worker.runner import ModelRunner

    monkeypatch.setattr(ModelRunner, "forward", lambda self, plan: plan.sum().item())
    waits = []
    with bench.watched(waits):
        ModelRunner.forward(None, torch.ones(8, device="cuda"))
    assert len(waits) == 1
