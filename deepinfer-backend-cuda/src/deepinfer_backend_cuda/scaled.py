"""Launchers of the quantisers and of products with kept weights: ``quantize`` and kin.

A weight that a checkpoint stores in FP8 or FP4 stays in as many bytes, in another order
(``kernels.scaled``); a product decodes it in registers to bfloat16, which is exact, and multiplies
in bfloat16. FP8 tensor cores would gain nothing here: on SM90 their sums keep 13 bits and would
have to be promoted every 32 columns, where scales change, which costs what the faster product wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from deepinfer.errors import UnsupportedError
from deepinfer.ops.lowbit import BlockScaled
from deepinfer.ops.reference.scaled import FORMATS, Kind
from torch import Tensor

from deepinfer_backend_cuda import linear as dense
from deepinfer_backend_cuda.kernels import moe as products
from deepinfer_backend_cuda.kernels import scaled as kernels
from deepinfer_backend_cuda.launch import exact, options

KINDS = {"fp8": kernels.FP8, "mxfp4": kernels.MXFP4, "nvfp4": kernels.NVFP4}
ROWS, COLUMNS = 64, 128
"""Of a kept weight's blocks."""
DECODED_ROWS = 512
"""From so many rows on, a weight is decoded to bfloat16 once and multiplied as such: same bits."""
WIDE = 16384
TILES = {
    (16, False): (16, 64, 4, 4),
    (16, True): (16, 128, 4, 4),
    (32, False): (32, 64, 4, 4),
    (32, True): (32, 128, 4, 4),
    (64, False): (64, 64, 4, 3),
    (64, True): (64, 128, 4, 3),
    (128, False): (64, 128, 4, 3),
    (128, True): (64, 128, 4, 3),
    (256, False): (128, 128, 8, 3),
    (256, True): (128, 128, 8, 3),
}
"""By rows at most, and whether there are WIDE outputs: a tile's rows, outputs, warps, stages."""
_CHUNK = 1 << 28  # bytes of codes that are put in order at a time


@dataclass(frozen=True, slots=True)
class KeptWeight:
    """A weight [..., N, K] in its stored bytes, blocks of 64 rows and 128 columns one after the
    other: ``words`` int32[..., blocks of rows, blocks of columns, 64·16 (FP4) or 2·64·16 (FP8)],
    ``scales`` int32[..., blocks of rows, blocks of columns, 64], a byte for 32 columns: the
    exponent field of a bfloat16.
    """

    words: Tensor
    scales: Tensor
    shape: torch.Size
    kind: int

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes

    @property
    def blocks(self) -> int:
        """Of columns."""
        return self.words.shape[-2]

    def __len__(self) -> int:
        return self.shape[0]


