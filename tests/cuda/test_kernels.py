"""Kernels without a GPU: right on the interpreter, compiled for both generations. Needs Triton."""

import pytest
from tested import NEEDS_TRITON

pytestmark = NEEDS_TRITON
TARGETS = ["90", "100"]


def test_a_case_of_each_op_on_the_interpreter(script):
    assert " 0 wrong" in script("interpreted.py", "some", TRITON_INTERPRET="1")


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(script, target):
    """And is reached by a launch."""
    assert " 0 faulty" in script("ahead.py", target, "once")


def test_short_launches_have_every_tile_of_the_long_ones_and_are_small(script):
    """As racecheck wants them: rings are walked twice, programs have more than one tile."""
    assert " 0 faulty" in script("traffic.py")


@pytest.mark.slow
def test_all_cases_on_the_interpreter(script):
    assert " 0 wrong" in script("interpreted.py", TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_variant_compiles(script, target):
    assert " 0 faulty" in script("ahead.py", target)


@pytest.mark.slow
def test_every_short_launch_compiles(script):
    assert " 0 faulty" in script("ahead.py", "90", "short")


def test_steps_that_run_as_graphs_have_one_tuple_of_layers(sources):
    """``Layers`` keeps the graphs of one: a model's other tuple is for steps of more rows."""
    layers = pytest.importorskip("deepinfer_backend_cuda.layers", reason="needs Triton")
    from deepinfer.worker import batch

    assert batch._FEW_ROWS >= layers.MOST_TOKENS
