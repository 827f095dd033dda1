"""The native kernels as functions on torch tensors. A backend maps the op table to these.

Common to all. Tensors are on the CPU and contiguous in their last dimension; where a docstring says
"row stride", dimension 0 may have any stride (a slice of a fused projection), the rest is
contiguous. Activations are float32 or bfloat16; arithmetic is float32; a bfloat16 result is rounded
once, to nearest even. T may be 0. Wrong dtypes raise TypeError, wrong shapes or strides ValueError.

Guaranteed: every output element is one chain of operations fixed by its own row, the weights and
absolute positions. It does not depend on the number of rows, on a row's place, on chunking, on page
numbers or on ``num_threads`` (None: torch's number), and is the same with AVX2 and AVX-512.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, get_num_threads

from deepinfer.native import _kernels, loader
from deepinfer.native.weights import (
    PackedWeight,
    dequantize,
    prepare_linear,
    quantize_int8_reference,
    unpack,
)

__all__ = [
    "PackedWeight",
    "add_rms_norm",
    "apply_bitmask",
    "attention",
    "dequantize",
    "embedding",
    "filter_top",
    "gumbel_argmax",
    "kv_write",
    "linear",
    "logprobs",
    "prepare_linear",
    "quantize_int8_reference",
    "rms_norm",
    "rope",
    "silu_mul",
    "unpack",
]

_CODE = {torch.float32: 0, torch.bfloat16: 1}
_FLOATS = "must be float32 or bfloat16"
_linear, _norm, _rope, _silu = _kernels.linear, _kernels.norm, _kernels.rope, _kernels.silu
_empty, _f32, _i64, _i32 = torch.empty, torch.float32, torch.int64, torch.int32

assert loader.ISA_NAMES  # the loader has handed the threads over


def _code(x: Tensor, name: str) -> int:
    code = _CODE.get(x.dtype)
    if code is None:
        raise TypeError(f"{name} {_FLOATS}, not {x.dtype}")
    return code


def _expect(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], name: str) -> int:
    """Address of a contiguous tensor of this dtype and shape."""
    if x.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, not {x.dtype}")
    if x.shape != shape or not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous {list(shape)}, not {list(x.shape)}")
    return x.data_ptr()


def _rows(x: Tensor, name: str) -> int:
    """Row stride of x [T, ...] whose rows are contiguous."""
    stride, want = x.stride(), 1
    for i in range(x.dim() - 1, 0, -1):
        if stride[i] != want and x.shape[i] != 1:
            raise ValueError(f"the rows of {name} must be contiguous")
        want *= x.shape[i]
    return stride[0]


def apply_bitmask(
    logits: Tensor, bitmask: Tensor, index: Tensor, *, num_threads: int | None = None
) -> Tensor:
    """Forbid ids, in place; returns ``logits``. As the reference, mask by mask on one thread.

    logits float32[m, V], bitmask int32[k, W], index int64[k]. A mask is bytes to numpy and one
    pass over its row to torch: a few microseconds, where the reference makes a table of all bits.
    """
    vocab = logits.shape[1]
    width = min(vocab, bitmask.shape[1] * 32)
    words = np.ascontiguousarray(bitmask.numpy()).astype("<i4", copy=False)
    for mask, row in zip(~words, index.tolist(), strict=True):
        if row < 0:
            continue
        bits = np.unpackbits(mask.view(np.uint8), count=width, bitorder="little")
        line = logits[row]
        line[:width].masked_fill_(torch.from_numpy(bits.view(bool)), -torch.inf)
        line[width:] = -torch.inf
    return logits


def linear(
    x: Tensor,
    w: PackedWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    num_threads: int | None = None,
) -> Tensor:
    """``x · wᵀ + bias``. x [T, K] (row stride; or [..., K] contiguous), bias [N] -> [T, N].

    The chain of an element is acc = fma(x[k], w[k], acc) for k = 0 … K−1 from 0, then + bias, then
    the rounding to ``out_dtype`` (None: that of x).

    int8: every 32 values of a row of x are rounded as ``ops.quant.round_rows`` says, to integers
    and a scale xs. The chain is acc = fma(s, xs·ws, acc) over such groups, ascending: s the exact
    sum of their 32 products of integers, ws the weight's scale. A group of x with a NaN or an
    infinity makes the row NaN.
    """
    dtype = x.dtype
    code = _code(x, "x")
    shape = x.shape
    if shape[-1] != w.k:
        raise ValueError(f"x has {shape[-1]} columns, the weight {w.k}")
    if len(shape) == 2:
        rows, ld = shape[0], x.stride(0)
        if x.stride(1) != 1 and w.k != 1:
            raise ValueError("the rows of x must be contiguous")
    else:
        if not x.is_contiguous():
            raise ValueError("x must be contiguous")
        rows, ld = x.numel() // w.k, w.k
    bias_pointer = bias_code = 0
    if bias is not None:
        bias_code = _code(bias, "bias")
        bias_pointer = _expect(bias, bias.dtype, (w.n,), "bias")
    out_dtype = out_dtype or dtype
    out_code = _CODE.get(out_dtype)
    if out_code is None:
        raise TypeError(f"out_dtype {_FLOATS}, not {out_dtype}")
    out = _empty((*shape[:-1], w.n), dtype=out_dtype)
    _linear(
        x.data_ptr(), code, ld, rows, w.n, w.k, w.pointer, w.code, w.scale_pointer,
        bias_pointer, bias_code, out.data_ptr(), out_code, num_threads or get_num_threads(),
    )  # fmt: skip
    return out


def embedding(
    ids: Tensor,
    w: PackedWeight,
    out_dtype: torch.dtype | None = None,
    *,
    num_threads: int | None = None,
) -> Tensor:
    """Rows of a packed table. ids int64[T] in [0, N) -> [T, K] (None: dtype of w, int8: float32).

    The table may be the very PackedWeight of a tied head. An id outside raises ValueError.
    """
    if ids.dtype != _i64:
        raise TypeError(f"ids must be int64, not {ids.dtype}")
    if not ids.is_contiguous():
        raise ValueError("ids must be contiguous")
    out_dtype = out_dtype or (w.dtype if w.scales is None else _f32)
    out = _empty((*ids.shape, w.k), dtype=out_dtype)
    _kernels.embedding(
        ids.data_ptr(), ids.numel(), w.pointer, w.code, w.scale_pointer, w.n, w.k,
        out.data_ptr(), _code(out, "out_dtype"), num_threads or get_num_threads(),
    )  # fmt: skip
    return out


def rms_norm(x: Tensor, w: Tensor | None, eps: float, *, num_threads: int | None = None) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · w`` over the last dimension H. x [..., H] (row stride), w [H].

    The squares are summed in 64 lanes (element i in lane i % 64), the lanes pairwise.
    """
    code = _code(x, "x")
    shape = x.shape
    h = shape[-1]
    if h == 0:
        raise ValueError("x must have at least one column")
    w_pointer = w_code = 0
    if w is not None:
        w_code = _code(w, "w")
        w_pointer = _expect(w, w.dtype, (h,), "w")
    outer, ld = (shape[0], _rows(x, "x")) if len(shape) > 1 else (1, h)
    total = x.numel() // h
    inner = total // outer if total else 1
    out = _empty(shape, dtype=x.dtype)
    _norm(
        x.data_ptr(), 0, w_pointer, w_code, out.data_ptr(), 0, code, total, inner, h, ld, 0,
        float(eps), num_threads or get_num_threads(),
    )  # fmt: skip
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, w: Tensor | None, eps: float, *, num_threads: int | None = None
) -> tuple[Tensor, Tensor]:
    """(y, residual'): residual' = x + residual in their dtype, y = rms_norm(residual').

    x, residual [T, H] (row strides), w [H]. The inputs are not changed.
    """
    code = _code(x, "x")
    if x.dtype != residual.dtype:
        raise TypeError("x and residual must have one dtype")
    if x.dim() != 2 or x.shape != residual.shape or x.shape[1] == 0:
        raise ValueError("x and residual must be [T, H] of one shape")
    rows, h = x.shape
    w_pointer = w_code = 0
    if w is not None:
        w_code = _code(w, "w")
        w_pointer = _expect(w, w.dtype, (h,), "w")
    out, total = _empty((rows, h), dtype=x.dtype), _empty((rows, h), dtype=x.dtype)
    _norm(
        x.data_ptr(), residual.data_ptr(), w_pointer, w_code, out.data_ptr(), total.data_ptr(),
        code, rows, 1, h, _rows(x, "x"), _rows(residual, "residual"), float(eps),
        num_threads or get_num_threads(),
    )  # fmt: skip
    return out, total


