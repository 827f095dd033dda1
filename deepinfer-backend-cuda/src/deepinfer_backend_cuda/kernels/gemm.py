"""Matrix products y = x · wᵀ (+ bias): one float32 accumulator for each element, k ascending.

That chain is the definition. On tensor cores every tile shape and operand order walks it in the
same steps of 16, so tiles may follow M while bits do not (measured on SM90: 14 tile shapes equal
bit for bit, and equal to a model of the hardware). K is never split between accumulators.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_backend_cuda.kernels.chain import follow
from deepinfer_backend_cuda.kernels.rows import silu_times


@triton.jit(do_not_specialize=["M", "PROGRAMS"])
def gemm_kernel(
    x_desc, w_desc, y_desc, y_ptr, bias_ptr, M, N, K, PROGRAMS,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SWAP: tl.constexpr, BIASED: tl.constexpr, STORE_TILES: tl.constexpr, OUT: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """x [M, K], w [N, K], y [M, N] by tensor descriptors; programs walk tiles in groups of rows.

    SWAP: tiles are computed transposed, so that few rows are the narrow side of the instruction.
    """
    follow(CHAIN)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS):
        width = GROUP * tiles_n
        first = (tile // width) * GROUP
        height = tl.minimum(tiles_m - first, GROUP)
        m = (first + (tile % width) % height) * BM
        n = ((tile % width) // height) * BN
        if SWAP:
            acc = tl.zeros((BN, BM), tl.float32)
        else:
            acc = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, tl.cdiv(K, BK)):
            x = x_desc.load([m, k * BK])  # past an edge: zeros, which change no bit
            w = w_desc.load([n, k * BK])
            if SWAP:
                acc = tl.dot(w, x.T, acc)
            else:
                acc = tl.dot(x, w.T, acc)
        if SWAP:
            acc = acc.T
        cols = n + tl.arange(0, BN)
        if BIASED:
            acc += tl.load(bias_ptr + cols, mask=cols < N, other=0).to(tl.float32)[None, :]
        if STORE_TILES:
            y_desc.store([m, n], acc.to(OUT))
        else:
            rows = m + tl.arange(0, BM)
            to = y_ptr + rows[:, None].to(tl.int64) * N + cols[None, :]
            tl.store(to, acc.to(OUT), mask=(rows < M)[:, None] & (cols < N)[None, :])


@triton.jit(do_not_specialize=["M", "PROGRAMS"])
def gated_gemm_kernel(
    x_desc, w_desc, y_desc, y_ptr, M, N, K, PROGRAMS,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SWAP: tl.constexpr, PAIRED: tl.constexpr, STORE_TILES: tl.constexpr, OUT: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """y[m, n] = silu(x[m] · w[n]) · (x[m] · w[N + n]), w [2·N, K]: what ``gemm_kernel`` and then
    ``silu_mul_kernel`` give, both products rounded to OUT between. Launch without contraction.

    PAIRED: w comes as [2, N, K], and one product of 2·BN columns is both.
    """
    follow(CHAIN)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS):
        width = GROUP * tiles_n
        first = (tile // width) * GROUP
        height = tl.minimum(tiles_m - first, GROUP)
        m = (first + (tile % width) % height) * BM
        n = ((tile % width) // height) * BN
        if PAIRED:
            both = tl.zeros((BM, 2 * BN), tl.float32)
            for k in tl.range(0, tl.cdiv(K, BK)):
                x = x_desc.load([m, k * BK])
                w = w_desc.load([0, n, k * BK]).reshape(2 * BN, BK)
                both = tl.dot(x, w.T, both)
            gate, up = tl.split(tl.permute(both.reshape(BM, 2, BN), (0, 2, 1)))
        else:
            if SWAP:
                gate = tl.zeros((BN, BM), tl.float32)
                up = tl.zeros((BN, BM), tl.float32)
            else:
                gate = tl.zeros((BM, BN), tl.float32)
                up = tl.zeros((BM, BN), tl.float32)
            for k in tl.range(0, tl.cdiv(K, BK)):
                x = x_desc.load([m, k * BK])
                w = w_desc.load([n, k * BK])
                u = w_desc.load([N + n, k * BK])
                if SWAP:
                    gate = tl.dot(w, x.T, gate)
                    up = tl.dot(u, x.T, up)
                else:
                    gate = tl.dot(x, w.T, gate)
                    up = tl.dot(x, u.T, up)
        y = silu_times(gate.to(OUT).to(tl.float32), up.to(OUT).to(tl.float32), OUT).to(OUT)
        if SWAP:
            y = y.T
        if STORE_TILES:
            y_desc.store([m, n], y)
        else:
            rows, cols = m + tl.arange(0, BM), n + tl.arange(0, BN)
            to = y_ptr + rows[:, None].to(tl.int64) * N + cols[None, :]
            tl.store(to, y, mask=(rows < M)[:, None] & (cols < N)[None, :])


@triton.jit(do_not_specialize=["M"])
def plain_gemm_kernel(
    x_ptr, w_ptr, y_ptr, bias_ptr, M, N, K, x_row, w_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIASED: tl.constexpr,
    PRECISION: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """The same by pointers: any K, and float32 (PRECISION "ieee": multiply-adds, k ascending).

    One tile shape for every M, because multiply-adds promise nothing across shapes.
    """
    follow(CHAIN)
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    cols = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in tl.range(0, K, BK):
        k = k0 + ks
        x_mask = (rows < M)[:, None] & (k < K)[None, :]
        w_mask = (k < K)[:, None] & (cols < N)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_row + k[None, :], mask=x_mask, other=0)
        w = tl.load(w_ptr + cols[None, :] * w_row + k[:, None], mask=w_mask, other=0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    if BIASED:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0).to(tl.float32)[None, :]
    to = y_ptr + rows[:, None] * N + cols[None, :]
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    tl.store(to, acc.to(y_ptr.dtype.element_ty), mask=mask)
