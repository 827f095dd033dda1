"""Experts: choice, a stable sort on the device, products, and the sum of a token's experts.

Products have one float32 chain for each element, k ascending in steps of 16, as ``kernels.gemm``
has: values of kept weights are exact in bfloat16, so a product with one has the bits of the product
with the same weight dequantised, in any tile. The weight is the first operand, decoded in
registers; rows are the second, so that few of them are the narrow side of the instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_backend_cuda.kernels.chain import follow
from deepinfer_backend_cuda.kernels.scaled import FP8, gated, quantized, weight_tile

DENSE = tl.constexpr(3)
"""Beside the kinds of ``kernels.scaled``: a weight of bfloat16 values."""


@triton.jit(do_not_specialize=["slots"])
def sort_kernel(
    ids_ptr, order_ptr, place_ptr, offsets_ptr, slots, E,
    BLOCK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Program e of E + 1 finds the slots of expert e (E: of no expert), in order: a stable sort.

    order int64[slots]: the slot of each row; place int32[slots]: the row of each slot; offsets
    int64[E + 1].
    """
    follow(CHAIN)
    e = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for first in tl.range(0, slots, BLOCK):
        i = first + at
        id = tl.load(ids_ptr + i, mask=i < slots, other=E + 1)
        id = tl.where((id < 0) | ((id >= E) & (i < slots)), E, id)
        before += (id < e).to(tl.int32)
    row = tl.sum(before, 0)
    tl.store(offsets_ptr + e, row.to(tl.int64))
    for first in tl.range(0, slots, BLOCK):
        i = first + at
        id = tl.load(ids_ptr + i, mask=i < slots, other=E + 1)
        id = tl.where((id < 0) | ((id >= E) & (i < slots)), E, id)
        mine = (id == e) & (i < slots)
        count = tl.cumsum(mine.to(tl.int32), 0)
        to = row + count - 1
        tl.store(order_ptr + to, i.to(tl.int64), mask=mine)
        tl.store(place_ptr + i, to, mask=mine)
        row += tl.sum(mine.to(tl.int32), 0)


