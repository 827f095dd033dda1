"""Hyper-connections and Engram's gate: n streams mixed around each sublayer. float32, rounded once.

A mix is a product of all streams of a token with a float32 matrix. The matrix is kept in three
bfloat16 parts whose sum it is, so bfloat16 rows meet it on tensor cores: PIECE columns at a time,
one chain for each part; parts and pieces are then added in order. Everything else has one tile
for all steps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_backend_cuda.kernels.chain import follow

PIECE = tl.constexpr(512)


@triton.jit(do_not_specialize=["tokens"])
def mix_kernel(
    x_ptr, w_ptr, part_ptr, tokens, ROWS, K, pieces,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SINGLE: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """Piece s of x [T, K] · wᵀ to part float32[T, pieces, BN]; w bfloat16[3, ROWS, K].

    SINGLE: float32 rows, multiply-adds, in one tile for all steps.
    """
    follow(CHAIN)
    t = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    s = tl.program_id(1)
    n = tl.arange(0, BN)
    size = ROWS * K
    high = tl.zeros((BM, BN), tl.float32)
    middle = tl.zeros((BM, BN), tl.float32)
    low = tl.zeros((BM, BN), tl.float32)
    for first in tl.range(0, PIECE, BK):
        k = s * PIECE + first + tl.arange(0, BK)
        x = tl.load(
            x_ptr + t[:, None] * K + k[None, :],
            mask=(t < tokens)[:, None] & (k < K)[None, :],
            other=0,
        )
        at = w_ptr + n[None, :] * K + k[:, None]
        mask = (n < ROWS)[None, :] & (k < K)[:, None]
        a = tl.load(at, mask=mask, other=0)
        b = tl.load(at + size, mask=mask, other=0)
        c = tl.load(at + 2 * size, mask=mask, other=0)
        if SINGLE:
            w = a.to(tl.float32) + b.to(tl.float32) + c.to(tl.float32)
            high = tl.dot(x, w, high, input_precision="ieee")
        else:
            high = tl.dot(x, a, high)
            middle = tl.dot(x, b, middle)
            low = tl.dot(x, c, low)
    to = part_ptr + (t[:, None] * pieces + s) * BN + n[None, :]
    tl.store(to, high + (middle + low), mask=(t < tokens)[:, None])


@triton.jit
def _sigmoid(x):
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def opening_kernel(
    x_ptr, carried_ptr, norm_ptr, y_ptr, unit_ptr, D, norm_eps,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """unit[t] = rsqrt(mean(x[t]²) + eps) over all streams; ROWS: y[t] = rms_norm(Σ carried · x)."""
    follow(CHAIN)
    t = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    squares = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(N):
        x = tl.load(x_ptr + (t * N + i) * D + cols, mask=mask, other=0).to(tl.float32)
        squares += x * x
        if ROWS:
            part = x * tl.load(carried_ptr + t * N + i)
            total = part if i == 0 else total + part
    mean = tl.div_rn(tl.sum(squares, 0), (N * D).to(tl.float32))
    tl.store(unit_ptr + t, tl.div_rn(1.0, tl.sqrt_rn(mean + norm_eps)))
    if ROWS:
        x = total.to(y_ptr.dtype.element_ty).to(tl.float32)
        mean = tl.div_rn(tl.sum(x * x, 0), D.to(tl.float32))
        y = x * tl.div_rn(1.0, tl.sqrt_rn(mean + norm_eps))
        y = y * tl.load(norm_ptr + cols, mask=mask, other=0).to(tl.float32)
        tl.store(y_ptr + t * D + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _shares(c, sums, eps):
    return tl.div_rn(c, tl.broadcast_to(sums + eps, c.shape))


@triton.jit(do_not_specialize=["tokens"])
def balance_kernel(
    part_ptr, unit_ptr, scale_ptr, base_ptr, pre_ptr, post_ptr, comb_ptr, tokens, pieces, iters,
    eps, N: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """The mixes of BT tokens from their products: pieces in order, gates, and Sinkhorn's steps."""
    follow(CHAIN)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    real = t < tokens
    j = tl.arange(0, N)
    cell = j[:, None] * N + j[None, :]
    pre = tl.zeros((BT, N), tl.float32)
    post = tl.zeros((BT, N), tl.float32)
    c = tl.zeros((BT, N, N), tl.float32)
    for s in tl.range(0, pieces):
        at = part_ptr + (t * pieces + s) * BN
        pre += tl.load(at[:, None] + j[None, :], mask=real[:, None], other=0)
        post += tl.load(at[:, None] + N + j[None, :], mask=real[:, None], other=0)
        rest = at[:, None, None] + 2 * N + cell[None, :, :]
        c += tl.load(rest, mask=real[:, None, None], other=0)
    unit = tl.load(unit_ptr + t, mask=real, other=0)
    pre = pre * unit[:, None] * tl.load(scale_ptr) + tl.load(base_ptr + j)[None, :]
    to = t[:, None] * N + j[None, :]
    tl.store(pre_ptr + to, _sigmoid(pre) + eps, mask=real[:, None])
    post = post * unit[:, None] * tl.load(scale_ptr + 1) + tl.load(base_ptr + N + j)[None, :]
    tl.store(post_ptr + to, 2.0 * _sigmoid(post), mask=real[:, None])
    c = c * unit[:, None, None] * tl.load(scale_ptr + 2)
    c += tl.load(base_ptr + 2 * N + cell)[None, :, :]
    c = tl.exp(c - tl.max(c, 2)[:, :, None])
    c = _shares(c, tl.sum(c, 2)[:, :, None], 0.0) + eps
    c = _shares(c, tl.sum(c, 1)[:, None, :], eps)
    for _ in tl.range(1, iters):
        c = _shares(c, tl.sum(c, 2)[:, :, None], eps)
        c = _shares(c, tl.sum(c, 1)[:, None, :], eps)
    to = t[:, None, None] * (N * N) + cell[None, :, :]
    tl.store(comb_ptr + to, c, mask=real[:, None, None])


