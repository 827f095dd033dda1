"""Launchers of the expert ops. Nothing here waits for the device: grids follow from shapes alone.

How many tiles of rows the experts have is known on the device; a launch has as many programs as
there can be at most, and those without a tile end at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from deepinfer.ops.reference.scaled import ScaledMoEParams
from torch import Tensor

from deepinfer_backend_cuda import linear as dense
from deepinfer_backend_cuda import rows as row_ops
from deepinfer_backend_cuda import scaled
from deepinfer_backend_cuda.dispatch import Sorted, Tiles, sort, tiles
from deepinfer_backend_cuda.kernels import moe as kernels
from deepinfer_backend_cuda.launch import exact, options
from deepinfer_backend_cuda.scaled import COLUMNS, KeptWeight

_OUT = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
HEIGHTS = ((12, 16), (24, 32), (96, 64))
"""(rows that an expert has on average at most, rows of a tile)."""
GATED = {16: (64, 4, 4), 32: (64, 4, 4), 64: (64, 4, 3), 128: (64, 4, 3)}
DOWN = {16: (128, 4, 3), 32: (128, 4, 4), 64: (128, 8, 3)}
"""By rows of a tile: its outputs, warps and stages, measured on an H200. None of these moves a bit;
warps are whole groups of four, see ``kernels.scaled._fp4_pairs``.
"""
_SCORES = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2}


def route(
    logits: Tensor, bias: Tensor | None, k: int, score: str, renorm: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """logits float32[T, E], bias [E] or [T, E] -> (ids int32[T, k], weights float32[T, k])."""
    return _route(logits, bias, None, None, k, score, renorm, scale)


def _route(
    logits: Tensor,
    bias: Tensor | None,
    image_bias: Tensor | None,
    image: Tensor | None,
    k: int,
    score: str,
    renorm: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    logits = logits.contiguous()
    tokens, experts = logits.shape
    ids = torch.empty((tokens, k), dtype=torch.int32, device=logits.device)
    weights = logits.new_empty((tokens, k))
    if not tokens:
        return ids, weights
    seen = image is not None and image_bias is not None
    kernels.route_kernel[(tokens,)](
        logits,
        logits if bias is None else bias.contiguous(),
        image_bias if seen else logits,
        image if seen else logits,
        ids,
        weights,
        experts if bias is not None and bias.dim() == 2 else 0,
        float(scale),
        E=experts,
        BLOCK=triton.next_power_of_2(experts),
        K=k,
        PADDED=triton.next_power_of_2(k),
        SCORE=_SCORES[score],
        BIASED=bias is not None,
        IMAGES=seen,
        RENORM=renorm,
        num_warps=1 if experts <= 128 else 4,
        **exact(tokens),
    )
    return ids, weights


def tile_rows(slots: int, experts: int, most: int = 64) -> int:
    """Rows of a tile, by how many an expert has on average."""
    mean = slots / experts
    return next((rows for limit, rows in HEIGHTS if mean <= limit), most)


def grouped_linear(
    x: Tensor, w: Tensor, offsets: Tensor, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Row r of expert e is ``x[r] · w[e]ᵀ``, with ``linear``'s bits. x [R, K], w [E, N, K]."""
    return _grouped(x, w, offsets, out_dtype)


