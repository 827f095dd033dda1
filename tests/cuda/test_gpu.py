"""On a GPU: the conformance kit in full, and bits through ``benchmarks/cuda_check.py``."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


def test_conformance(tmp_path):
    """The level is the highest there is: every op, every argument, bitwise independence."""
    badge = tmp_path / "badge.json"
    kit = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs")
    where = ("deepinfer.testing.conformance", "--backend", "cuda", "--badge", str(badge))
    done = subprocess.run([sys.executable, *kit, *where], cwd=tmp_path)
    assert done.returncode == 0
    assert json.loads(badge.read_text("utf-8"))["level"] == "full, invariant"


def test_a_graph_may_die_while_another_is_recorded():
    """Python's collector may run anywhere, also between two launches of a capture."""
    import torch
    from deepinfer_backend_cuda.graphs import Graphs

    device = torch.device("cuda")
    x = torch.ones(8, device=device)
    other = Graphs(device)
    gone = [other.capture(lambda: x + 1)]
    del other

    def fn():
        doubled = x * 2
        gone.clear()
        gc.collect()
        return doubled + 1

    replay = Graphs(device).capture(lambda: x * 3)
    torch.cuda.synchronize()
    again = Graphs(device).record(fn)
    assert replay().tolist() == [3.0] * 8 and again().tolist() == [3.0] * 8


def test_bits(tmp_path):
    """Rows alone, in company, in pieces: the same bits at the shapes of real models."""
    found = tmp_path / "bits.json"
    script = str(ROOT / "benchmarks" / "cuda_check.py")
    subprocess.run(
        [sys.executable, script, "--parts", "bits", "--json", str(found)], cwd=tmp_path, check=True
    )
    assert json.loads(found.read_text("utf-8"))["bits"]["differ"] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_a_last_layer_of_few_rows_has_the_bits_of_all(tmp_path, monkeypatch, family, dtype):
    """Prompts in steps of many rows, and in steps that run every row of every layer."""
    from deepinfer import LLM, SamplingParams
    from deepinfer.models.llama import DecoderLayer
    from deepinfer.testing.tiny import write_tiny_checkpoint

    path, right, cut = write_tiny_checkpoint(tmp_path, family), DecoderLayer.tail, []
    monkeypatch.setattr(DecoderLayer, "tail", lambda *args: (cut.append(1), right(*args))[1])
    prompts = [{"prompt_token_ids": list(range(5 + i, 45 + 9 * i))} for i in range(20)]
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2)
    found, how = [], {"kv_cache_memory": "32MiB", "max_model_len": 256, "backend": "cuda"}
    for most in (128, 1500):
        cut.clear()
        with LLM(str(path), max_num_batched_tokens=most, dtype=dtype, **how) as llm:
            outs = llm.generate(prompts, params)
        found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outs])
        assert bool(cut) == (most > 256)
    assert found[0] == found[1]


@pytest.mark.parametrize("rows", [1, 3, 20, 33, 48, 80, 100, 128, 160, 192, 255, 300, 500])
def test_what_lies_behind_the_rows_of_a_product_does_not_matter(rows):
    """Boxes are copied whole where the storage has room: here NaN lies there."""
    import torch
    from deepinfer_backend_cuda.linear import gated, linear

    torch.manual_seed(rows)
    n, k = 1536, 1024
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    roomy = torch.full((1024, k), torch.nan, device="cuda", dtype=torch.bfloat16)
    roomy[:rows] = x
    for product in (linear, gated):
        want, got = product(x, w), product(roomy[:rows], w)
        assert not got.isnan().any()
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))
