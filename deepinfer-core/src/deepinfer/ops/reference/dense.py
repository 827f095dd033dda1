"""Dense ops: embedding, projections, norms, gates, rotary positions. Plain torch, the definitions.

Common to all: activations are float32 or bfloat16, arithmetic is float32, and the result is rounded
once, to nearest even. T rows may be 0. Weights may be what ``prepare`` made of them; here, tensors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.ops.table import op


@op
def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Rows of a table. ids int64[T] in [0, V), table [V, H] -> [T, H] of the table's dtype."""
    return table[ids]


@op
def linear(
    x: Tensor, w: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``x · wᵀ + bias``. x [..., K], w [N, K], bias [N] -> [..., N] of ``out_dtype`` (x's if None).

    The bias is added before the one rounding. The order of the K products is not promised.
    """
    wide_bias = None if bias is None else bias.float()
    return F.linear(x.float(), w.float(), wide_bias).to(out_dtype or x.dtype)


@op
def rms_norm(x: Tensor, w: Tensor | None, eps: float) -> Tensor:
    """``x · rsqrt(mean(x²) + eps) · w`` over the last dimension. x [..., H], w [H] -> like x."""
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (y if w is None else y * w.float()).to(x.dtype)


@op
def add_rms_norm(
    ops: Any, x: Tensor, residual: Tensor, w: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """``residual' = x + residual``, rounded; ``y = rms_norm(residual')``. Returns (y, residual').

    Neither input is changed.
    """
    total = x + residual
    return ops.rms_norm(total, w, eps), total


@op
def silu_mul(x: Tensor, limit: float | None = None) -> Tensor:
    """``silu(gate) · up``. x [..., 2·I]: gate, then up -> [..., I] of x's dtype.

    With ``limit`` the gate is cut to at most limit and up to [−limit, limit] before.
    """
    gate, up = x.float().chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (F.silu(gate) * up).to(x.dtype)


@op
def gated_mlp(ops: Any, x: Tensor, gate_up: Any, down: Any) -> Tensor:
    """``down · silu_mul(gate_up · x)``. x [T, H], gate_up [2·I, H], down [H, I] -> [T, H].

    Rounds after each of the three ops.
    """
    y: Tensor = ops.linear(ops.silu_mul(ops.linear(x, gate_up)), down)
    return y


@op
def rope(x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first R of D elements by their position's angles.

    x [T, N, D], positions int64[T] in [0, P), cos_sin float32[P, R]: R/2 cosines, then R/2 sines
    -> [T, N, D] of x's dtype. Pair i is (i, i + R/2), or (2i, 2i + 1) if ``interleaved``:
    ``a' = a·cos − b·sin``, ``b' = b·cos + a·sin``. Elements from R on are copied.
    """
    cos, sin = cos_sin[positions][:, None, :].chunk(2, dim=-1)
    rotated = cos_sin.shape[-1]
    head = x[..., :rotated].float()
    if interleaved:
        a, b = head[..., 0::2], head[..., 1::2]
    else:
        a, b = head.chunk(2, dim=-1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    y = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    y = y.to(x.dtype)
    return y if rotated == x.shape[-1] else torch.cat((y, x[..., rotated:]), -1)
