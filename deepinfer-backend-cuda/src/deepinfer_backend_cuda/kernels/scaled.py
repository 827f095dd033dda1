"""Quantised numbers: rounding to FP8 and FP4 groups, their records, and weights decoded as tiles.

Formats as in ``deepinfer.ops.reference.scaled``: ``FP8`` groups of 32 E4M3 values and ``MXFP4``
groups of 32 E2M1 values with E8M0 scales, ``NVFP4`` groups of 16 E2M1 values with E4M3 scales.
Everything here is exact or rounded once, so no order is part of a result. Launch with
``enable_fp_fusion=False``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_backend_cuda.kernels.chain import follow

FP8 = tl.constexpr(0)
MXFP4 = tl.constexpr(1)
NVFP4 = tl.constexpr(2)
PAIRED = tl.constexpr(4)
"""MXFP4 weights decoded two words at a time: SM90 alone, in tiles of whole warp groups."""

_INF = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _real(x):
    return x.to(tl.float32, bitcast=True)


@triton.jit
def _to_steps(x, normal, BELOW: tl.constexpr):
    """float32 x ≥ 0 to nearest even, in steps of its power of two (``normal`` at least) · BELOW.

    A quotient is below 16, and adding 1.5·2^23 rounds it to an integer.
    """
    step = tl.maximum(_real(_bits(x) & _INF), normal) * BELOW
    return (tl.div_rn(x, step) + 12582912.0 - 12582912.0) * step


@triton.jit
def scale_of(top, KIND: tl.constexpr):
    """The scale of a group whose largest magnitude has the bits ``top`` int32; NaN spoils it, and
    an infinity does with E8M0.
    """
    if KIND == NVFP4:
        most = tl.maximum(_real(top), 6.0 * 2.0**-9)
        share = tl.minimum(tl.div_rn(most, 6.0), 448.0)
        scale = _to_steps(share, 2.0**-6, 0.125)
        return tl.where(top > _INF, float("nan"), scale)
    if KIND == FP8:
        most = tl.maximum(_real(tl.minimum(top, _INF)), 1e-4) * (1.0 / 448.0)
    else:
        most = tl.maximum(_real(tl.minimum(top, _INF)), 6.0 * 2.0**-126) * (1.0 / 6.0)
    up = (tl.minimum(_bits(most), _INF) + 0x007FFFFF) & _INF
    return _real(up)


@triton.jit
def share_of(x, scale, KIND: tl.constexpr):
    """x in units of its scale, as the format has it; x's sign stays, of zeros too."""
    size = _real(_bits(x) & _MAGNITUDE)
    if KIND == FP8:
        share = _to_steps(tl.minimum(tl.div_rn(size, scale), 448.0), 2.0**-6, 0.125)
    else:
        share = _to_steps(tl.minimum(tl.div_rn(size, scale), 6.0), 1.0, 0.5)
    return _real(_bits(share) | (_bits(x) & ~_MAGNITUDE))


@triton.jit
def quantized(x, ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr):
    """float32 x [ROWS, GROUPS·GROUP] rounded to the format's values."""
    x = tl.reshape(x, (ROWS, GROUPS, GROUP))
    top = tl.max(_bits(x) & _MAGNITUDE, 2)
    scale = tl.broadcast_to(scale_of(top, KIND)[:, :, None], (ROWS, GROUPS, GROUP))
    spoilt = tl.broadcast_to((top >= _INF if KIND != NVFP4 else top > _INF)[:, :, None], x.shape)
    y = share_of(x, scale, KIND) * scale
    return tl.reshape(tl.where(spoilt, float("nan"), y), (ROWS, GROUPS * GROUP))


@triton.jit
def e8m0(code):
    """uint8 exponents to float32: 2^(code − 127), 255 is NaN."""
    bits = code.to(tl.int32) << 23
    bits = tl.where(code == 0, 0x00400000, bits)
    return tl.where(code == 255, float("nan"), _real(bits))


@triton.jit
def e4m3(code):
    """uint8 E4M3 codes to float32."""
    code = code.to(tl.int32)
    size = _real((code & 0x7F) << 20) * 2.0**120
    size = tl.where((code & 0x7F) == 0x7F, float("nan"), size)
    return _real(_bits(size) | ((code & 0x80) << 24))


@triton.jit
def e2m1(code):
    """E2M1 codes 0 … 15 to float32."""
    code = code.to(tl.int32)
    size = _real((code & 7) << 22) * 2.0**126
    return _real(_bits(size) | ((code & 8) << 28))


