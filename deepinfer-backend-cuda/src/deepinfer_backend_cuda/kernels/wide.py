"""Products of many rows for Hopper: ``kernels.gemm``'s chains at the tensor cores' pace.

A warp fetches weights and rows into a ring of stages, on into the next tile while this one ends;
two warp groups multiply 64 rows each, and as neither waits for the other but at the ring, one goes
on while the other stores. A tile has up to three parts of columns, so that its width need not be a
power of two: 224 columns cut 28672 into 128 tiles for 132 multiprocessors. Bits are those of
``gemm_kernel`` and ``gated_gemm_kernel``, which stand for these where no Hopper GPU is.
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

from deepinfer_backend_cuda.kernels.stream import SWIZZLED, silu_times

ROWS = gl.constexpr(64)  # of a warp group


@gluon.jit
def place(tile, tiles_m, tiles_n, GROUP: gl.constexpr):
    """(tile of rows, tile of columns): GROUP tiles of rows are walked together."""
    width = GROUP * tiles_n
    first = (tile // width) * GROUP
    height = gl.minimum(tiles_m - first, GROUP)
    return first + (tile % width) % height, (tile % width) // height


@gluon.jit
def _part(w_desc, full, ring, n, k, N, real, P: gl.constexpr, BK: gl.constexpr,
          GATED: gl.constexpr):  # fmt: skip
    """P rows of weights of a stage (GATED: P / 2 of the gate, P / 2 of what it gates)."""
    BOX: gl.constexpr = w_desc.block_type.shape[0]
    SPAN: gl.constexpr = P // 2 if GATED else P
    for at in gl.static_range(0, SPAN, BOX):
        to = ring.slice(at, BOX)
        tma.async_copy_global_to_shared(w_desc, [n + at, k * BK], full, to, pred=real)
        if GATED:
            to = ring.slice(SPAN + at, BOX)
            tma.async_copy_global_to_shared(w_desc, [N + n + at, k * BK], full, to, pred=real)


@gluon.jit
def _weights(
    w_desc, full, ring_0, ring_1, ring_2, stage, n, k, N, real,
    P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr, BK: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Ask for a stage's weights; its barrier waits for its rows too."""
    ONE: gl.constexpr = P0 // 2 if GATED else P0
    TWO: gl.constexpr = (P0 + P1) // 2 if GATED else P0 + P1
    bar = full.index(stage)
    mbarrier.expect(bar, (2 * ROWS + P0 + P1 + P2) * BK * 2, pred=real)
    _part(w_desc, bar, ring_0.index(stage), n, k, N, real, P0, BK, GATED)
    if P1 > 0:
        _part(w_desc, bar, ring_1.index(stage), n + ONE, k, N, real, P1, BK, GATED)
    if P2 > 0:
        _part(w_desc, bar, ring_2.index(stage), n + TWO, k, N, real, P2, BK, GATED)


