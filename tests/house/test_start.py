"""What an import and a ``--help`` cost: CPU time, best of several, so that a busy machine does not
matter.
"""

from __future__ import annotations

from tree import fresh

IMPORT = """
import time; start = time.process_time()
import deepinfer
print(time.process_time() - start)
"""
HELP = """
import runpy, sys, time
sys.argv = ["deepinfer", "--help"]
try:
    runpy.run_module("deepinfer", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
heavy = {"torch", "numpy", "transformers", "tokenizers"} & set(sys.modules)
assert not heavy, heavy
print(time.process_time())  # the interpreter's own start counts
"""


def test_import_takes_under_100_ms():
    best = min(float(fresh(IMPORT)) for _ in range(5))
    assert best < 0.1, f"{best * 1e3:.0f} ms"


def test_help_takes_under_300_ms():
    best = min(float(fresh(HELP).split()[-1]) for _ in range(7))
    assert best < 0.3, f"{best * 1e3:.0f} ms"


def test_help_loads_nothing_heavy():
    assert "Usage" in fresh(HELP)
