"""Launchers of hyper-connections and Engram's gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from deepinfer.errors import UnsupportedError
from deepinfer.ops.reference.engram import EngramParams
from deepinfer.ops.reference.hyper import HyperParams, Mix
from torch import Tensor

from deepinfer_backend_cuda import scaled
from deepinfer_backend_cuda.kernels import hyper as kernels
from deepinfer_backend_cuda.launch import exact, options


@dataclass(frozen=True, slots=True)
class MixWeight:
    """A float32 matrix [rows, K] as ``parts`` bfloat16[3, rows, K], whose sum it is."""

    parts: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.parts.shape[1:]

    @property
    def nbytes(self) -> int:
        return self.parts.nbytes


def prepare(weight: Any, uses: frozenset[str]) -> Any:
    """A mix' matrix in its three parts: 8 bits of the significand each, so nothing is lost. What
    else an opening reads, its norm, stays.
    """
    if "hyper_mix" not in uses:
        return weight
    wide = weight.float()
    parts = wide.new_empty((3, *wide.shape), dtype=torch.bfloat16)
    for part in parts:
        part.copy_(wide)
        wide = wide - part.float()
    return MixWeight(parts)


def _streams(x: Tensor) -> Tensor:
    n = x.shape[1]
    if n < 2 or n & (n - 1):
        raise UnsupportedError(
            f"hc_mult={n}: this backend mixes 2, 4, 8 … streams.",
            setting="backend",
            next_step="Choose another backend.",
        )
    return x.contiguous()


def _product(x: Tensor, fn: MixWeight) -> tuple[Tensor, int, int]:
    """(parts float32[T, pieces, columns], pieces, columns) of x [T, n, D]."""
    tokens, (rows, k) = len(x), fn.shape
    single = x.dtype is torch.float32
    pieces = triton.cdiv(k, int(kernels.PIECE.value))
    columns = max(16, triton.next_power_of_2(rows))
    part = torch.empty((tokens, pieces, columns), dtype=torch.float32, device=x.device)
    height = 16 if single or tokens <= 512 else 64
    kernels.mix_kernel[triton.cdiv(tokens, height), pieces](
        x,
        fn.parts,
        part,
        tokens,
        rows,
        k,
        pieces,
        BM=height,
        BN=columns,
        BK=32 if single else 128,
        SINGLE=single,
        num_warps=4,
        num_stages=1 if single else 3,
        **options(tokens),
    )
    return part, pieces, columns


def _open(
    x: Tensor,
    fn: MixWeight,
    scale: Tensor,
    base: Tensor,
    iters: int,
    eps: float,
    norm_eps: float,
    carried: Tensor | None,
    norm: Tensor | None,
) -> tuple[Tensor, Mix]:
    """(rows, mix); the rows only where ``carried`` is given."""
    x = _streams(x)
    tokens, n, width = x.shape
    y = x.new_empty((tokens, width) if carried is not None else (0, width))
    pre, post = torch.empty((2, tokens, n), dtype=torch.float32, device=x.device)
    comb = pre.new_empty((tokens, n, n))
    if not tokens:
        return y, (pre, post, comb)
    part, pieces, columns = _product(x, fn)
    unit, block = pre.new_empty(tokens), triton.next_power_of_2(width)
    kernels.opening_kernel[(tokens,)](
        x,
        part if carried is None else carried.contiguous(),
        part if norm is None else norm,
        y,
        unit,
        width,
        norm_eps,
        N=n,
        BLOCK=block,
        ROWS=carried is not None,
        num_warps=min(max(block // 512, 1), 16),
        **exact(tokens),
    )
    kernels.balance_kernel[(triton.cdiv(tokens, 32),)](
        part,
        unit,
        scale.float(),
        base.float(),
        pre,
        post,
        comb,
        tokens,
        pieces,
        iters,
        eps,
        N=n,
        BT=32,
        BN=columns,
        num_warps=4,
        **exact(tokens),
    )
    return y, (pre, post, comb)


def hyper_mix(
    x: Tensor,
    fn: Any,
    scale: Tensor,
    base: Tensor,
    iters: int,
    eps: float,
    norm_eps: float,
) -> Mix:
    """x [T, n, D] -> (pre, post [T, n], comb [T, n, n]), float32."""
    return _open(x, fn, scale, base, iters, eps, norm_eps, None, None)[1]


def hyper_open(x: Tensor, pre: Tensor, params: HyperParams) -> tuple[Tensor, Mix]:
    """x [T, n, D], pre float32[T, n] -> (rows [T, D], mix)."""
    p = params
    return _open(x, p.fn, p.scale, p.base, p.iters, p.eps, p.norm_eps, pre, p.norm)


def hyper_collapse(x: Tensor, pre: Tensor) -> Tensor:
    """x [T, n, D], pre float32[T, n] -> [T, D]."""
    x = x.contiguous()
    tokens, n, width = x.shape
    y = x.new_empty((tokens, width))
    if y.numel():
        block = min(1024, triton.next_power_of_2(width))
        kernels.collapse_kernel[tokens, triton.cdiv(width, block)](
            x, pre.contiguous(), y, width, N=n, BLOCK=block, num_warps=4, **exact(tokens)
        )
    return y


def hyper_merge(x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """x [T, n, D], y [T, D], post [T, n], comb [T, n, n] -> [T, n, D]."""
    x = _streams(x)
    tokens, n, width = x.shape
    to = x.new_empty(x.shape)
    if to.numel():
        block = min(1024, triton.next_power_of_2(width))
        kernels.merge_streams_kernel[tokens, triton.cdiv(width, block)](
            x,
            y.contiguous(),
            post.contiguous(),
            comb.contiguous(),
            to,
            width,
            N=n,
            BLOCK=block,
            num_warps=4,
            **exact(tokens),
        )
    return to


def engram_gate(
    x: Tensor,
    keys: Tensor,
    value: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    active: Tensor | None = None,
) -> Tensor:
    """x, keys [T, n, D], value [T, D], weights [n, D], active bool[T] -> [T, n, D]."""
    x = x.contiguous()
    tokens, n, width = x.shape
    if keys.stride()[1:] != (width, 1):
        keys = keys.contiguous()
    if value.stride(-1) != 1:
        value = value.contiguous()
    y = x.new_empty(x.shape)
    if y.numel():
        block = triton.next_power_of_2(width)
        kernels.engram_gate_kernel[tokens, n](
            x,
            keys,
            value,
            q_weight.contiguous(),
            k_weight.contiguous(),
            x if active is None else active,
            y,
            width,
            keys.stride(0),
            value.stride(0),
            width**-0.5,
            eps,
            N=n,
            BLOCK=block,
            MASKED=active is not None,
            num_warps=min(max(block // 512, 1), 16),
            **exact(tokens),
        )
    return y


def engram_block(x: Tensor, rows: Tensor, active: Tensor | None, params: EngramParams) -> Tensor:
    """x [T, n, D], rows [T, columns·width] -> [T, n, D]."""
    streams, width = x.shape[1:]
    kv = scaled.scaled_linear(rows, params.kv)
    keys = kv[:, : streams * width].view(len(kv), streams, width)
    value = kv[:, streams * width :]
    return engram_gate(x, keys, value, params.q_weight, params.k_weight, params.eps, active)
