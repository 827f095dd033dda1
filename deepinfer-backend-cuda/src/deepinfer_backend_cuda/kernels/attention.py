"""Paged attention: one kernel for prefill, chunks, decode and verification.

A row's definition, which knows nothing of its batch: keys are walked in pieces of PIECE at absolute
positions 0, PIECE, …; in a piece an online softmax takes BLOCK_N keys at a time, ascending, and all
sums are chains of tensor-core steps (those of the weights too, as a product with ones), whose bits
do not depend on the tile; pieces are merged ascending by ``_merge``. A step in which a row sees
nothing changes none of its bits, so rows share tiles freely. The height of tiles, warps, and
whether a program walks all pieces itself or one piece and another kernel merges, are the launch's
choice: same arithmetic, same order. Launch with ``enable_fp_fusion=False``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_backend_cuda.kernels.chain import follow

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
UNROLLED = tl.constexpr(4)  # pieces whose loads are under way together in a merge


@triton.jit(do_not_specialize=["requests", "tokens", "tiles"])
def tiles_kernel(
    cu_q_ptr, request_ptr, first_ptr, requests, tokens, tiles,
    BQ: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Cut the query rows of each request of LEAST to MOST (0: any number) into tiles of BQ: request
    and first row of each tile.

    Request ``requests`` stands for rows that nobody owns (MOST 0: they have tiles too),
    ``requests + 1`` for no tile at all.
    """
    follow(CHAIN)
    b = tl.program_id(0)
    other = tl.arange(0, N)
    mask = other < requests
    begin = tl.load(cu_q_ptr + other, mask=mask, other=0)
    end = tl.load(cu_q_ptr + other + 1, mask=mask, other=0)
    mine = end - begin >= LEAST
    if MOST > 0:
        mine = mine & (end - begin <= MOST)
    counts = tl.where(mine, (end - begin + BQ - 1) // BQ, 0)
    place = tl.sum(tl.where(other < b, counts, 0), 0)
    count = tl.sum(tl.where(other == b, counts, 0), 0)
    if MOST == 0:
        if b == requests:
            count = (tokens - tl.load(cu_q_ptr + requests) + BQ - 1) // BQ
    for at in tl.range(0, count, BLOCK):
        i = at + tl.arange(0, BLOCK)
        tl.store(request_ptr + place + i, tl.zeros_like(i) + b, mask=i < count)
        tl.store(first_ptr + place + i, i * BQ, mask=i < count)
    if b == requests:
        for at in tl.range(place + count, tiles, BLOCK):
            i = at + tl.arange(0, BLOCK)
            tl.store(request_ptr + i, tl.zeros_like(i) + requests + 1, mask=i < tiles)


@triton.jit
def _block(
    q, m, l, acc, at, keys, position, k_ptr, v_ptr, table, scale, softcap, window,
    k_page, k_line, v_page, v_line,
    D: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    EDGE: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: keys ``at … at + BLOCK_N − 1``.

    EDGE: not every row sees all of them. A value that is no number then counts for the rows that
    see it only (their sum becomes NaN), since 0 · NaN is NaN.
    """
    n = at + tl.arange(0, BLOCK_N)
    od = tl.arange(0, BD)
    mask = (od < D)[None, :]
    if EDGE:
        page = tl.load(table + n // PAGE, mask=n < keys, other=0).to(tl.int64)
        mask = mask & (n < keys)[:, None]
    else:
        page = tl.load(table + n // PAGE).to(tl.int64)
        mask = tl.broadcast_to(mask, (BLOCK_N, BD))
    line = n % PAGE
    k = tl.load(k_ptr + (page * k_page + line * k_line)[:, None] + od[None, :], mask=mask, other=0)
    s = tl.dot(q, k.T, input_precision=PRECISION)
    if CAP:
        s = s * scale / softcap
        s = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(s * (2.0 * LOG2E))))
        unit = LOG2E
    else:
        unit = scale * LOG2E
    v = tl.load(v_ptr + (page * v_page + line * v_line)[:, None] + od[None, :], mask=mask, other=0)
    if EDGE:
        seen = n[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (n[None, :] > position[:, None] - window)
        s = tl.where(seen, s, float("-inf"))
        odd = v.to(tl.float32) * 0.0 != 0.0
        v = tl.where(odd, 0.0, v).to(v.dtype)
        spoilt = tl.max(odd.to(tl.int32), 1)
        spoilt = tl.max(tl.where(seen, tl.broadcast_to(spoilt[None, :], seen.shape), 0), 1)
    best = tl.maximum(m, tl.max(s, 1) * unit)
    base = tl.where(best == float("-inf"), 0.0, best)
    p = tl.exp2(tl.fma(s, tl.zeros_like(s) + unit, tl.broadcast_to(-base[:, None], s.shape)))
    p = p.to(v.dtype)
    keep = tl.exp2(m - base)[:, None]
    ones = tl.full((BLOCK_N, 16), 1.0, tl.float32).to(v.dtype)
    l = tl.dot(p, ones, l * keep, input_precision=PRECISION)
    if EDGE:
        l = tl.where(spoilt[:, None] > 0, float("nan"), l)
    acc = tl.dot(p, v, acc * keep, input_precision=PRECISION)
    return best, l, acc


@triton.jit
def _nothing(BM: tl.constexpr, BD: tl.constexpr):
    """The state of a piece that has not begun: largest score, sums, weighted values."""
    m = tl.full((BM,), float("-inf"), tl.float32)
    return m, tl.zeros((BM, 16), tl.float32), tl.zeros((BM, BD), tl.float32)


@triton.jit
def _merge(top, total, acc, m, l, part):
    """The state of the pieces so far, and of one more."""
    best = tl.maximum(top, m)
    base = tl.where(best == float("-inf"), 0.0, best)
    keep, add = tl.exp2(top - base), tl.exp2(m - base)
    total = tl.fma(total, keep, l * add)
    acc = tl.fma(acc, tl.broadcast_to(keep[:, None], acc.shape), part * add[:, None])
    return best, total, acc


@triton.jit
def _merge_stored(
    top, total, acc, part_ptr, state_ptr, at, real, dim, od, D: tl.constexpr
):  # fmt: skip
    """The same of a piece that another program stored: read past this processor's own cache."""
    m = tl.load(state_ptr + at * 2, mask=real, other=float("-inf"), cache_modifier=".cg")
    l = tl.load(state_ptr + at * 2 + 1, mask=real, other=0, cache_modifier=".cg")
    where, mask = part_ptr + at[:, None] * D + od[None, :], real[:, None] & dim[None, :]
    part = tl.load(where, mask=mask, other=0, cache_modifier=".cg")
    return _merge(top, total, acc, m, l, part)


@triton.jit
def _finish(top, total, acc, sink, HAS_SINK: tl.constexpr):
    """(o, lse) of the last state; a row that saw nothing gives 0 and −inf, NaN stays NaN."""
    empty = (top == float("-inf")) & (total == 0.0)
    lse = tl.where(empty, float("-inf"), (top + tl.log2(total)) * LN2)
    o = acc * tl.div_rn(1.0, tl.where(empty, 1.0, total))[:, None]
    if HAS_SINK:
        o = o * tl.div_rn(1.0, 1.0 + tl.exp2((sink - lse) * LOG2E))[:, None]
    return tl.where(empty[:, None], 0.0, o), lse


@triton.jit(do_not_specialize=["requests", "tokens", "pieces"])
def attention_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, cu_q_ptr, request_ptr, first_ptr, o_ptr, lse_ptr,
    part_ptr, state_ptr, arrived_ptr, sink_ptr, scale, softcap, window,
    q_row, q_head, k_page, k_line, k_head, v_page, v_line, v_head, table_row,
    requests, tokens, pieces,
    G: tl.constexpr, HKV: tl.constexpr, BQ: tl.constexpr, BM: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, PIECE: tl.constexpr,
    SPLIT: tl.constexpr, SINK: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, EDGE_STAGES: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """BQ query rows of one request times the G heads of one cached head: BM rows of a tile.

    q [T, HKV·G, D]; o, lse contiguous. SPLIT: program (·, s) stores piece s of each row to
    ``part`` float32[T, HQ, pieces, D] and (max, sum) to ``state`` float32[T, HQ, pieces, 2]; the
    one that ``arrived`` int32[tiles, HKV] says is a tile's last merges its pieces, ascending, and
    sets it back to 0.
    """
    follow(CHAIN)
    # Heads of a request beside each other: their lines of the cache share pages of memory.
    tile = tl.program_id(0) // HKV
    h = tl.program_id(0) % HKV
    b = tl.load(request_ptr + tile)
    if b <= requests:
        first = tl.load(first_ptr + tile)
        begin = tl.load(cu_q_ptr + b)
        count = tokens - begin
        length = 0
        if b < requests:
            count = tl.load(cu_q_ptr + b + 1) - begin
            length = tl.load(lengths_ptr + b).to(tl.int32)
        rm = tl.arange(0, BM)
        j, head = first + rm // G, h * G + rm % G
        real = (rm < BQ * G) & (j < count)
        position = tl.where(real & (b < requests), length - count + j, -1)
        keys = tl.max(position, 0) + 1  # how many the tile's last row sees
        least = tl.min(tl.where(real, position, 2147483647), 0) + 1  # … and its first row
        low = 0
        if WINDOW:
            low = tl.maximum(least - window, 0)
            low = tl.minimum(low, tl.maximum(keys - 1, 0)) // BLOCK_N * BLOCK_N
        table = table_ptr + b.to(tl.int64) * table_row
        od = tl.arange(0, BD)
        dim = od < D
        row = (begin + j).to(tl.int64)
        q = tl.load(
            q_ptr + (row * q_row + head * q_head)[:, None] + od[None, :],
            mask=real[:, None] & dim[None, :],
            other=0,
        )
        top = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        out = tl.zeros((BM, BD), tl.float32)
        m, l, acc = _nothing(BM, BD)  # sums by a product with ones have 16 equal columns
        n0, n1 = low, keys
        if SPLIT:
            n0 = tl.maximum(tl.program_id(1) * PIECE, low)
            n1 = tl.minimum((tl.program_id(1) + 1) * PIECE, keys)
        # Blocks that all rows see whole, then those on the diagonal.
        whole = n0 if WINDOW else tl.maximum(n0, tl.minimum(n1, least // BLOCK_N * BLOCK_N))
        for at in tl.range(n0, whole, BLOCK_N):
            m, l, acc = _block(
                q, m, l, acc, at, keys, position, k_ptr + h * k_head, v_ptr + h * v_head, table,
                scale, softcap, window, k_page, k_line, v_page, v_line,
                D, BD, PAGE, BLOCK_N, False, CAP, WINDOW, PRECISION,
            )  # fmt: skip
            if not SPLIT:
                if (at + BLOCK_N) % PIECE == 0:
                    top, total, out = _merge(top, total, out, m, tl.max(l, 1), acc)
                    m, l, acc = _nothing(BM, BD)
        for at in tl.range(whole, n1, BLOCK_N, num_stages=EDGE_STAGES):
            m, l, acc = _block(
                q, m, l, acc, at, keys, position, k_ptr + h * k_head, v_ptr + h * v_head, table,
                scale, softcap, window, k_page, k_line, v_page, v_line,
                D, BD, PAGE, BLOCK_N, True, CAP, WINDOW, PRECISION,
            )  # fmt: skip
            if not SPLIT:
                if (at + BLOCK_N) % PIECE == 0:
                    top, total, out = _merge(top, total, out, m, tl.max(l, 1), acc)
                    m, l, acc = _nothing(BM, BD)
        last = True
        if SPLIT:
            walked = tl.maximum(tl.cdiv(keys, PIECE), 1)
            at_part = (row * (HKV * G) + head) * pieces
            last = False
            if tl.program_id(1) < walked:
                mine = at_part + tl.program_id(1)
                mask = real[:, None] & dim[None, :]
                tl.store(part_ptr + mine[:, None] * D + od[None, :], acc, mask=mask)
                tl.store(state_ptr + mine * 2, m, mask=real)
                tl.store(state_ptr + mine * 2 + 1, tl.max(l, 1), mask=real)
                tl.debug_barrier()  # one thread's arrival speaks for all
                last = tl.atomic_add(arrived_ptr + tile * HKV + h, 1) == walked - 1
            if last:
                tl.store(arrived_ptr + tile * HKV + h, 0)
                for piece in tl.range(0, walked, loop_unroll_factor=UNROLLED):
                    top, total, out = _merge_stored(
                        top, total, out, part_ptr, state_ptr, at_part + piece, real, dim, od, D
                    )
        else:
            top, total, out = _merge(top, total, out, m, tl.max(l, 1), acc)  # the piece begun last
        if last:
            sink = tl.zeros((BM,), tl.float32)
            if SINK:
                sink = tl.load(sink_ptr + head, mask=real, other=0)
            o, lse = _finish(top, total, out, sink, SINK)
            at_row = row * (HKV * G) + head
            to = o_ptr + at_row[:, None] * D + od[None, :]
            tl.store(to, o.to(o_ptr.dtype.element_ty), mask=real[:, None] & dim[None, :])
            tl.store(lse_ptr + at_row, lse, mask=real)
