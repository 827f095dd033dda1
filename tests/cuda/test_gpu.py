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
