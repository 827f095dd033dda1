"""``deepinfer bench``: the harness around engines in processes of their own."""

import json

import pytest
from deepinfer.benchmarking import harness
from deepinfer.benchmarking.child import common, measure
from deepinfer.benchmarking.harness import Contestant, Result, table
from deepinfer.benchmarking.workloads import WORKLOADS, Workload


def test_prompts_are_the_same_for_every_engine_and_new_each_round():
    work = WORKLOADS["shared-prefix"]
    one, again, other = work.prompts(1000, 1), work.prompts(1000, 1), work.prompts(1000, 2)
    assert one == again != other
    assert len(one) == 32 and {len(p) for p in one} == {1056}
    assert len(common(one)) >= 1024 and common([[1, 2], [1, 2, 3]]) == [1, 2]
    assert all(100 <= t < 900 for t in one[0])


class Slow:
    """An engine on a clock of its own: 1 s a prompt, 2 s a token."""

    def run(self, prompts, output):
        self.now += len(prompts) + 2 * output

    now = 0.0


@pytest.mark.parametrize(
    ("kind", "value"), [("rate", 2 * 5 / 12), ("first", 12_000.0), ("gap", 2_000.0), ("cpu", 12.0)]
)
def test_measures(monkeypatch, kind, value):
    engine = Slow()
    for clock in ("perf_counter", "process_time"):
        monkeypatch.setattr(f"deepinfer.benchmarking.child.time.{clock}", lambda: engine.now)
    work = {"measure": kind, "prompts": [[1], [2]], "again": [[3], [4]], "output": 5}
    assert measure(engine, work)["value"] == pytest.approx(value)


def test_the_table_says_how_many_times_better():
    result = Result()
    for label, rate, gap in (("deepinfer", 90.0, 20.0), ("slow", 30.0, 40.0)):
        result.add("throughput", label, rate)
        result.add("between-tokens", label, gap)
    result.absent["vllm"] = "vllm is not installed"
    text = table(result, "deepinfer")
    assert "30 (3.00×)" in text and "40 (2.00×)" in text
    assert "vllm: left out, vllm is not installed" in text
    assert result.ratios("deepinfer")["throughput"]["slow"] == 3.0


def test_absent_and_broken_engines_are_left_out(tiny_model, monkeypatch):
    small = Workload("small", "rate", requests=2, prompt=4, output=3)
    monkeypatch.setattr(harness, "WORKLOADS", {"small": small})
    spec = {"threads": 1, "model": str(tiny_model), "engine": {"max_model_len": 256}}
    contestants = [
        Contestant(label="deepinfer", engine="deepinfer", spec=spec),
        Contestant(label="wrong", engine="deepinfer", spec={**spec, "model": "/no/such/model"}),
        Contestant(label="vllm", engine="vllm", spec={"threads": 1}),
    ]
    result = harness.run(contestants, ["small"], rounds=2)
    assert result.absent["vllm"] == "vllm is not installed"
    assert "/no/such/model" in result.absent["wrong"]
    assert len(result.values["small"]["deepinfer"]) == 2
    assert result.values["memory"]["deepinfer"][0] > 50


VLLM = """
import os, types
__version__ = "0"
class SamplingParams:
    def __init__(self, **wishes):
        assert wishes.pop("temperature") == 0 and wishes.pop("ignore_eos")
        self.count = wishes.pop("max_tokens")
        assert wishes == {"detokenize": False}
class LLM:
    def __init__(self, model, *, skip_tokenizer_init, max_model_len, dtype, max_num_seqs):
        # Its own variables, and only in this process.
        assert os.environ["VLLM_CPU_KVCACHE_SPACE"] and os.environ["OMP_NUM_THREADS"] == "1"
        config = types.SimpleNamespace(get_vocab_size=lambda: 1000)
        self.llm_engine = types.SimpleNamespace(model_config=config)
    def generate(self, prompts, params, use_tqdm):
        assert all(list(p) == ["prompt_token_ids"] for p in prompts)
        part = types.SimpleNamespace(token_ids=[1] * (params.count - SHORT))
        return [types.SimpleNamespace(outputs=[part])] * len(prompts)
"""


@pytest.mark.parametrize("short", [0, 1])
def test_vllm_gets_ids_and_must_write_what_was_asked(tmp_path, monkeypatch, short):
    """On a stand-in with vLLM's names; ``--peer vllm=PYTHON`` runs the real one."""
    (tmp_path / "vllm.py").write_text(VLLM.replace("SHORT", str(short)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    small = Workload("small", "rate", requests=2, prompt=4, output=3)
    monkeypatch.setattr(harness, "WORKLOADS", {"small": small})
    peer = Contestant(label="vllm", engine="vllm", spec={"threads": 1, "hf": "x"})
    result = harness.run([peer], ["small"], rounds=1)
    assert ("vllm" in result.absent) is bool(short)
    assert short or result.notes["vllm"] == {"backend": "vllm 0 float32", "threads": 1}


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_startup_shows_its_stages_and_writes_down_what_was_measured(shell, tmp_path, quantization):
    options = () if quantization is None else ("--quantization", quantization)
    done = shell("bench", "startup", "--rounds", "1", "-o", str(tmp_path / "out"), *options)
    assert done.code == 0, done.err
    assert "import torch" in done.out and "weights and KV" in done.out
    written = json.loads((tmp_path / "out").read_text())
    assert written["medians"]["startup"]["deepinfer"] > 0
    notes = written["notes"]["deepinfer"]
    assert notes["quantization"] == quantization and notes["backend"].endswith("float32")


def test_a_peer_needs_a_name_and_an_interpreter(shell):
    done = shell("bench", "latency", "--peer", "nonsense")
    assert done.code == 2 and "transformers, llama.cpp, vllm" in done.err
