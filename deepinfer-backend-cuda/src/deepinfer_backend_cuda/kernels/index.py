"""The indexer: scores of index keys, blocks of them, and the k best of a row.

A score is Σ_h w_h · relu(q_h · key): products are one chain of tensor-core steps, even channels,
then odd ones; heads are one ``tl.sum`` in one tile for every step, whatever its rows and keys. The
choice is exact, so how it is found is no part of a result: the k highest, ties to the lowest place,
−∞ never.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_backend_cuda.kernels.chain import follow

KEYS = tl.constexpr(128)
"""Keys of a tile: with the number of heads, what orders a score's sum."""
PACKED = tl.constexpr(0)
PAGED = tl.constexpr(1)
FLAT = tl.constexpr(2)


@triton.jit
def _nibbles(byte, scale):
    """E2M1 codes of both nibbles times an E8M0 scale's bfloat16: (even, odd) bfloat16."""
    byte = byte.to(tl.uint16)
    low = (((byte & 7) << 6) | ((byte & 8) << 12)).to(tl.bfloat16, bitcast=True)
    high = (((byte & 0x70) << 2) | ((byte & 0x80) << 8)).to(tl.bfloat16, bitcast=True)
    top = tl.full(byte.shape, 2.0**126, tl.float32).to(tl.bfloat16)
    return low * top * scale, high * top * scale


