"""Latents: rotation, what a step leaves in its caches, and what its queries gather and attend to.

Attention reads a pool of latents through a table of places, ``size`` for a query's window and k for
chosen entries, −1 for none. Its order is that of the places: BLOCK_N at a time, an online softmax,
and sums that are chains of tensor-core steps (those of the weights, rounded and what rounding left,
as products with ones), so neither the heads of a tile nor its warps move a bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_backend_cuda.kernels.chain import follow
from deepinfer_backend_cuda.kernels.scaled import (
    FP8,
    NVFP4,
    e2m1,
    e4m3,
    e8m0,
    quantized,
)

PLAIN = tl.constexpr(3)
"""Beside the kinds of records: rows of values."""
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _normed(x, w_ptr, cols, WIDTH: tl.constexpr, eps):
    """float32 row x, zeros behind WIDTH, as ``rms_norm`` has it."""
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(x * x, 0), WIDTH * 1.0) + eps))
    return x * scale * tl.load(w_ptr + cols, mask=cols < WIDTH, other=0).to(tl.float32)


@triton.jit
def norm_quantize_kernel(
    x_ptr, w_ptr, y_ptr, pick_ptr, x_row, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PICKED: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """y[t] = quantize(rms_norm(x[t]), "fp8"), of row ``pick[t]`` if PICKED."""
    follow(CHAIN)
    t = tl.program_id(0).to(tl.int64)
    row = t
    if PICKED:
        row = tl.load(pick_ptr + t)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row + cols, mask=cols < WIDTH, other=0).to(tl.float32)
    y = _normed(x, w_ptr, cols, WIDTH, eps).to(y_ptr.dtype.element_ty).to(tl.float32)
    y = tl.reshape(quantized(y[None, :], 1, BLOCK // 32, 32, FP8), (BLOCK,))
    tl.store(y_ptr + t * WIDTH + cols, y.to(y_ptr.dtype.element_ty), mask=cols < WIDTH)


@triton.jit
def _turned(x, cols, angle_ptr, partner, D: tl.constexpr, R: tl.constexpr):
    """float32 row x with its last R of D channels rotated in adjacent pairs; ``partner``: the row
    with the two of each pair exchanged.
    """
    at = cols - (D - R)
    tail = (at >= 0) & (cols < D)
    cos = tl.load(angle_ptr + at // 2, mask=tail, other=1)
    sin = tl.load(angle_ptr + R // 2 + at // 2, mask=tail, other=0)
    turn = tl.where(cols % 2 == 0, -(partner * sin), partner * sin)
    return tl.where(tail, x * cos + turn, x)


@triton.jit
def norm_turn_kernel(
    x_ptr, w_ptr, y_ptr, own_ptr, pos_ptr, angles_ptr, x_row, eps, shift,
    D: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, OWN: tl.constexpr, PLAIN_Y: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """y[t] = rms_norm(x[t]) rotated at position ``max(pos − shift, 0)``; OWN: own[t] =
    quantize(y[t], "fp8"); PLAIN_Y: own[t] = rms_norm(x[t]), not rotated.
    """
    follow(CHAIN)
    t = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + t * x_row + cols, mask=cols < D, other=0).to(tl.float32)
    y = _normed(x, w_ptr, cols, D, eps).to(y_ptr.dtype.element_ty).to(tl.float32)
    if PLAIN_Y:
        tl.store(own_ptr + t * D + cols, y.to(own_ptr.dtype.element_ty), mask=cols < D)
    even, odd = tl.split(tl.reshape(y, (BLOCK // 2, 2)))
    partner = tl.reshape(tl.join(odd, even), (BLOCK,))
    angle = angles_ptr + tl.maximum(tl.load(pos_ptr + t) - shift, 0) * R
    y = _turned(y, cols, angle, partner, D, R).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + t * D + cols, y, mask=cols < D)
    if OWN:
        y = quantized(y.to(tl.float32)[None, :], 1, BLOCK // 32, 32, FP8)
        y = tl.reshape(y, (BLOCK,)).to(own_ptr.dtype.element_ty)
        tl.store(own_ptr + t * D + cols, y, mask=cols < D)


@triton.jit
def turn_kernel(
    x_ptr, pos_ptr, angles_ptr, x_row, x_head, heads, sign,
    D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """The last R channels of x [T, heads, D], in place; ``sign`` −1 turns back."""
    follow(CHAIN)
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, HALF)
    c = tl.arange(0, 2 * HALF)
    mask = (h < heads)[:, None] & (c < R)[None, :]
    angle = angles_ptr + tl.load(pos_ptr + t) * R + i
    cos = tl.load(angle, mask=i < R // 2, other=1)[None, :]
    sin = tl.load(angle + R // 2, mask=i < R // 2, other=0)[None, :] * sign
    at = x_ptr + t * x_row + h[:, None] * x_head + (D - R) + c[None, :]
    x = tl.load(at, mask=mask, other=0).to(tl.float32)
    a, b = tl.split(tl.reshape(x, (HEADS, HALF, 2)))
    x = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (HEADS, 2 * HALF))
    tl.store(at, x.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def compress_kernel(
    u_ptr, s_ptr, y_ptr, state_ptr, row_ptr, pos_ptr, starts_ptr, blocks_ptr, u_row, depth,
    D: tl.constexpr, BLOCK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Rows at odd positions pool themselves and the one before, of this step or of ``state``."""
    follow(CHAIN)
    t = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < D
    request, p = tl.load(row_ptr + t), tl.load(pos_ptr + t)
    y = tl.zeros((BLOCK,), tl.float32)
    if (request >= 0) & (p % 2 == 1):
        u1 = tl.load(u_ptr + t * u_row + cols, mask=mask, other=0)
        s1 = tl.load(s_ptr + t * u_row + cols, mask=mask, other=0)
        if p - 1 >= tl.load(starts_ptr + request):
            u0 = tl.load(u_ptr + (t - 1) * u_row + cols, mask=mask, other=0)
            s0 = tl.load(s_ptr + (t - 1) * u_row + cols, mask=mask, other=0)
        else:
            old = state_ptr + (tl.load(blocks_ptr + request) * depth + (p - 1) % depth) * (2 * D)
            u0 = tl.load(old + cols, mask=mask, other=0)
            s0 = tl.load(old + D + cols, mask=mask, other=0)
        top = tl.maximum(s0, s1)
        a, b = tl.exp(s0 - top), tl.exp(s1 - top)
        y = tl.div_rn(a * u0 + b * u1, a + b)
    tl.store(y_ptr + t * D + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def open_kernel(
    u_ptr, s_ptr, state_ptr, row_ptr, pos_ptr, slot_ptr, cu_q_ptr, blocks_ptr, u_row, depth,
    D: tl.constexpr, BLOCK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """u and s of each request's last ``depth`` rows that write, to their places in ``state``."""
    follow(CHAIN)
    t = tl.program_id(0).to(tl.int64)
    request = tl.load(row_ptr + t)
    if (request >= 0) & (tl.load(slot_ptr + t) >= 0):
        if t >= tl.load(cu_q_ptr + request + 1) - depth:
            cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            mask = cols < D
            p = tl.load(pos_ptr + t)
            to = state_ptr + (tl.load(blocks_ptr + request) * depth + p % depth) * (2 * D)
            tl.store(to + cols, tl.load(u_ptr + t * u_row + cols, mask=mask), mask=mask)
            tl.store(to + D + cols, tl.load(s_ptr + t * u_row + cols, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def places_kernel(
    row_ptr, pos_ptr, slot_ptr, cu_q_ptr, blocks_ptr, ring_ptr, entry_ptr, tokens, rows, ratio,
    RING: tl.constexpr, ENTRY: tl.constexpr, BLOCK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Where each row enters a ring of ``rows`` (RING), and the slot of the entry that it closes
    (ENTRY); −1 where it does not. int64[T] each.
    """
    follow(CHAIN)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = t < tokens
    p = tl.load(pos_ptr + t, mask=mask, other=0)
    slot = tl.load(slot_ptr + t, mask=mask, other=-1)
    if RING:
        request = tl.load(row_ptr + t, mask=mask, other=-1)
        alive = mask & (request >= 0) & (slot >= 0)
        end = tl.load(cu_q_ptr + request + 1, mask=alive, other=0)
        block = tl.load(blocks_ptr + request, mask=alive, other=0)
        last = alive & (t >= end - rows)
        tl.store(ring_ptr + t, tl.where(last, block * rows + p % rows, -1), mask=mask)
    if ENTRY:
        closes = (slot >= 0) & (p % ratio == ratio - 1)
        tl.store(entry_ptr + t, tl.where(closes, slot // ratio, -1), mask=mask)


@triton.jit
def _values(
    ptr, row, seen, cols, WIDTH: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Rows int64[B] of a cache of rows of WIDTH elements, as float32 [B, cols]."""
    mask = seen[:, None] & (cols < D)[None, :]
    at = ptr + row[:, None] * WIDTH
    if KIND == PLAIN:
        value = tl.load(at + cols[None, :], mask=mask, other=0).to(tl.float32)
    elif KIND == FP8:
        value = e4m3(tl.load(at + cols[None, :], mask=mask, other=0))
        value = value * e8m0(tl.load(at + D + cols[None, :] // 32, mask=mask, other=0))
    else:
        byte = tl.load(at + cols[None, :] // 2, mask=mask, other=0).to(tl.int32)
        value = e2m1((byte >> ((cols % 2) * 4)[None, :]) & 15)
        if KIND == NVFP4:
            value = value * e4m3(tl.load(at + D // 2 + cols[None, :] // 16, mask=mask, other=0))
        else:
            value = value * e8m0(tl.load(at + D // 2 + cols[None, :] // 32, mask=mask, other=0))
    return value


@triton.jit(do_not_specialize=["owns", "k"])
def gather_kernel(
    own_ptr, ring_ptr, cache_ptr, entries_ptr, row_ptr, pos_ptr, cu_q_ptr, starts_ptr, blocks_ptr,
    floors_ptr, table_ptr, pool_ptr, place_ptr, table_row, width, pages, rows, k,
    SIZE: tl.constexpr, PER_PAGE: tl.constexpr, FLOORED: tl.constexpr, ENTRIES: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, RING_KIND: tl.constexpr, RING_WIDTH: tl.constexpr,
    CACHE_KIND: tl.constexpr, CACHE_WIDTH: tl.constexpr, COPY: tl.constexpr,
    owns, requests, BLOCK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """BLOCK of the SIZE + k places of query t. COPY: their latents go to its own rows of the pool
    [T·(SIZE + k), D]; else the places name rows of a pool of all (``pool_kernel``).
    """
    follow(CHAIN)
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = SIZE + k
    request = tl.load(row_ptr + t)
    alive = request >= 0
    request = tl.maximum(request, 0)
    start = tl.load(starts_ptr + request)
    low = tl.zeros_like(start)
    if FLOORED:
        low = tl.maximum(tl.load(floors_ptr + request), 0)
    at = tl.load(pos_ptr + t) - SIZE + 1 + i
    window = (i < SIZE) & (at >= low) & alive
    here = window & (at >= start)
    before = window & (at < start)
    own = tl.load(cu_q_ptr + request).to(tl.int64) + at - start
    ring = tl.load(blocks_ptr + request) * rows + at % rows
    slot = own * 0
    chosen = i < 0
    if ENTRIES:
        entry = tl.load(
            entries_ptr + t * k + (i - SIZE), mask=(i >= SIZE) & (i < total) & alive, other=-1
        ).to(tl.int64)
        chosen = entry >= 0
        column = tl.minimum(entry // PER_PAGE, width - 1)
        page = tl.load(table_ptr + request * table_row + column, mask=chosen, other=0).to(tl.int64)
        slot = page * PER_PAGE + entry % PER_PAGE
    if COPY:
        row = t * total + i
        cols = tl.arange(0, BD)
        value = tl.zeros((BLOCK, BD), tl.float32)
        if tl.program_id(1) * BLOCK < SIZE:
            value += _values(own_ptr, own, here, cols, D, D, PLAIN)
            value += _values(ring_ptr, ring, before, cols, RING_WIDTH, D, RING_KIND)
        if ENTRIES:
            if (tl.program_id(1) + 1) * BLOCK > SIZE:
                value += _values(cache_ptr, slot, chosen, cols, CACHE_WIDTH, D, CACHE_KIND)
        tl.store(
            pool_ptr + row[:, None] * D + cols[None, :],
            value.to(pool_ptr.dtype.element_ty),
            mask=(here | before | chosen)[:, None] & (cols < D)[None, :],
        )
    else:
        back: tl.constexpr = SIZE - 1
        row = tl.where(here, own, owns + request * back + back + at - start)
        if ENTRIES:
            far = owns + requests * back + request * width * PER_PAGE + entry
            row = tl.where(chosen, far, row)
    found = tl.where(here | before | chosen, row, -1)
    tl.store(place_ptr + t * total + i, found.to(tl.int32), mask=i < total)


@triton.jit(do_not_specialize=["owns"])
def pool_kernel(
    own_ptr, ring_ptr, cache_ptr, starts_ptr, blocks_ptr, table_ptr, pool_ptr, table_row, width,
    pages, rows, requests, owns,
    SIZE: tl.constexpr, PER_PAGE: tl.constexpr, ENTRIES: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, RING_KIND: tl.constexpr, RING_WIDTH: tl.constexpr,
    CACHE_KIND: tl.constexpr, CACHE_WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """BLOCK rows of the pool of a step: its own latents, the window before each request's first
    row, each request's entries up to ``width`` pages.
    """
    follow(CHAIN)
    back: tl.constexpr = SIZE - 1
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.arange(0, BD)
    here = r < owns
    old = r - owns
    before = (old >= 0) & (old < requests * back)
    request = tl.where(before, old // back, 0)
    at = tl.load(starts_ptr + request) - back + old % back
    before = before & (at >= 0)
    ring = tl.load(blocks_ptr + request) * rows + at % rows
    value = _values(own_ptr, r, here, cols, D, D, PLAIN)
    value += _values(ring_ptr, ring, before, cols, RING_WIDTH, D, RING_KIND)
    there = r < 0
    if ENTRIES:
        far = old - requests * back
        there = (far >= 0) & (far < requests * width * PER_PAGE)
        request = tl.where(there, far // (width * PER_PAGE), 0)
        entry = far % (width * PER_PAGE)
        page = tl.load(table_ptr + request * table_row + entry // PER_PAGE, mask=there, other=0).to(
            tl.int64
        )
        there = there & (page >= 0) & (page < pages)
        slot = page * PER_PAGE + entry % PER_PAGE
        value += _values(cache_ptr, slot, there, cols, CACHE_WIDTH, D, CACHE_KIND)
    tl.store(
        pool_ptr + r[:, None] * D + cols[None, :],
        value.to(pool_ptr.dtype.element_ty),
        mask=(here | before | there)[:, None] & (cols < D)[None, :],
    )


@triton.jit
def sparse_kernel(
    q_ptr, pool_ptr, place_ptr, sink_ptr, o_ptr, scale, q_row, q_head, heads, total,
    BH: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """BH heads of query t over its ``total`` places: o [T, heads, D], contiguous."""
    follow(CHAIN)
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    od = tl.arange(0, BD)
    mask = (h < heads)[:, None] & (od < D)[None, :]
    q = tl.load(q_ptr + t * q_row + h[:, None] * q_head + od[None, :], mask=mask, other=0)
    unit = scale * LOG2E
    m = tl.full((BH,), float("-inf"), tl.float32)
    l = tl.zeros((BH, 16), tl.float32)
    acc = tl.zeros((BH, BD), tl.float32)
    ones = tl.full((BLOCK_N, 16), 1.0, tl.float32).to(q.dtype)
    for at in tl.range(0, total, BLOCK_N):
        n = at + tl.arange(0, BLOCK_N)
        place = tl.load(place_ptr + t * total + n, mask=n < total, other=-1)
        seen = place >= 0
        kv = tl.load(
            pool_ptr + place[:, None].to(tl.int64) * D + od[None, :],
            mask=seen[:, None] & (od < D)[None, :],
            other=0,
        )
        s = tl.dot(q, kv.T, input_precision=PRECISION) * unit
        s = tl.where(seen[None, :], s, float("-inf"))
        best = tl.maximum(m, tl.max(s, 1))
        base = tl.where(best == float("-inf"), 0.0, best)
        p = tl.exp2(s - base[:, None])
        keep = tl.exp2(m - base)[:, None]
        rounded = p.to(kv.dtype)
        l = tl.dot(rounded, ones, l * keep, input_precision=PRECISION)
        if PRECISION != "ieee":
            l = tl.dot((p - rounded.to(tl.float32)).to(kv.dtype), ones, l)
        acc = tl.dot(rounded, kv, acc * keep, input_precision=PRECISION)
        m = best
    sink = tl.load(sink_ptr + h, mask=h < heads, other=0).to(tl.float32) * LOG2E
    base = tl.where(m == float("-inf"), 0.0, m)
    total_weight = tl.max(l, 1) + tl.exp2(sink - base)
    o = tl.div_rn(acc, tl.broadcast_to(total_weight[:, None], acc.shape))
    o = tl.where((m == float("-inf"))[:, None], 0.0, o)
    to = o_ptr + (t * heads + h[:, None]) * D + od[None, :]
    tl.store(to, o.to(o_ptr.dtype.element_ty), mask=mask)
