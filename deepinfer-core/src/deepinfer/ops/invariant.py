"""Batch-invariant variants in plain torch: a row's bits depend on that row alone.

They are made of the arithmetic in ``ops.rows``: products of one fixed shape (rows padded to 32,
keys in tiles of 128 at absolute positions), fixed trees of additions, functions that treat all
elements alike. ``tests/core/ops`` compares bits alone and in company, permuted, in chunks, on moved
pages, and with 1 and 2 threads.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.api.backend import Impl
from deepinfer.api.ops import SAMPLING
from deepinfer.ops.reference import moe
from deepinfer.ops.reference.attention import AttentionPlan, weigh
from deepinfer.ops.rows import row_sum, sigmoid, softmax, tiled

ROW_EXACT: Final = frozenset(
    {
        *("embedding", "rope", "plan_attention", "kv_write", "permute", "expand_rows"),
        *("append_rows", "quantize", "pack_rows", "unpack_rows", "hyper_collapse", "hyper_merge"),
        *("engram_rows", "engram_gate", "compress", "full_attention"),
        *SAMPLING,
    }
)
"""References that keep rows apart as they are: copies, sorts, arithmetic of ``ops.rows``."""

QUERIES: Final = 16
KEYS: Final = 128


def invariant_ops() -> dict[str, Impl]:
    """Overrides for every reference whose rows are not apart."""
    ops = (linear, rms_norm, silu_mul, attention, route, grouped_linear)
    return {fn.__name__: Impl(fn) for fn in ops}


def linear(
    x: Tensor, w: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The reference's, in tiles of 32 rows."""
    y = tiled(x.float().reshape(-1, x.shape[-1]), w.float())
    if bias is not None:
        y += bias.float()
    return y.view(*x.shape[:-1], y.shape[-1]).to(out_dtype or x.dtype)


def rms_norm(x: Tensor, w: Tensor | None, eps: float) -> Tensor:
    wide = x.float()
    mean = row_sum(wide * wide) / x.shape[-1]
    y = wide * (1 / torch.sqrt(mean + eps))[..., None]
    return (y if w is None else y * w.float()).to(x.dtype)


def silu_mul(x: Tensor, limit: float | None = None) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate / (1 + torch.exp(-gate)) * up).to(x.dtype)


def _sqrtsoftplus(x: Tensor) -> Tensor:
    return torch.sqrt(x.clamp(min=0) + torch.log1p(torch.exp(-x.abs())))


_SCORES: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "softmax": softmax,
    "sigmoid": sigmoid,
    "sqrtsoftplus": _sqrtsoftplus,
}


def route(
    logits: Tensor, bias: Tensor | None, k: int, score: str, renorm: bool, scale: float
) -> tuple[Tensor, Tensor]:
    return moe.select(_SCORES[score](logits), bias, k, renorm, scale)


def grouped_linear(
    x: Tensor, w: Tensor, offsets: Tensor, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The reference's, each expert in tiles of 32 rows."""
    bounds = offsets.tolist()
    y = x.new_zeros((len(x), w.shape[1]), dtype=out_dtype or x.dtype)
    for expert, (begin, end) in enumerate(pairwise(bounds)):
        if begin < end:
            y[begin:end] = tiled(x[begin:end].float(), w[expert].float()).to(y.dtype)
    return y


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int | None = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The reference's: 16 query rows against 128 keys at a time, an online softmax in key order.

    A tile in which a row sees nothing changes none of its bits, so neither the rows that share its
    tile nor keys after its own position show.
    """
    o = torch.zeros_like(q, dtype=torch.float32)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    singles = zip(plan.singles.tolist(), plan.single_rows.tolist(), strict=True)
    alone = [(b, row, 1, int(plan.kv_lengths[b])) for b, row in singles]
    for request, row, q_len, kv_len in [*alone, *plan.chunks]:
        pages = plan.block_table[request, : -(-kv_len // plan.page_size)]
        keys, values = _tiles(k_cache[pages], kv_len), _tiles(v_cache[pages], kv_len)
        for begin in range(0, q_len, QUERIES):
            rows = slice(row + begin, row + min(begin + QUERIES, q_len))
            first = kv_len - q_len + begin
            o[rows], lse[rows] = _attend(q[rows], keys, values, first, (scale, window, softcap))
    if sink is not None:
        o *= sigmoid(lse - sink)[..., None]
    return o.to(q.dtype), lse


def _tiles(pages: Tensor, length: int) -> Tensor:
    """Pages [n, page, HKV, D] to tiles float32[tiles, HKV, 128, D]; zeros from ``length`` on."""
    rows = pages.flatten(0, 1)[:length].float()
    padded = F.pad(rows, (0, 0, 0, 0, 0, -length % KEYS))
    return padded.view(len(padded) // KEYS, KEYS, *rows.shape[1:]).transpose(1, 2)


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    first: int,
    how: tuple[float, int | None, float | None],
) -> tuple[Tensor, Tensor]:
    """Up to 16 query rows [r, HQ, D] at positions first, first + 1, …"""
    scale, window, softcap = how
    rows, heads, dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    grouped = F.pad(q.float(), (0, 0, 0, 0, 0, QUERIES - rows)).view(QUERIES, kv_heads, group, dim)
    grouped = grouped.transpose(0, 1).flatten(1, 2)  # [HKV, 16·G, D]
    position = torch.arange(first, first + QUERIES).repeat_interleave(group)[:, None]
    top = grouped.new_full((*grouped.shape[:2], 1), -torch.inf)
    total = torch.zeros_like(top)
    acc = torch.zeros_like(grouped)
    begin = 0 if window is None else max(first - window + 1, 0) // KEYS
    for tile in range(begin, max(first + rows - 1, -1) // KEYS + 1):
        key = torch.arange(tile * KEYS, (tile + 1) * KEYS)
        visible = key <= position
        if window is not None:
            visible &= key > position - window
        scores = torch.bmm(grouped, keys[tile].transpose(1, 2)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible, -torch.inf)
        best = torch.maximum(top, scores.amax(-1, keepdim=True))
        base = torch.where(best == -torch.inf, 0.0, best)  # −inf − −inf is no number
        weight, keep = torch.exp(scores - base), torch.exp(top - base)
        total = total * keep + row_sum(weight)[..., None]
        acc = acc * keep + weigh(weight, values[tile], visible)
        top = best
    empty = top == -torch.inf  # not "total == 0": NaN has to come through
    o = torch.where(empty, 0.0, acc / total) + 0.0  # + 0.0 makes every zero positive
    lse = torch.where(empty, -torch.inf, top + torch.log(total))
    o = o.view(kv_heads, QUERIES, group, dim).transpose(0, 1).reshape(QUERIES, heads, dim)
    lse = lse.view(kv_heads, QUERIES, group).transpose(0, 1).reshape(QUERIES, heads)
    return o[:rows], lse[:rows]