def keep(weight: Any, uses: frozenset[str]) -> Any:
    """``prepare`` of every op here: block-scaled weights are put in the kernels' order.

    Raises:
        UnsupportedError: a scale is too large for a product of two bfloat16 numbers to hold it, or
            an FP8 code is NaN.
    """
    if not isinstance(weight, BlockScaled):
        return weight
    four = weight.kind == "fp4"
    most, above = int(weight.scales.max()), 126 if four else 120
    if most + above > 254:
        raise _refused(f"a scale of 2^{most - 127}; the largest is 2^{127 - above}")
    *lead, n, k = weight.shape
    rows, columns = -(-n // ROWS), -(-k // COLUMNS)
    count = weight.codes[..., 0, 0].numel()
    codes = weight.codes.reshape(count, n, weight.codes.shape[-1])
    scales = weight.scales.reshape(count, *weight.scales.shape[-2:])
    words = codes.new_empty(
        (count, rows, columns, ROWS * 16 * (1 if four else 2)), dtype=torch.int32
    )
    fields = codes.new_empty((count, rows, columns, ROWS), dtype=torch.int32)
    step = max(1, _CHUNK // max(codes[0].numel(), 1))
    for first in range(0, count, step):
        part = slice(first, first + step)
        if not four and bool(((codes[part] & 0x7F) == 0x7F).any()):
            raise _refused("a NaN code")
        padded = _padded(codes[part], rows * ROWS, columns * COLUMNS // (2 if four else 1), 0)
        words[part] = _fp4_words(padded) if four else _fp8_words(padded)
        fields[part] = _fields(scales[part], four, rows, columns, above)
    lead_shape = tuple(lead)
    return KeptWeight(
        words.view(*lead_shape, *words.shape[1:]),
        fields.view(*lead_shape, *fields.shape[1:]),
        weight.shape,
        int((_fp4_kind(codes.device) if four else kernels.FP8).value),
    )


@cache
def _fp4_kind(device: torch.device) -> Any:
    """How the kernels of a device decode MXFP4 weights; the values are the same."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return kernels.PAIRED if hopper else kernels.MXFP4


def _refused(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"A block-scaled weight has {what}: it cannot be multiplied as stored on this device.",
        setting="dequantize_weights",
        next_step="Set dequantize_weights=True.",
    )


def _padded(x: Tensor, rows: int, columns: int, value: int) -> Tensor:
    if x.shape[-2:] == (rows, columns):
        return x
    out = x.new_full((*x.shape[:-2], rows, columns), value)
    out[..., : x.shape[-2], : x.shape[-1]] = x
    return out


def _blocked(x: Tensor, columns: int) -> Tensor:
    """[c, R·64, C·w] -> [c, R, C, 64, w]."""
    count, n, width = x.shape
    parts = x.view(count, n // ROWS, ROWS, columns, width // columns)
    return parts.permute(0, 1, 3, 2, 4)


def _fp8_words(codes: Tensor) -> Tensor:
    """Columns 16·i + j of 64: byte of word j. See ``kernels.scaled._fp8_half`` for the order."""
    blocks = _blocked(codes, codes.shape[-1] // COLUMNS).reshape(-1, ROWS, 2, 4, 8, 2).int()
    even, odd = blocks[..., 0], blocks[..., 1]  # [·, row, half, i, pair]
    halves = [even[:, :, :, i + 1] | even[:, :, :, i] << 8 for i in (0, 2)]
    others = [odd[:, :, :, i + 1] | odd[:, :, :, i] << 8 for i in (0, 2)]
    words = torch.stack([a | b << 16 for a, b in zip(halves, others, strict=True)], -1)
    words = words.flatten(-2).transpose(1, 2)  # [·, half, row, 16]
    return words.reshape(*_grid(codes, 1), 2 * ROWS * 16)


def _fp4_words(codes: Tensor) -> Tensor:
    """Columns 16·i + j of 128: four bits of word j, i < 4 in even words, the others in odd ones."""
    blocks = _blocked(codes, codes.shape[-1] * 2 // COLUMNS).reshape(-1, ROWS, 8, 8).int()
    found = []
    for nibble in (blocks & 15, blocks >> 4):  # [·, row, i, pair]: even columns, odd columns
        sign, size = nibble & 8, nibble & 7
        for i in (0, 4):
            s, e = sign[:, :, i : i + 4].unbind(2), size[:, :, i : i + 4].unbind(2)
            found.append(
                (s[0] << 12 | e[0] << 6)
                | (s[1] << 6 | e[1])
                | (s[2] << 11 | e[2] << 3)
                | (s[3] << 10 | e[3] << 10)
            )
    low, high = found[:2], found[2:]
    words = torch.stack([a | b << 16 for a, b in zip(low, high, strict=True)], -1).flatten(-2)
    return words.reshape(*_grid(codes, 2), ROWS * 16)


def _grid(codes: Tensor, per_byte: int) -> tuple[int, int, int]:
    count, n, width = codes.shape
    return count, n // ROWS, width * per_byte // COLUMNS


def _fields(scales: Tensor, four: bool, rows: int, columns: int, above: int) -> Tensor:
    """Four bytes of each row and block of columns."""
    if not four:
        scales = scales.repeat_interleave(32, -2)
    padded = _padded(scales, rows * ROWS, columns * 4, 0)
    exponents = _blocked(padded, columns).int() + above
    shifts = torch.arange(0, 32, 8, device=scales.device, dtype=torch.int32)
    return (exponents << shifts).sum(-1, dtype=torch.int32)


def quantize(x: Tensor, kind: Kind) -> Tensor:
    """x [..., K] -> like x, contiguous."""
    form, width = FORMATS[kind], x.shape[-1]
    if width % form.group:
        raise ValueError(f"{kind} takes rows of whole groups of {form.group}, not {width}")
    rows = _rows(x)
    y = x.new_empty(x.shape)
    if y.numel():
        groups = min(1024, triton.next_power_of_2(width)) // form.group
        grid = (len(rows), triton.cdiv(width, groups * form.group))
        kernels.quantize_kernel[grid](
            rows,
            y,
            rows.stride(0),
            WIDTH=width,
            GROUPS=groups,
            GROUP=form.group,
            KIND=KINDS[kind],
            num_warps=4,
            **exact(len(rows)),
        )
    return y


def _rows(x: Tensor) -> Tensor:
    """x as rows [T, K] of unit inner stride."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def gated_quantize(x: Tensor, limit: float | None) -> Tensor:
    """``quantize(silu_mul(x, limit), "fp8")``. x [T, 2·I] contiguous -> [T, I]."""
    width = x.shape[-1] // 2
    y = x.new_empty((len(x), width))
    if y.numel():
        kernels.gated_quantize_kernel[len(x), triton.cdiv(width, 1024)](
            x,
            y,
            x.stride(0),
            0.0 if limit is None else float(limit),
            WIDTH=width,
            GROUPS=32,
            LIMITED=limit is not None,
            num_warps=4,
            **exact(len(x)),
        )
    return y


def pack_rows(x: Tensor, kind: Kind) -> Tensor:
    """x [..., d] -> uint8[..., n]."""
    form, width = FORMATS[kind], x.shape[-1]
    if width % form.group:
        raise ValueError(f"{kind} takes rows of whole groups of {form.group}, not {width}")
    rows = _rows(x)
    size = width * form.value_bits // 8 + width // form.group
    out = torch.empty((*x.shape[:-1], size), dtype=torch.uint8, device=x.device)
    write_rows(rows, out.view(-1, size), None, kind)
    return out


def write_rows(x: Tensor, to: Tensor, slots: Tensor | None, kind: Kind) -> None:
    """Rows x [T, d] as records (``to`` uint8[R, n]) or values [R, d], to rows ``slots`` int64[T]
    (None: to their own); what lies outside of R is not written.
    """
    form, width = FORMATS[kind], x.shape[-1]
    if not len(x):
        return
    if x.stride(-1) != 1:
        x = x.contiguous()
    kernels.pack_kernel[(len(x),)](
        x,
        to,
        to if slots is None else slots,
        x.stride(0),
        to.stride(0),
        len(to),
        WIDTH=width,
        GROUPS=triton.next_power_of_2(width) // form.group,
        GROUP=form.group,
        KIND=KINDS[kind],
        SLOTS=slots is not None,
        PACKED=to.dtype is torch.uint8,
        num_warps=1 if width <= 256 else 2,
        **exact(len(x)),
    )


def unpack_rows(records: Tensor, kind: Kind, dtype: torch.dtype) -> Tensor:
    """uint8[..., n] -> [..., d] of ``dtype``."""
    form, size = FORMATS[kind], records.shape[-1]
    width = size * 8 // (form.group * form.value_bits + 8) * form.group
    rows = _rows(records)
    y = torch.empty((*records.shape[:-1], width), dtype=dtype, device=records.device)
    if y.numel():
        kernels.unpack_kernel[(len(rows),)](
            rows,
            y,
            rows.stride(0),
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            GROUP=form.group,
            KIND=KINDS[kind],
            num_warps=1 if width <= 256 else 2,
            **exact(len(rows)),
        )
    return y


def decode(w: KeptWeight, y: Tensor | None = None) -> Tensor:
    """A kept weight [N, K] as bfloat16."""
    n, k = w.shape
    if y is None:
        y = torch.empty((n, k), dtype=torch.bfloat16, device=w.words.device)
    kernels.decode_kernel[triton.cdiv(n, ROWS), w.blocks](
        w.words,
        w.scales,
        y,
        n,
        k,
        w.blocks,
        KIND=kernels.MXFP4 if w.kind == kernels.PAIRED.value else w.kind,
        BN=ROWS,
        num_warps=4,
        **options(n),
    )
    return y


def scaled_linear(x: Tensor, w: Any, out_dtype: torch.dtype | None = None) -> Tensor:
    """``quantize(x, "fp8") · wᵀ``. x [..., K], w [N, K] -> [..., N] of ``out_dtype``."""
    x = quantize(x, "fp8")
    if not isinstance(w, KeptWeight):
        return dense.linear(x, w, None, out_dtype)
    return product(x, w, out_dtype)


def product(x: Tensor, w: KeptWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    """``x · wᵀ`` for rows that are exact in bfloat16, as quantised ones are."""
    n, k = w.shape
    y = torch.empty((*x.shape[:-1], n), dtype=out_dtype or x.dtype, device=x.device)
    rows, out = _rows(x).to(torch.bfloat16), y.view(-1, n)
    if not out.numel():
        return y
    if len(rows) >= DECODED_ROWS and k % 8 == 0:
        dense.product(rows, decode(w), None, out)
        return y
    bm, bn, warps, stages = tile_of(len(rows), n)
    launch_product(rows, w.words, w.scales, out, (n, k), w.kind, (bm, bn, warps, stages))
    return y


def tile_of(rows: int, n: int) -> tuple[int, int, int, int]:
    """(rows, outputs, warps, stages) of a tile; none of them moves a bit."""
    bucket = next((most for most in (16, 32, 64, 128) if rows <= most), 256)
    return TILES[bucket, n >= WIDE]


def launch_product(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    y: Tensor,
    shape: tuple[int, int],
    kind: int,
    tile: tuple[int, int, int, int],
    batch: tuple[int, int, int] = (1, 0, 0),
) -> None:
    """y [M, N] becomes x [M, K] · wᵀ. ``batch``: matrices, and what x and y step between them."""
    n, k = shape
    bm, bn, warps, stages = tile
    count, x_batch, y_batch = batch
    products.product_kernel[triton.cdiv(n, bn), triton.cdiv(len(x), bm), count](
        x,
        words,
        scales,
        y,
        y,
        y,
        len(x),
        n,
        k,
        triton.cdiv(k, COLUMNS),
        x.stride(0),
        x_batch,
        y.stride(0),
        y_batch,
        words.stride(0) if count > 1 else 0,
        scales.stride(0) if count > 1 else 0,
        BM=bm,
        BN=bn,
        KIND=kind,
        GROUPED=False,
        num_warps=warps,
        num_stages=stages,
        **options(len(x)),
    )
