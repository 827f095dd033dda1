"""Launchers of the latent ops: caches, compression, rotation, and the whole half layer."""

from __future__ import annotations

from typing import Any

import torch
import triton
from deepinfer.api.model import DeviceBatch
from deepinfer.ops.reference.latent import (
    COMPRESSED,
    WINDOW,
    LatentCaches,
    LatentParams,
    LatentRows,
    Window,
)
from deepinfer.ops.reference.sparse import INDEX, Picks
from torch import Tensor

from deepinfer_backend_cuda import linear as dense
from deepinfer_backend_cuda import scaled
from deepinfer_backend_cuda.index import select_sparse
from deepinfer_backend_cuda.kernels import latent as kernels
from deepinfer_backend_cuda.kernels import moe as products
from deepinfer_backend_cuda.launch import exact, options
from deepinfer_backend_cuda.sparse import latent_attention


def prepare(weight: Any, uses: frozenset[str]) -> Any:
    """Block-scaled weights are kept; a compressor's, float32 by its rule, is held in bfloat16 where
    that is what it was stored in, so that tensor cores multiply it exactly.
    """
    if "compress" in uses and isinstance(weight, Tensor) and weight.dtype is torch.float32:
        narrow = weight.to(torch.bfloat16)
        return narrow if torch.equal(narrow.float(), weight) else weight
    return scaled.keep(weight, uses)


def latent_write(x: Tensor, cache: Tensor, slots: Tensor, kind: Any) -> None:
    """x [T, d] to cache [blocks, rows, width] at slots int64[T], −1 nowhere."""
    scaled.write_rows(x, cache.view(-1, cache.shape[2]), slots, kind)


def compress(u: Tensor, s: Tensor, state: Tensor, batch: DeviceBatch) -> Tensor:
    """u, s float32[T, d], state float32[blocks, rows, 2·d] -> float32[T, d]."""
    return _pool_pairs(u, s, state, batch, torch.float32)


def _pool_pairs(
    u: Tensor, s: Tensor, state: Tensor, batch: DeviceBatch, dtype: torch.dtype
) -> Tensor:
    assert batch.requests is not None
    if u.stride(-1) != 1 or u.stride() != s.stride():
        u, s = u.contiguous(), s.contiguous()
    tokens, d = u.shape
    y = torch.empty((tokens, d), dtype=dtype, device=u.device)
    if not tokens:
        return y
    block = min(512, triton.next_power_of_2(d))
    grid = (tokens, triton.cdiv(d, block))
    requests, depth = batch.requests, state.shape[1]
    kernels.compress_kernel[grid](
        u,
        s,
        y,
        state,
        batch.row_of_token,
        batch.positions,
        requests.starts,
        requests.blocks,
        u.stride(0),
        depth,
        D=d,
        BLOCK=block,
        num_warps=2,
        **exact(tokens),
    )
    kernels.open_kernel[grid](
        u,
        s,
        state,
        batch.row_of_token,
        batch.positions,
        batch.kv_slots,
        requests.cu_q,
        requests.blocks,
        u.stride(0),
        depth,
        D=d,
        BLOCK=block,
        num_warps=2,
        **options(tokens),
    )
    return y


def places(
    batch: DeviceBatch, rows: int, ratio: int, ring: bool, entry: bool
) -> tuple[Tensor, Tensor]:
    """int64[T] each: where rows enter a ring of ``rows``, and the slots of entries that they close;
    what is not asked for is not filled.
    """
    assert batch.requests is not None
    tokens = len(batch.ids)
    to_ring, to_entry = torch.empty((2, tokens), dtype=torch.int64, device=batch.ids.device)
    if tokens:
        kernels.places_kernel[(triton.cdiv(tokens, 256),)](
            batch.row_of_token,
            batch.positions,
            batch.kv_slots,
            batch.requests.cu_q,
            batch.requests.blocks,
            to_ring,
            to_entry,
            tokens,
            rows,
            ratio,
            RING=ring,
            ENTRY=entry,
            BLOCK=256,
            num_warps=4,
            **options(tokens),
        )
    return to_ring, to_entry