@triton.jit
def _scales(code):
    """E8M0 bytes as bfloat16; 255 becomes an infinity, which is no number of a key either."""
    code = code.to(tl.uint16)
    return tl.where(code == 0, 0x40, code << 7).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _keys(
    ptr, slot, shown, DI: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """(even, odd) channels, bfloat16 [KEYS, DI/2] each, of the rows ``slot``."""
    j = tl.arange(0, DI // 2)
    at = ptr + slot[:, None] * WIDTH
    mask = shown[:, None] & (j < DI)[None, :]
    if KIND == PACKED:
        byte = tl.load(at + j[None, :], mask=mask, other=0)
        code = tl.load(at + DI // 2 + j[None, :] // 16, mask=mask, other=0)
        even, odd = _nibbles(byte, _scales(code))
    elif KIND == PAGED:
        even = tl.load(at + 2 * j[None, :], mask=mask, other=0)
        odd = tl.load(at + 2 * j[None, :] + 1, mask=mask, other=0)
    else:
        even = tl.load(at + j[None, :], mask=mask, other=0)
        odd = tl.load(at + DI // 2 + j[None, :], mask=mask, other=0)
    return even.to(tl.bfloat16), odd.to(tl.bfloat16)


# Triton 3.6 takes page · per_page + line, where line runs within a page, for a multiple of per_page
# if it knows that number, and then reads records of odd width in words. So it is not told.


@triton.jit(do_not_specialize=["per_page"])
def index_keys_kernel(
    cache_ptr, table_ptr, pool_ptr, table_row, width, pages, per_page,
    DI: tl.constexpr, CACHE_WIDTH: tl.constexpr, KIND: tl.constexpr,
    BLOCK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Keys of request b's pages in order: pool bfloat16[requests, width·per_page, DI], even
    channels first. Entries of no page are not written.
    """
    follow(CHAIN)
    b = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    shown = entry < width * per_page
    page = tl.load(table_ptr + b * table_row + entry // per_page, mask=shown, other=-1)
    shown = shown & (page >= 0) & (page < pages)
    slot = page.to(tl.int64) * per_page + entry % per_page
    even, odd = _keys(cache_ptr, slot, shown, DI, CACHE_WIDTH, KIND)
    j = tl.arange(0, DI // 2)
    to = pool_ptr + (b * width * per_page + entry)[:, None] * DI + j[None, :]
    tl.store(to, even, mask=shown[:, None] & (j < DI)[None, :])
    tl.store(to + DI // 2, odd, mask=shown[:, None] & (j < DI)[None, :])


@triton.jit(do_not_specialize=["first", "k", "per_page"])
def index_score_kernel(
    q_ptr, w_ptr, cache_ptr, blocks_ptr, row_ptr, pos_ptr, table_ptr, score_ptr, table_row, width,
    q_row, w_row, score_row, first, ratio, k, kept, per_page,
    HI: tl.constexpr, HEADS: tl.constexpr, DI: tl.constexpr,
    CACHE_WIDTH: tl.constexpr, KIND: tl.constexpr, AMONG: tl.constexpr, SIZE: tl.constexpr,
    SKIP: tl.constexpr, TILES: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """TILES tiles of the scores of row ``first + program``, −∞ where nothing is visible.

    AMONG: place i is entry ``i % SIZE`` of the row's kept block ``i // SIZE``. SKIP: a row that has
    no more than k visible entries takes them all, so its scores are not computed.
    """
    follow(CHAIN)
    t = first + tl.program_id(0).to(tl.int64)
    request = tl.load(row_ptr + t)
    visible = (tl.load(pos_ptr + t) + 1) // ratio
    if request < 0:
        visible = visible * 0
    places = visible
    if AMONG:
        places = tl.minimum(visible * 0 + kept * SIZE, visible * SIZE)
    begin = tl.program_id(1) * (TILES * KEYS)
    if (begin < places) & ((not SKIP) | (visible > k)):
        h = tl.arange(0, HEADS)
        j = tl.arange(0, DI // 2)
        at = q_ptr + t * q_row + h[None, :] * DI + 2 * j[:, None]
        even_q = tl.load(at, mask=(h < HI)[None, :], other=0).to(tl.bfloat16)
        odd_q = tl.load(at + 1, mask=(h < HI)[None, :], other=0).to(tl.bfloat16)
        w = tl.load(w_ptr + t * w_row + h, mask=h < HI, other=0)
        for tile in tl.range(0, TILES):
            i = begin + tile * KEYS + tl.arange(0, KEYS)
            entry = i.to(tl.int64)
            shown = entry < visible
            if AMONG:
                block = tl.load(
                    blocks_ptr + t * kept + i // SIZE, mask=i < kept * SIZE, other=-1
                ).to(tl.int64)
                entry = block * SIZE + i % SIZE
                shown = (block >= 0) & (entry < visible)
            to = score_ptr + (t - first) * score_row + i
            if tl.max(shown.to(tl.int32), 0) == 0:  # kept blocks end long before their places do
                tl.store(to, tl.full((KEYS,), float("-inf"), tl.float32), mask=i < places)
            else:
                if KIND == FLAT:
                    slot = request * width * per_page + entry
                else:
                    page = tl.load(
                        table_ptr + request * table_row + entry // per_page, mask=shown, other=0
                    )
                    slot = page.to(tl.int64) * per_page + entry % per_page
                even, odd = _keys(cache_ptr, slot, shown, DI, CACHE_WIDTH, KIND)
                s = tl.zeros((KEYS, HEADS), tl.float32)
                s = tl.dot(even, even_q, s)
                s = tl.dot(odd, odd_q, s)
                s = tl.where(s > 0, s, 0.0) * w[None, :]
                score = tl.where(shown, tl.sum(s, 1), float("-inf"))
                tl.store(to, score, mask=i < places)


@triton.jit(do_not_specialize=["first"])
def best_blocks_kernel(
    score_ptr, top_ptr, row_ptr, pos_ptr, score_row, top_row, first, ratio,
    SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """The highest score of each block of SIZE visible entries; +∞ for the newest one's."""
    follow(CHAIN)
    t = first + tl.program_id(0).to(tl.int64)
    visible = (tl.load(pos_ptr + t) + 1) // ratio
    if tl.load(row_ptr + t) < 0:
        visible = visible * 0
    b = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, PADDED)
    i = b[:, None] * SIZE + j[None, :]
    mask = (i < visible) & (j < SIZE)[None, :]
    top = tl.max(
        tl.load(score_ptr + (t - first) * score_row + i, mask=mask, other=float("-inf")),
        1,
    )
    newest = (visible - 1) // SIZE
    top = tl.where((visible > 0) & (b == newest), float("inf"), top)
    tl.store(top_ptr + (t - first) * top_row + b, top, mask=b * SIZE < visible)


@triton.jit
def _ordered(x):
    """float32 as uint32 whose order is theirs; −0 is 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, ~bits, bits | -2147483648)
    return key.to(tl.uint32, bitcast=True)


@triton.jit
def _count(score_ptr, held, places, least, BLOCK: tl.constexpr, HELD: tl.constexpr):
    """How many of a row's first ``places`` scores have keys of at least ``least``; ``held``: all of
    them, if HELD.
    """
    if HELD > 0:
        found = (held >= least).to(tl.int32)
    else:
        found = tl.zeros((BLOCK,), tl.int32)
        for at in tl.range(0, places, BLOCK):
            i = at + tl.arange(0, BLOCK)
            x = tl.load(score_ptr + i, mask=i < places, other=float("-inf"))
            found += (_ordered(x) >= least).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def _blocks_end(blocks_ptr, kept, BLOCK: tl.constexpr):
    """How many of a row's kept blocks there are, up to the last that is one."""
    end = tl.zeros((BLOCK,), tl.int32)
    for at in tl.range(0, kept, BLOCK):
        i = at + tl.arange(0, BLOCK)
        block = tl.load(blocks_ptr + i, mask=i < kept, other=-1)
        end = tl.maximum(end, tl.where(block >= 0, i + 1, 0))
    return tl.max(end, 0)


@triton.jit(do_not_specialize=["first", "k"])
def best_entries_kernel(
    score_ptr, blocks_ptr, out_ptr, row_ptr, pos_ptr, score_row, first, ratio, k, kept,
    AMONG: tl.constexpr, SIZE: tl.constexpr, UNIT: tl.constexpr, SKIP: tl.constexpr,
    BLOCK: tl.constexpr, HELD: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """The k best of a row, ascending, then −1: out int32[T, k].

    UNIT: scores are of blocks of so many entries. AMONG and SKIP as in ``index_score_kernel``. The
    key of the k-th best is found bit by bit, by counting. HELD: how many keys of a row are kept
    in registers meanwhile, all of them or (0) none.
    """
    follow(CHAIN)
    t = first + tl.program_id(0).to(tl.int64)
    visible = (tl.load(pos_ptr + t) + 1) // ratio
    if tl.load(row_ptr + t) < 0:
        visible = visible * 0
    places = (visible + UNIT - 1) // UNIT
    if AMONG:
        places = tl.minimum(visible * SIZE, _blocks_end(blocks_ptr + t * kept, kept, 1024) * SIZE)
    score_ptr += (t - first) * score_row
    out_ptr += t * k
    many = places > k
    if SKIP:
        many = visible > k
    held = tl.zeros((1,), tl.uint32)
    if HELD > 0:
        all_of = tl.arange(0, HELD)
        held = tl.load(score_ptr + all_of, mask=all_of < places, other=float("-inf"))
        held = _ordered(held)
    least = tl.full((1,), 0x00800000, tl.uint32)  # of the lowest finite number
    more = tl.full((1,), 0, tl.int32)
    if many:
        if _count(score_ptr, held, places, least, BLOCK, HELD) > k:
            key = tl.full((1,), 0, tl.uint32)
            for bit in tl.range(0, 32):
                trial = key | (tl.full((1,), 0x80000000, tl.uint32) >> bit)
                key = tl.where(_count(score_ptr, held, places, trial, BLOCK, HELD) >= k, trial, key)
            least = key
            # ties that have no room
            more = more + (_count(score_ptr, held, places, key, BLOCK, HELD) - k)
    ties = tl.full((1,), 0, tl.int32)
    if tl.max(more, 0) > 0:
        above = _count(score_ptr, held, places, least + 1, BLOCK, HELD)
        ties = ties + (k - above)
    at_out = 0
    seen = tl.full((1,), 0, tl.int32)
    for at in tl.range(0, places, BLOCK):
        i = at + tl.arange(0, BLOCK)
        real = i < places
        if SKIP:
            x = tl.load(score_ptr + i, mask=real & (visible > k), other=0.0)
        else:
            x = tl.load(score_ptr + i, mask=real, other=float("-inf"))
        key = _ordered(x)
        chosen = real & (key >= least)
        tied = (chosen & (key == least)).to(tl.int32)
        rank = seen + tl.cumsum(tied, 0) - tied
        chosen = chosen & ((tied == 0) | (tl.max(more, 0) <= 0) | (rank < ties))
        seen += tl.sum(tied, 0)
        taken = chosen.to(tl.int32)
        to = at_out + tl.cumsum(taken, 0) - taken
        entry = i
        if AMONG:
            block = tl.load(blocks_ptr + t * kept + i // SIZE, mask=chosen, other=0)
            entry = block * SIZE + i % SIZE
        tl.store(out_ptr + to, entry.to(tl.int32), mask=chosen & (to < k))
        at_out += tl.sum(taken, 0)
    for at in tl.range(at_out, k, BLOCK):
        i = at + tl.arange(0, BLOCK)
        tl.store(out_ptr + i, tl.full((BLOCK,), -1, tl.int32), mask=i < k)
