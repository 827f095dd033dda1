"""Prefill attention for Hopper: the arithmetic of ``kernels.attention``, laid out for the chip.

Two warp groups walk the same keys for 64 rows each, and a warp fetches pages by the bulk copy
engine into a ring of stages, on into the next tile while this one ends. The groups take turns at
the tensor cores: one computes its weights while the other multiplies. Blocks, pieces, chains and
merges are those of ``kernels.attention`` in the same order, so that a row's bits are the same from
either kernel; that one is what tests without a GPU run. Heads of 64 or 128, bfloat16, no window,
no softcap. Launch with ``enable_fp_fusion=False``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

KEYS = gl.constexpr(64)
ROWS = gl.constexpr(64)  # of a warp group
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
ROW = gl.constexpr(gl.SliceLayout(1, SCORES))
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def _tile(
    work, total, tiles, request_ptr, first_ptr, cu_q_ptr, lengths_ptr, requests, tokens,
    BQ: gl.constexpr, HKV: gl.constexpr,
):  # fmt: skip
    """What a piece of work is, longest first: (request, head, first row within the request, its
    rows, its row in q, keys that its last row sees, keys that blocks which all rows see have,
    positions less rows). Rows that nobody owns see no key; no tile has no rows.
    """
    work = gl.minimum(work, total - 1)
    tile, h = tiles - 1 - work // HKV, work % HKV
    b = gl.load(request_ptr + tile)
    first = gl.load(first_ptr + tile)
    owned = gl.minimum(b, requests - 1)
    begin = gl.load(cu_q_ptr + gl.minimum(b, requests))
    end = gl.load(cu_q_ptr + owned + 1)
    length = gl.load(lengths_ptr + owned).to(gl.int32)
    count = gl.where(b < requests, end - begin, tokens - begin)
    count = gl.where(b <= requests, count, 0)
    first = gl.where(b <= requests, first, 0)
    before = length - count
    keys = gl.maximum(before + gl.minimum(first + BQ, count), 0)
    keys = gl.where(b < requests, keys, 0)
    whole = gl.minimum(keys, gl.maximum(before + first + 1, 0) // KEYS * KEYS)
    before = gl.where(b < requests, before, -1 - tokens)  # every position is negative
    return owned, h, first, count, begin, keys, whole, before


@gluon.jit
def _rows(WHICH: gl.constexpr, first, count, begin, h, G: gl.constexpr, BQ: gl.constexpr, layout):
    """Rows of a warp group: (token within the request, is it one, place in q, head)."""
    rm = WHICH * ROWS + gl.arange(0, ROWS, layout)
    j, head = first + rm // G, h * G + rm % G
    return j, (rm < BQ * G) & (j < count), (begin + j).to(gl.int64), head


@gluon.jit
def _fetch(
    k_desc, v_desc, k_ring, v_ring, k_full, k_free, v_full, v_free, table_ptr, table_row,
    request_ptr, first_ptr, cu_q_ptr, lengths_ptr, k_head, v_head, k_jump, v_jump,
    requests, tokens, tiles, total, BQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr,
    PAGE: gl.constexpr, LINES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The fetching warp: block after block of keys and values, as stages come free."""
    halves: gl.constexpr = D // 64
    parts: gl.constexpr = KEYS // LINES
    seen = 0
    for work in range(gl.program_id(0), total, gl.num_programs(0)):
        b, h, _first, _count, _begin, keys, _whole, _before = _tile(
            work, total, tiles, request_ptr, first_ptr, cu_q_ptr, lengths_ptr, requests, tokens,
            BQ, HKV,
        )  # fmt: skip
        table = table_ptr + b.to(gl.int64) * table_row
        for at in range(0, keys, KEYS):
            stage = seen % STAGES
            phase = (seen // STAGES) & 1
            mbarrier.wait(k_free.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), KEYS * D * 2)
            for part in gl.static_range(parts):
                n = at + part * LINES
                page = gl.load(table + n // PAGE, mask=n < keys, other=0)
                row = page * k_jump + n % PAGE
                for half in gl.static_range(halves):
                    to = k_ring.index((stage * halves + half) * parts + part)
                    where = [row, h * k_head + half * 64]
                    tma.async_copy_global_to_shared(k_desc, where, k_full.index(stage), to)
            mbarrier.wait(v_free.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), KEYS * D * 2)
            for part in gl.static_range(parts):
                n = at + part * LINES
                page = gl.load(table + n // PAGE, mask=n < keys, other=0)
                row = page * v_jump + n % PAGE
                for half in gl.static_range(halves):
                    to = v_ring.index((stage * halves + half) * parts + part)
                    where = [row, h * v_head + half * 64]
                    tma.async_copy_global_to_shared(v_desc, where, v_full.index(stage), to)
            seen += 1


@gluon.jit
def _take_turn(p, WHICH: gl.constexpr):
    """Wait for the turn with the weights p [64, 64] at hand.

    Were the wait not made to depend on them, the compiler would put the exponentials off until
    after it, into the turn: the barrier's number is 8 + WHICH + their signs, which are 0.
    """
    return gl.inline_asm_elementwise(
        f"""{{
        .reg .b32 t;
        or.b32 t, $16, $17; or.b32 t, t, $18; or.b32 t, t, $19; or.b32 t, t, $20;
        or.b32 t, t, $21; or.b32 t, t, $22; or.b32 t, t, $23; or.b32 t, t, $24;
        or.b32 t, t, $25; or.b32 t, t, $26; or.b32 t, t, $27; or.b32 t, t, $28;
        or.b32 t, t, $29; or.b32 t, t, $30; or.b32 t, t, $31;
        shr.u32 t, t, 31; add.u32 t, t, {8 + WHICH};
        barrier.sync.aligned t, 256;
        mov.b32 $0, $16; mov.b32 $1, $17; mov.b32 $2, $18; mov.b32 $3, $19;
        mov.b32 $4, $20; mov.b32 $5, $21; mov.b32 $6, $22; mov.b32 $7, $23;
        mov.b32 $8, $24; mov.b32 $9, $25; mov.b32 $10, $26; mov.b32 $11, $27;
        mov.b32 $12, $28; mov.b32 $13, $29; mov.b32 $14, $30; mov.b32 $15, $31;
        }}""",
        "=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [p], gl.bfloat16, is_pure=False, pack=32,
    )  # fmt: skip


@gluon.jit
def _pass_turn(WHICH: gl.constexpr):
    """Let warp group WHICH have its turn."""
    gl.inline_asm_elementwise(
        f"barrier.arrive.aligned {8 + WHICH}, 256; // $0",
        "=r", [], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _block(
    WHICH: gl.constexpr, q, k_view, v_view, ones, mine, k_full, k_free, v_full, v_free,
    s, m, l, acc, seen, at, keys, position, unit,
    D: gl.constexpr, STAGES: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """``kernels.attention._block`` on a stage of the ring, given its scores; the products of its
    weights and the scores of the next block are one turn at the tensor cores.
    """
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    stage = seen % STAGES
    following = (seen + 1) % STAGES
    more = at + KEYS < keys
    n = at + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
    if EDGE:
        s = gl.where(n[None, :] <= position[:, None], s, float("-inf"))
    best = gl.maximum(m, gl.max(s, 1) * unit)
    base = gl.where(best == float("-inf"), 0.0, best)
    p = gl.exp2(gl.fma(s, gl.full_like(s, 0.0) + unit, gl.zeros_like(s) - base[:, None]))
    keep = gl.exp2(m - base)
    p = p.to(gl.bfloat16)
    l = l * gl.convert_layout(keep, gl.SliceLayout(1, SUMS))[:, None]
    acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, OUT))[:, None]
    mbarrier.wait(v_full.index(stage), (seen // STAGES) & 1)
    v = v_view.index(stage)
    if EDGE:
        # A value that is no number counts for the rows that see it only: 0 · NaN is NaN.
        READ: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        key = at + gl.arange(0, KEYS, gl.SliceLayout(1, READ))
        odd_key = gl.zeros([KEYS], gl.int32, gl.SliceLayout(1, READ))
        for half in gl.static_range(D // 64):
            bits = v.slice(half * 64, 64, dim=1).load(READ).to(gl.int16, bitcast=True)
            odd = (bits & 0x7F80) == 0x7F80
            odd_key = gl.maximum(odd_key, gl.max(odd.to(gl.int32), 1))
            bits = gl.where(odd | (key >= keys)[:, None], 0, bits).to(gl.int16)
            mine.slice(half * 64, 64, dim=1).store(bits.to(gl.bfloat16, bitcast=True))
        fence_async_shared()
        gl.thread_barrier()
        odd_key = gl.convert_layout(odd_key, gl.SliceLayout(0, SCORES))
        spoilt = (n[None, :] <= position[:, None]) & (odd_key[None, :] > 0)
        spoilt = gl.convert_layout(gl.max(spoilt.to(gl.int32), 1), gl.SliceLayout(1, SUMS))
        v = mine
    mbarrier.wait(k_full.index(following), ((seen + 1) // STAGES) & 1, pred=more)
    p = _take_turn(p, WHICH)
    p_sums = gl.convert_layout(p, gl.DotOperandLayout(0, SUMS, 2))
    p_out = gl.convert_layout(p, gl.DotOperandLayout(0, OUT, 2))
    # Behind the last block this reads what lies in the ring, and nobody reads it.
    k = k_view.index(following).permute((1, 0))
    s = warpgroup_mma(q, k, gl.zeros_like(s), use_acc=False, is_async=True)
    l = warpgroup_mma(p_sums, ones, l, is_async=True)
    acc = warpgroup_mma(p_out, v, acc, is_async=True)
    _pass_turn(1 - WHICH)
    l, acc, s = warpgroup_mma_wait(0, deps=[l, acc, s])
    gl.thread_barrier()
    mbarrier.arrive(v_free.index(stage), count=1)
    mbarrier.arrive(k_free.index(following), count=1, pred=more)
    if EDGE:
        l = gl.where(spoilt[:, None] > 0, float("nan"), l)
    return s, best, l, acc


@gluon.jit
def _merge(top, total, out, m, l, part, OUT: gl.constexpr):
    """``kernels.attention._merge``."""
    l = gl.convert_layout(gl.max(l, 1), ROW)
    best = gl.maximum(top, m)
    base = gl.where(best == float("-inf"), 0.0, best)
    keep, add = gl.exp2(top - base), gl.exp2(m - base)
    total = gl.fma(total, keep, l * add)
    keep = gl.convert_layout(keep, gl.SliceLayout(1, OUT))[:, None]
    add = gl.convert_layout(add, gl.SliceLayout(1, OUT))[:, None]
    out = gl.fma(out, gl.zeros_like(out) + keep, part * add)
    return best, total, out


@gluon.jit
def _attend(
    WHICH: gl.constexpr, q_ptr, q_row, q_head, q, k_view, v_view, ones, mine,
    k_full, k_free, v_full, v_free, o_ptr, lse_ptr, sink_ptr, unit,
    request_ptr, first_ptr, cu_q_ptr, lengths_ptr, requests, tokens, tiles, total_work,
    G: gl.constexpr, HKV: gl.constexpr, BQ: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, PIECE: gl.constexpr, SINK: gl.constexpr,
):  # fmt: skip
    """A warp group: 64 rows of each of the program's tiles through all keys."""
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    READ: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    if WHICH == 1:
        _pass_turn(0)
    seen = 0
    for work in range(gl.program_id(0), total_work, gl.num_programs(0)):
        _b, h, first, count, begin, keys, whole, before = _tile(
            work, total_work, tiles, request_ptr, first_ptr, cu_q_ptr, lengths_ptr, requests,
            tokens, BQ, HKV,
        )  # fmt: skip
        _, real, row, head = _rows(WHICH, first, count, begin, h, G, BQ, gl.SliceLayout(1, READ))
        at_q = (row * q_row + head * q_head)[:, None]
        at_q = at_q + gl.arange(0, D, gl.SliceLayout(0, READ))[None, :]
        q.store(gl.load(q_ptr + at_q, mask=real[:, None], other=0))
        fence_async_shared()
        gl.thread_barrier()
        j, real, row, head = _rows(WHICH, first, count, begin, h, G, BQ, ROW)
        position = gl.where(real, before + j, -1)
        top = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        total = gl.zeros([ROWS], gl.float32, ROW)
        out = gl.zeros([ROWS, D], gl.float32, OUT)
        m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        l = gl.zeros([ROWS, 16], gl.float32, SUMS)
        acc = gl.zeros([ROWS, D], gl.float32, OUT)
        stage = seen % STAGES
        mbarrier.wait(k_full.index(stage), (seen // STAGES) & 1, pred=keys > 0)
        s = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
        k = k_view.index(stage).permute((1, 0))
        s = warpgroup_mma(q, k, s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        gl.thread_barrier()
        mbarrier.arrive(k_free.index(stage), count=1, pred=keys > 0)
        for at in range(0, whole, KEYS):
            s, m, l, acc = _block(
                WHICH, q, k_view, v_view, ones, mine, k_full, k_free, v_full, v_free,
                s, m, l, acc, seen, at, keys, position, unit, D, STAGES, False,
            )  # fmt: skip
            seen += 1
            if (at + KEYS) % PIECE == 0:
                top, total, out = _merge(top, total, out, m, l, acc, OUT)
                m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
                l = gl.zeros([ROWS, 16], gl.float32, SUMS)
                acc = gl.zeros([ROWS, D], gl.float32, OUT)
        for at in range(whole, keys, KEYS):
            s, m, l, acc = _block(
                WHICH, q, k_view, v_view, ones, mine, k_full, k_free, v_full, v_free,
                s, m, l, acc, seen, at, keys, position, unit, D, STAGES, True,
            )  # fmt: skip
            seen += 1
            if (at + KEYS) % PIECE == 0:
                top, total, out = _merge(top, total, out, m, l, acc, OUT)
                m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
                l = gl.zeros([ROWS, 16], gl.float32, SUMS)
                acc = gl.zeros([ROWS, D], gl.float32, OUT)
        top, total, out = _merge(top, total, out, m, l, acc, OUT)
        empty = (top == float("-inf")) & (total == 0.0)
        lse = gl.where(empty, float("-inf"), (top + gl.log2(total)) * LN2)
        at_row = row * (HKV * G) + head
        gl.store(lse_ptr + at_row, lse, mask=real)
        share = gl.div_rn(gl.full_like(total, 1.0), gl.where(empty, 1.0, total))
        o = out * gl.convert_layout(share, gl.SliceLayout(1, OUT))[:, None]
        if SINK:
            sink = gl.load(sink_ptr + head, mask=real, other=0)
            share = gl.div_rn(gl.full_like(lse, 1.0), 1.0 + gl.exp2((sink - lse) * LOG2E))
            o = o * gl.convert_layout(share, gl.SliceLayout(1, OUT))[:, None]
        o = gl.where(gl.convert_layout(empty, gl.SliceLayout(1, OUT))[:, None], 0.0, o)
        _, real, row, head = _rows(WHICH, first, count, begin, h, G, BQ, gl.SliceLayout(1, OUT))
        to = (row * (HKV * G) + head)[:, None] * D
        to = to + gl.arange(0, D, gl.SliceLayout(0, OUT))[None, :]
        gl.store(o_ptr + to, o.to(gl.bfloat16), mask=real[:, None])


@gluon.jit(do_not_specialize=["requests", "tokens", "tiles"])
def flash_kernel(
    q_ptr, k_desc, v_desc, table_ptr, lengths_ptr, cu_q_ptr, request_ptr, first_ptr,
    o_ptr, lse_ptr, sink_ptr, scale, q_row, q_head, k_jump, v_jump, k_head, v_head, table_row,
    requests, tokens, tiles,
    G: gl.constexpr, HKV: gl.constexpr, BQ: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
    LINES: gl.constexpr, PIECE: gl.constexpr, STAGES: gl.constexpr, SINK: gl.constexpr,
    CHAIN: gl.constexpr,
):  # fmt: skip
    """BQ query rows of one request times the G heads of one cached head: 128 rows of a tile.

    q [T, HKV·G, D]; caches as descriptors of lines [·, all heads] in boxes [LINES, 64], a page
    ``k_jump`` lines behind the one before; o, lse contiguous. Tiles as ``tiles_kernel`` cuts them.
    """
    if CHAIN:
        gdc_launch_dependents()
        gdc_wait()
    halves: gl.constexpr = D // 64
    parts: gl.constexpr = KEYS // LINES
    RING: gl.constexpr = [STAGES * halves * parts, LINES, 64]
    k_ring = gl.allocate_shared_memory(gl.bfloat16, RING, SWIZZLED)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, RING, SWIZZLED)
    k_view = k_ring._reinterpret(gl.bfloat16, [STAGES, KEYS, D], SWIZZLED)
    v_view = v_ring._reinterpret(gl.bfloat16, [STAGES, KEYS, D], SWIZZLED)
    q = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, D], SWIZZLED)
    mine = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, D], SWIZZLED)
    ones = gl.allocate_shared_memory(gl.bfloat16, [16, KEYS], SWIZZLED)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=2)
    ONES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ones.store(gl.full([16, KEYS], 1.0, gl.bfloat16, ONES))
    fence_async_shared()
    gl.thread_barrier()
    unit = scale * LOG2E
    total = tiles * HKV
    gl.warp_specialize(
        [
            (_attend, (
                0, q_ptr, q_row, q_head, q.index(0), k_view, v_view, ones.permute((1, 0)),
                mine.index(0), k_full, k_free, v_full, v_free, o_ptr, lse_ptr, sink_ptr,
                unit, request_ptr, first_ptr, cu_q_ptr, lengths_ptr, requests, tokens, tiles,
                total, G, HKV, BQ, D, STAGES, PIECE, SINK,
            )),
            (_attend, (
                1, q_ptr, q_row, q_head, q.index(1), k_view, v_view, ones.permute((1, 0)),
                mine.index(1), k_full, k_free, v_full, v_free, o_ptr, lse_ptr, sink_ptr,
                unit, request_ptr, first_ptr, cu_q_ptr, lengths_ptr, requests, tokens, tiles,
                total, G, HKV, BQ, D, STAGES, PIECE, SINK,
            )),
            (_fetch, (
                k_desc, v_desc, k_ring, v_ring, k_full, k_free, v_full, v_free, table_ptr,
                table_row, request_ptr, first_ptr, cu_q_ptr, lengths_ptr, k_head, v_head, k_jump,
                v_jump, requests, tokens, tiles, total, BQ, HKV, D, PAGE, LINES, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