@gluon.jit
def _fetch(
    x_desc, w_desc, x_ring, ring_0, ring_1, ring_2, full, free, M, N, K,
    P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, GATED: gl.constexpr, CHAIN: gl.constexpr,
):  # fmt: skip
    """The fetching warp: the first stages' weights before it waits for earlier kernels' rows."""
    WIDE: gl.constexpr = (P0 + P1 + P2) // 2 if GATED else P0 + P1 + P2
    tiles_m, tiles_n = gl.cdiv(M, 2 * ROWS), gl.cdiv(N, WIDE)
    steps = gl.cdiv(K, BK)
    m, n = place(gl.program_id(0), tiles_m, tiles_n, GROUP)
    for early in gl.static_range(STAGES):
        _weights(
            w_desc, full, ring_0, ring_1, ring_2, early, n * WIDE, early, N, early < steps,
            P0, P1, P2, BK, GATED,
        )  # fmt: skip
    if CHAIN:
        gdc_wait()
    for early in gl.static_range(STAGES):
        where = [m * 2 * ROWS, early * BK]
        to = x_ring.index(early)
        tma.async_copy_global_to_shared(x_desc, where, full.index(early), to, pred=early < steps)
    seen = gl.minimum(steps, STAGES)
    early_steps = seen
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = place(tile, tiles_m, tiles_n, GROUP)
        begin = gl.where(tile == gl.program_id(0), early_steps, 0)
        for k in range(begin, steps):
            stage = seen % STAGES
            mbarrier.wait(free.index(stage), ((seen // STAGES) & 1) ^ 1)
            _weights(
                w_desc, full, ring_0, ring_1, ring_2, stage, n * WIDE, k, N, True,
                P0, P1, P2, BK, GATED,
            )  # fmt: skip
            where = [m * 2 * ROWS, k * BK]
            tma.async_copy_global_to_shared(x_desc, where, full.index(stage), x_ring.index(stage))
            seen += 1


@gluon.jit
def _store(acc, y_ptr, bias_ptr, m, n, M, N, P: gl.constexpr, GATED: gl.constexpr,
           BIASED: gl.constexpr, OUT: gl.constexpr):  # fmt: skip
    """A part's results: columns from n on, rows from m on."""
    if GATED:
        two = acc.reshape([ROWS, 2, P // 2]).permute([0, 2, 1])
        gate, up = two.split()
        y = silu_times(gate, up)
    else:
        y = acc
    LAYOUT: gl.constexpr = y.type.layout
    WIDE: gl.constexpr = P // 2 if GATED else P
    columns = n + gl.arange(0, WIDE, gl.SliceLayout(0, LAYOUT))
    rows = m + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    if BIASED:
        bias = gl.load(bias_ptr + columns, mask=columns < N, other=0)
        y += bias.to(gl.float32)[None, :]
    to = y_ptr + rows[:, None].to(gl.int64) * N + columns[None, :]
    gl.store(to, y.to(OUT), mask=(rows < M)[:, None] & (columns < N)[None, :])


@gluon.jit
def _multiply(
    WHICH: gl.constexpr, x_ring, ring_0, ring_1, ring_2, full, free, y_ptr, bias_ptr, M, N, K,
    P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, GATED: gl.constexpr, BIASED: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """A warp group: 64 rows of each of the program's tiles."""
    WIDE: gl.constexpr = (P0 + P1 + P2) // 2 if GATED else P0 + P1 + P2
    ONE: gl.constexpr = P0 // 2 if GATED else P0
    TWO: gl.constexpr = (P0 + P1) // 2 if GATED else P0 + P1
    LAYOUT_0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P0, 16])
    LAYOUT_1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(P1, 16), 16])
    LAYOUT_2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(P2, 16), 16])
    PARTS: gl.constexpr = 1 + (P1 > 0) + (P2 > 0)
    tiles_m, tiles_n = gl.cdiv(M, 2 * ROWS), gl.cdiv(N, WIDE)
    steps = gl.cdiv(K, BK)
    seen = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        acc_0 = gl.zeros([ROWS, P0], gl.float32, LAYOUT_0)
        acc_1 = gl.zeros([ROWS, max(P1, 16)], gl.float32, LAYOUT_1)
        acc_2 = gl.zeros([ROWS, max(P2, 16)], gl.float32, LAYOUT_2)
        for k in range(steps):
            stage = seen % STAGES
            mbarrier.wait(full.index(stage), (seen // STAGES) & 1)
            x = x_ring.index(stage).slice(WHICH * ROWS, ROWS)
            w = ring_0.index(stage).permute((1, 0))
            acc_0 = warpgroup_mma(x, w, acc_0, is_async=True)
            if P1 > 0:
                w = ring_1.index(stage).permute((1, 0))
                acc_1 = warpgroup_mma(x, w, acc_1, is_async=True)
            if P2 > 0:
                w = ring_2.index(stage).permute((1, 0))
                acc_2 = warpgroup_mma(x, w, acc_2, is_async=True)
            if PARTS == 1:
                acc_0 = warpgroup_mma_wait(PARTS, deps=[acc_0])
            elif PARTS == 2:
                acc_0, acc_1 = warpgroup_mma_wait(PARTS, deps=[acc_0, acc_1])
            else:
                acc_0, acc_1, acc_2 = warpgroup_mma_wait(PARTS, deps=[acc_0, acc_1, acc_2])
            gl.thread_barrier()  # the group is through with the stage before
            before = (seen + STAGES - 1) % STAGES
            mbarrier.arrive(free.index(before), count=1, pred=k > 0)
            seen += 1
        if PARTS == 1:
            acc_0 = warpgroup_mma_wait(0, deps=[acc_0])
        elif PARTS == 2:
            acc_0, acc_1 = warpgroup_mma_wait(0, deps=[acc_0, acc_1])
        else:
            acc_0, acc_1, acc_2 = warpgroup_mma_wait(0, deps=[acc_0, acc_1, acc_2])
        gl.thread_barrier()
        mbarrier.arrive(free.index((seen + STAGES - 1) % STAGES), count=1)
        m, n = place(tile, tiles_m, tiles_n, GROUP)
        m, n = m * 2 * ROWS + WHICH * ROWS, n * WIDE
        _store(acc_0, y_ptr, bias_ptr, m, n, M, N, P0, GATED, BIASED, OUT)
        if P1 > 0:
            _store(acc_1, y_ptr, bias_ptr, m, n + ONE, M, N, P1, GATED, BIASED, OUT)
        if P2 > 0:
            _store(acc_2, y_ptr, bias_ptr, m, n + TWO, M, N, P2, GATED, BIASED, OUT)


@gluon.jit(do_not_specialize=["M"])
def wide_kernel(
    x_desc, w_desc, y_ptr, bias_ptr, M, N, K,
    P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, GATED: gl.constexpr, BIASED: gl.constexpr, OUT: gl.constexpr,
    CHAIN: gl.constexpr,
):  # fmt: skip
    """x [M, K] in boxes [128, BK], w [N, K] (GATED: [2·N, K]) in boxes of rows that divide all
    parts; y [M, N] contiguous. P0 + P1 + P2 rows of w make a tile. Only the fetching warp waits
    for earlier kernels: the others wait for what it fetched.
    """
    if CHAIN:
        gdc_launch_dependents()
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * ROWS, BK], SWIZZLED)
    ring_0 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, P0, BK], SWIZZLED)
    ring_1 = ring_0
    ring_2 = ring_0
    if P1 > 0:
        ring_1 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, P1, BK], SWIZZLED)
    if P2 > 0:
        ring_2 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, P2, BK], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_multiply, (
                0, x_ring, ring_0, ring_1, ring_2, full, free, y_ptr, bias_ptr, M, N, K,
                P0, P1, P2, BK, GROUP, STAGES, GATED, BIASED, OUT,
            )),
            (_multiply, (
                1, x_ring, ring_0, ring_1, ring_2, full, free, y_ptr, bias_ptr, M, N, K,
                P0, P1, P2, BK, GROUP, STAGES, GATED, BIASED, OUT,
            )),
            (_fetch, (
                x_desc, w_desc, x_ring, ring_0, ring_1, ring_2, full, free, M, N, K,
                P0, P1, P2, BK, GROUP, STAGES, GATED, CHAIN,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
