"""On a GPU: the conformance kit in full, and bits through ``benchmarks/cuda_check.py``."""

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


def test_bits(tmp_path):
    """Rows alone, in company, in pieces: the same bits at the shapes of real models."""
    found = tmp_path / "bits.json"
    script = str(ROOT / "benchmarks" / "cuda_check.py")
    subprocess.run(
        [sys.executable, script, "--parts", "bits", "--json", str(found)], cwd=tmp_path, check=True
    )
    assert json.loads(found.read_text("utf-8"))["bits"]["differ"] == []
