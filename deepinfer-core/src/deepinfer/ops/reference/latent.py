"""Attention over shared latents: a window of raw ones and chosen compressed ones, with a sink.

DeepSeek-V4.1's attention (specification 3). A layer's keys and values are one latent a token,
shared by all heads: ``own`` for this step's rows, and before them the layer's window, a ring of the
last rows of each request's state block (position p at row ``p % R``). What is older is read from
the compressed entries of the layer's KV source, as far as its indexer chose them (``sparse``).
A step's rows enter the ring after attention has read it.

Row-exact: products have one fixed shape (4 query rows, each with its own keys), sums are trees.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.api.model import DeviceBatch
from deepinfer.ops.reference.sparse import INDEX, Blocks, Picks, entry_slots, read_entries
from deepinfer.ops.rows import row_sum
from deepinfer.ops.table import op

WINDOW: Final = "fp8"  # how window entries are quantised
COMPRESSED: Final = "nvfp4"
_TILE: Final = 4
_SCRATCH: Final = 1 << 24  # elements of keys that are gathered at a time


@op
def latent_write(ops: Any, x: Tensor, cache: Tensor, slots: Tensor, kind: str) -> None:
    """Quantise rows and store them, in place.

    x [T, d]; cache [blocks, rows, width]: uint8 records of ``kind``, or the same values in
    bfloat16; slots int64[T]: block·rows + row, −1 writes nothing. A slot may appear once.
    """
    kept = slots >= 0
    if not bool(kept.all()):
        x, slots = x[kept], slots[kept]
    if len(x):
        packed = cache.dtype == torch.uint8
        rows = ops.pack_rows(x, kind) if packed else ops.quantize(x, kind).to(cache.dtype)
        cache[slots // cache.shape[1], slots % cache.shape[1]] = rows


@op
def compress(u: Tensor, s: Tensor, state: Tensor, batch: DeviceBatch) -> Tensor:
    """Pool pairs of tokens: rows at odd positions p get ``Σ_t softmax(s)_t · u_t`` over t = p−1, p.

    u, s float32[T, d]; the softmax is per channel. state float32[blocks, rows, 2·d]: u and s of
    the last ``rows`` positions of each request, position p at row ``p % rows``; it gives the
    partner that an earlier step ran, then takes this step's rows. Returns float32[T, d], rows at
    even positions and rows that no request owns 0.
    """
    assert batch.requests is not None
    request, position = batch.row_of_token.clamp(min=0), batch.positions
    depth = state.shape[1]
    closes = (position % 2 == 1) & (batch.row_of_token >= 0)
    here = position - 1 >= batch.requests.starts[request]
    before = torch.arange(len(u), device=u.device).sub(1).clamp(min=0)
    block = batch.requests.blocks[request]
    old = state[block, (position - 1).clamp(min=0) % depth]
    now = torch.cat((u, s), -1)
    partner = torch.where(here[:, None], now[before], old)
    u0, s0 = partner.chunk(2, -1)
    top = torch.maximum(s0, s)
    a, b = torch.exp(s0 - top), torch.exp(s - top)
    pooled = torch.where(closes[:, None], (a * u0 + b * u) / (a + b), 0.0)
    keep = last_rows(batch, depth)
    state[block[keep], position[keep] % depth] = now[keep]
    return pooled


def last_rows(batch: DeviceBatch, count: int) -> Tensor:
    """bool[T]: rows that write, and stand among the last ``count`` of their request's in the step.

    Of more rows than a ring holds only the last may enter it: a place is written once.
    """
    assert batch.requests is not None
    request = batch.row_of_token.clamp(min=0)
    end = batch.requests.cu_q[1:].long()[request]
    at = torch.arange(len(batch.ids), device=end.device)
    return (batch.row_of_token >= 0) & (batch.kv_slots >= 0) & (at >= end - count)


def ring_slots(batch: DeviceBatch, rows: int) -> Tensor:
    """int64[T]: where each row enters a ring of ``rows``, −1 where it does not."""
    assert batch.requests is not None
    block = batch.requests.blocks[batch.row_of_token.clamp(min=0)]
    place = block * rows + batch.positions % rows
    return torch.where(last_rows(batch, rows), place, -1)


class Window(NamedTuple):
    """What latent attention reads of a layer's raw latents.

    ``own`` [TK, d]: the rows of ``keys``, this step's, quantised; ``ring`` [blocks, R, width]:
    those of earlier steps, R ≥ size; ``size``: how many positions a query sees, its own included;
    ``floored``: nothing below its request's floor.
    """

    own: Tensor
    ring: Tensor
    keys: DeviceBatch
    size: int
    floored: bool


@op
def latent_attention(
    ops: Any,
    q: Tensor,
    window: Window,
    batch: DeviceBatch,
    sink: Tensor,
    scale: float,
    cache: Tensor | None = None,
    entries: Tensor | None = None,
) -> Tensor:
    """One softmax over a window, chosen compressed entries and a sink, for each head.

    q [T, H, d], the rows of ``batch``, whose requests are those of ``window.keys``. A query at p
    sees the window's positions ``max(0 or floor, p−size+1) … p``, and ``entries`` int32[T, k] (−1:
    none) of cache [pages, per_page, width], nvfp4 records or bfloat16 values. The sink float32[H]
    is a logit that is not scaled and brings no value. Returns o [T, H, d] of q's dtype; a row that
    sees nothing gets 0. Logits and sums are float32; with q in bfloat16 the weights
    ``exp(logit − max)`` are rounded to bfloat16 before they multiply the values.
    """
    pool, index = _window(ops, window, batch)
    chosen = 0 if entries is None else entries.shape[1]
    step = max(1, _SCRATCH // ((window.size + chosen) * q.shape[2]) // _TILE) * _TILE
    out = torch.empty_like(q)
    for begin in range(0, len(q), step):
        rows = slice(begin, min(begin + step, len(q)))
        seen = index[rows] >= 0
        kv = torch.where(seen[..., None], pool[index[rows].clamp(min=0)], 0.0)
        if cache is not None and entries is not None:
            more, present = _gather(ops, cache, batch, rows, entries[rows].long())
            kv, seen = torch.cat((kv, more), 1), torch.cat((seen, present), 1)
        out[rows] = _attend(q[rows], kv, seen, sink, scale).to(q.dtype)
    return out


def _window(ops: Any, window: Window, batch: DeviceBatch) -> tuple[Tensor, Tensor]:
    """(float32[P, d], int64[T, size]): latents, and which of them each row sees, −1 for none.

    The pool is this step's rows, then the size−1 positions before each request's first.
    """
    keys, size = window.keys.requests, window.size
    assert keys is not None
    device, back = window.own.device, size - 1
    rows = window.ring.shape[1]
    old = keys.starts[:, None] - back + torch.arange(back, device=device)
    slots = keys.blocks[:, None] * rows + old.clamp(min=0) % rows
    history = read_entries(ops, window.ring, slots.flatten(), WINDOW, torch.float32)
    pool = torch.cat((window.own.float(), history))
    request = batch.row_of_token.clamp(min=0)
    at = batch.positions[:, None] - back + torch.arange(size, device=device)
    offset = at - keys.starts[request][:, None]
    here = keys.cu_q[:-1].long()[request][:, None] + offset
    before = len(window.own) + (request * back + back)[:, None] + offset
    low = keys.floors[request] if window.floored else torch.zeros_like(request)
    seen = (at >= low.clamp(min=0)[:, None]) & (batch.row_of_token >= 0)[:, None]
    return pool, torch.where(seen, torch.where(offset >= 0, here, before), -1)


def _gather(
    ops: Any, cache: Tensor, batch: DeviceBatch, rows: slice, entries: Tensor
) -> tuple[Tensor, Tensor]:
    """(float32[r, k, d], bool[r, k]): chosen entries, 0 where there are none."""
    seen = (entries >= 0) & (batch.row_of_token[rows] >= 0)[:, None]
    request = batch.row_of_token[rows].clamp(min=0)
    slots = entry_slots(batch, cache.shape[1], request, entries.clamp(min=0))
    # Neighbouring rows choose much the same: each entry is dequantised once.
    known, place = torch.unique(torch.where(seen, slots, 0), return_inverse=True)
    values = read_entries(ops, cache, known, COMPRESSED, torch.float32)
    return torch.where(seen[..., None], values[place], 0.0), seen


def _attend(q: Tensor, kv: Tensor, seen: Tensor, sink: Tensor, scale: float) -> Tensor:
    """q [r, H, d], kv float32[r, E, d], seen bool[r, E] -> float32[r, H, d]."""
    rows, spare = len(q), -len(q) % _TILE
    if spare:
        q, kv = (F.pad(x, (0, 0, 0, 0, 0, spare)) for x in (q, kv))
        seen = F.pad(seen, (0, 0, 0, spare))
    logits = _products(q.float().contiguous(), kv.transpose(1, 2)) * scale
    logits = logits.masked_fill(~seen[:, None], -torch.inf)
    top = logits.amax(-1, keepdim=True)
    base = torch.where(top == -torch.inf, 0.0, top)  # −inf − −inf is no number
    weight = torch.exp(logits - base)
    total = row_sum(weight)[..., None] + torch.exp(sink.float()[:, None] - base)
    if q.dtype == torch.bfloat16:
        weight = weight.bfloat16().float()
    return torch.where(top == -torch.inf, 0.0, _products(weight, kv) / total)[:rows]


def _products(a: Tensor, b: Tensor) -> Tensor:
    """``a[i] @ b[i]`` for float32 a [r, M, K], b [r, K, N], in calls of four of one layout."""
    out = a.new_empty((len(a), a.shape[1], b.shape[2]))
    for begin in range(0, len(a), _TILE):
        part = slice(begin, begin + _TILE)
        torch.bmm(a[part], b[part], out=out[part])
    return out


class CompressorParams(NamedTuple):
    """A KV source's compressor: ``kv`` [d, D] for ratio 1, [2·d, D] (kv, then gate) for ratio 2;
    ``norm`` [d]; ``key`` [DI, d] and ``key_norm`` [DI]: its index keys.
    """

    kv: Any
    norm: Tensor
    key: Any
    key_norm: Tensor


class IndexerParams(NamedTuple):
    """An index source: ``q`` [HI·DI, L] reads the query latent, ``weights`` [HI, D] the input.

    ``k``: entries to choose; ``publish``: blocks to keep for later indexers; ``block_size`` of
    those it chooses from, 0 where from all.
    """

    q: Any
    weights: Any
    heads: int
    k: int
    publish: Blocks | None = None
    block_size: int = 0


class LatentParams(NamedTuple):
    """A layer's attention: prepared weights and shape.

    ``q_kv`` [L + d, D]: query latent and latent; ``q_norm`` [L], ``kv_norm`` [d]; ``q`` [H·d, L];
    ``out_a`` [G, N, H·d/G] and ``out_b`` [D, G·N]; ``sink`` float32[H]. ``ratio``: tokens of a
    compressed entry, 0 for none; ``floored``: the window ends at the floor.
    """

    q_kv: Any
    q_norm: Tensor
    kv_norm: Tensor
    q: Any
    out_a: Any
    out_b: Any
    sink: Tensor
    heads: int
    groups: int
    eps: float
    window: int
    ratio: int
    floored: bool
    compressor: CompressorParams | None = None
    indexer: IndexerParams | None = None


class LatentCaches(NamedTuple):
    """A layer's ring, its open groups, and the entries of its KV source; None for what it lacks."""

    window: Tensor
    open: Tensor | None = None
    compressed: Tensor | None = None
    index_keys: Tensor | None = None


