"""On a GPU: DeepSeek-V4.1's ops, bits and recorded prompts, by ``benchmarks/cuda_v41_check.py``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("v41") / "found.json"
    script = str(ROOT / "benchmarks" / "cuda_v41_check.py")
    command = [sys.executable, script, "--parts", "ops,bits,golden", "--json", str(out)]
    subprocess.run(command, cwd=out.parent, check=True)
    return json.loads(out.read_text("utf-8"))


def test_ops_are_the_references(found):
    assert found["ops"]["ran"] > 500
    assert found["ops"]["wrong"] == []


def test_rows_keep_apart_and_stored_weights_have_the_dequantised_bits(found):
    assert found["bits"]["compared"] > 300
    assert found["bits"]["differ"] == []


@pytest.mark.parametrize("weights", ["", " dequantised"])
def test_recorded_prompts_in_float32(found, weights):
    """The README's bounds: most rows of short prompts carry no flip of a code."""
    golden = found["golden"][f"f32{weights}"]
    assert golden["short_rows_within_1e-3"] >= 0.7
    assert golden["p200"]["rows_within_1e-3"] >= 0.2
    assert all(golden[p]["chunks_equal"] for p in golden if p.startswith("p"))


@pytest.mark.parametrize("weights", ["", " dequantised"])
def test_recorded_prompts_in_bfloat16(found, weights):
    golden = found["golden"][f"bf16{weights}"]
    assert golden["p33"]["mean_error"] <= 0.25 and golden["p33"]["top1"] >= 0.75
    assert golden["p200"]["mean_error"] <= 0.45 and golden["p200"]["top1"] >= 0.6
    assert all(golden[p]["chunks_equal"] for p in golden if p.startswith("p"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_says_the_same_in_any_company(found, dtype):
    engine = found["golden"]["engine"][dtype]
    assert engine["together_equal"] and engine["cached_equal"]
