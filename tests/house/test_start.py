"""What an import and a ``--help`` cost. Best of several, so that a busy machine does not matter."""

from __future__ import annotations

import subprocess
import sys
import time

from tree import fresh

IMPORT = """
import time; start = time.perf_counter()
import deepinfer
print(time.perf_counter() - start)
"""
HELP = """
import runpy, sys
sys.argv = ["deepinfer", "--help"]
try:
    runpy.run_module("deepinfer", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
heavy = {"torch", "numpy", "transformers", "tokenizers"} & set(sys.modules)
assert not heavy, heavy
"""


def test_import_takes_under_100_ms():
    best = min(float(fresh(IMPORT)) for _ in range(5))
    assert best < 0.1, f"{best * 1e3:.0f} ms"


def test_help_takes_under_300_ms():
    def once() -> float:
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "deepinfer", "--help"],
            check=True,
            capture_output=True,
            timeout=60,
        )
        return time.perf_counter() - start

    best = min(once() for _ in range(7))
    assert best < 0.3, f"{best * 1e3:.0f} ms"


def test_help_loads_nothing_heavy():
    assert "Usage" in fresh(HELP)