def turn(x: Tensor, positions: Tensor, cos_sin: Tensor, backwards: bool = False) -> None:
    """The last R channels of x [T, N, D], in place."""
    tokens, heads, dim = x.shape
    rotated = cos_sin.shape[-1]
    if not x.numel():
        return
    some = min(16, triton.next_power_of_2(heads))
    kernels.turn_kernel[tokens, triton.cdiv(heads, some)](
        x,
        positions,
        cos_sin,
        x.stride(0),
        x.stride(1),
        heads,
        -1.0 if backwards else 1.0,
        D=dim,
        R=rotated,
        HALF=triton.next_power_of_2(rotated // 2),
        HEADS=some,
        num_warps=4,
        **exact(tokens),
    )


def norm_quantize(x: Tensor, w: Tensor, eps: float, picked: Tensor | None = None) -> Tensor:
    """``quantize(rms_norm(x), "fp8")`` of rows [T, L] of any row stride, or of those picked."""
    tokens, width = len(x) if picked is None else len(picked), x.shape[1]
    y = x.new_empty((tokens, width))
    if tokens:
        kernels.norm_quantize_kernel[(tokens,)](
            x,
            w,
            y,
            x if picked is None else picked,
            x.stride(0),
            eps,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            PICKED=picked is not None,
            num_warps=4,
            **exact(tokens),
        )
    return y


def norm_turn(
    x: Tensor,
    w: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    shift: int = 0,
    beside: str | None = None,
) -> tuple[Tensor, Tensor]:
    """rms_norm of rows [T, d], rotated at ``max(position − shift, 0)``; and beside it the same
    rounded to FP8 ("own"), or before the rotation ("plain").
    """
    y = x.new_empty(x.shape)
    other = y if beside is None else x.new_empty(x.shape)
    if len(x):
        kernels.norm_turn_kernel[(len(x),)](
            x,
            w,
            y,
            other,
            positions,
            cos_sin,
            x.stride(0),
            eps,
            shift,
            D=x.shape[1],
            BLOCK=triton.next_power_of_2(x.shape[1]),
            R=cos_sin.shape[-1],
            OWN=beside == "own",
            PLAIN_Y=beside == "plain",
            num_warps=2,
            **exact(len(x)),
        )
    return y, other


def latent_attention_block(
    x: Tensor,
    params: LatentParams,
    caches: LatentCaches,
    rows: LatentRows,
    cos_sin: Tensor,
    picks: Picks | None,
) -> tuple[Tensor, Picks | None]:
    """The half layer: x [TK, D] normed -> (y [T, D], picks')."""
    keys, queries = rows.keys, rows.queries
    latent_size = params.q_norm.shape[0]
    both = _product(scaled.quantize(x, "fp8"), params.q_kv)
    kv, own = norm_turn(
        both[:, latent_size:], params.kv_norm, params.eps, keys.positions, cos_sin, beside="own"
    )
    sourced = params.compressor is not None
    to_ring, to_entry = places(keys, caches.window.shape[1], max(params.ratio, 1), True, sourced)
    if sourced:
        _compress(x, params, caches, keys, cos_sin, to_entry)
    if rows.picked is not None:
        x = x.index_select(0, rows.picked)
    y = x
    if len(x):
        c = norm_quantize(both[:, :latent_size], params.q_norm, params.eps, rows.picked)
        if params.indexer is not None:
            picks = _index(x, c, params, caches, queries, cos_sin, picks)
        window = Window(own, caches.window, keys, params.window, params.floored)
        y = _attention(c, params, caches, window, queries, cos_sin, picks)
    latent_write(kv, caches.window, to_ring, WINDOW)
    return y, picks


def _product(x: Tensor, w: Any, out_dtype: torch.dtype | None = None) -> Tensor:
    """Of rows that are rounded to FP8 already."""
    if isinstance(w, scaled.KeptWeight):
        return scaled.product(x, w, out_dtype)
    return dense.linear(x, w, None, out_dtype)


def _compress(
    x: Tensor,
    params: LatentParams,
    caches: LatentCaches,
    batch: DeviceBatch,
    cos_sin: Tensor,
    slots: Tensor,
) -> None:
    """Write the entries that this step's rows close."""
    how, ratio = params.compressor, params.ratio
    assert how is not None and caches.compressed is not None and caches.index_keys is not None
    if ratio == 1:
        pooled = dense.linear(x, how.kv)
    else:
        assert caches.open is not None
        u, s = dense.linear(x, how.kv, None, torch.float32).chunk(2, -1)
        pooled = _pool_pairs(u, s, caches.open, batch, x.dtype)
    entry, latent = norm_turn(
        pooled, how.norm, params.eps, batch.positions, cos_sin, ratio - 1, beside="plain"
    )
    key, _ = norm_turn(
        dense.linear(latent, how.key), how.key_norm, params.eps, batch.positions, cos_sin, ratio - 1
    )
    latent_write(key, caches.index_keys, slots, INDEX)
    latent_write(entry, caches.compressed, slots, COMPRESSED)


def _index(
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
    q = _product(c, how.q).view(len(c), how.heads, -1)
    turn(q, batch.positions, cos_sin)
    q = scaled.quantize(q, INDEX)
    scale = q.shape[2] ** -0.5 * how.heads**-0.5
    w = (dense.linear(x, how.weights).float() * scale).to(x.dtype).float()
    candidates = picks if how.block_size else None
    found = select_sparse(
        q, w, caches.index_keys, batch, params.ratio, how.k, how.publish, candidates, how.block_size
    )
    if found.blocks is None and picks is not None:
        return Picks(found.entries, picks.blocks)
    return found


def _attention(
    c: Tensor,
    params: LatentParams,
    caches: LatentCaches,
    window: Window,
    batch: DeviceBatch,
    cos_sin: Tensor,
    picks: Picks | None,
) -> Tensor:
    """Queries from their latent, attention, the rotation undone, and the grouped projection."""
    q = _product(c, params.q).view(len(c), params.heads, -1)
    turn(q, batch.positions, cos_sin)
    cache, entries = None, None
    if params.ratio:
        assert picks is not None, "a layer with compressed entries follows an index source"
        cache, entries = caches.compressed, picks.entries
    scale = q.shape[2] ** -0.5
    o = latent_attention(q, window, batch, params.sink, scale, cache, entries)
    turn(o, batch.positions, cos_sin, backwards=True)
    z = _by_groups(o.flatten(1), params.out_a)
    return _product(scaled.quantize(z, "fp8"), params.out_b)


def _by_groups(x: Tensor, w: Any) -> Tensor:
    """Group g of x [T, G·K] times w[g]ᵀ, side by side: [T, G·N]."""
    groups, n, k = w.shape
    y = x.new_empty((len(x), groups * n))
    kept = isinstance(w, scaled.KeptWeight)
    if not kept and (x.dtype is not torch.bfloat16 or w.dtype is not torch.bfloat16):
        for g in range(groups):
            y[:, g * n : (g + 1) * n] = dense.linear(x[:, g * k : (g + 1) * k], w[g])
        return y
    tile = scaled.tile_of(len(x), n)
    words, scales = (w.words, w.scales) if kept else (w.contiguous(), w)
    kind = w.kind if kept else int(products.DENSE.value)
    scaled.launch_product(x, words, scales, y, (n, k), kind, tile, (groups, k, n))
    return y
