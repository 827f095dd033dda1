"""Launches of the kernels that are written for Hopper alone, and when they serve.

Each stands for a kernel of ``kernels.gemm`` or ``kernels.attention`` with the same bits, so that
choosing one is a matter of speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deepinfer_backend_cuda.kernels import flash as flash_kernels
from deepinfer_backend_cuda.kernels import long as long_kernels
from deepinfer_backend_cuda.kernels import stream as stream_kernels
from deepinfer_backend_cuda.kernels import wide as wide_kernels
from deepinfer_backend_cuda.launch import exact, processors, rows_behind

STREAMED_ROWS = 64
"""Products of at most so many rows are streamed (``kernels.stream``)."""
WIDE_ROWS = 256
"""Those of at most so many have tiles of any width (``kernels.wide``); of more rows there are tiles
enough for every multiprocessor (``kernels.long``).
"""
FLASH_ROWS = 128
"""Rows of a tile of ``kernels.flash``: tokens times a head group."""
_OUT = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
_SWIZZLED = stream_kernels.SWIZZLED.value


@cache
def serves(device: torch.device) -> bool:
    """Whether ``device`` is a Hopper GPU."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@dataclass(frozen=True, slots=True)
class Stream:
    """Rows of weights and depth of a tile, stages of its ring; programs on a multiprocessor."""

    n: int
    k: int
    stages: int
    residents: int = 1


def stream_tile(m: int, n: int, k: int, gated: bool, device: torch.device) -> Stream:
    """From measurements on an H200."""
    if gated and m <= 8:
        return Stream(128, 128, 4)
    if gated:
        once = triton.cdiv(n, 128) <= processors(device)
        return Stream(256, 64, 5) if once else Stream(128, 64, 4, residents=2)
    if n <= 4096:
        # A short product follows attention: its ring has to fit beside those programs.
        return Stream(32, 128, 8 if k > 4096 else 7)
    return Stream(64, 128, 6) if n < 16384 else Stream(128, 128, 4)


def stream(
    x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, gated: bool = False,
    tile: Stream | None = None,
) -> None:  # fmt: skip
    """y [M, N] becomes x [M, K] · wᵀ + bias, or with w [2·N, K] its ``silu_mul``.

    M at most 64; x and w as tensor descriptors want them (``linear._aligned``).
    """
    (m, k), n = x.shape, y.shape[1]
    tile = tile or stream_tile(m, n, k, gated, y.device)
    box = tile.n // 2 if gated else tile.n
    rows = next(size for size in (8, 16, 32, 64) if m <= size)  # copying rows that are none is slow
    programs = min(triton.cdiv(n, box), tile.residents * processors(y.device))
    kernels: Any = stream_kernels
    kernels.stream_kernel[(programs,)](
        TensorDescriptor(x, [rows_behind(x, rows), k], [x.stride(0), 1], [rows, tile.k], _SWIZZLED),
        TensorDescriptor(w, [len(w), k], [w.stride(0), 1], [box, tile.k], _SWIZZLED),
        y,
        y if bias is None else bias,
        m,
        n,
        k,
        programs,
        ROWS=rows,
        BN=tile.n,
        BK=tile.k,
        STAGES=tile.stages,
        GATED=gated,
        BIASED=bias is not None,
        OUT=_OUT[y.dtype],
        num_warps=4,
        **exact(m),
    )


def multiplies(x: Tensor, y: Tensor) -> bool:
    """Whether ``product`` takes these; of more than WIDE_ROWS rows ``long`` takes whole tiles only.

    Others are left to ``kernels.gemm``: edges are rare, and the difference is 2 to 5 %.
    """
    whole = y.dtype is torch.bfloat16 and y.shape[1] % 256 == 0 and x.shape[1] % 64 == 0
    return serves(x.device) and (whole or len(x) <= WIDE_ROWS)


