"""Launchers of the row kernels: the ops ``rms_norm``, ``silu_mul``, ``rope``, ``kv_write`` and kin.

Contracts as in ``deepinfer.ops.reference``; no launch waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
from deepinfer.ops.reference import batch
from torch import Tensor

from deepinfer_backend_cuda.kernels import rows as kernels
from deepinfer_backend_cuda.launch import empty_rows, exact

HEADS, ROPE_WARPS = 8, 2
"""Heads that a program rotates, and its warps."""
MOST_PARTS = 8
"""Tensors of a row, and numbers, that ``append_rows_kernel`` takes."""


def rms_norm(x: Tensor, w: Tensor | None, eps: float) -> Tensor:
    """x [..., H] of any row stride, w [H] or None -> like x, contiguous."""
    heads, x_row, x_head = _two_strides(x)
    if heads == 0:
        x = x.contiguous()
        heads, x_row, x_head = 1, x.shape[-1], 0
    y = empty_rows(x, x.shape)
    _norm(x, None, w, y, None, (heads, x_row, x_head), eps)
    return y


def add_rms_norm(
    x: Tensor, residual: Tensor, w: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """x, residual [T, H] -> (y, residual'), both contiguous."""
    width = x.shape[-1]
    x, residual = x.reshape(-1, width), residual.reshape(-1, width)
    if x.stride(1) != 1:
        x = x.contiguous()
    if residual.stride(1) != 1:
        residual = residual.contiguous()
    y, total = empty_rows(x, x.shape), x.new_empty(x.shape)
    _norm(x, residual, w, y, total, (1, x.stride(0), 0), eps)
    return y, total


def _norm(
    x: Tensor,
    residual: Tensor | None,
    w: Tensor | None,
    y: Tensor,
    total: Tensor | None,
    strides: tuple[int, int, int],
    eps: float,
) -> None:
    width = x.shape[-1]
    if not y.numel():
        return
    block = triton.next_power_of_2(width)
    kernels.rms_norm_kernel[(y.numel() // width,)](
        x,
        x if residual is None else residual,
        x if w is None else w,
        y,
        y if total is None else total,
        *strides,
        0 if residual is None else residual.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        ADD=residual is not None,
        WEIGHTED=w is not None,
        num_warps=min(max(block // 512, 1), 16),
        **exact(y.numel() // width),
    )


def _two_strides(x: Tensor) -> tuple[int, int, int]:
    """(heads, row stride, head stride) of x [T, heads, H] or [..., H]; heads 0 if it needs a copy.

    Rows of any leading shape are one dimension where they lie evenly.
    """
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return 0, 0, 0
    if x.dim() == 1:
        return 1, 0, 0
    if x.dim() == 2:
        return 1, x.stride(0), 0
    if x.dim() == 3 and x.shape[1]:
        return x.shape[1], x.stride(0), x.stride(1)
    return 0, 0, 0


def silu_mul(x: Tensor, limit: float | None = None) -> Tensor:
    """x [..., 2·I] -> [..., I]."""
    width = x.shape[-1] // 2
    flat = x.reshape(-1, 2 * width)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    y = empty_rows(x, (len(flat), width))
    if y.numel():
        block = min(1024, triton.next_power_of_2(width))
        kernels.silu_mul_kernel[(len(flat), triton.cdiv(width, block))](
            flat,
            y,
            flat.stride(0),
            width,
            0.0 if limit is None else float(limit),
            BLOCK=block,
            LIMITED=limit is not None,
            **exact(len(flat)),
        )
    return y.view(*x.shape[:-1], width)


def rope(x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False) -> Tensor:
    """x [T, N, D] of any row and head stride -> contiguous."""
    if x.stride(2) != 1:
        x = x.contiguous()
    tokens, heads, dim = x.shape
    y = x.new_empty(x.shape)
    if y.numel():
        kernels.rope_kernel[(tokens, triton.cdiv(heads, HEADS))](
            x,
            y,
            positions,
            cos_sin,
            heads,
            x.stride(0),
            x.stride(1),
            D=dim,
            BLOCK=triton.next_power_of_2(dim),
            HEADS=HEADS,
            R=cos_sin.shape[1],
            INTERLEAVED=interleaved,
            num_warps=ROPE_WARPS,
            **exact(tokens),
        )
    return y


def rope_write(
    qkv: Tensor,
    heads: tuple[int, int, int],
    positions: Tensor,
    cos_sin: Tensor,
    kv: tuple[Tensor, Tensor],
    slots: Tensor,
) -> Tensor:
    """Rotate, write the cache, return the queries [T, HQ, D]. ``heads``: HQ, HKV, D.

    qkv [T, (HQ + 2·HKV)·D] of unit inner stride; caches whose lines are contiguous.
    """
    hq, hkv, dim = heads
    k, v = kv
    q = qkv.new_empty((len(qkv), hq, dim))
    if len(qkv):
        kernels.rope_write_kernel[(len(qkv), triton.cdiv(hq + 2 * hkv, HEADS))](
            qkv,
            q,
            k,
            v,
            positions,
            slots,
            cos_sin,
            qkv.stride(0),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            HQ=hq,
            HKV=hkv,
            D=dim,
            BLOCK=triton.next_power_of_2(dim),
            HEADS=HEADS,
            R=cos_sin.shape[1],
            PAGE=k.shape[1],
            num_warps=ROPE_WARPS,
            **exact(len(qkv)),
        )
    return q


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """k, v [T, HKV, D] to their slots, in place; −1 writes nothing."""
    if k.stride(2) != 1 or v.stride(2) != 1:
        k, v = k.contiguous(), v.contiguous()
    tokens, heads, dim = k.shape
    if not k.numel():
        return
    kernels.kv_write_kernel[(tokens, heads)](
        k,
        v,
        k_cache,
        v_cache,
        slots,
        heads,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.stride(0),
        v_cache.stride(1),
        D=dim,
        BLOCK=triton.next_power_of_2(dim),
        PAGE=k_cache.shape[1],
        num_warps=1,
        **exact(tokens),
    )


def append_rows(
    parts: Sequence[Tensor], numbers: Sequence[Tensor], rows: Tensor, ints: Tensor, count: Tensor
) -> None:
    """parts [T, H] each, numbers int64[T] each, to rows [N, L·H] and ints int64[M, N] from
    ``count`` int64[1] on, which grows by T.
    """
    tokens, width = parts[0].shape
    if max(len(parts), len(numbers)) > MOST_PARTS or not parts[0].numel():
        batch.append_rows(parts, numbers, rows, ints, count)
        return
    parts = tuple(p if p.stride(1) == 1 else p.contiguous() for p in parts)
    block = triton.next_power_of_2(width)
    kernels.append_rows_kernel[(tokens, len(parts))](
        parts,
        tuple(p.stride(0) for p in parts),
        tuple(n.contiguous() for n in numbers),
        rows,
        ints,
        count,
        len(rows),
        rows.stride(0),
        ints.stride(0),
        PARTS=len(parts),
        NUMBERS=len(numbers),
        FEW=MOST_PARTS,
        WIDTH=width,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 8),
        **exact(tokens),
    )


def stage(
    step: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    standing: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    """A step of T rows of n <= T requests into a graph's inputs of N >= T rows and as many
    requests: each x [·, H], block table int32[·, W], positions and slots int64[·] of the rows,
    lengths int64[·] of the requests, and cu_q int32[· + 1], which begins with 0.
    """
    x, table, positions, slots, lengths, cu_q = (tensor.contiguous() for tensor in step)
    x_to, table_to, *_, cu_q_to = standing
    tokens, width = x.shape
    kernels.stage_kernel[(len(x_to),)](
        x,
        x_to,
        table,
        table_to,
        positions,
        standing[2],
        slots,
        standing[3],
        lengths,
        standing[4],
        cu_q,
        cu_q_to,
        tokens,
        len(table),
        table.shape[1],
        x.stride(0),
        table.stride(0),
        table_to.stride(0),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        PAGES_BLOCK=triton.next_power_of_2(table.shape[1]),
        num_warps=4,
        **exact(tokens),
    )