@triton.jit
def collapse_kernel(
    x_ptr, pre_ptr, y_ptr, D, N: tl.constexpr, BLOCK: tl.constexpr, CHAIN: tl.constexpr
):
    """y[t] = Σ_i pre[t, i] · x[t, i], streams ascending."""
    follow(CHAIN)
    t = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < D
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(N):
        x = tl.load(x_ptr + (t * N + i) * D + cols, mask=mask, other=0).to(tl.float32)
        part = x * tl.load(pre_ptr + t * N + i)
        total = part if i == 0 else total + part
    tl.store(y_ptr + t * D + cols, total.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def merge_streams_kernel(
    x_ptr, y_ptr, post_ptr, comb_ptr, to_ptr, D,
    N: tl.constexpr, BLOCK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """to[t, j] = post[t, j] · y[t] + Σ_i comb[t, i, j] · x[t, i], streams ascending."""
    follow(CHAIN)
    t = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < D
    j = tl.arange(0, N)
    y = tl.load(y_ptr + t * D + cols, mask=mask, other=0).to(tl.float32)
    total = tl.load(post_ptr + t * N + j)[:, None] * y[None, :]
    for i in tl.static_range(N):
        x = tl.load(x_ptr + (t * N + i) * D + cols, mask=mask, other=0).to(tl.float32)
        total += tl.load(comb_ptr + (t * N + i) * N + j)[:, None] * x[None, :]
    to = to_ptr + (t * N + j[:, None]) * D + cols[None, :]
    tl.store(to, total.to(to_ptr.dtype.element_ty), mask=mask[None, :])


@triton.jit
def engram_gate_kernel(
    x_ptr, key_ptr, value_ptr, qw_ptr, kw_ptr, active_ptr, y_ptr, D, key_row, value_row, root, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Stream i of token t: x + γ · value, with γ from x and its key."""
    follow(CHAIN)
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    x = tl.load(x_ptr + (t * N + i) * D + cols, mask=mask, other=0).to(tl.float32)
    key = tl.load(key_ptr + t * key_row + i * D + cols, mask=mask, other=0).to(tl.float32)
    qw = tl.load(qw_ptr + i * D + cols, mask=mask, other=0).to(tl.float32)
    kw = tl.load(kw_ptr + i * D + cols, mask=mask, other=0).to(tl.float32)
    width = D.to(tl.float32)
    delta = tl.sum(x * (qw * kw) * key, 0)
    delta = tl.div_rn(delta, tl.sqrt_rn(tl.div_rn(tl.sum(x * x, 0), width) + eps))
    delta = tl.div_rn(delta, tl.sqrt_rn(tl.div_rn(tl.sum(key * key, 0), width) + eps)) * root
    size = tl.sqrt_rn(tl.maximum(tl.abs(delta), 1e-6))
    bits = delta.to(tl.int32, bitcast=True)
    gate = tl.div_rn(1.0, 1.0 + tl.exp(tl.where(bits < 0, size, -size)))
    gate = tl.where(delta != delta, delta, gate)
    if MASKED:
        gate = tl.where(tl.load(active_ptr + t) != 0, gate, 0.0)
    value = tl.load(value_ptr + t * value_row + cols, mask=mask, other=0).to(tl.float32)
    y = x + gate * value
    tl.store(y_ptr + (t * N + i) * D + cols, y.to(y_ptr.dtype.element_ty), mask=mask)
