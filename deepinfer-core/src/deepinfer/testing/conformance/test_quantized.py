"""int8 weights, where the facts name them: close to the full weight, whoever else is in the batch.

The scheme is the backend's own (groups, scales, rounding), so the bound is on the whole: root mean
square of the error against root mean square of the answer. Eight bits with a scale for each 32
values come to 0.5 %; one scale for a whole row of normal values to about 1 %.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.testing.conformance.kit import Kit, Run, reference_run

BOUND = 0.015


def linear(run: Run, rows: int) -> Any:
    weight = run.weight(run.draw.normal(70, 96, scale=0.2), "linear")
    return run.ops.linear(run.put(run.draw.normal(rows, 96)), weight, out_dtype=torch.float32)


def gated_mlp(run: Run, rows: int) -> Any:
    gate_up = run.weight(run.draw.normal(2 * 64, 96, scale=0.2), "gated_mlp", "linear")
    down = run.weight(run.draw.normal(96, 64, scale=0.2), "gated_mlp", "linear")
    return run.ops.gated_mlp(run.put(run.draw.normal(rows, 96)), gate_up, down)


def grouped_linear(run: Run, rows: int) -> Any:
    weight = run.weight(run.draw.normal(3, 70, 96, scale=0.2), "grouped_linear")
    offsets = run.put(torch.tensor([0, rows // 2, rows // 2, rows]))
    x = run.put(run.draw.normal(rows, 96))
    return run.ops.grouped_linear(x, weight, offsets, torch.float32)


OPS = {fn.__name__: fn for fn in (linear, gated_mlp, grouped_linear)}


@pytest.mark.parametrize("rows", [1, 7, 70])
@pytest.mark.parametrize("op", OPS)
def test_int8_weights_stay_close(kit: Kit, dtype: str, op: str, rows: int) -> None:
    """Against the reference on the full weight."""
    needs_int8(kit)
    with torch.inference_mode():
        got: Tensor = OPS[op](kit.quantized_run(dtype), rows).cpu().double()
        want: Tensor = OPS[op](reference_run(dtype), rows).double()
    bound = BOUND if op != "gated_mlp" else 3 * BOUND  # three projections deep
    error = float((got - want).square().mean().sqrt() / want.square().mean().sqrt())
    assert error < bound, f"{op}: error {error:.4f} of the answer, at most {bound}"


def test_int8_weights_are_smaller(kit: Kit, dtype: str) -> None:
    """A prepared weight says its size, and it is at most a third of float32's."""
    needs_int8(kit)
    run = kit.quantized_run(dtype)
    prepared = run.weight(run.draw.wide(128, 256).to(run.dtype), "linear")
    size = getattr(prepared, "nbytes", None)
    if size is None:
        pytest.skip("the prepared weight does not say its size")
    assert size < 128 * 256 * 4 / 3


def needs_int8(kit: Kit) -> None:
    """Skip where int8 is not among the facts."""
    if "int8" not in kit.backend.facts().quantizations:
        pytest.skip("int8 weights are not offered")
