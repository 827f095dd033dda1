"""Attention over a paged cache: one op for prefill, decode and verification.

The cache of a layer is two tensors [pages, page_size, HKV, D]. A request's token at position p
lies at offset ``p % page_size`` of its page number ``p // page_size``, which the block table names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.ops.table import op

_QUERY_BLOCK = 512  # bounds the score matrix of a long chunk


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What ``attention`` needs of a step, made once. Opaque outside a backend."""

    block_table: Tensor  # int64[n, max_pages]
    kv_lengths: Tensor  # int64[n]
    page_size: int
    singles: Tensor  # int64[s]: requests with one query row …
    single_rows: Tensor  # int64[s]: … and which row that is
    chunks: tuple[tuple[int, int, int, int], ...]  # the others: (request, row, q_len, kv_len)


@op
def plan_attention(
    block_table: Tensor, kv_lengths: Tensor, cu_q: Tensor, page_size: int
) -> AttentionPlan:
    """Prepare a step's attention; called once per step, used by every layer.

    block_table int32[n, max_pages] (entries past a request's pages are not read), kv_lengths
    int64[n] with this step's tokens included, cu_q int32[n+1]: request b owns query rows
    ``cu_q[b] … cu_q[b+1]−1``. Requests may have 0 rows.
    """
    q_lengths = cu_q.diff()
    singles = (q_lengths == 1).nonzero()[:, 0]
    starts, lengths, kv = cu_q.tolist(), q_lengths.tolist(), kv_lengths.tolist()
    chunks = tuple((b, starts[b], q, kv[b]) for b, q in enumerate(lengths) if q > 1)
    return AttentionPlan(
        block_table.long(), kv_lengths, page_size, singles, cu_q[singles].long(), chunks
    )


@op
def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store rows in the cache, in place. k, v [T, HKV, D]; slots int64[T]: page·page_size + offset,
    −1 writes nothing. A slot may appear once. Rows are rounded to the cache's dtype.
    """
    kept = slots >= 0
    if not bool(kept.all()):
        k, v, slots = k[kept], v[kept], slots[kept]
    page_size = k_cache.shape[1]
    pages, offsets = slots // page_size, slots % page_size
    k_cache[pages, offsets] = k.to(k_cache.dtype)
    v_cache[pages, offsets] = v.to(v_cache.dtype)


@op
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
    """Causal attention of query rows over their request's cached keys.

    q [T, HQ, D]; query head h reads cached head ``h // (HQ / HKV)``. Row i of request b stands at
    position ``p = kv_len − q_len + i`` and sees keys j <= p; with ``window``, only j > p − window.
    Scores are ``scale · q·k``, then ``softcap · tanh(score / softcap)``. With ``sink`` float32[HQ]
    the output is scaled by ``sigmoid(lse − sink)``.

    Returns (o [T, HQ, D] of q's dtype, lse float32[T, HQ]): lse is the natural log-sum-exp of the
    scores, without the sink. A row that sees no key, and rows that no request owns: o 0, lse −inf.
    """
    o = torch.zeros_like(q, dtype=torch.float32)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    if len(plan.singles):
        _decode(q, k_cache, v_cache, plan, (scale, window, softcap), o, lse)
    for request, row, q_len, kv_len in plan.chunks:
        pages = plan.block_table[request, : -(-kv_len // plan.page_size)]
        keys, values = k_cache[pages].flatten(0, 1), v_cache[pages].flatten(0, 1)
        for begin in range(0, q_len, _QUERY_BLOCK):
            end = min(begin + _QUERY_BLOCK, q_len)
            rows = slice(row + begin, row + end)
            first = kv_len - q_len + begin
            seen = max(first + end - begin, 0)
            positions = torch.arange(first, first + end - begin, device=q.device)
            visible = _visible(positions[None], seen, window)
            o[None, rows], lse[None, rows] = _attend(
                q[None, rows], keys[None, :seen], values[None, :seen], visible, scale, softcap
            )
    if sink is not None:
        o *= torch.sigmoid(lse - sink)[..., None]
    return o.to(q.dtype), lse


def _decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    how: tuple[float, int | None, float | None],
    o: Tensor,
    lse: Tensor,
) -> None:
    """All requests with one query row at once, padded to the longest."""
    scale, window, softcap = how
    lengths = plan.kv_lengths[plan.singles]
    longest = max(int(lengths.max()), 0)
    pages = plan.block_table[plan.singles, : -(-longest // plan.page_size)]
    used = torch.arange(pages.shape[1], device=q.device) * plan.page_size < lengths[:, None]
    pages = torch.where(used, pages, 0)
    keys, values = k_cache[pages].flatten(1, 2), v_cache[pages].flatten(1, 2)
    visible = _visible(lengths[:, None] - 1, keys.shape[1], window)
    rows = plan.single_rows
    out, norm = _attend(q[rows][:, None], keys, values, visible, scale, softcap)
    o[rows], lse[rows] = out[:, 0], norm[:, 0]


def _visible(positions: Tensor, keys: int, window: int | None) -> Tensor:
    """positions int64[n, t] -> bool[n, t, keys]: which keys each query sees."""
    key = torch.arange(keys, device=positions.device)
    seen = key <= positions[..., None]
    return seen if window is None else seen & (key > positions[..., None] - window)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """q [n, t, HQ, D], k and v [n, s, HKV, D], visible bool[n, t, s] -> float32 o, lse."""
    n, t, heads, dim = q.shape
    kv_heads = k.shape[2]
    # A cached head's queries are rows of one product: [n, HKV, t·G, D] · [n, HKV, D, s].
    grouped = q.float().view(n, t, kv_heads, -1, dim).permute(0, 2, 1, 3, 4)
    group = grouped.shape[3]
    keys, values = k.float().transpose(1, 2), v.float().transpose(1, 2)
    scores = grouped.reshape(n, kv_heads, t * group, dim) @ keys.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    shape = (n, kv_heads, t, group, visible.shape[-1])
    seen = visible[:, None, :, None, :].expand(shape).reshape(scores.shape)
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.clamp(min=torch.finfo(torch.float32).min)[..., None])
    o = weigh(weights, values, seen).view(n, kv_heads, t, group, dim).permute(0, 2, 1, 3, 4)
    return (
        o.reshape(n, t, heads, dim),
        lse.view(n, kv_heads, t, group).permute(0, 2, 1, 3).reshape(n, t, heads),
    )


def weigh(weights: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """``weights @ values``, where a value that is no number shows only in rows that see it.

    The weight of an unseen value is 0, but 0 · NaN is NaN, and a cache line that was never written
    may hold anything. weights and visible [..., r, s], values [..., s, D].
    """
    o = weights @ values
    if not bool(o.isnan().any()):
        return o
    finite = values.isfinite()
    touched = visible.float() @ (~finite).float() > 0
    return (weights @ torch.where(finite, values, 0.0)).masked_fill(touched, torch.nan)
