"""Launchers of ``latent_attention``: what a step's queries read is laid out, then attended to.

Many queries of few texts share one pool of latents; few of many have copies of what they chose.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from deepinfer.api.model import DeviceBatch
from deepinfer.ops.reference.latent import COMPRESSED, WINDOW, Window
from torch import Tensor

from deepinfer_backend_cuda import scaled
from deepinfer_backend_cuda.kernels import latent as kernels
from deepinfer_backend_cuda.launch import exact, processors

POOL_BYTES = 512 << 20
"""Bound of the latents of a step that are laid out once, for all its queries."""
_ROWS = 8  # latents that a program lays out
STAGES = 2
"""Of the walk over places, in bfloat16."""
COPY_BYTES = 512 << 20
"""Bound of the copies that queries have of their own; more are taken in runs."""


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
        num_stages=1 if single else STAGES,
        **exact(tokens),
    )
