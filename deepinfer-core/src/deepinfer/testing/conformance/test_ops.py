"""Every op of the table against its reference: shapes, dtypes, ties, NaN, empty inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer.api.ops import OP_NAMES
from deepinfer.testing.conformance import (  # noqa: F401  (declare cases)
    inputs_latent,
    inputs_v41,
    inputs_vision,
)
from deepinfer.testing.conformance.compare import difference, tolerance
from deepinfer.testing.conformance.inputs import CASES, Case
from deepinfer.testing.conformance.kit import Kit, Run, reference_run, tensors
from deepinfer.testing.conformance.session import DECLINED, kit_of
from deepinfer.testing.trace import unfuse


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each case and dtype; the name ends in the dtype where there is a choice."""
    if "case" not in metafunc.fixturenames:
        return
    kit = kit_of(metafunc.config)
    dtypes, ops = kit.dtypes, set(OP_NAMES)
    if metafunc.function is test_invariant_op_matches_reference:
        ops = kit.invariant_ops()
    if metafunc.function is test_composite_has_the_bits_of_its_parts:
        ops = {"attention_block", "decoder_layers"}
    chosen = [
        pytest.param(c, d, id=f"{c.op}-{c.name}" + f"-{d}" * (len(c.dtypes) > 1))
        for c in CASES
        for d in c.dtypes
        if c.op in ops and (d in dtypes or len(c.dtypes) == 1)
    ]
    metafunc.parametrize("case, precision", chosen)


def answer(case: Case, run: Run) -> Any:
    """What the op returns; a declared refusal of an optional argument skips the test."""
    try:
        with torch.inference_mode():
            return case.call(run)
    except Exception as why:
        if case.optional is not None and case.optional in str(why):
            pytest.skip(f"{DECLINED}{case.op}({case.optional})")
        raise


def test_op_matches_reference(kit: Kit, case: Case, precision: str) -> None:
    """Same inputs, same answer: exactly, or within the two tolerances of ``compare.py``."""
    compare(kit.run(precision, head_dim=case.head_dim), case, precision)


def test_invariant_op_matches_reference(kit: Kit, case: Case, precision: str) -> None:
    """The same of what an invariant engine gets."""
    compare(kit.run(precision, True, case.head_dim), case, precision)


def test_composite_has_the_bits_of_its_parts(kit: Kit, case: Case, precision: str) -> None:
    """Of those that say so (``Impl.of_parts``): the same numbers by the ops they are written in."""
    run = kit.run(precision, head_dim=case.head_dim)
    if case.op not in run.ops.of_parts:
        return  # it says nothing of the kind
    got = tensors(answer(case, run))
    fused_again = unfuse(run.ops)
    try:
        want = tensors(answer(case, kit.run(precision, head_dim=case.head_dim)))
    finally:
        fused_again()
    for one, two in zip(got, want, strict=True):
        assert torch.equal(*(t.cpu().flatten().view(torch.uint8) for t in (one, two))), case.op


def compare(run: Run, case: Case, precision: str) -> None:
    """Run a case on the backend and on the references."""
    got = tensors(answer(case, run))
    want = tensors(answer(case, reference_run(precision)))
    bound = tolerance(case.op, precision)
    wrong = [difference(g, w, bound) for g, w in zip(got, want, strict=True)]
    said = [f"output {i}: {text}" for i, text in enumerate(wrong) if text]
    assert not said, f"{case.op}, served by {run.ops.origin[case.op]}: {'; '.join(said)}"
    assert not run.changed(), f"{case.op} changes inputs of shape {run.changed()}"


def test_every_op_has_cases() -> None:
    """An op without a case would pass unseen."""
    assert {c.op for c in CASES} == set(OP_NAMES)