class LatentRows(NamedTuple):
    """``keys``: the rows that leave latents; ``queries``: those that attend, row i of them row
    ``picked[i]`` of keys (None: the same rows).
    """

    keys: DeviceBatch
    queries: DeviceBatch
    picked: Tensor | None = None


@op
def latent_attention_block(
    ops: Any,
    x: Tensor,
    params: LatentParams,
    caches: LatentCaches,
    rows: LatentRows,
    cos_sin: Tensor,
    picks: Picks | None,
) -> tuple[Tensor, Picks | None]:
    """Attention of a layer, from normed rows to rows before the merge. Returns (y, picks').

    x [TK, D]: normed rows of ``rows.keys``; y [T, D] for ``rows.queries``. cos_sin float32[P, R]
    turns the last R channels, adjacent pairs. ``picks``: what the last index source chose for the
    rows of queries; an index source returns its own. Writes the caches: window, open groups,
    compressed entries and index keys. Rounds after each op.
    """
    keys, queries = rows.keys, rows.queries
    latent_size = params.q_norm.shape[0]
    both = ops.scaled_linear(x, params.q_kv)
    kv = ops.rms_norm(both[:, latent_size:], params.kv_norm, params.eps)
    kv = turn(ops, kv[:, None], keys.positions, cos_sin)[:, 0]
    if params.compressor is not None:
        _compress(ops, x, params, caches, keys, cos_sin)
    if rows.picked is not None:
        x, both = x[rows.picked], both[rows.picked]
    if len(x):
        c = ops.rms_norm(both[:, :latent_size], params.q_norm, params.eps)
        if params.indexer is not None:
            picks = _index(ops, x, c, params, caches, queries, cos_sin, picks)
        window = Window(
            ops.quantize(kv, WINDOW), caches.window, keys, params.window, params.floored
        )
        y = _attention(ops, c, params, caches, window, queries, cos_sin, picks)
    else:
        y = x
    ops.latent_write(kv, caches.window, ring_slots(keys, caches.window.shape[1]), WINDOW)
    return y, picks