@triton.jit
def expert_tiles_kernel(
    offsets_ptr, tile_ptr, E, tiles,
    BM: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Cut each expert's rows into tiles of BM: tile int32[tiles, 2], expert and first row.

    Expert −1: no tile. Program e writes those of expert e, program E the rest.
    """
    follow(CHAIN)
    e = tl.program_id(0)
    other = tl.arange(0, N)
    begin = tl.load(offsets_ptr + other, mask=other < E, other=0)
    end = tl.load(offsets_ptr + other + 1, mask=other < E, other=0)
    counts = ((end - begin + BM - 1) // BM).to(tl.int32)
    place = tl.sum(tl.where(other < e, counts, 0), 0)
    mine = tl.sum(tl.where(other == e, counts, 0), 0)
    row = tl.sum(tl.where(other == e, begin, 0), 0).to(tl.int32)
    if e == E:
        mine = tiles - place
    for at in tl.range(0, mine, BLOCK):
        i = at + tl.arange(0, BLOCK)
        tl.store(tile_ptr + (place + i) * 2, tl.where(e == E, -1, e + i * 0), mask=i < mine)
        tl.store(tile_ptr + (place + i) * 2 + 1, row + i * BM, mask=i < mine)


@triton.jit
def _operand(w_ptr, s_ptr, rows, block, blocks, N, K, BN: tl.constexpr, KIND: tl.constexpr):
    """Columns ``128·block …`` of the rows of a weight, as two bfloat16 [BN, 64]."""
    if KIND == DENSE:
        k = block * 128 + tl.arange(0, 64)
        at = w_ptr + rows[:, None].to(tl.int64) * K + k[None, :]
        left = tl.load(at, mask=(k < K)[None, :], other=0)
        right = tl.load(at + 64, mask=(k + 64 < K)[None, :], other=0)
    else:
        left, right = weight_tile(w_ptr, s_ptr, rows, block, blocks, BN, KIND)
    return left, right


@triton.jit
def _rows_of(
    tile_ptr, offsets_ptr, order_ptr, rows, PER_SLOT: tl.constexpr, BM: tl.constexpr,
    GROUPED: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """(expert, rows int32[BM], rows of x that they read, which are real) of a program's tile."""
    m = tl.arange(0, BM)
    if GROUPED:
        expert = tl.load(tile_ptr + tl.program_id(1) * 2)
        row = tl.load(tile_ptr + tl.program_id(1) * 2 + 1) + m
        end = tl.load(offsets_ptr + tl.maximum(expert, 0) + 1).to(tl.int32)
    else:
        expert = tl.program_id(2)
        row = tl.program_id(1) * BM + m
        end = rows
    real = row < end
    source = row
    if GATHER:
        source = (tl.load(order_ptr + row, mask=real, other=0) // PER_SLOT).to(tl.int32)
    return expert, row, source, real


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    x_ptr, w_ptr, s_ptr, y_ptr, tile_ptr, offsets_ptr, rows, N, K, blocks,
    x_row, x_batch, y_row, y_batch, w_expert, s_expert,
    BM: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr, GROUPED: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """y[r] = x[r] · w[e]ᵀ for the rows of a tile: program (BN outputs, tile, matrix).

    GROUPED: tiles of expert rows from ``tile_ptr``; else row tiles of BM, and matrix e reads x and
    writes y at ``e·x_batch`` and ``e·y_batch``. x bfloat16 of unit inner stride.
    """
    follow(CHAIN)
    expert, row, source, real = _rows_of(
        tile_ptr, offsets_ptr, tile_ptr, rows, 1, BM, GROUPED, False
    )
    if expert >= 0:
        e = expert.to(tl.int64)
        w_ptr += e * w_expert
        s_ptr += e * s_expert
        if not GROUPED:
            x_ptr += e * x_batch
            y_ptr += e * y_batch
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        n_in = tl.minimum(n, N - 1)
        k = tl.arange(0, 64)
        x = x_ptr + source[:, None].to(tl.int64) * x_row + k[None, :]
        acc = tl.zeros((BN, BM), tl.float32)
        for block in tl.range(0, blocks):
            left, right = _operand(w_ptr, s_ptr, n_in, block, blocks, N, K, BN, KIND)
            at = block * 128 + k
            one = tl.load(x + block * 128, mask=real[:, None] & (at < K)[None, :], other=0)
            acc = tl.dot(left, one.T, acc)
            two = tl.load(
                x + block * 128 + 64, mask=real[:, None] & (at + 64 < K)[None, :], other=0
            )
            acc = tl.dot(right, two.T, acc)
        to = y_ptr + row[None, :].to(tl.int64) * y_row + n[:, None]
        tl.store(to, acc.to(y_ptr.dtype.element_ty), mask=(n < N)[:, None] & real[None, :])


@triton.jit(do_not_specialize=["rows"])
def gated_kernel(
    x_ptr, w_ptr, s_ptr, y_ptr, tile_ptr, offsets_ptr, order_ptr, weight_ptr, rows, INNER, K,
    blocks, x_row, w_expert, s_expert, limit,
    PER_SLOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr,
    LIMITED: tl.constexpr, OUT: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Gate and up, activation, routing weight, and FP8 rounding: program (BN of INNER, tile).

    Row r of y [slots, INNER] is ``quantize(weight · silu_mul(gate_up[e] · x[order[r] // k]))``
    with the projections and the product rounded to OUT first. BN is a multiple of 32.
    """
    follow(CHAIN)
    expert, row, source, real = _rows_of(
        tile_ptr, offsets_ptr, order_ptr, rows, PER_SLOT, BM, True, True
    )
    if expert >= 0:
        e = expert.to(tl.int64)
        w_ptr += e * w_expert
        s_ptr += e * s_expert
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        n_in = tl.minimum(n, INNER - 1)
        k = tl.arange(0, 64)
        x = x_ptr + source[:, None].to(tl.int64) * x_row + k[None, :]
        gate = tl.zeros((BN, BM), tl.float32)
        up = tl.zeros((BN, BM), tl.float32)
        for block in tl.range(0, blocks):
            at = block * 128 + k
            one = tl.load(x + block * 128, mask=real[:, None] & (at < K)[None, :], other=0)
            two = tl.load(
                x + block * 128 + 64, mask=real[:, None] & (at + 64 < K)[None, :], other=0
            )
            left, right = _operand(w_ptr, s_ptr, n_in, block, blocks, 0, K, BN, KIND)
            gate = tl.dot(left, one.T, gate)
            gate = tl.dot(right, two.T, gate)
            left, right = _operand(w_ptr, s_ptr, INNER + n_in, block, blocks, 0, K, BN, KIND)
            up = tl.dot(left, one.T, up)
            up = tl.dot(right, two.T, up)
        share = tl.load(
            weight_ptr + tl.load(order_ptr + row, mask=real, other=0), mask=real, other=0
        )
        y = gated(gate.to(OUT).to(tl.float32), up.to(OUT).to(tl.float32), limit, LIMITED)
        y = (y * share[None, :]).to(OUT).to(tl.float32)
        y = quantized(y.T, BM, BN // 32, 32, FP8)
        to = y_ptr + row[:, None].to(tl.int64) * INNER + n[None, :]
        tl.store(to, y.to(y_ptr.dtype.element_ty), mask=real[:, None] & (n < INNER)[None, :])


@triton.jit
def plain_kernel(
    x_ptr, w_ptr, y_ptr, tile_ptr, offsets_ptr, N, K, x_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """``product_kernel`` for dense weights of any type: multiply-adds, in one tile for all."""
    follow(CHAIN)
    expert = tl.load(tile_ptr + tl.program_id(1) * 2)
    if expert >= 0:
        row = tl.load(tile_ptr + tl.program_id(1) * 2 + 1) + tl.arange(0, BM)
        real = row < tl.load(offsets_ptr + expert + 1).to(tl.int32)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        w_ptr += expert.to(tl.int64) * N * K
        acc = tl.zeros((BM, BN), tl.float32)
        for first in tl.range(0, K, BK):
            k = first + tl.arange(0, BK)
            x = tl.load(
                x_ptr + row[:, None].to(tl.int64) * x_row + k[None, :],
                mask=real[:, None] & (k < K)[None, :],
                other=0,
            )
            w = tl.load(
                w_ptr + n[None, :] * K + k[:, None],
                mask=(n < N)[None, :] & (k < K)[:, None],
                other=0,
            )
            acc = tl.dot(x.to(tl.float32), w.to(tl.float32), acc, input_precision="ieee")
        to = y_ptr + row[:, None].to(tl.int64) * N + n[None, :]
        tl.store(to, acc.to(y_ptr.dtype.element_ty), mask=real[:, None] & (n < N)[None, :])


@triton.jit
def combine_kernel(
    rows_ptr, place_ptr, offsets_ptr, shared_ptr, y_ptr, E, WIDTH,
    SLOTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """y[t] = Σ rows[place[t, j]] in float32, in ascending order of expert, then + shared[t].

    Slots of experts elsewhere, whose places lie past offsets[E], add nothing.
    """
    follow(CHAIN)
    t = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < WIDTH
    j = tl.arange(0, PADDED)
    place = tl.load(place_ptr + t * SLOTS + j, mask=j < SLOTS, other=2147483647)
    end = tl.load(offsets_ptr + E).to(tl.int32)
    total = tl.zeros((BLOCK,), tl.float32)
    last = -1
    for slot in tl.static_range(SLOTS):
        last = tl.min(tl.where(place > last, place, 2147483647), 0)
        row = tl.load(
            rows_ptr + last.to(tl.int64) * WIDTH + cols, mask=mask & (last < end), other=0
        ).to(tl.float32)
        total = row if slot == 0 else total + row
    if SHARED:
        total += tl.load(shared_ptr + t * WIDTH + cols, mask=mask, other=0).to(tl.float32)
    tl.store(y_ptr + t * WIDTH + cols, total.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def route_kernel(
    logits_ptr, bias_ptr, other_ptr, image_ptr, ids_ptr, weights_ptr, bias_row, scale,
    E: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr,
    SCORE: tl.constexpr, BIASED: tl.constexpr, IMAGES: tl.constexpr, RENORM: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """The K highest of score + bias of a row, ties to the lower id, and their weights.

    SCORE 0 softmax, 1 sigmoid, 2 sqrtsoftplus. IMAGES: rows of images take ``other`` as bias. NaN
    ranks highest.
    """
    follow(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    real = e < E
    z = tl.load(logits_ptr + row * E + e, mask=real, other=float("-inf"))
    if SCORE == 0:
        top = tl.max(z, 0)
        score = tl.exp(z - top)
        score = tl.div_rn(score, tl.zeros_like(score) + tl.sum(score, 0))
    elif SCORE == 1:
        score = tl.div_rn(1.0, 1.0 + tl.exp(-z))
    else:
        size = tl.where(z < 0, -z, z)
        small = tl.exp(-size)
        # log(1 + s) of a small s, as log1p has it
        wide = 1.0 + small
        tail = tl.where(wide == 1.0, small, tl.log(wide) * tl.div_rn(small, wide - 1.0))
        score = tl.sqrt_rn(tl.where(z > 0, z, 0.0) + tail)
        score = tl.where(z != z, z, score)
    rank = score
    if BIASED:
        rank = score + tl.load(bias_ptr + row * bias_row + e, mask=real, other=0)
        if IMAGES:
            if tl.load(image_ptr + row) != 0:
                rank = score + tl.load(other_ptr + e, mask=real, other=0)
    rank = tl.where(rank != rank, float("inf"), rank)
    rank = tl.where(real, rank, float("-inf"))
    left = real.to(tl.int32)
    slot = tl.arange(0, PADDED)
    ids = tl.zeros((PADDED,), tl.int32)
    weights = tl.zeros((PADDED,), tl.float32)
    total = 0.0
    for j in tl.static_range(K):
        open = tl.where(left > 0, rank, float("-inf"))
        best = tl.max(open, 0)
        id = tl.min(tl.where((open == best) & (left > 0), e, BLOCK), 0)
        mine = tl.sum(tl.where(e == id, score, 0.0), 0)
        left = tl.where(e == id, 0, left)
        ids = tl.where(slot == j, id, ids)
        weights = tl.where(slot == j, mine, weights)
        total = mine if j == 0 else total + mine
    if RENORM:
        weights = tl.div_rn(weights, tl.zeros_like(weights) + (total + 1e-20))
    tl.store(ids_ptr + row * K + slot, ids, mask=slot < K)
    tl.store(weights_ptr + row * K + slot, weights * scale, mask=slot < K)