def grouped_scaled_linear(
    x: Tensor, w: Any, offsets: Tensor, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The same with x rounded to FP8; w dense or kept."""
    return _grouped(scaled.quantize(x, "fp8"), w, offsets, out_dtype)


def _grouped(x: Tensor, w: Any, offsets: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    experts, n, k = w.shape
    # Rows past offsets[E] are 0; a launch writes the others only.
    y = torch.zeros((len(x), n), dtype=out_dtype or x.dtype, device=x.device)
    if not y.numel():
        return y
    if x.stride(-1) != 1:
        x = x.contiguous()
    if isinstance(w, Tensor) and (w.dtype is not torch.bfloat16 or x.dtype is not w.dtype):
        cut = tiles(offsets, len(x), 32)
        kernels.plain_kernel[triton.cdiv(n, 32), len(cut.tile)](
            x,
            w.contiguous(),
            y,
            cut.tile,
            offsets,
            n,
            k,
            x.stride(0),
            BM=32,
            BN=32,
            BK=32,
            num_warps=4,
            num_stages=2,
            **options(len(x)),
        )
        return y
    cut = tiles(offsets, len(x), tile_rows(len(x), experts))
    grouped_product(x.to(torch.bfloat16), w, y, cut, offsets)
    return y


def grouped_product(x: Tensor, w: Any, y: Tensor, cut: Tiles, offsets: Tensor) -> None:
    """y [R, N] becomes x [R, K] · w[e]ᵀ, tile by tile."""
    _, n, k = w.shape
    kept = isinstance(w, KeptWeight)
    words = w.words if kept else w.contiguous()
    outputs, warps, stages = DOWN[cut.rows]
    kernels.product_kernel[triton.cdiv(n, outputs), len(cut.tile)](
        x,
        words,
        w.scales if kept else words,
        y,
        cut.tile,
        offsets,
        len(x),
        n,
        k,
        triton.cdiv(k, COLUMNS),
        x.stride(0),
        0,
        y.stride(0),
        0,
        words.stride(0),
        w.scales.stride(0) if kept else 0,
        BM=cut.rows,
        BN=outputs,
        KIND=w.kind if kept else kernels.DENSE,
        GROUPED=True,
        num_warps=warps,
        num_stages=stages,
        **options(len(x)),
    )


def scaled_moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Any,
    down: Any,
    num_experts: int,
    limit: float | None,
) -> Tensor:
    """x [T, D], ids int32[T, k], weights float32[T, k] -> float32[T, D]."""
    rounded = scaled.quantize(x, "fp8")
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _experts(rounded, ids, weights, gate_up, down, limit, None, y)
    return y


def _experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Any,
    down: Any,
    limit: float | None,
    shared: Tensor | None,
    y: Tensor,
) -> None:
    """y [T, D] becomes the sum of the experts' rows, and ``shared``. x: rounded to FP8."""
    tokens, k = ids.shape
    if not y.numel():
        return
    experts, width, _ = down.shape
    sorted_ = sort(ids, experts)
    if isinstance(gate_up, KeptWeight):
        inner = _gated(x, weights, gate_up, sorted_, limit, k)
    else:
        slot = sorted_.order.div(k, rounding_mode="floor")
        pairs = _grouped(x.index_select(0, slot), gate_up, sorted_.offsets, None)
        share = weights.flatten().index_select(0, sorted_.order)
        gated = row_ops.silu_mul(pairs.float(), limit) * share[:, None]
        inner = scaled.quantize(gated.to(x.dtype), "fp8")
    if isinstance(down, KeptWeight):
        found = x.new_empty((tokens * k, width))
        cut = tiles(sorted_.offsets, tokens * k, tile_rows(tokens * k, experts))
        grouped_product(inner.to(torch.bfloat16), down, found, cut, sorted_.offsets)
    else:
        found = _grouped(inner, down, sorted_.offsets, None)
    block = min(1024, triton.next_power_of_2(width))
    kernels.combine_kernel[tokens, triton.cdiv(width, block)](
        found,
        sorted_.place,
        sorted_.offsets,
        found if shared is None else shared,
        y,
        experts,
        width,
        SLOTS=k,
        PADDED=triton.next_power_of_2(k),
        BLOCK=block,
        SHARED=shared is not None,
        num_warps=4,
        **exact(tokens),
    )


def _gated(
    x: Tensor,
    weights: Tensor,
    gate_up: KeptWeight,
    sorted_: Sorted,
    limit: float | None,
    k: int,
) -> Tensor:
    """The experts' inner rows [T·k, I], rounded to FP8, by expert."""
    experts, both, width = gate_up.shape
    slots, inner = len(sorted_.order), both // 2
    cut = tiles(sorted_.offsets, slots, tile_rows(slots, experts, 128))
    y = x.new_empty((slots, inner))
    outputs, warps, stages = GATED[cut.rows]
    kernels.gated_kernel[triton.cdiv(inner, outputs), len(cut.tile)](
        x.to(torch.bfloat16),
        gate_up.words,
        gate_up.scales,
        y,
        cut.tile,
        sorted_.offsets,
        sorted_.order,
        weights,
        slots,
        inner,
        width,
        gate_up.blocks,
        x.stride(0),
        gate_up.words.stride(0),
        gate_up.scales.stride(0),
        0.0 if limit is None else float(limit),
        PER_SLOT=k,
        BM=cut.rows,
        BN=outputs,
        KIND=gate_up.kind,
        LIMITED=limit is not None,
        OUT=_OUT[x.dtype],
        num_warps=warps,
        num_stages=stages,
        **exact(slots),
    )
    return y


def scaled_moe_block(x: Tensor, image: Tensor | None, params: ScaledMoEParams) -> Tensor:
    """Router, routed experts, the shared one. x [T, D] -> [T, D]."""
    y = torch.empty_like(x)
    if not y.numel():
        return y
    logits = dense.linear(x, params.router, None, torch.float32)
    ids, weights = _route(
        logits, params.bias, params.image_bias, image, params.chosen, params.score, True,
        params.scale,
    )  # fmt: skip
    rounded = scaled.quantize(x, "fp8")
    shared = _shared(rounded, params)
    _experts(rounded, ids, weights, params.gate_up, params.down, params.limit, shared, y)
    return y


def _shared(x: Tensor, params: ScaledMoEParams) -> Tensor:
    """The shared expert of rows that are rounded to FP8."""
    pairs = _product(x, params.shared_gate_up)
    return _product(scaled.gated_quantize(pairs, params.limit), params.shared_down)


def _product(x: Tensor, w: Any) -> Tensor:
    return scaled.product(x, w) if isinstance(w, KeptWeight) else dense.linear(x, w)
