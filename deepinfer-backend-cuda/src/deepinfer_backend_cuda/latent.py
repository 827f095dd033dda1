"""Launchers of the latent ops: caches, compression, sparse attention, and the whole half layer."""

from __future__ import annotations

from functools import cache
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
from deepinfer_backend_cuda.launch import exact, options, processors

POOL_BYTES = 512 << 20
"""Bound of the latents of a step that are laid out once, for all its queries."""
_ROWS = 8  # latents that a program lays out
COPY_BYTES = 512 << 20
"""Bound of the copies that queries have of their own; more are taken in runs."""


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


def latent_attention(
    q: Tensor,
    window: Window,
    batch: DeviceBatch,
    sink: Tensor,
    scale: float,
    cache: Tensor | None = None,
    entries: Tensor | None = None,
) -> Tensor:
    """q [T, H, d] -> o [T, H, d]: a window, chosen entries and a sink."""
    o = q.new_empty(q.shape)
    if not q.numel():
        return o
    if q.stride(2) != 1:
        q = q.contiguous()
    if cache is None:
        entries = None
    found = _Latents(q, window, batch, cache, entries)
    if found.shared():
        pool = found.pool()
        _attend(q, pool, found.places(None, slice(0, len(q))), sink, scale, o)
        return o
    step = max(1, COPY_BYTES // (found.total * q.shape[2] * q.element_size()))
    for first in range(0, len(q), step):
        rows = slice(first, min(first + step, len(q)))
        count = rows.stop - rows.start
        pool = q.new_empty((count * found.total, q.shape[2]))
        _attend(q[rows], pool, found.places(pool, rows), sink, scale, o[rows])
    return o


class _Latents:
    """What a step's queries may read, and how it is brought side by side."""

    def __init__(
        self,
        q: Tensor,
        window: Window,
        batch: DeviceBatch,
        cache: Tensor | None,
        entries: Tensor | None,
    ) -> None:
        assert window.keys.requests is not None and batch.requests is not None
        self._q, self._window, self._batch = q, window, batch
        self._requests = window.keys.requests
        self._own = window.own.to(q.dtype).contiguous()
        self._cache, self._entries = cache, entries
        self._table = batch.requests.block_table
        self._chosen = 0 if entries is None else entries.shape[1]
        self._per_page = 1 if cache is None else cache.shape[1]
        self._width = 0 if cache is None else self._table.shape[1]
        self.total = window.size + self._chosen

    def shared(self) -> bool:
        """Whether laying out everything once is less than a copy for each query."""
        size = self._rows()
        bytes_ = size * self._q.shape[2] * self._q.element_size()
        return 2 * size <= len(self._q) * self.total and bytes_ <= POOL_BYTES

    def _rows(self) -> int:
        requests = len(self._requests.starts)
        far = requests * self._width * self._per_page
        return len(self._own) + requests * (self._window.size - 1) + far

    def _shapes(self) -> dict[str, Any]:
        """Constants of both kernels."""
        dim, cache, ring = self._q.shape[2], self._cache, self._window.ring
        source = ring if cache is None else cache
        return {
            "SIZE": self._window.size,
            "PER_PAGE": self._per_page,
            "ENTRIES": cache is not None,
            "D": dim,
            "BD": triton.next_power_of_2(dim),
            "RING_KIND": scaled.KINDS[WINDOW] if ring.dtype is torch.uint8 else kernels.PLAIN,
            "RING_WIDTH": ring.shape[2],
            "CACHE_KIND": (
                scaled.KINDS[COMPRESSED] if source.dtype is torch.uint8 else kernels.PLAIN
            ),
            "CACHE_WIDTH": source.shape[2],
            "num_warps": 4,
        }

    def pool(self) -> Tensor:
        """[rows, d]: the step's own latents, what was before it, all entries."""
        rows = self._rows()
        pool = self._q.new_empty((rows, self._q.shape[2]))
        cache = self._window.ring if self._cache is None else self._cache
        kernels.pool_kernel[(triton.cdiv(rows, _ROWS),)](
            self._own,
            self._window.ring,
            cache,
            self._requests.starts,
            self._requests.blocks,
            self._table,
            pool,
            self._table.stride(0),
            self._width,
            len(cache),
            self._window.ring.shape[1],
            len(self._requests.starts),
            len(self._own),
            BLOCK=_ROWS,
            **self._shapes(),
            **exact(len(self._q)),
        )
        return pool

    def places(self, copies: Tensor | None, rows: slice) -> Tensor:
        """int32[T, total]: rows of the pool, which are filled here where ``copies`` is given."""
        batch, count = self._batch, rows.stop - rows.start
        found = torch.empty((count, self.total), dtype=torch.int32, device=self._q.device)
        cache = self._window.ring if self._cache is None else self._cache
        block = 128 if copies is None else _ROWS
        kernels.gather_kernel[count, triton.cdiv(self.total, block)](
            self._own,
            self._window.ring,
            cache,
            found if self._entries is None else self._entries[rows],
            batch.row_of_token[rows],
            batch.positions[rows],
            self._requests.cu_q,
            self._requests.starts,
            self._requests.blocks,
            self._requests.floors,
            self._table,
            found if copies is None else copies,
            found,
            self._table.stride(0),
            self._width,
            len(cache),
            self._window.ring.shape[1],
            self._chosen,
            FLOORED=self._window.floored,
            COPY=copies is not None,
            owns=len(self._own),
            requests=len(self._requests.starts),
            BLOCK=block,
            **self._shapes(),
            **exact(count),
        )
        return found


@cache
def _keys() -> int:
    """Places of a step of the softmax, a part of the definition: 64 do not fit SM100's kernel."""
    if triton.knobs.runtime.interpret:
        return 64
    return 64 if triton.runtime.driver.active.get_current_target().arch < 100 else 32


def _attend(q: Tensor, pool: Tensor, places: Tensor, sink: Tensor, scale: float, o: Tensor) -> None:
    """o [T, H, d] from the latents that ``places`` names."""
    tokens, heads, dim = q.shape
    single = q.dtype is torch.float32
    # In bfloat16 every height gives the same bits; few queries fill the device with low ones.
    high = 64 if not single and heads > 16 and tokens >= processors(q.device) else 16
    kernels.sparse_kernel[tokens, triton.cdiv(heads, high)](
        q,
        pool,
        places,
        sink,
        o,
        float(scale),
        q.stride(0),
        q.stride(1),
        heads,
        places.shape[1],
        BH=high,
        D=dim,
        BD=triton.next_power_of_2(dim),
        BLOCK_N=16 if single else _keys(),
        PRECISION="ieee" if single else "tf32",
        num_warps=8 if high == 64 else 4,
        num_stages=1 if single else 2,
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