def product(x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, gated: bool = False) -> None:
    """``stream``, ``wide`` or ``long``, by rows."""
    if len(x) <= STREAMED_ROWS:
        stream(x, w, bias, y, gated)
    else:
        (wide if len(x) <= WIDE_ROWS else long)(x, w, bias, y, gated)


def flashes(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether ``flash`` takes these: bfloat16, heads of 64 or 128, pages of at least 8 lines that
    tensor descriptors can address.
    """
    if q.dtype is not torch.bfloat16 or q.shape[2] not in (64, 128) or q.stride(2) != 1:
        return False
    if q.shape[1] // k_cache.shape[2] > FLASH_ROWS or q.stride(0) % 8 or q.stride(1) % 8:
        return False
    return q.data_ptr() % 16 == 0 and all(_addressable(cache) for cache in (k_cache, v_cache))


def _addressable(cache: Tensor) -> bool:
    """[pages, page_size, HKV, D] as evenly spaced lines of all heads."""
    page, line, head, one = cache.stride()
    even = page % line == 0 and line % 8 == 0 and head % 8 == 0 and one == 1
    inside = (cache.shape[2] - 1) * head + cache.shape[3] <= line
    return even and inside and cache.shape[1] >= 8 and cache.data_ptr() % 16 == 0


def flash(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    tiles: tuple[int, Tensor, Tensor],
    step: tuple[Tensor, Tensor, Tensor],
    scale: float,
    sink: Tensor | None,
    out: tuple[Tensor, Tensor],
    piece: int,
    stages: int = 4,
) -> None:
    """Fill (o, lse); ``tiles`` cut for FLASH_ROWS // G tokens each, ``step``: block table, lengths
    and cu_q of the plan.
    """
    tokens, heads, dim = q.shape
    page_size, kv_heads = caches[0].shape[1:3]
    table, lengths, cu_q = step
    most, request, first = tiles
    lines = min(page_size, 64)
    group = heads // kv_heads
    kernels: Any = flash_kernels
    kernels.flash_kernel[(min(most * kv_heads, processors(q.device)),)](
        q,
        *(_lines(cache, lines) for cache in caches),
        table,
        lengths,
        cu_q,
        request,
        first,
        *out,
        out[1] if sink is None else sink,
        float(scale),
        q.stride(0),
        q.stride(1),
        *(cache.stride(0) // cache.stride(1) for cache in caches),
        *(cache.stride(2) for cache in caches),
        table.stride(0),
        len(lengths),
        tokens,
        most,
        G=group,
        HKV=kv_heads,
        BQ=FLASH_ROWS // group,
        D=dim,
        PAGE=page_size,
        LINES=lines,
        PIECE=piece,
        STAGES=stages,
        SINK=sink is not None,
        num_warps=4,
        **exact(tokens),
    )


def _lines(cache: Tensor, lines: int) -> TensorDescriptor:
    page, line, head, _ = cache.stride()
    rows = (len(cache) - 1) * (page // line) + cache.shape[1]
    width = (cache.shape[2] - 1) * head + cache.shape[3]
    return TensorDescriptor(cache, [rows, width], [line, 1], [lines, 64], _SWIZZLED)


@dataclass(frozen=True, slots=True)
class Wide:
    """Rows of weights in the parts of a tile, largest first; stages of its ring; tiles of rows that
    are walked together.
    """

    parts: tuple[int, ...]
    stages: int
    group: int = 8


_PARTS = ((256,), (128, 64, 32), (128, 64), (128,), (64, 32), (64,), (32,))
_RING_BYTES = 226 << 10


@cache
def wide_tile(m: int, n: int, gated: bool, device: torch.device) -> Wide:
    """The width whose tiles fill the multiprocessors best.

    A step of a tile takes the time of its products or that of fetching its inputs, whichever is
    longer (at 790 TFLOP/s and 112 GB/s for a multiprocessor 2.7 ns a column and 1.1 ns a line), and
    its share of what a tile costs beside, about 3 µs.
    """
    share = 2 if gated else 1

    def cost(parts: tuple[int, ...]) -> float:
        width = sum(parts)
        tiles = triton.cdiv(m, 128) * triton.cdiv(n, width // share)
        waves = int(triton.cdiv(tiles, processors(device)))
        return waves * (max(2.7 * width, 1.1 * (128 + width)) + 47)

    parts = min(_PARTS, key=cost)
    return Wide(parts, min(8, _RING_BYTES // ((128 + sum(parts)) * 128)))


def wide(
    x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, gated: bool = False,
    tile: Wide | None = None,
) -> None:  # fmt: skip
    """As ``stream``, of any number of rows."""
    (m, k), n = x.shape, y.shape[1]
    tile = tile or wide_tile(triton.cdiv(m, 128) * 128, n, gated, y.device)
    width = sum(tile.parts) // (2 if gated else 1)
    box = min(tile.parts) // (2 if gated else 1)
    programs = min(processors(y.device), triton.cdiv(m, 128) * triton.cdiv(n, width))
    parts = (*tile.parts, 0, 0)
    kernels: Any = wide_kernels
    kernels.wide_kernel[(programs,)](
        TensorDescriptor(x, [rows_behind(x, 128), k], [x.stride(0), 1], [128, 64], _SWIZZLED),
        TensorDescriptor(w, [len(w), k], [w.stride(0), 1], [box, 64], _SWIZZLED),
        y,
        y if bias is None else bias,
        m,
        n,
        k,
        P0=parts[0],
        P1=parts[1],
        P2=parts[2],
        BK=64,
        GROUP=tile.group,
        STAGES=tile.stages,
        GATED=gated,
        BIASED=bias is not None,
        OUT=_OUT[y.dtype],
        num_warps=4,
        **exact(m),
    )


@dataclass(frozen=True, slots=True)
class Long:
    """Rows of a part and parts of a tile (``kernels.long``); stages of its ring; tiles of rows that
    are walked together.
    """

    rows: int
    parts: int
    stages: int
    group: int


LOW, TALL = Long(128, 1, 4, 8), Long(64, 3, 3, 11)


def long_tile(m: int, n: int, gated: bool, biased: bool, device: torch.device) -> Long:
    """The one that fills the multiprocessors better; a row of TALL costs 3 % less (an H200, 8192
    rows). With a bias it would spill registers.
    """
    if biased:
        return LOW

    def rows(tile: Long) -> int:
        height = tile.rows * tile.parts
        tiles = triton.cdiv(m, height) * triton.cdiv(n, 128 if gated else 256)
        return int(triton.cdiv(tiles, processors(device))) * height

    return TALL if rows(TALL) * 0.97 < rows(LOW) else LOW


def long(
    x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, gated: bool = False,
    tile: Long | None = None,
) -> None:  # fmt: skip
    """As ``stream``, of any number of rows; y bfloat16, N a multiple of 256."""
    (m, k), n = x.shape, y.shape[1]
    tile = tile or long_tile(m, n, gated, bias is not None, y.device)
    columns, height = 128 if gated else 256, tile.rows * tile.parts
    tiles = triton.cdiv(m, height) * triton.cdiv(n, columns)
    kernels: Any = long_kernels
    kernels.long_kernel[(min(processors(y.device), tiles),)](
        TensorDescriptor(
            x, [rows_behind(x, height), k], [x.stride(0), 1], [tile.rows, 64], _SWIZZLED
        ),
        TensorDescriptor(w, [len(w), k], [w.stride(0), 1], [columns, 64], _SWIZZLED),
        TensorDescriptor(y, [m, n], [n, 1], [tile.rows, 128], _SWIZZLED),
        y if bias is None else bias,
        m,
        n,
        k,
        ROWS=tile.rows,
        PARTS=tile.parts,
        GROUP=tile.group,
        STAGES=tile.stages,
        GATED=gated,
        BIASED=bias is not None,
        num_warps=tile.rows // 16,
        **exact(m),
    )