@triton.jit
def quantize_kernel(
    x_ptr, y_ptr, x_row,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """GROUPS groups of a row of x [T, WIDTH] (row stride ``x_row``) to y, contiguous."""
    follow(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * (GROUPS * GROUP) + tl.arange(0, GROUPS * GROUP)
    mask = cols < WIDTH
    x = tl.load(x_ptr + row * x_row + cols, mask=mask, other=0).to(tl.float32)
    y = tl.reshape(quantized(x[None, :], 1, GROUPS, GROUP, KIND), (GROUPS * GROUP,))
    tl.store(y_ptr + row * WIDTH + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gated_quantize_kernel(
    x_ptr, y_ptr, x_row, limit,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, LIMITED: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """y[t] = quantize(silu(gate) · up, "fp8") of x [T, 2·WIDTH]: gate, then up."""
    follow(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * (GROUPS * 32) + tl.arange(0, GROUPS * 32)
    mask = cols < WIDTH
    gate = tl.load(x_ptr + row * x_row + cols, mask=mask, other=0).to(tl.float32)
    up = tl.load(x_ptr + row * x_row + WIDTH + cols, mask=mask, other=0).to(tl.float32)
    y = gated(gate, up, limit, LIMITED).to(y_ptr.dtype.element_ty).to(tl.float32)
    y = tl.reshape(quantized(y[None, :], 1, GROUPS, 32, FP8), (GROUPS * 32,))
    tl.store(y_ptr + row * WIDTH + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gated(gate, up, limit, LIMITED: tl.constexpr):
    """silu(gate) · up in float32, as ``silu_mul`` has it; NaN stays."""
    if LIMITED:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up


@triton.jit
def _scale_codes(scale, KIND: tl.constexpr):
    """A scale's byte."""
    bits = _bits(scale)
    if KIND == NVFP4:
        code = tl.where(scale < 2.0**-6, (scale * 512.0).to(tl.int32), (bits >> 20) - 960)
        return tl.where(scale != scale, 0x7F, code).to(tl.uint8)
    return (bits >> 23).to(tl.uint8)


@triton.jit
def packed_rows(
    x, ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr
):
    """(codes, scale bytes) of float32 x [ROWS, GROUPS·GROUP]: uint8 [ROWS, values' bytes] and
    [ROWS, GROUPS].
    """
    x = tl.reshape(x, (ROWS, GROUPS, GROUP))
    top = tl.max(_bits(x) & _MAGNITUDE, 2)
    scale = scale_of(top, KIND)
    share = share_of(x, tl.broadcast_to(scale[:, :, None], x.shape), KIND)
    size = _real(_bits(share) & _MAGNITUDE)
    sign = (_bits(share) >> 31) & 1
    if KIND == FP8:
        low = (size * 512.0).to(tl.int32)
        code = tl.where(size < 2.0**-6, low, (_bits(size) >> 20) - 960)
        code = tl.where(size != size, 0x7F, code) | (sign << 7)
        codes = tl.reshape(code.to(tl.uint8), (ROWS, GROUPS * GROUP))
    else:
        code = tl.where(size < 1.0, (size * 2.0).to(tl.int32), (_bits(size) >> 22) - 252)
        code = tl.where(size != size, 0, code | (sign << 3))
        even, odd = tl.split(tl.reshape(code, (ROWS, GROUPS * GROUP // 2, 2)))
        codes = (even | (odd << 4)).to(tl.uint8)
    return codes, _scale_codes(scale, KIND)


@triton.jit
def pack_kernel(
    x_ptr, to_ptr, slot_ptr, x_row, to_row, rows,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    SLOTS: tl.constexpr, PACKED: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Row t of x [T, WIDTH] as a record (PACKED) or as its values, to row ``slot[t]`` of ``to``.

    SLOTS False: to row t. A slot below 0 or past ``rows`` writes nothing. GROUPS·GROUP ≥ WIDTH.
    """
    follow(CHAIN)
    t = tl.program_id(0).to(tl.int64)
    slot = t
    if SLOTS:
        slot = tl.load(slot_ptr + t)
    if (slot >= 0) & (slot < rows):
        cols = tl.arange(0, GROUPS * GROUP)
        x = tl.load(x_ptr + t * x_row + cols, mask=cols < WIDTH, other=0).to(tl.float32)[None, :]
        to = to_ptr + slot * to_row
        if PACKED:
            codes, scales = packed_rows(x, 1, GROUPS, GROUP, KIND)
            NBYTES: tl.constexpr = WIDTH if KIND == FP8 else WIDTH // 2
            SIZE: tl.constexpr = GROUPS * GROUP if KIND == FP8 else GROUPS * GROUP // 2
            at = tl.arange(0, SIZE)
            tl.store(to + at, tl.reshape(codes, (SIZE,)), mask=at < NBYTES)
            g = tl.arange(0, GROUPS)
            tl.store(to + NBYTES + g, tl.reshape(scales, (GROUPS,)), mask=g < WIDTH // GROUP)
        else:
            y = tl.reshape(quantized(x, 1, GROUPS, GROUP, KIND), (GROUPS * GROUP,))
            tl.store(to + cols, y.to(to_ptr.dtype.element_ty), mask=cols < WIDTH)


@triton.jit
def unpack_kernel(
    r_ptr, y_ptr, r_row,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """Records [T, n] (row stride ``r_row``) to values y [T, WIDTH], contiguous."""
    follow(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < WIDTH
    record = r_ptr + row * r_row
    if KIND == FP8:
        value = e4m3(tl.load(record + cols, mask=mask, other=0))
        scale = e8m0(tl.load(record + WIDTH + cols // GROUP, mask=mask, other=0))
    else:
        byte = tl.load(record + cols // 2, mask=mask, other=0).to(tl.int32)
        value = e2m1((byte >> ((cols % 2) * 4)) & 15)
        code = tl.load(record + WIDTH // 2 + cols // GROUP, mask=mask, other=0)
        if KIND == NVFP4:
            scale = e4m3(code)
        else:
            scale = e8m0(code)
    tl.store(y_ptr + row * WIDTH + cols, (value * scale).to(y_ptr.dtype.element_ty), mask=mask)


# --- weights ---------------------------------------------------------------------------------

# A weight is kept as 32-bit words, for blocks of 64 rows and 128 columns [64, 16·(1 or 2)]: word j
# holds values of columns 2·(j//2) and the next, in its low and high half, so that a mask and a
# shift give a pair of bfloat16, in the order in which a matrix instruction takes them. What is
# masked is 2^−126 (FP4) or 2^−120 (FP8) of the value; the scale, a bfloat16, brings it back.


@triton.jit
def _pairs(words, BN: tl.constexpr):
    """uint32 [BN, 8], two bfloat16 each -> bfloat16 [BN, 16]."""
    even = (words & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    odd = (words >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.reshape(tl.join(even, odd), (BN, 16))


@triton.jit
def _beside(a, b, BN: tl.constexpr, WIDTH: tl.constexpr):
    """[BN, WIDTH/2] twice -> [BN, WIDTH]: a's columns, then b's."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (BN, WIDTH))


@triton.jit
def _scale_at(scales, g: tl.constexpr):
    """Byte g of each word: the exponent field of a bfloat16. [BN, 1]."""
    field = ((scales >> (8 * g)) & 0xFF) << 7
    return field.to(tl.uint16).to(tl.bfloat16, bitcast=True)[:, None]


@triton.jit
def _fp4_half(v, low, high, BN: tl.constexpr):
    """Four pairs of each word v uint32 [BN, 8] -> bfloat16 [BN, 64], scaled."""
    a = _pairs(v & 0x81C081C0, BN) * low
    b = _pairs((v << 6) & 0x81C081C0, BN) * low
    c = _pairs(((v << 1) & 0x80008000) | ((v << 3) & 0x01C001C0), BN) * high
    d = _pairs(((v << 2) & 0x80008000) | ((v >> 4) & 0x01C001C0), BN) * high
    return _beside(_beside(a, b, BN, 32), _beside(c, d, BN, 32), BN, 64)


@triton.jit
def _fp4_pairs(w):
    """Both halves' pairs of words uint32 [BN, 16] at once, as eight bfloat16 [BN, 16]: what
    ``_fp4_half`` does with ``_pairs``, without taking pairs apart to put them together again.

    The instructions take the two words that a thread holds side by side: neighbours in a row where
    registers run along rows, as they do in SM90's first operand of a warp group (four warps), and
    as nowhere else is promised. ``benchmarks/cuda_v41_check.py`` compares the bits.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, u;
        and.b32 $0, $8, 0x81C081C0;
        shl.b32 t, $8, 6;
        and.b32 $1, t, 0x81C081C0;
        shl.b32 t, $8, 1;
        shl.b32 u, $8, 3;
        and.b32 t, t, 0x80008000;
        lop3.b32 $2, u, 0x01C001C0, t, 0xEA;
        shl.b32 t, $8, 2;
        shr.b32 u, $8, 4;
        and.b32 t, t, 0x80008000;
        lop3.b32 $3, u, 0x01C001C0, t, 0xEA;
        and.b32 $4, $9, 0x81C081C0;
        shl.b32 t, $9, 6;
        and.b32 $5, t, 0x81C081C0;
        shl.b32 t, $9, 1;
        shl.b32 u, $9, 3;
        and.b32 t, t, 0x80008000;
        lop3.b32 $6, u, 0x01C001C0, t, 0xEA;
        shl.b32 t, $9, 2;
        shr.b32 u, $9, 4;
        and.b32 t, t, 0x80008000;
        lop3.b32 $7, u, 0x01C001C0, t, 0xEA;
        }
        """,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
        [w],
        dtype=(
            tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
            tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
        ),
        is_pure=True,
        pack=2,
    )  # fmt: skip


@triton.jit
def _fp8_half(w, low, high, BN: tl.constexpr):
    """Words uint32 [BN, 16] of 64 columns -> bfloat16 [BN, 64], scaled."""
    v0, v1 = tl.split(tl.reshape(w, (BN, 8, 2)))
    a = _pairs((v0 & 0x80008000) | ((v0 >> 4) & 0x07F007F0), BN) * low
    b = _pairs(((v0 << 8) & 0x80008000) | ((v0 << 4) & 0x07F007F0), BN) * low
    c = _pairs((v1 & 0x80008000) | ((v1 >> 4) & 0x07F007F0), BN) * high
    d = _pairs(((v1 << 8) & 0x80008000) | ((v1 << 4) & 0x07F007F0), BN) * high
    return _beside(_beside(a, b, BN, 32), _beside(c, d, BN, 32), BN, 64)


@triton.jit
def weight_tile(w_ptr, s_ptr, rows, block, blocks, BN: tl.constexpr, KIND: tl.constexpr):
    """Columns of block ``block`` (of ``blocks``) of the rows int32[BN] of a kept weight, as two
    bfloat16 [BN, 64].
    """
    j = tl.arange(0, 16)
    at = (rows // 64) * blocks + block
    scales = tl.load(s_ptr + at * 64 + rows % 64).to(tl.uint32, bitcast=True)
    if KIND == MXFP4 or KIND == PAIRED:
        w = tl.load(w_ptr + (at * 1024 + (rows % 64) * 16)[:, None] + j[None, :])
        w = w.to(tl.uint32, bitcast=True)
        if KIND == MXFP4:
            v0, v1 = tl.split(tl.reshape(w, (BN, 8, 2)))
            left = _fp4_half(v0, _scale_at(scales, 0), _scale_at(scales, 1), BN)
            right = _fp4_half(v1, _scale_at(scales, 2), _scale_at(scales, 3), BN)
        else:
            a, b, c, d, e, f, g, h = _fp4_pairs(w)
            one, two = _scale_at(scales, 0), _scale_at(scales, 1)
            left = _beside(
                _beside(a * one, b * one, BN, 32), _beside(c * two, d * two, BN, 32), BN, 64
            )
            one, two = _scale_at(scales, 2), _scale_at(scales, 3)
            right = _beside(
                _beside(e * one, f * one, BN, 32), _beside(g * two, h * two, BN, 32), BN, 64
            )
    else:
        from_row = (at * 2048 + (rows % 64) * 16)[:, None] + j[None, :]
        w = tl.load(w_ptr + from_row).to(tl.uint32, bitcast=True)
        left = _fp8_half(w, _scale_at(scales, 0), _scale_at(scales, 1), BN)
        w = tl.load(w_ptr + from_row + 1024).to(tl.uint32, bitcast=True)
        right = _fp8_half(w, _scale_at(scales, 2), _scale_at(scales, 3), BN)
    return left, right


@triton.jit
def decode_kernel(
    w_ptr, s_ptr, y_ptr, N, K, blocks, KIND: tl.constexpr, BN: tl.constexpr, CHAIN: tl.constexpr
):
    """A kept weight as bfloat16 y [N, K]: program (64 rows, block of columns)."""
    follow(CHAIN)
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    left, right = weight_tile(w_ptr, s_ptr, rows, tl.program_id(1), blocks, BN, KIND)
    cols = tl.program_id(1) * 128 + tl.arange(0, 64)
    to = y_ptr + rows[:, None].to(tl.int64) * K + cols[None, :]
    inside = (rows < N)[:, None]
    tl.store(to, left, mask=inside & (cols < K)[None, :])
    tl.store(to + 64, right, mask=inside & (cols + 64 < K)[None, :])
