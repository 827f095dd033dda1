"""Products of many rows for Hopper: ``kernels.gemm``'s chains, stored while others go on.

A warp fetches rows and weights into a ring of stages, on into the next tile while this one ends;
what multiplies rounds its part of a tile and leaves the storing to the copy engine. A tile has 256
columns and 128 rows (8 warps in step) or 192 (three groups of 4 warps, each on its own): the
taller one takes a fifth less from L2 for each product. Bits are those of ``gemm_kernel`` and
``gated_gemm_kernel``, which stand for these where no Hopper GPU is, and where tiles have edges.
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
from deepinfer_backend_cuda.kernels.wide import place

COLUMNS = gl.constexpr(256)
HALF = gl.constexpr(128)
BK = gl.constexpr(64)


@gluon.jit
def _fetch(
    x_desc, w_desc, x_ring, w_ring, full, free, M, N, K,
    ROWS: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """The fetching warp: step after step of all the program's tiles, as stages come free."""
    WIDE: gl.constexpr = HALF if GATED else COLUMNS
    tiles_m, tiles_n = gl.cdiv(M, PARTS * ROWS), gl.cdiv(N, WIDE)
    steps = gl.cdiv(K, BK)
    seen = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = place(tile, tiles_m, tiles_n, GROUP)
        m, n = m * PARTS * ROWS, n * WIDE
        for k in range(steps):
            stage = seen % STAGES
            bar = full.index(stage)
            mbarrier.wait(free.index(stage), ((seen // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, (PARTS * ROWS + COLUMNS) * BK * 2)
            for part in gl.static_range(PARTS):
                to = x_ring.index(stage * PARTS + part)
                tma.async_copy_global_to_shared(x_desc, [m + part * ROWS, k * BK], bar, to)
            to = w_ring.index(stage)
            if GATED:
                tma.async_copy_global_to_shared(w_desc, [n, k * BK], bar, to.slice(0, HALF))
                tma.async_copy_global_to_shared(w_desc, [N + n, k * BK], bar, to.slice(HALF, HALF))
            else:
                tma.async_copy_global_to_shared(w_desc, [n, k * BK], bar, to)
            seen += 1


@gluon.jit
def _store(y, y_buf, y_desc, m, n):
    """y to rows from m and columns from n on, as soon as the store before has left the buffer."""
    tma.store_wait(0)
    gl.thread_barrier()
    y_buf.store(y)
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(y_desc, [m, n], y_buf)


@gluon.jit
def _biased(y, bias_ptr, n):
    bias = gl.load(bias_ptr + n + gl.arange(0, y.shape[1], gl.SliceLayout(0, y.type.layout)))
    return y + bias.to(gl.float32)[None, :]


@gluon.jit
def _multiply(
    WHICH: gl.constexpr, x_ring, w_ring, full, free, y_buf, y_desc, bias_ptr, M, N, K,
    ROWS: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, BIASED: gl.constexpr,
):  # fmt: skip
    """ROWS rows of each of the program's tiles.

    Three groups of warps leave a thread 160 registers but the compiler 128 for one instruction, so
    that one of 256 columns, with 128 sums, is made of two.
    """
    TWO: gl.constexpr = PARTS == 3
    ONE: gl.constexpr = HALF if TWO else COLUMNS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, ONE, 16])
    WIDE: gl.constexpr = HALF if GATED else COLUMNS
    tiles_m, tiles_n = gl.cdiv(M, PARTS * ROWS), gl.cdiv(N, WIDE)
    steps = gl.cdiv(K, BK)
    seen = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        acc = gl.zeros([ROWS, ONE], gl.float32, LAYOUT)
        more = gl.zeros([ROWS, ONE], gl.float32, LAYOUT)
        for k in range(steps):
            stage = seen % STAGES
            mbarrier.wait(full.index(stage), (seen // STAGES) & 1)
            x = x_ring.index(stage * PARTS + WHICH)
            w = w_ring.index(stage)
            if TWO:
                acc = warpgroup_mma(x, w.slice(0, HALF).permute((1, 0)), acc, is_async=True)
                more = warpgroup_mma(x, w.slice(HALF, HALF).permute((1, 0)), more, is_async=True)
                acc, more = warpgroup_mma_wait(2, deps=[acc, more])
            else:
                acc = warpgroup_mma(x, w.permute((1, 0)), acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])
            gl.thread_barrier()  # all these warps are through with the stage before
            before = (seen + STAGES - 1) % STAGES
            mbarrier.arrive(free.index(before), count=1, pred=k > 0)
            seen += 1
        if TWO:
            acc, more = warpgroup_mma_wait(0, deps=[acc, more])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        gl.thread_barrier()
        mbarrier.arrive(free.index((seen + STAGES - 1) % STAGES), count=1)
        m, n = place(tile, tiles_m, tiles_n, GROUP)
        m, n = (m * PARTS + WHICH) * ROWS, n * WIDE
        if TWO:
            first, second = acc, more
        else:
            first, second = acc.reshape([ROWS, 2, HALF]).permute([0, 2, 1]).split()
        if GATED:
            _store(silu_times(first, second).to(gl.bfloat16), y_buf, y_desc, m, n)
        else:
            if BIASED:
                first = _biased(first, bias_ptr, n)
                second = _biased(second, bias_ptr, n + HALF)
            _store(first.to(gl.bfloat16), y_buf, y_desc, m, n)
            _store(second.to(gl.bfloat16), y_buf, y_desc, m, n + HALF)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def long_kernel(
    x_desc, w_desc, y_desc, bias_ptr, M, N, K,
    ROWS: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, BIASED: gl.constexpr, CHAIN: gl.constexpr,
):  # fmt: skip
    """x [M, K] in boxes [ROWS, 64], w [N, K] in boxes [256, 64] (GATED: [2·N, K] in [128, 64]),
    y bfloat16 [M, N] in boxes [ROWS, 128]: PARTS · ROWS rows and 256 rows of w make a tile, N is
    whole tiles. PARTS is 1, of 8 warps, or 3, of 4 each.
    """
    if CHAIN:
        gdc_launch_dependents()
        gdc_wait()
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES * PARTS, ROWS, BK], SWIZZLED)
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLUMNS, BK], SWIZZLED)
    y_buf = gl.allocate_shared_memory(gl.bfloat16, [PARTS, ROWS, HALF], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=PARTS)
    fence_async_shared()
    gl.thread_barrier()
    if PARTS == 1:
        gl.warp_specialize(
            [
                (_multiply, (
                    0, x_ring, w_ring, full, free, y_buf.index(0), y_desc, bias_ptr, M, N, K,
                    ROWS, PARTS, GROUP, STAGES, GATED, BIASED,
                )),
                (_fetch, (
                    x_desc, w_desc, x_ring, w_ring, full, free, M, N, K,
                    ROWS, PARTS, GROUP, STAGES, GATED,
                )),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    0, x_ring, w_ring, full, free, y_buf.index(0), y_desc, bias_ptr, M, N, K,
                    ROWS, PARTS, GROUP, STAGES, GATED, BIASED,
                )),
                (_multiply, (
                    1, x_ring, w_ring, full, free, y_buf.index(1), y_desc, bias_ptr, M, N, K,
                    ROWS, PARTS, GROUP, STAGES, GATED, BIASED,
                )),
                (_multiply, (
                    2, x_ring, w_ring, full, free, y_buf.index(2), y_desc, bias_ptr, M, N, K,
                    ROWS, PARTS, GROUP, STAGES, GATED, BIASED,
                )),
                (_fetch, (
                    x_desc, w_desc, x_ring, w_ring, full, free, M, N, K,
                    ROWS, PARTS, GROUP, STAGES, GATED,
                )),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