def rope(
    x: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool = False,
    *,
    num_threads: int | None = None,
) -> Tensor:
    """Rotate the first R of D elements. x [T, N, D] (row stride), positions int64[T],
    cos_sin float32[P, R]: R/2 cosines, then R/2 sines -> [T, N, D] of x's dtype.

    Pair i is (i, i + R/2), or (2i, 2i + 1) if ``interleaved``: a' = a·cos − b·sin,
    b' = b·cos + a·sin. The rest is copied. A position outside [0, P) raises ValueError.
    """
    code = _code(x, "x")
    if x.dim() != 3:
        raise ValueError("x must be [T, N, D]")
    t, heads, d = x.shape
    at = _expect(positions, _i64, (t,), "positions")
    table = _expect(cos_sin, _f32, tuple(cos_sin.shape), "cos_sin")
    if cos_sin.dim() != 2 or cos_sin.shape[1] > d or cos_sin.shape[1] % 2:
        raise ValueError("cos_sin must be [P, R] with R even and at most D")
    out = _empty((t, heads, d), dtype=x.dtype)
    _rope(
        x.data_ptr(), at, table, out.data_ptr(), code, t, heads, d, cos_sin.shape[1],
        _rows(x, "x"), cos_sin.shape[0], int(interleaved), num_threads or get_num_threads(),
    )  # fmt: skip
    return out


