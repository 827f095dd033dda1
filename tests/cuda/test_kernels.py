"""Kernels without a GPU: right on the interpreter, compiled for both generations. Needs Triton."""

import importlib.util

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]


def test_cases_on_the_interpreter(script):
    assert " 0 wrong" in script("interpreted.py", TRITON_INTERPRET="1")


@pytest.mark.parametrize("target", ["90", "100"])
def test_kernels_compile(script, target):
    assert "FAULTY" not in script("ahead.py", target)
