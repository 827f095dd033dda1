"""Top-k, top-p and min-p without sorting: what survives is found by its worst member.

Survivors are the first of a row in the order (value descending, id ascending), so a cut is a value
and how many of its equals stay. The value is found two bits at a time, from sums over all ids that
reach it. Weights are added as integers of 2⁻⁴³, so a sum does not depend on the order of additions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_backend_cuda.kernels.chain import follow

UNIT = tl.constexpr(8796093022208.0)  # 2^43: 2^19 weights of at most 1 stay below 2^63


@triton.jit
def _scores(z_ptr, at, V, BLOCK: tl.constexpr):
    """(ids, which are there, logits with NaN as −inf, the same as integers of their order)."""
    ids = at + tl.arange(0, BLOCK)
    mask = ids < V
    z = tl.load(z_ptr + ids, mask=mask, other=float("-inf"))
    z = tl.where(z != z, float("-inf"), z)
    bits = (z + 0.0).to(tl.int32, bitcast=True)  # −0 ties with 0
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
    return ids, mask, z, order


@triton.jit
def _weight(z, peak, t):
    """exp(z/T − peak/T): quotients float32, exp float64; 1 where z is the peak, even infinite."""
    t = tl.zeros_like(z) + t
    distance = tl.div_rn(z, t) - tl.div_rn(tl.zeros_like(z) + peak, t)
    return tl.exp(tl.where(z == peak, 0.0, distance).to(tl.float64))


@triton.jit
def _reaching(z_ptr, V, floor, first, second, third, peak, t, WEIGHTS: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    """How many ids, or WEIGHTS: what weight, has an order of at least ``first``, …, which ascend;
    int64 each. Ids below ``floor`` do not count.
    """
    one = tl.zeros((), tl.int64)
    two = tl.zeros((), tl.int64)
    three = tl.zeros((), tl.int64)
    for at in tl.range(0, V, BLOCK):
        _, mask, z, order = _scores(z_ptr, at, V, BLOCK)
        mask = mask & (order >= floor) & (order >= first)
        if tl.max(mask.to(tl.int32), 0) > 0:  # most blocks have none of the few best
            if WEIGHTS:
                each = (_weight(z, peak, t) * UNIT).to(tl.int64)
            else:
                each = tl.full((BLOCK,), 1, tl.int64)
            one += tl.sum(tl.where(mask, each, 0), 0)
            two += tl.sum(tl.where(mask & (order >= second), each, 0), 0)
            three += tl.sum(tl.where(mask & (order >= third), each, 0), 0)
    return one, two, three


@triton.jit
def _worst(z_ptr, V, floor, least, peak, t, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr):
    """The highest order that ids with at least ``least`` of what ``_reaching`` counts reach."""
    found = tl.zeros((), tl.uint32)
    for step in tl.range(0, 16):
        low = tl.full((), 0x40000000, tl.uint32) >> (2 * step)
        first, second, third = found + low, found + low * 2, found + low * 3
        one, two, three = _reaching(z_ptr, V, floor, first, second, third, peak, t, WEIGHTS, BLOCK)
        if WEIGHTS:
            enough_1, enough_2 = one.to(tl.float64) >= least, two.to(tl.float64) >= least
            enough_3 = three.to(tl.float64) >= least
        else:
            enough_1, enough_2, enough_3 = one >= least, two >= least, three >= least
        found = tl.where(
            enough_3, third, tl.where(enough_2, second, tl.where(enough_1, first, found))
        )
    return found


@triton.jit
def _tied(z_ptr, V, order_of, peak, t, BLOCK: tl.constexpr):
    """The weight of the ids of one order, as an integer."""
    found = tl.zeros((), tl.int64)
    for at in tl.range(0, V, BLOCK):
        _, mask, z, order = _scores(z_ptr, at, V, BLOCK)
        mask = mask & (order == order_of)
        if tl.max(mask.to(tl.int32), 0) > 0:
            each = (_weight(z, peak, t) * UNIT).to(tl.int64)
            found = tl.maximum(found, tl.max(tl.where(mask, each, 0), 0))
    return found


@triton.jit
def filter_kernel(
    z_ptr, out_ptr, t_ptr, k_ptr, p_ptr, floor_ptr, z_row, V, BLOCK: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """A row of z [m, V] with −inf for what top-k, then top-p, then min-p remove."""
    follow(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_row
    out_ptr += row * V
    t, k = tl.load(t_ptr + row), tl.load(k_ptr + row)
    p, share = tl.load(p_ptr + row), tl.load(floor_ptr + row)
    used = (t != 0.0) & ((k > 0) | (p < 1.0) | (share > 0.0))
    cut = tl.zeros((), tl.uint32)  # order of the worst survivor, and how many of its equals stay
    stay = tl.zeros((), tl.int64) + V
    peak = tl.full((), float("-inf"), tl.float32)
    if used:
        for at in tl.range(0, V, BLOCK):
            _, _, z, _ = _scores(z_ptr, at, V, BLOCK)
            peak = tl.maximum(peak, tl.max(z, 0))
        if (k > 0) & (k < V):
            cut = _worst(z_ptr, V, cut, k.to(tl.int64), peak, t, False, BLOCK)
            more, _, _ = _reaching(z_ptr, V, cut, cut + 1, cut + 1, cut + 1, peak, t, False, BLOCK)
            stay = k.to(tl.int64) - more
        if p < 1.0:
            # The sum over the k best: those above the cut, and those of its equals that stay.
            above, _, _ = _reaching(z_ptr, V, cut, cut + 1, cut + 1, cut + 1, peak, t, True, BLOCK)
            equals = _tied(z_ptr, V, cut, peak, t, BLOCK)
            whole, _, _ = _reaching(z_ptr, V, cut, cut, cut, cut, peak, t, True, BLOCK)
            total = tl.minimum(above + equals * stay, whole)
            least = tl.maximum(p.to(tl.float64) * total.to(tl.float64), 1.0)
            worst = _worst(z_ptr, V, cut, least, peak, t, True, BLOCK)
            if worst > cut:
                cut = worst
                stay = tl.zeros((), tl.int64) + V
            above, _, _ = _reaching(z_ptr, V, cut, cut + 1, cut + 1, cut + 1, peak, t, True, BLOCK)
            equals = _tied(z_ptr, V, cut, peak, t, BLOCK)
            want = (least - above.to(tl.float64)) / tl.maximum(equals, 1).to(tl.float64)
            stay = tl.minimum(stay, tl.maximum(tl.ceil(want).to(tl.int64), 1))
    before = tl.zeros((), tl.int64)
    for at in tl.range(0, V, BLOCK):
        ids, mask, z, order = _scores(z_ptr, at, V, BLOCK)
        equal = (mask & (order == cut)).to(tl.int64)
        rank = before + tl.cumsum(equal, 0)
        before += tl.sum(equal, 0)
        keep = (order > cut) | ((order == cut) & (rank <= stay))
        if used:
            keep = keep & (_weight(z, peak, t) >= share.to(tl.float64))
        tl.store(out_ptr + ids, tl.where(keep, z, float("-inf")), mask=mask)


@triton.jit
def bitmask_kernel(
    z_ptr, mask_ptr, index_ptr, z_row, z_column, mask_row, V, WORDS, BLOCK: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """−inf is added to BLOCK ids of the row that a mask is for, where its bits do not allow them.

    Several masks of a row write the same, in any order.
    """
    follow(CHAIN)
    row = tl.load(index_ptr + tl.program_id(0))
    if row >= 0:
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        word, real = ids // 32, ids < V
        at = mask_ptr + tl.program_id(0).to(tl.int64) * mask_row + word
        bits = tl.load(at, mask=real & (word < WORDS), other=0)
        banned = real & (((bits >> (ids % 32)) & 1) == 0)
        to = z_ptr + row * z_row + ids * z_column
        tl.store(to, tl.load(to, mask=banned) + float("-inf"), mask=banned)
