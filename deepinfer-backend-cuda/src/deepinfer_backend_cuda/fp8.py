"""``quantization="fp8"``: weights of projections as E4M3, a power of two for each 32×32 tile.

A weight is quantised when it is loaded and takes half of bfloat16's bytes; a product decodes it in
registers (``scaled``). Its values are exact in bfloat16, rows stay what they are, so a product has
the bits of ``linear`` with the decoded weight: nothing of batch invariance changes. What a weight
loses is its last mantissa bits: 2.6 % of its size, root mean square.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from deepinfer.api import Impl
from deepinfer.api.model import DeviceBatch
from deepinfer.ops.lowbit import TILE, BlockScaled
from deepinfer.ops.reference.blocks import AttentionParams
from deepinfer.ops.table import EXACT_WEIGHTS
from torch import Tensor

from deepinfer_backend_cuda import layers, moe, rows, scaled
from deepinfer_backend_cuda import linear as dense
from deepinfer_backend_cuda.scaled import KeptWeight

TOP = 448.0
"""E4M3's largest value."""
_CHUNK = 8192  # rows that are quantised at a time


def prepare(weight: Any, uses: frozenset[str]) -> Any:
    """A projection's weight [..., N, K], quantised; what decides, or is looked up in, as it is."""
    if not isinstance(weight, Tensor) or uses & EXACT_WEIGHTS or "embedding" in uses:
        return weight
    return scaled.keep(block_scaled(weight), uses)


def block_scaled(weight: Tensor) -> BlockScaled:
    """The nearest values to weight [..., N, K]; a tile's scale is the least that holds its largest.

    Raises:
        ValueError: a value that is not finite.
    """
    *lead, n, k = weight.shape
    high, wide = -(-n // TILE), -(-k // TILE)
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales = torch.empty((*lead, high, wide), dtype=torch.uint8, device=weight.device)
    flat, to = weight.reshape(-1, n, k), codes.view(-1, n, k)
    tiles = scales.view(-1, high, wide)
    for index in range(len(flat)):
        for begin in range(0, n, _CHUNK):
            part = flat[index, begin : begin + _CHUNK]
            made, exponents = _quantised(part)
            to[index, begin : begin + _CHUNK] = made
            tiles[index, begin // TILE : begin // TILE + len(exponents)] = exponents
    return BlockScaled(codes, scales, "fp8")


def _quantised(part: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8[n, k] and scales uint8[⌈n/32⌉, ⌈k/32⌉] of some rows."""
    n, k = part.shape
    padded = F.pad(part.float(), (0, -k % TILE, 0, -n % TILE))
    blocks = padded.view(padded.shape[0] // TILE, TILE, -1, TILE)
    top = blocks.abs().amax((1, 3))
    if not bool(top.isfinite().all()):
        raise ValueError("a weight holds a value that is not finite, which FP8 has no code for")
    least = (top / TOP).clamp(min=2.0**-126)
    exponents = (least.view(torch.int32) + 0x007FFFFF) >> 23  # rounded up to a power of two
    unit = (exponents << 23).view(torch.float32)
    values = (blocks / unit[:, None, :, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    return values.view(padded.shape)[:n, :k], exponents.to(torch.uint8)


def linear(
    x: Tensor, w: Any, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """As ``linear``; w [N, K] may be a kept weight, x bfloat16 then."""
    if not isinstance(w, KeptWeight):
        return dense.linear(x, w, bias, out_dtype)
    if bias is None:
        return scaled.product(x, w, out_dtype)
    y = scaled.product(x, w, torch.float32)
    return y.add_(bias).to(out_dtype or x.dtype)


def attention_block(
    x: Tensor,
    residual: Tensor | None,
    params: AttentionParams,
    batch: DeviceBatch,
    kv: tuple[Tensor, Tensor],
    cos_sin: Tensor,
) -> tuple[Tensor, Tensor]:
    """``layers.attention_block`` with this ``linear``."""
    return layers.attention_block(x, residual, params, batch, kv, cos_sin, linear)


def mlp_block(
    x: Tensor, residual: Tensor, norm: Tensor | None, eps: float, gate_up: Any, down: Any
) -> tuple[Tensor, Tensor]:
    """Norm, gate and up, gate · up, down."""
    x, residual = rows.add_rms_norm(x, residual, norm, eps)
    return linear(rows.silu_mul(linear(x, gate_up)), down), residual


BLOCKS = (attention_block, mlp_block)
OPS: Mapping[str, Impl] = {
    "linear": Impl(linear, prepare),
    "grouped_linear": Impl(moe.grouped_linear, prepare),
    "mlp_block": Impl(mlp_block),
}
