"""The draw: argmax of z/T + Gumbel noise, Philox4x32-10 as in ``deepinfer.sampling.philox``.

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
