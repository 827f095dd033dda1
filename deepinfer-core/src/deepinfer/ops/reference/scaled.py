"""Ops on block-scaled numbers: activation quantisers, packed records, FP8 and FP4 linears, experts.

Three kinds of groups along the last dimension, each with one scale: ``fp8`` 32 E4M3 values and an
E8M0 scale, ``mxfp4`` 32 E2M1 values and an E8M0 scale, ``nvfp4`` 16 E2M1 values and an E4M3 scale
(DeepSeek-V4.1 specification, section 8.3). Weights are dense tensors, prepared by ``linear`` and
``grouped_linear``, or :class:`~deepinfer.ops.lowbit.BlockScaled`, multiplied block by block; a
weight's ``uses`` name the scaled op first and then the dense one: ``("scaled_linear", "linear")``.

Every op here keeps rows apart, given a ``linear`` and a ``silu_mul`` that do.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.ops.lowbit import TILE, BlockScaled, e4m3, e8m0, pack_fp4, unpack_fp4
from deepinfer.ops.rows import ROWS
from deepinfer.ops.table import op

Kind = Literal["fp8", "mxfp4", "nvfp4"]

_EXPONENT: Final = 0x7F800000
_MANTISSA: Final = 0x007FFFFF
OUTPUTS: Final = 256
"""Output rows of a block-scaled weight that are decoded at a time."""


@dataclass(frozen=True, slots=True)
class Format:
    """``group`` values share a scale; the largest value is ``top``; below ``least`` every maximum
    counts as that. Values have ``mantissa`` bits behind the first and steps that shrink until
    ``normal``. A record of d values has ``d·value_bits/8`` bytes of values, then its scales.
    """

    group: int
    top: float
    least: float
    mantissa: int
    normal: float
    value_bits: int


FORMATS: Final[dict[str, Format]] = {
    "fp8": Format(32, 448.0, 1e-4, 3, 2.0**-6, 8),
    "mxfp4": Format(32, 6.0, 6 * 2.0**-126, 1, 1.0, 4),
    "nvfp4": Format(16, 6.0, 6 * 2.0**-9, 1, 1.0, 4),
}


@op
def quantize(x: Tensor, kind: Kind) -> Tensor:
    """Round to the values that the format has: quantised and dequantised, like x.

    x [..., K], K a multiple of the group; arithmetic is float32 and every result is exact in
    float32 and bfloat16. With A the largest magnitude of a group, at least ``least``: E8M0 scales
    are ``2^⌈log2(A · fp32(1/top))⌉``, E4M3 scales ``e4m3(min(A/6, 448))``; values are x / scale,
    rounded to nearest even and held within ±top. A NaN makes its group NaN, an infinity too where
    the scale is E8M0.
    """
    form = FORMATS[kind]
    groups, scale = _scaled_groups(x, kind)
    if kind == "nvfp4":
        values = _shares(groups, scale, form).mul_(scale)
    else:  # powers of two: the steps may carry the scale, and no value can pass the top
        values = _to_steps(groups, scale * form.normal, form)
    return values.flatten(-2).to(x.dtype)


@op
def pack_rows(x: Tensor, kind: Kind) -> Tensor:
    """:func:`quantize` as bytes: uint8 records of the values' codes, then the scales' codes.

    x [..., d] -> uint8[..., n]: ``fp8`` n = d + d/32, ``mxfp4`` d/2 + d/32, ``nvfp4`` d/2 + d/16.
    FP4 codes lie two in a byte, the even element in the low nibble. Codes of NaN groups are
    whatever decodes to NaN.
    """
    groups, scale = _scaled_groups(x, kind)
    values = _shares(groups, scale, FORMATS[kind]).flatten(-2)
    scale = scale.squeeze(-1)
    if kind == "nvfp4":
        scales = scale.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        scales = (scale.view(torch.int32) >> 23).to(torch.uint8)
    codes = values.to(torch.float8_e4m3fn).view(torch.uint8) if kind == "fp8" else pack_fp4(values)
    return torch.cat((codes, scales), -1)


@op
def unpack_rows(records: Tensor, kind: Kind, dtype: torch.dtype) -> Tensor:
    """Values of :func:`pack_rows`' records: uint8[..., n] -> [..., d] of ``dtype``.

    ``unpack_rows(pack_rows(x, kind), kind, x.dtype)`` has the bits of ``quantize(x, kind)``.
    """
    form = FORMATS[kind]
    groups = records.shape[-1] * 8 // (form.group * form.value_bits + 8)
    codes, scales = records[..., :-groups].contiguous(), records[..., -groups:].contiguous()
    values = e4m3(codes) if kind == "fp8" else unpack_fp4(codes)
    scale = (e4m3 if kind == "nvfp4" else e8m0)(scales)[..., None]
    values = values.view(*records.shape[:-1], groups, form.group)
    return values.mul_(scale).flatten(-2).to(dtype)


@op
def scaled_linear(ops: Any, x: Tensor, w: Any, out_dtype: torch.dtype | None = None) -> Tensor:
    """``quantize(x, "fp8") · wᵀ``. x [..., K], w [N, K] -> [..., N] of ``out_dtype`` (x's if None).

    A dense weight is multiplied by ``linear``. A ``BlockScaled`` one: the products of each 32-wide
    block of K are summed in float32 and scaled, the blocks added in float32 in ascending order,
    and the sum rounded once.
    """
    x = ops.quantize(x, "fp8")
    if not isinstance(w, BlockScaled):
        y: Tensor = ops.linear(x, w, None, out_dtype)
        return y
    wide = _block_product(x.float().reshape(-1, x.shape[-1]), w)
    return wide.view(*x.shape[:-1], len(w)).to(out_dtype or x.dtype)


@op
def grouped_scaled_linear(
    ops: Any, x: Tensor, w: Any, offsets: Tensor, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Each expert's rows times its weight, as :func:`scaled_linear`.

    x [R, K] sorted by expert, w [E, N, K], offsets int64[E+1] -> [R, N] of ``out_dtype`` (x's if
    None). Rows from ``offsets[E]`` on are 0.
    """
    x = ops.quantize(x, "fp8")
    if not isinstance(w, BlockScaled):
        dense: Tensor = ops.grouped_linear(x, w, offsets, out_dtype)
        return dense
    y = x.new_zeros((len(x), w.shape[1]), dtype=out_dtype or x.dtype)
    for expert, (begin, end) in enumerate(pairwise(offsets.tolist())):
        if begin < end:
            y[begin:end] = _block_product(x[begin:end].float(), w[expert]).to(y.dtype)
    return y


@op
def scaled_moe(
    ops: Any,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Any,
    down: Any,
    num_experts: int,
    limit: float | None,
) -> Tensor:
    """Gated experts on scaled linears. x [T, D], ids int32[T, k], weights float32[T, k],
    gate_up [E, 2·I, D], down [E, D, I] -> float32[T, D], before the one rounding.

    Per slot: ``a = weight · silu(min(gate, limit)) · clamp(up, ±limit)`` in float32 on the rounded
    projections, then ``down · a``; both a and its projection are rounded to x's dtype. A token's
    slots are added in float32 in ascending order of their expert. Slots of experts elsewhere add
    nothing.
    """
    k = ids.shape[1]
    order, offsets = ops.permute(ids, num_experts)
    pairs = ops.grouped_scaled_linear(x.index_select(0, order // k), gate_up, offsets)
    gated = ops.silu_mul(pairs.float(), limit) * weights.flatten()[order, None]
    rows = ops.grouped_scaled_linear(gated.to(x.dtype), down, offsets)
    # Rows lie by expert, so a token's rows in ascending order are its experts in ascending order.
    places = order.argsort().view(ids.shape).sort(-1).values
    total: Tensor = rows.index_select(0, places[:, 0]).float()
    for slot in range(1, k):
        total += rows.index_select(0, places[:, slot])
    return total


class ScaledMoEParams(NamedTuple):
    """A layer's router and experts: prepared weights and shape.

    ``router`` [E, D], read by ``linear``, never quantised; ``bias`` and ``image_bias`` float32[E]
    (None: image rows take ``bias``). ``gate_up`` [E, 2·I, D], ``down`` [E, D, I], read by
    ``grouped_scaled_linear``; ``shared_gate_up`` [2·I, D], ``shared_down`` [D, I], read by
    ``scaled_linear``. ``scale`` multiplies the chosen weights; ``limit`` cuts the gates.
    """

    router: Any
    bias: Tensor
    image_bias: Tensor | None
    gate_up: Any
    down: Any
    shared_gate_up: Any
    shared_down: Any
    experts: int
    chosen: int
    scale: float
    limit: float | None
    score: str = "sqrtsoftplus"


def choose_experts(
    ops: Any, x: Tensor, image: Tensor | None, params: ScaledMoEParams
) -> tuple[Tensor, Tensor]:
    """:func:`scaled_moe_block`'s router: (ids int32[T, k], weights float32[T, k])."""
    bias = params.bias
    if image is not None and params.image_bias is not None:
        bias = torch.where(image[:, None], params.image_bias, bias)
    logits = ops.linear(x, params.router, None, torch.float32)
    ids, weights = ops.route(logits, bias, params.chosen, params.score, True, params.scale)
    return ids, weights


@op
def scaled_moe_block(ops: Any, x: Tensor, image: Tensor | None, params: ScaledMoEParams) -> Tensor:
    """Router, routed experts and the shared one. x [T, D] (normed) -> [T, D] of x's dtype.

    ``image`` bool[T]: rows that choose with ``image_bias`` (None: no row). The shared expert has
    the routed ones' formula without a weight; its rounded output is added to their float32 sum,
    which is then rounded (specification, section 4).
    """
    ids, weights = choose_experts(ops, x, image, params)
    routed = ops.scaled_moe(
        x, ids, weights, params.gate_up, params.down, params.experts, params.limit
    )
    pairs = ops.scaled_linear(x, params.shared_gate_up)
    shared = ops.scaled_linear(ops.silu_mul(pairs, params.limit), params.shared_down)
    y: Tensor = (routed + shared.float()).to(x.dtype)
    return y


def _scaled_groups(x: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """(x as float32[..., G, g], its scales float32[..., G, 1])."""
    form = FORMATS[kind]
    if x.shape[-1] % form.group:
        raise ValueError(f"{kind} takes rows of whole groups of {form.group}, not {x.shape[-1]}")
    groups = x.float().view(*x.shape[:-1], x.shape[-1] // form.group, form.group)
    most = groups.abs().amax(-1, keepdim=True).clamp_(min=form.least)
    if kind == "nvfp4":
        return groups, most.div_(form.top).clamp_(max=448.0).to(torch.float8_e4m3fn).float()
    # The power of two at or above: one more in the exponent wherever the mantissa is not zero.
    bits = most.mul_(1 / form.top).view(torch.int32).clamp_(max=_EXPONENT)
    return groups, bits.add_(_MANTISSA).bitwise_and_(_EXPONENT).view(torch.float32)


def _shares(groups: Tensor, scale: Tensor, form: Format) -> Tensor:
    """Values in units of their scale, as the format has them."""
    return _to_steps((groups / scale).clamp_(-form.top, form.top), form.normal, form)


def _to_steps(x: Tensor, normal: Tensor | float, form: Format) -> Tensor:
    """x to nearest even, ``mantissa`` bits behind the first; below ``normal`` steps stay."""
    power = (x.view(torch.int32) & _EXPONENT).view(torch.float32)  # 2^⌊log2 |x|⌋
    step = power.clamp_(min=normal).mul_(2.0**-form.mantissa)
    return (x / step).round_().mul_(step)


def _block_product(x: Tensor, w: BlockScaled) -> Tensor:
    """Quantised float32 x [R, K] · wᵀ, K block by K block.

    Scales are powers of two, so a block's products may carry them from the start: the sum is the
    same as if it were scaled afterwards. All shapes are fixed by the weight, rows come in tiles.
    """
    depth = x.shape[-1] // TILE
    padded = F.pad(x, (0, 0, 0, -len(x) % ROWS))
    tiles = padded.view(-1, ROWS, depth, TILE).transpose(1, 2)
    out = x.new_empty((len(padded), len(w)))
    for begin in range(0, len(w), OUTPUTS):
        end = min(begin + OUTPUTS, len(w))
        part = w.rows(begin, end).dequantize().view(end - begin, depth, TILE)
        columns = part.permute(1, 2, 0).contiguous()
        for tile, rows in enumerate(tiles):
            products = torch.bmm(rows, columns)
            total = products[0]
            for block in products[1:]:
                total += block
            out[tile * ROWS : (tile + 1) * ROWS, begin:end] = total
    return out[: len(x)]