def silu_mul(x: Tensor, limit: float | None = None, *, num_threads: int | None = None) -> Tensor:
    """``gate / (1 + e^−gate) · up``. x [T, 2·I] (row stride; or [..., 2·I] contiguous) -> [T, I].

    With ``limit``, gate is cut to at most limit and up to [−limit, limit] before. The exponential
    is within 1.5 ulp and the same function for every element, wherever it stands.
    """
    code = _code(x, "x")
    shape = x.shape
    if shape[-1] % 2:
        raise ValueError("x must have an even number of columns")
    half = shape[-1] // 2
    if len(shape) == 2:
        rows, ld = shape[0], _rows(x, "x")
        if x.stride(1) != 1 and half:
            raise ValueError("the rows of x must be contiguous")
    else:
        if not x.is_contiguous():
            raise ValueError("x must be contiguous")
        rows, ld = (x.numel() // shape[-1] if half else 0), shape[-1]
    out = _empty((*shape[:-1], half), dtype=x.dtype)
    _silu(
        x.data_ptr(), out.data_ptr(), code, rows, half, ld, int(limit is not None),
        float(limit or 0.0), num_threads or get_num_threads(),
    )  # fmt: skip
    return out


def kv_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    num_threads: int | None = None,
) -> None:
    """Store rows. k, v [T, HKV, D] (row strides), caches [P, page, HKV, D] contiguous, float32 or
    bfloat16, slots int64[T] = page·page_size + offset; a negative slot writes nothing.

    A slot may appear once. A slot beyond the cache raises ValueError and nothing is written.
    """
    code, cache_code = _code(k, "k"), _code(k_cache, "k_cache")
    if v.dtype != k.dtype:
        raise TypeError("k and v must have one dtype")
    if k.dim() != 3 or v.shape != k.shape or k_cache.dim() != 4:
        raise ValueError("k and v must be [T, HKV, D], the caches [P, page, HKV, D]")
    t, heads, d = k.shape
    pages, page = k_cache.shape[:2]
    shape = (pages, page, heads, d)
    _kernels.kv_write(
        k.data_ptr(), v.data_ptr(), code, _expect(k_cache, k_cache.dtype, shape, "k_cache"),
        _expect(v_cache, k_cache.dtype, shape, "v_cache"), cache_code,
        _expect(slots, _i64, (t,), "slots"), t, heads * d, _rows(k, "k"), _rows(v, "v"),
        pages * page, num_threads or get_num_threads(),
    )  # fmt: skip


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    kv_lengths: Tensor,
    cu_q: Tensor,
    scale: float,
    window: int | None = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
    *,
    num_threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention over a paged cache -> (o [T, HQ, D] of q's dtype, lse float32[T, HQ]).

    q [T, HQ, D] (row stride), D <= 256; caches [P, page, HKV, D] contiguous; block_table
    int32[B, max_pages], entries behind a request's pages are not read; kv_lengths int32 or
    int64[B], this call's tokens included; cu_q int32[B+1]. Row i of request b stands at position
    kv_len − q_len + i and sees positions <= its own and, with ``window``, > its own − window.
    Scores: scale·q·k, then softcap·tanh(score / softcap). ``sink`` float32[HQ] joins the
    denominator, not lse. A row that sees nothing or that no request owns: 0, −inf.

    Softmax runs online in tiles of 64 and spans of 256 absolute positions, spans merged ascending.
    Never reads cache beyond a request's last visible position.
    """
    code, cache_code = _code(q, "q"), _code(k_cache, "k_cache")
    if q.dim() != 3 or k_cache.dim() != 4 or block_table.dim() != 2:
        raise ValueError("q must be [T, HQ, D], caches [P, page, HKV, D], block_table [B, pages]")
    t, hq, d = q.shape
    pages, page, hkv, _ = k_cache.shape
    batch, max_pages = block_table.shape
    if hkv == 0 or hq % hkv or not 0 < d <= 256:
        raise ValueError("HQ must be a multiple of HKV, and D at most 256")
    if window is not None and window < 1:
        raise ValueError("window must be at least 1")
    shape = (pages, page, hkv, d)
    o, lse = _empty((t, hq, d), dtype=q.dtype), _empty((t, hq), dtype=_f32)
    wide = kv_lengths.dtype == _i64
    _kernels.attention(
        q.data_ptr(), _expect(k_cache, k_cache.dtype, shape, "k_cache"),
        _expect(v_cache, k_cache.dtype, shape, "v_cache"),
        _expect(block_table, _i32, (batch, max_pages), "block_table"),
        _expect(kv_lengths, _i64 if wide else _i32, (batch,), "kv_lengths"), int(wide),
        _expect(cu_q, _i32, (batch + 1,), "cu_q"),
        None if sink is None else _expect(sink, _f32, (hq,), "sink"), o.data_ptr(),
        lse.data_ptr(), code, cache_code, t, batch, hq, hkv, d, page, max_pages, _rows(q, "q"),
        window or 0, pages, float(scale), float(softcap or 0.0), num_threads or get_num_threads(),
    )  # fmt: skip
    return o, lse


def _logits(logits: Tensor) -> tuple[int, int, int]:
    if logits.dtype != _f32:
        raise TypeError(f"logits must be float32, not {logits.dtype}")
    if logits.dim() != 2 or logits.shape[1] == 0 or logits.stride(1) != 1:
        raise ValueError("logits must be [m, V] with contiguous rows and V > 0")
    return logits.shape[0], logits.shape[1], logits.stride(0)


def filter_top(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    num_threads: int | None = None,
) -> Tensor:
    """A copy of logits float32[m, V] (row stride) with −inf for removed ids.

    temperature, top_p, min_p float32[m]; top_k int64[m]. Per row, over p = softmax(z/T): the
    ``top_k`` best (<= 0: all); of those, renormalised, the fewest best whose sum reaches ``top_p``
    (>= 1: all), at least one; of those, what has ``min_p`` of the best one's probability. Ties: the
    lower id. NaN counts as −inf. A row with T = 0 stays. z/T is float32, the rest float64, sums
    run from the best id down.
    """
    m, v, stride = _logits(logits)
    out = _empty((m, v), dtype=_f32)
    _kernels.filter(
        logits.data_ptr(), stride, m, v, _expect(temperature, _f32, (m,), "temperature"),
        _expect(top_k, _i64, (m,), "top_k"), _expect(top_p, _f32, (m,), "top_p"),
        _expect(min_p, _f32, (m,), "min_p"), out.data_ptr(), num_threads or get_num_threads(),
    )  # fmt: skip
    return out


def gumbel_argmax(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    allowed: Tensor | None = None,
    *,
    num_threads: int | None = None,
) -> Tensor:
    """int64[m]: argmax over v of z_v/T + G(seed, position, v); at T = 0 of z_v. Ties: lowest id.

    logits float32[m, V] (row stride), temperature float32[m] >= 0, seed and position int64[m]
    (seed: 64 bits). ``allowed`` int32[m, ⌈V/32⌉]: bit v % 32 of word v // 32 permits id v. NaN
    counts as −inf; −inf wins only if all are, then the lowest permitted id (0 if none). G is
    Philox4x32-10 noise as in ``sampling.philox``: float64, rounded once to float32.
    """
    m, v, stride = _logits(logits)
    words = -(-v // 32)
    out = _empty((m,), dtype=_i64)
    _kernels.gumbel(
        logits.data_ptr(), stride, m, v, _expect(temperature, _f32, (m,), "temperature"),
        _expect(seed, seed.dtype if seed.dtype == torch.uint64 else _i64, (m,), "seed"),
        _expect(position, _i64, (m,), "position"),
        None if allowed is None else _expect(allowed, _i32, (m, words), "allowed"), words,
        out.data_ptr(), num_threads or get_num_threads(),
    )  # fmt: skip
    return out


def logprobs(
    logits: Tensor, k: int, chosen: Tensor, *, num_threads: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(top_ids int32[m, k], top_values float32[m, k], chosen_value float32[m], rank int32[m]).

    log_softmax of logits float32[m, V] (row stride): its k best, ties to the lower id, and the
    value and rank (from 1, ties as before) of chosen int64[m]. NaN counts as −inf. Meant for
    small k. A chosen id outside [0, V) raises ValueError.
    """
    m, v, stride = _logits(logits)
    if not 0 <= k <= v:
        raise ValueError(f"k must lie in 0 … {v}, not {k}")
    ids, values = _empty((m, k), dtype=_i32), _empty((m, k), dtype=_f32)
    value, rank = _empty((m,), dtype=_f32), _empty((m,), dtype=_i32)
    _kernels.logprobs(
        logits.data_ptr(), stride, m, v, k, _expect(chosen, _i64, (m,), "chosen"), ids.data_ptr(),
        values.data_ptr(), value.data_ptr(), rank.data_ptr(), num_threads or get_num_threads(),
    )  # fmt: skip
    return ids, values, value, rank
