"""Kernels whose unit is a row: norms, gate, rotation, cache write. float32, rounded once.

A row is one program and one tile, so its additions are ordered by its width alone; launches pass
``enable_fp_fusion=False``, so no multiply-add is contracted one way here and another way there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_backend_cuda.kernels.chain import follow

ARRIVAL = tl.constexpr(1 << 32)
"""What ``append_rows_kernel`` adds to a count for each program."""


@triton.jit(do_not_specialize=["heads"])
def rms_norm_kernel(
    x_ptr, r_ptr, w_ptr, y_ptr, total_ptr, heads, x_row, x_head, r_row, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, WEIGHTED: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """Row (t, h) of x [T, heads, WIDTH]: y = x · rsqrt(mean(x²) + eps) · w, contiguous.

    ADD (heads 1): first total = x + r, rounded to x's type and stored. The sum over the row is one
    ``tl.sum`` over BLOCK = the next power of two of WIDTH.
    """
    follow(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < WIDTH
    x = tl.load(x_ptr + (row // heads) * x_row + (row % heads) * x_head + cols, mask=mask, other=0)
    x = x.to(tl.float32)
    if ADD:
        x += tl.load(r_ptr + row * r_row + cols, mask=mask, other=0).to(tl.float32)
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * WIDTH + cols, rounded, mask=mask)
        x = rounded.to(tl.float32)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(x * x, 0), WIDTH * 1.0) + eps))
    y = x * scale
    if WEIGHTED:
        y = y * tl.load(w_ptr + cols, mask=mask, other=0).to(tl.float32)
    tl.store(y_ptr + row * WIDTH + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def silu_times(gate, up, TO: tl.constexpr):
    """silu(gate) · up in float32, to be rounded to TO: a float32 result divides exactly."""
    if TO == tl.float32:
        return tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def silu_mul_kernel(
    x_ptr, y_ptr, x_row, width, limit, BLOCK: tl.constexpr, LIMITED: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """y[t, i] = silu(x[t, i]) · x[t, width + i]; elementwise."""
    follow(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    gate = tl.load(x_ptr + row * x_row + cols, mask=mask, other=0).to(tl.float32)
    up = tl.load(x_ptr + row * x_row + width + cols, mask=mask, other=0).to(tl.float32)
    if LIMITED:
        gate = tl.where(gate > limit, limit, gate)  # NaN stays
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    to = y_ptr.dtype.element_ty
    tl.store(y_ptr + row * width + cols, silu_times(gate, up, to).to(to), mask=mask)


@triton.jit
def _rotated(x_ptr, angle_ptr, cols, real, D: tl.constexpr, R: tl.constexpr, INTERLEAVED):
    """Elements ``cols`` [1, ·] of heads at ``x_ptr`` [·, 1] (``real``: which are there), before and
    after the rotation: x·cos ∓ partner·sin, float32.
    """
    if INTERLEAVED:
        pair, first = cols // 2, cols % 2 == 0
        partner = tl.where(first, cols + 1, cols - 1)
    else:
        pair, first = cols % (R // 2), cols < R // 2
        partner = tl.where(first, cols + R // 2, cols - R // 2)
    turned = cols < R
    x = tl.load(x_ptr + cols, mask=real & (cols < D), other=0).to(tl.float32)
    other = tl.load(x_ptr + partner, mask=real & turned, other=0).to(tl.float32)
    cos = tl.load(angle_ptr + pair, mask=turned, other=1)
    sin = tl.load(angle_ptr + R // 2 + pair, mask=turned, other=0)
    return x, tl.where(turned, x * cos + tl.where(first, -(other * sin), other * sin), x)


@triton.jit(do_not_specialize=["heads"])
def rope_kernel(
    x_ptr, y_ptr, pos_ptr, angles_ptr, heads, x_row, x_head,
    D: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, R: tl.constexpr,
    INTERLEAVED: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """HEADS heads of a row of x [T, heads, D] rotated by its position's angles float32[P, R]."""
    follow(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    angle = angles_ptr + tl.load(pos_ptr + row) * R
    at = x_ptr + row * x_row + head * x_head
    _, y = _rotated(at, angle, cols, head < heads, D, R, INTERLEAVED)
    to = y_ptr + (row * heads + head) * D + cols
    tl.store(to, y.to(y_ptr.dtype.element_ty), mask=(head < heads) & (cols < D))


@triton.jit
def rope_write_kernel(
    qkv_ptr, q_ptr, k_ptr, v_ptr, pos_ptr, slot_ptr, angles_ptr, qkv_row, k_page, k_line, v_page,
    v_line, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    HEADS: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Of HEADS heads of a row of qkv [T, (HQ + 2·HKV)·D]: queries rotated to q [T, HQ, D], keys
    rotated and values as they are to their cache lines (slot −1: nowhere). The same bits as rope,
    then kv_write.
    """
    follow(CHAIN)
    t = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    angle = angles_ptr + tl.load(pos_ptr + t) * R
    real = head < HQ + 2 * HKV
    x, y = _rotated(qkv_ptr + t * qkv_row + head * D, angle, cols, real, D, R, False)
    y, inside = tl.where(head < HQ + HKV, y, x).to(qkv_ptr.dtype.element_ty), cols < D
    to = q_ptr + (t * HQ + head) * D + cols
    tl.store(to, y.to(q_ptr.dtype.element_ty), mask=inside & (head < HQ))
    slot = tl.load(slot_ptr + t)
    written = inside & real & (slot >= 0)
    page, line = slot // PAGE, slot % PAGE
    to = k_ptr + page * k_page + line * k_line + (head - HQ) * D + cols
    mask = written & (head >= HQ) & (head < HQ + HKV)
    tl.store(to, y.to(k_ptr.dtype.element_ty), mask=mask)
    to = v_ptr + page * v_page + line * v_line + (head - HQ - HKV) * D + cols
    tl.store(to, y.to(v_ptr.dtype.element_ty), mask=written & (head >= HQ + HKV))


@triton.jit(do_not_specialize=["heads"])
def kv_write_kernel(
    k_ptr, v_ptr, kc_ptr, vc_ptr, slot_ptr, heads, k_row, k_head, v_row, v_head, k_page, k_line,
    v_page, v_line, D: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Head (t, h) of k and v [T, heads, D] to line ``slot % PAGE`` of page ``slot // PAGE``."""
    follow(CHAIN)
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    slot = tl.load(slot_ptr + t)
    if slot >= 0:
        cols = tl.arange(0, BLOCK)
        mask = cols < D
        page, line = slot // PAGE, slot % PAGE
        k = tl.load(k_ptr + t * k_row + h * k_head + cols, mask=mask)
        v = tl.load(v_ptr + t * v_row + h * v_head + cols, mask=mask)
        to = page * k_page + line * k_line + h * D + cols
        tl.store(kc_ptr + to, k.to(kc_ptr.dtype.element_ty), mask=mask)
        to = page * v_page + line * v_line + h * D + cols
        tl.store(vc_ptr + to, v.to(vc_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["room"])
def append_rows_kernel(
    parts, part_rows, numbers, rows_ptr, ints_ptr, count_ptr, room, rows_row, ints_row,
    PARTS: tl.constexpr, NUMBERS: tl.constexpr, FEW: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Program (t, p): row t of part p to its place beside the others, row count + t of ``rows``,
    and with part 0 the numbers of t to that column of ``ints``, below ``room``; then count += T.

    The upper half of ``count``, 0 before and after, is how many programs have arrived. So one
    addition tells a program where its row goes and whether it is the last, which stores what is
    counted now: all others have read it. One address has one order, so no fence is needed.
    """
    follow(CHAIN)
    t = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    cols, few = tl.arange(0, BLOCK), tl.arange(0, FEW)
    mask = cols < WIDTH
    # Loads are under way while the place is asked for.
    x = tl.zeros((BLOCK,), rows_ptr.dtype.element_ty)
    for i in tl.static_range(PARTS):
        if part == i:
            x = tl.load(parts[i] + t * part_rows[i] + cols, mask=mask)
    told = tl.zeros((FEW,), tl.int64)
    for i in tl.static_range(NUMBERS):
        told = tl.where(few == i, tl.load(numbers[i] + t, mask=part == 0, other=0), told)
    seen = tl.atomic_add(count_ptr, ARRIVAL, sem="relaxed")
    count = seen % ARRIVAL
    at = count + t
    if at < room:
        tl.store(rows_ptr + at * rows_row + part * WIDTH + cols, x, mask=mask)
        to = ints_ptr + few.to(tl.int64) * ints_row + at
        tl.store(to, told, mask=(few < NUMBERS) & (part == 0))
    if seen // ARRIVAL == tl.num_programs(0) * PARTS - 1:
        tl.store(count_ptr, count + tl.num_programs(0))


@triton.jit(do_not_specialize=["tokens", "requests", "pages", "table_row"])
def stage_kernel(
    x_ptr, x_to, table_ptr, table_to, pos_ptr, pos_to, slot_ptr, slot_to, length_ptr, length_to,
    cu_q_ptr, cu_q_to, tokens, requests, pages, x_row, table_row, to_row,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGES_BLOCK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Row t and request t of a step to a graph's standing inputs; a row that is none writes
    nowhere, a request that is none has no rows and no keys.
    """
    follow(CHAIN)
    t = tl.program_id(0)
    real = t < tokens
    asked = t < requests
    cols = tl.arange(0, BLOCK)
    mask = (cols < WIDTH) & real
    row = t.to(tl.int64)
    tl.store(x_to + row * WIDTH + cols, tl.load(x_ptr + row * x_row + cols, mask=mask), mask=mask)
    page = tl.arange(0, PAGES_BLOCK)
    mask = (page < pages) & asked
    table = tl.load(table_ptr + row * table_row + page, mask=mask)
    tl.store(table_to + row * to_row + page, table, mask=mask)
    tl.store(pos_to + t, tl.load(pos_ptr + t, mask=real, other=0))
    tl.store(slot_to + t, tl.load(slot_ptr + t, mask=real, other=-1))
    tl.store(length_to + t, tl.load(length_ptr + t, mask=asked, other=0))
    tl.store(cu_q_to + t + 1, tl.load(cu_q_ptr + t + 1, mask=asked, other=tokens))