def turn(
    ops: Any, x: Tensor, positions: Tensor, cos_sin: Tensor, backwards: bool = False
) -> Tensor:
    """x [T, N, D], its last R channels rotated in adjacent pairs; ``backwards``: by minus that."""
    rotated = cos_sin.shape[-1]
    tail = x[..., -rotated:].contiguous()
    if backwards:  # of the conjugate, conjugated
        sign = tail.new_tensor((1.0, -1.0)).repeat(rotated // 2)
        tail = ops.rope(tail * sign, positions, cos_sin, True) * sign
    else:
        tail = ops.rope(tail, positions, cos_sin, True)
    return torch.cat((x[..., :-rotated], tail), -1)


def _compress(
    ops: Any,
    x: Tensor,
    params: LatentParams,
    caches: LatentCaches,
    batch: DeviceBatch,
    cos_sin: Tensor,
) -> None:
    """Write the entries that this step's rows close: compressed latents and index keys.

    Every row is computed; those that close no group write nothing.
    """
    how, ratio = params.compressor, params.ratio
    assert how is not None and caches.compressed is not None and caches.index_keys is not None
    if ratio == 1:
        pooled = ops.linear(x, how.kv)
    else:
        assert caches.open is not None
        u, s = ops.linear(x, how.kv, None, torch.float32).chunk(2, -1)
        pooled = ops.compress(u, s, caches.open, batch).to(x.dtype)
    latent = ops.rms_norm(pooled, how.norm, params.eps)
    first = (batch.positions - (ratio - 1)).clamp(min=0)  # the group's first token
    closes = (batch.kv_slots >= 0) & (batch.positions % ratio == ratio - 1)
    slots = torch.where(closes, batch.kv_slots // ratio, -1)
    key = ops.rms_norm(ops.linear(latent, how.key), how.key_norm, params.eps)
    key = turn(ops, key[:, None], first, cos_sin)[:, 0]
    ops.latent_write(key, caches.index_keys, slots, INDEX)
    entry = turn(ops, latent[:, None], first, cos_sin)[:, 0]
    ops.latent_write(entry, caches.compressed, slots, COMPRESSED)


def _index(
    ops: Any,
    x: Tensor,
    c: Tensor,
    params: LatentParams,
    caches: LatentCaches,
    batch: DeviceBatch,
    cos_sin: Tensor,
    picks: Picks | None,
) -> Picks:
    """Choose entries, and keep an earlier source's blocks if this one keeps none."""
    how = params.indexer
    assert how is not None and caches.index_keys is not None
    q = ops.scaled_linear(c, how.q).view(len(c), how.heads, -1)
    q = ops.quantize(turn(ops, q, batch.positions, cos_sin), INDEX)
    scale = q.shape[2] ** -0.5 * how.heads**-0.5
    w = (ops.linear(x, how.weights).float() * scale).to(x.dtype).float()
    candidates = picks if how.block_size else None
    found: Picks = ops.select_sparse(
        q, w, caches.index_keys, batch, params.ratio, how.k, how.publish, candidates, how.block_size
    )
    if found.blocks is None and picks is not None:
        return Picks(found.entries, picks.blocks)
    return found


def _attention(
    ops: Any,
    c: Tensor,
    params: LatentParams,
    caches: LatentCaches,
    window: Window,
    batch: DeviceBatch,
    cos_sin: Tensor,
    picks: Picks | None,
) -> Tensor:
    """Queries from their latent, attention, the rotation undone, and the grouped projection."""
    heads = params.heads
    q = turn(ops, ops.scaled_linear(c, params.q).view(len(c), heads, -1), batch.positions, cos_sin)
    cache, entries = None, None
    if params.ratio:
        assert picks is not None, "a layer with compressed entries follows an index source"
        cache, entries = caches.compressed, picks.entries
    scale: float = q.shape[2] ** -0.5
    o = ops.latent_attention(q, window, batch, params.sink, scale, cache, entries)
    o = turn(ops, o, batch.positions, cos_sin, backwards=True)
    groups = params.groups
    parts = o.view(len(o), groups, -1).transpose(0, 1).flatten(0, 1)
    offsets = torch.arange(groups + 1, device=o.device) * len(o)
    z = ops.grouped_linear(parts, params.out_a, offsets)
    z = z.view(groups, len(o), -1).transpose(0, 1).flatten(1)
    y: Tensor = ops.scaled_linear(z, params.out_b)
    return y
