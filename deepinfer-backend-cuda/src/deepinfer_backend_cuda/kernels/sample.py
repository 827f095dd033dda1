"""The draw: argmax of z/T + Gumbel noise, Philox4x32-10 as in ``deepinfer.sampling.philox``; and
how likely what was drawn is.

A maximum does not depend on the order in which it is taken; ties go to the lower id.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_backend_cuda.kernels.chain import follow


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1, lane):
    """Word ``lane`` of ten rounds; all uint32."""
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c2 = high1 ^ c1 ^ k0, high0 ^ c3 ^ k1
        c1, c3 = low1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return tl.where(lane < 2, tl.where(lane == 0, c0, c1), tl.where(lane == 2, c2, c3))


@triton.jit
def gumbel_kernel(
    z_ptr, t_ptr, seed_ptr, position_ptr, best_ptr, id_ptr, z_row, V, blocks, BLOCK: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """Best score of BLOCK ids of a row, and its lowest id. G = −ln(−ln(1 − u)) in float64:
    1 − u is exact there, since u has 33 bits.
    """
    follow(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = ids < V
    z = tl.load(z_ptr + row * z_row + ids, mask=mask, other=float("-inf"))
    z = tl.where(z != z, float("-inf"), z)
    t = tl.load(t_ptr + row)
    if t != 0.0:
        seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
        zero = tl.zeros_like(ids).to(tl.uint32)
        word = _philox(
            (ids >> 2).to(tl.uint32),
            zero + (position & 0xFFFFFFFF).to(tl.uint32),
            zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32),
            zero,
            zero + (seed & 0xFFFFFFFF).to(tl.uint32),
            zero + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32),
            ids & 3,
        )
        u = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
        noise = (-tl.log(-tl.log(1.0 - u))).to(tl.float32)
        z = tl.div_rn(z, tl.zeros_like(z) + t) + noise
    best = tl.max(z, 0)
    first = tl.min(tl.where(z == best, ids, 2147483647), 0)
    tl.store(best_ptr + row * blocks + tl.program_id(1), best)
    tl.store(id_ptr + row * blocks + tl.program_id(1), first)


@triton.jit
def choose_kernel(
    best_ptr, id_ptr, out_ptr, blocks, BLOCK: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """The best of a row's blocks, lowest id first; out int64[m]."""
    follow(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < blocks
    score = tl.load(best_ptr + row * blocks + at, mask=mask, other=float("-inf"))
    ids = tl.load(id_ptr + row * blocks + at, mask=mask, other=2147483647)
    best = tl.max(score, 0)
    tl.store(out_ptr + row, tl.min(tl.where(score == best, ids, 2147483647), 0).to(tl.int64))


@triton.jit
def _log_softmax(z_ptr, at, V, peak, log_total, BLOCK: tl.constexpr):
    """(ids, which are there, their log-probabilities with NaN as −inf)."""
    ids = at + tl.arange(0, BLOCK)
    mask = ids < V
    z = tl.load(z_ptr + ids, mask=mask, other=float("-inf"))
    return ids, mask, (tl.where(z != z, float("-inf"), z) - peak) - log_total


@triton.jit
def score_kernel(
    z_ptr, key_ptr, chosen_ptr, value_ptr, rank_ptr, z_row, V, KEYS: tl.constexpr,
    BLOCK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """The log-probability and the rank of a row's chosen id; with KEYS every id's as int64[m, V]:
    its order as an integer, then the id counted down, so that no two are equal.

    exp is summed at each of BLOCK places, then over the places: an order fixed by V.
    """
    follow(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_row
    peak = tl.full((), float("-inf"), tl.float32)
    for at in tl.range(0, V, BLOCK):
        _, _, z = _log_softmax(z_ptr, at, V, 0.0, 0.0, BLOCK)
        peak = tl.maximum(peak, tl.max(z, 0))
    sums = tl.zeros((BLOCK,), tl.float32)
    for at in tl.range(0, V, BLOCK):
        _, mask, z = _log_softmax(z_ptr, at, V, peak, 0.0, BLOCK)
        sums += tl.where(mask, tl.exp(z), 0.0)
    log_total = tl.log(tl.sum(sums, 0))
    chosen = tl.load(chosen_ptr + row)
    mine = tl.load(z_ptr + chosen)
    mine = (tl.where(mine != mine, float("-inf"), mine) - peak) - log_total
    before = tl.zeros((BLOCK,), tl.int32)
    for at in tl.range(0, V, BLOCK):
        ids, mask, values = _log_softmax(z_ptr, at, V, peak, log_total, BLOCK)
        better = (values > mine) | ((values == mine) & (ids < chosen))
        before += (mask & better).to(tl.int32)
        if KEYS:
            bits = (values + 0.0).to(tl.int32, bitcast=True)  # −0 ties with 0
            order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
            key = (order << 32) | (0xFFFFFFFF - ids.to(tl.int64))
            tl.store(key_ptr + row * V + ids, key, mask=mask)
    tl.store(value_ptr + row, mine)
    tl.store(rank_ptr + row, tl.sum(before, 0) + 1)
