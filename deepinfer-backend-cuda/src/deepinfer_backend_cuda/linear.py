"""``linear``: which kernel, which tile.

The kernel is chosen by weight and dtype alone; the tile may follow M, since it moves no bit
(``kernels.gemm``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from deepinfer_backend_cuda import hopper, rows
from deepinfer_backend_cuda.kernels import gemm as kernels
from deepinfer_backend_cuda.launch import empty_rows, exact, options, processors

SHARED_BYTES = 232448 - 1024
"""Shared memory that one program may take on SM90 and SM100, less barriers."""
_OUT = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows, columns, depth of a tile; warps and pipeline stages; how many rows of tiles are walked
    together, so that their inputs are read from L2; ``pair``: gate and what it gates are one
    product (``kernels.gemm.gated_gemm_kernel``).
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    swap: bool = False
    group: int = 8
    pair: bool = False

    def fitting(self, out_bytes: int) -> Tile:
        """With as few stages fewer as shared memory asks for. They never touch the arithmetic."""
        tile = self
        while tile.stages > 1:
            inputs = tile.stages * (tile.m + tile.n) * tile.k * 2
            if inputs + tile.m * tile.n * out_bytes <= SHARED_BYTES:
                break
            tile = replace(tile, stages=tile.stages - 1)
        return tile


_WIDEST = Tile(128, 128, 64, 8, 4, pair=True)


@cache
def gated_tile(m: int, n: int) -> Tile:
    """The same for ``gated``, whose tiles have n columns of the gate and n of what it gates."""
    if m <= 32:
        tile = Tile(m, 64, 128, 4, 4, swap=True)
    elif m <= 64:
        tile = Tile(64, 64, 64, 4, 6)
    else:
        tile = Tile(128, 64, 64, 8, 5) if m <= 128 else _WIDEST
    columns = replace(tile, n=2 * tile.n).fitting(1)  # of which half are stored
    return replace(tile, stages=columns.stages)


@cache
def tile_for(m: int, n: int, out_bytes: int) -> Tile:
    """By a bucket of M (``bucket``) and N, from measurements on an H200."""
    return _tile_for(m, n, out_bytes).fitting(out_bytes)


def bucket(m: int) -> int:
    """The M that tiles are chosen for: the next of 16, 32, 64, 128, 256, 512."""
    return next((limit for limit in (16, 32, 64, 128, 256) if m <= limit), 512)


def _tile_for(m: int, n: int, out_bytes: int) -> Tile:
    if m <= 32:
        if n >= 16384:
            return Tile(16, 128, 128, 4, 4, swap=True)
        return Tile(m, 64, 128, 4, 5, swap=True)
    if m <= 64:
        if n < 2048:
            return Tile(16, 64, 128, 4, 5, swap=True)
        if n <= 4096:
            return Tile(64, 32, 128, 4, 5)
        return Tile(64, 64, 128, 4, 5) if n < 16384 else Tile(64, 128, 64, 4, 6)
    if m <= 256:
        if n < 1024:
            return Tile(32, 64, 128, 4, 5, swap=True)
        if n < 3072 or (m <= 128 and n <= 4096):
            return Tile(64, 64, 128, 4, 4)
        if n <= 4096 or (m <= 128 and n < 16384):
            return Tile(128, 64, 64, 4, 7)
        if m <= 128 or n < 16384 or out_bytes > 2:
            return Tile(128, 128, 64, 8, 5)
        return Tile(128, 256, 64, 8, 3)
    return Tile(128, 128, 64, 4, 4) if n < 1024 else Tile(128, 256, 64, 8, 3)


def linear(
    x: Tensor, w: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x [..., K], w [N, K], bias [N] -> [..., N] of ``out_dtype`` (x's if None), rounded once."""
    n, k = w.shape
    y = x.new_empty((x.numel() // k, n), dtype=out_dtype or x.dtype)
    product(x.reshape(-1, k), w, bias, y)
    return y.view(*x.shape[:-1], n)


def product(x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """y [M, N], contiguous, becomes x [M, K] · wᵀ + bias.

    Of at most ``hopper.WIDE_ROWS`` rows w has to be older than the kernels of the step: a Hopper
    GPU reads it before they have ended.
    """
    if not y.numel():
        return
    if x.dtype != w.dtype:
        x, w = x.float(), w.float()
    if not _matrix(w):
        _plain(x, w, bias, y)
    elif _addressable(w) and hopper.multiplies(x, y):  # a copy could not be read ahead
        hopper.product(_aligned(x), w, bias, y)
    else:
        _tensor_cores(_aligned(x), _aligned(w), bias, y)


def _matrix(w: Tensor) -> bool:
    """Whether tensor descriptors can address it and tensor cores multiply it exactly."""
    return w.dtype is torch.bfloat16 and w.shape[1] % 8 == 0


def gated(x: Tensor, w: Tensor) -> Tensor:
    """``silu_mul(linear(x, w))``, bit for bit: x [..., K], w [2·N, K] -> [..., N]."""
    n, k = w.shape[0] // 2, w.shape[1]
    y = empty_rows(x, (x.numel() // k, n))
    if x.dtype != w.dtype or not _matrix(w):
        return rows.silu_mul(linear(x, w))
    if y.numel():
        flat = _aligned(x.reshape(-1, k))
        if _addressable(w) and hopper.multiplies(flat, y):
            hopper.product(flat, w, None, y, gated=True)
        else:
            _gated(flat, _aligned(w), y)
    return y.view(*x.shape[:-1], n)


def _gated(x: Tensor, w: Tensor, y: Tensor) -> None:
    (m, k), n = x.shape, y.shape[1]
    tile = gated_tile(bucket(m), n)
    whole = n * y.element_size() % 16 == 0
    programs = min(processors(y.device), triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n))
    kernels.gated_gemm_kernel[(programs,)](
        TensorDescriptor(x, [m, k], [x.stride(0), 1], [tile.m, tile.k]),
        _halves(w, tile) if tile.pair else _whole(w, tile),
        TensorDescriptor(y, [m, n], [n, 1], [tile.m, tile.n]) if whole else y,
        y,
        m,
        n,
        k,
        programs,
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        GROUP=tile.group,
        SWAP=tile.swap,
        PAIRED=tile.pair,
        STORE_TILES=whole,
        OUT=_OUT[y.dtype],
        num_warps=tile.warps,
        num_stages=tile.stages,
        **exact(m),
    )


def _whole(w: Tensor, tile: Tile) -> TensorDescriptor:
    return TensorDescriptor(w, [*w.shape], [w.stride(0), 1], [tile.n, tile.k])


def _halves(w: Tensor, tile: Tile) -> TensorDescriptor:
    """w [2·N, K] as [2, N, K]: a box has the rows of both."""
    n, row = len(w) // 2, w.stride(0)
    return TensorDescriptor(w, [2, n, w.shape[1]], [n * row, row, 1], [2, tile.n, tile.k])


def _tensor_cores(x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> None:
    (m, k), n = x.shape, w.shape[0]
    tile = tile_for(bucket(m), n, y.element_size())
    whole = n * y.element_size() % 16 == 0
    programs = min(processors(y.device), triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n))
    kernels.gemm_kernel[(programs,)](
        TensorDescriptor(x, [m, k], [x.stride(0), 1], [tile.m, tile.k]),
        TensorDescriptor(w, [n, k], [w.stride(0), 1], [tile.n, tile.k]),
        TensorDescriptor(y, [m, n], [n, 1], [tile.m, tile.n]) if whole else y,
        y,
        y if bias is None else bias,
        m,
        n,
        k,
        programs,
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        GROUP=tile.group,
        SWAP=tile.swap,
        BIASED=bias is not None,
        STORE_TILES=whole,
        OUT=_OUT[y.dtype],
        num_warps=tile.warps,
        num_stages=tile.stages,
        **options(m),
    )


def _plain(x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> None:
    (m, k), n = x.shape, w.shape[0]
    if x.stride(1) != 1:
        x = x.contiguous()
    if w.stride(1) != 1:
        w = w.contiguous()
    kernels.plain_gemm_kernel[(triton.cdiv(m, 32), triton.cdiv(n, 32))](
        x,
        w,
        y,
        y if bias is None else bias,
        m,
        n,
        k,
        x.stride(0),
        w.stride(0),
        BM=32,
        BN=32,
        BK=32,
        BIASED=bias is not None,
        PRECISION="ieee",
        num_warps=4,
        num_stages=2,
        **options(m),
    )


def _addressable(x: Tensor) -> bool:
    """Whether a tensor descriptor can: unit inner stride, 16-byte rows and start."""
    return x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy that a tensor descriptor can address."""
    if _addressable(x):
        return x
    return x.clone(memory_format=torch.contiguous_format)
