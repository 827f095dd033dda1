"""Quantised weights, where the facts name them: close to the full weight, whoever is in the batch.

The scheme is the backend's own (groups, scales, rounding), so the bound is on the whole: root mean
square of the error against root mean square of the answer. Eight bits with a scale for each 32
values come to 0.5 %; one scale for a whole row of normal values to about 1 %. E4M3's three bits of
mantissa come to 2.6 %.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.errors import UnsupportedError
from deepinfer.testing.conformance.kit import Kit, Run, reference_run

BOUNDS = {"int8": 0.015, "fp8": 0.04}


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


@pytest.mark.parametrize("quantization", BOUNDS)
@pytest.mark.parametrize("rows", [1, 7, 70])
@pytest.mark.parametrize("op", OPS)
def test_quantized_weights_stay_close(
    kit: Kit, dtype: str, op: str, rows: int, quantization: str
) -> None:
    """Against the reference on the full weight."""
    run = offered(kit, dtype, quantization)
    with torch.inference_mode():
        got: Tensor = OPS[op](run, rows).cpu().double()
        want: Tensor = OPS[op](reference_run(dtype), rows).double()
    bound = BOUNDS[quantization] * (1 if op != "gated_mlp" else 3)  # three projections deep
    error = float((got - want).square().mean().sqrt() / want.square().mean().sqrt())
    assert error < bound, f"{op}: error {error:.4f} of the answer, at most {bound}"


@pytest.mark.parametrize("quantization", BOUNDS)
def test_quantized_weights_are_smaller(kit: Kit, dtype: str, quantization: str) -> None:
    """A prepared weight says its size, and it is at most a third of float32's."""
    run = offered(kit, dtype, quantization)
    prepared = run.weight(run.draw.wide(128, 256).to(run.dtype), "linear")
    size = getattr(prepared, "nbytes", None)
    if size is None:
        pytest.skip("the prepared weight does not say its size")
    assert size < 128 * 256 * 4 / 3


def offered(kit: Kit, dtype: str, quantization: str) -> Run:
    """The ops for such weights; skips what the facts do not name, or the backend refuses by name
    for this type of rows.
    """
    if quantization not in kit.backend.facts().quantizations:
        pytest.skip(f"{quantization} weights are not offered")
    try:
        return kit.quantized_run(dtype, quantization)
    except UnsupportedError as why:
        if why.setting != "dtype":
            raise
        pytest.skip(str(why))
