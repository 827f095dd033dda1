"""Products of few rows for Hopper: ``kernels.gemm``'s chains, fed without a pause.

A step of few rows is bound by reading weights, and weights wait for nobody: a program starts while
the kernels before it still run (programmatic dependent launch), fills its ring of stages with
weights, and only then waits for its rows. The ring is filled across tiles. Bits are those of
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

SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def _weights(w_desc, full, ring, stage, tile, k, N, real, ROWS: gl.constexpr, BN: gl.constexpr,
             BK: gl.constexpr, GATED: gl.constexpr):  # fmt: skip
    """Ask for a stage's weights; its barrier waits for its rows too."""
    mbarrier.expect(full.index(stage), (ROWS + BN) * BK * 2, pred=real)
    to = ring.index(stage)
    if GATED:
        half: gl.constexpr = BN // 2
        at = tile * half
        tma.async_copy_global_to_shared(
            w_desc, [at, k * BK], full.index(stage), to.slice(0, half), pred=real
        )
        tma.async_copy_global_to_shared(
            w_desc, [N + at, k * BK], full.index(stage), to.slice(half, half), pred=real
        )
    else:
        tma.async_copy_global_to_shared(
            w_desc, [tile * BN, k * BK], full.index(stage), to, pred=real
        )


@gluon.jit
def _rounded(x):
    """x rounded to bfloat16, two at a time: one by one it takes the unit of transcendentals."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2;"
        " shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000; }",
        "=r,=r,r,r", [x], gl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def silu_times(gate, up):
    """``kernels.rows.silu_times`` of both rounded to bfloat16. An exponential that is too small for
    a normal number is nothing beside 1, so it may as well be 0.
    """
    gate, up = _rounded(gate), _rounded(up)
    small = gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [gate * -1.4426950408889634], gl.float32,
        is_pure=True, pack=1,
    )  # fmt: skip
    return gate / (1.0 + small) * up


@gluon.jit(do_not_specialize=["M", "PROGRAMS"])
def stream_kernel(
    x_desc, w_desc, y_ptr, bias_ptr, M, N, K, PROGRAMS,
    ROWS: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, BIASED: gl.constexpr, OUT: gl.constexpr,
    CHAIN: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """x [M ≤ ROWS, K], w [N, K] (GATED: [2·N, K]) by descriptors of boxes [ROWS, BK] and [BN, BK]
    (GATED: [BN / 2, BK]); y [M, N] contiguous. BN counts rows of w. An instruction takes 64 rows:
    those behind ROWS are whatever lies there, and nobody's.
    """
    BM: gl.constexpr = 64
    WIDE: gl.constexpr = BN // 2 if GATED else BN
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, WIDE, 16])
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BK], SWIZZLED)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    gl.thread_barrier()
    if CHAIN:
        gdc_launch_dependents()
    steps = gl.cdiv(K, BK)
    tiles = gl.cdiv(N, WIDE)
    ahead = gl.program_id(0)  # tile and step that are asked for next
    k_ahead = 0
    for stage in gl.static_range(STAGES - 1):
        _weights(w_desc, full, w_ring, stage, ahead, k_ahead, N, ahead < tiles, ROWS, BN, BK, GATED)
        k_ahead += 1
        ahead = gl.where(k_ahead == steps, ahead + PROGRAMS, ahead)
        k_ahead = gl.where(k_ahead == steps, 0, k_ahead)
    if CHAIN:
        gdc_wait()
    ahead = gl.program_id(0)
    k_ahead = 0
    for stage in gl.static_range(STAGES - 1):
        tma.async_copy_global_to_shared(
            x_desc, [0, k_ahead * BK], full.index(stage), x_ring.index(stage).slice(0, ROWS),
            pred=ahead < tiles,
        )  # fmt: skip
        k_ahead += 1
        ahead = gl.where(k_ahead == steps, ahead + PROGRAMS, ahead)
        k_ahead = gl.where(k_ahead == steps, 0, k_ahead)
    stage = 0
    phase = 0
    last = STAGES - 1
    for tile in range(gl.program_id(0), tiles, PROGRAMS):
        acc = gl.zeros([BM, WIDE], gl.float32, ACC)
        up = gl.zeros([BM, WIDE], gl.float32, ACC)
        for _ in range(steps):
            mbarrier.wait(full.index(stage), phase)
            x, w = x_ring.index(stage), w_ring.index(stage)
            if GATED:
                gate_w = w.slice(0, WIDE).permute((1, 0))
                up_w = w.slice(WIDE, WIDE).permute((1, 0))
                acc = warpgroup_mma(x, gate_w, acc, is_async=True)
                up = warpgroup_mma(x, up_w, up, is_async=True)
                acc, up = warpgroup_mma_wait(2, deps=[acc, up])
            else:
                acc = warpgroup_mma(x, w.permute((1, 0)), acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])
            gl.thread_barrier()  # all warps are through with the stage before
            real = ahead < tiles
            _weights(w_desc, full, w_ring, last, ahead, k_ahead, N, real, ROWS, BN, BK, GATED)
            tma.async_copy_global_to_shared(
                x_desc, [0, k_ahead * BK], full.index(last), x_ring.index(last).slice(0, ROWS),
                pred=real,
            )  # fmt: skip
            k_ahead += 1
            ahead = gl.where(k_ahead == steps, ahead + PROGRAMS, ahead)
            k_ahead = gl.where(k_ahead == steps, 0, k_ahead)
            last = stage
            stage += 1
            phase = gl.where(stage == STAGES, phase ^ 1, phase)
            stage = gl.where(stage == STAGES, 0, stage)
        if GATED:
            acc, up = warpgroup_mma_wait(0, deps=[acc, up])
            acc = silu_times(acc, up)
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        columns = tile * WIDE + gl.arange(0, WIDE, gl.SliceLayout(0, ACC))
        rows = gl.arange(0, BM, gl.SliceLayout(1, ACC))
        if BIASED:
            bias = gl.load(bias_ptr + columns, mask=columns < N, other=0)
            acc += bias.to(gl.float32)[None, :]
        to = y_ptr + rows[:, None].to(gl.int64) * N + columns[None, :]
        gl.store(to, acc.to(OUT), mask=(rows < M)[:, None] & (columns < N)[None, :])
