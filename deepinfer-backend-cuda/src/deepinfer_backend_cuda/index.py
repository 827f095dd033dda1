"""Launcher of ``select_sparse``. No launch waits for the host: how much a row sees is known on the
device, and programs past it end at once.
"""

from __future__ import annotations

import torch
import triton
from deepinfer.api.model import DeviceBatch
from deepinfer.ops.reference.sparse import Blocks, Picks
from torch import Tensor

from deepinfer_backend_cuda.kernels import index as kernels
from deepinfer_backend_cuda.launch import exact, options

SCRATCH = 1 << 26
"""Scores, float32, that a launch may have at a time; rows are taken in runs of so many."""
POOL_BYTES = 256 << 20
"""Bound of index keys laid out in bfloat16, which pays where many rows read them."""
SHARED_ROWS = 16
"""Rows of a request from which on that is done."""
_TILES = 4
_CHOICE_WARPS = 8
HELD_PLACES = 16384
"""Places of a row up to which its choice keeps all scores in registers."""


def select_sparse(
    q: Tensor,
    w: Tensor,
    cache: Tensor,
    batch: DeviceBatch,
    ratio: int,
    k: int,
    publish: Blocks | None = None,
    candidates: Picks | None = None,
    block_size: int = 0,
) -> Picks:
    """q [T, HI, DI], w float32[T, HI], cache [pages, per_page, width] -> the k best of each row."""
    rows, device = len(q), q.device
    entries = torch.empty((rows, k), dtype=torch.int32, device=device)
    kept = None if publish is None else torch.empty(
        (rows, publish.kept), dtype=torch.int32, device=device
    )  # fmt: skip
    if not rows:
        return Picks(entries, kept)
    assert batch.requests is not None
    among = None if candidates is None else candidates.blocks
    bound = batch.requests.block_table.shape[1] * cache.shape[1]
    places = bound if among is None else min(bound * block_size, among.shape[1] * block_size)
    step = max(1, min(rows, SCRATCH // max(places, 1)))
    scores = q.new_empty((step, max(places, 1)), dtype=torch.float32)
    search = _Search(q, w, cache, batch, ratio, among, block_size, scores)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        search.score(first, count, places, k, skip=publish is None and among is None)
        search.choose(first, count, k, entries, skip=publish is None and among is None)
        if publish is not None and kept is not None:
            search.publish(first, count, publish, kept)
    return Picks(entries, kept)


class _Search:
    """One call's inputs, and its launches for rows ``first … first + count − 1``."""

    def __init__(
        self,
        q: Tensor,
        w: Tensor,
        cache: Tensor,
        batch: DeviceBatch,
        ratio: int,
        among: Tensor | None,
        block_size: int,
        scores: Tensor,
    ) -> None:
        assert batch.requests is not None
        self._q, self._w = q.contiguous(), w.contiguous()
        self._table = batch.requests.block_table
        self._batch, self._ratio = batch, ratio
        self._among, self._size = among, block_size
        self._scores = scores
        self._per_page = cache.shape[1]
        self._keys, self._width, self._kind = self._read(cache)

    def _read(self, cache: Tensor) -> tuple[Tensor, int, int]:
        """(keys, elements of a row, kind): the cache itself, or its keys in order."""
        requests, width = self._table.shape
        kind = kernels.PACKED if cache.dtype is torch.uint8 else kernels.PAGED
        rows, dim = requests * width * self._per_page, self._q.shape[2]
        if len(self._q) < SHARED_ROWS * requests or rows * dim * 2 > POOL_BYTES:
            return cache, cache.shape[2], int(kind.value)
        pool = torch.empty((rows, dim), dtype=torch.bfloat16, device=cache.device)
        kernels.index_keys_kernel[triton.cdiv(width * self._per_page, 64), requests](
            cache,
            self._table,
            pool,
            self._table.stride(0),
            width,
            len(cache),
            self._per_page,
            DI=dim,
            CACHE_WIDTH=cache.shape[2],
            KIND=kind,
            BLOCK=64,
            num_warps=4,
            **exact(len(self._q)),
        )
        return pool, dim, int(kernels.FLAT.value)

    def score(self, first: int, count: int, places: int, k: int, skip: bool) -> None:
        """Scores of the rows, to the beginning of the scratch."""
        heads = self._q.shape[1]
        keys = int(kernels.KEYS.value)
        kernels.index_score_kernel[count, triton.cdiv(max(places, 1), keys * _TILES)](
            self._q,
            self._w,
            self._keys,
            self._q if self._among is None else self._among,
            self._batch.row_of_token,
            self._batch.positions,
            self._table,
            self._scores,
            self._table.stride(0),
            self._table.shape[1],
            self._q.stride(0),
            self._w.stride(0),
            self._scores.stride(0),
            first,
            self._ratio,
            k,
            0 if self._among is None else self._among.shape[1],
            self._per_page,
            HI=heads,
            HEADS=max(16, triton.next_power_of_2(heads)),
            DI=self._q.shape[2],
            CACHE_WIDTH=self._width,
            KIND=self._kind,
            AMONG=self._among is not None,
            SIZE=max(self._size, 1),
            SKIP=skip,
            TILES=_TILES,
            num_warps=4,
            num_stages=2,
            **exact(count),
        )

    def choose(self, first: int, count: int, k: int, out: Tensor, skip: bool) -> None:
        """The best k entries of the rows."""
        self._choose(self._scores, first, count, k, out, self._among, self._size, 1, skip)

    def publish(self, first: int, count: int, blocks: Blocks, out: Tensor) -> None:
        """The best blocks of the rows."""
        size = blocks.size
        width = triton.cdiv(self._scores.shape[1], size)
        top = self._scores.new_empty((count, width))
        kernels.best_blocks_kernel[count, triton.cdiv(width, 128)](
            self._scores,
            top,
            self._batch.row_of_token,
            self._batch.positions,
            self._scores.stride(0),
            width,
            first,
            self._ratio,
            SIZE=size,
            PADDED=triton.next_power_of_2(size),
            BLOCK=128,
            num_warps=4,
            **options(count),
        )
        self._choose(top, first, count, blocks.kept, out, None, 1, size, False)

    def _choose(
        self,
        scores: Tensor,
        first: int,
        count: int,
        k: int,
        out: Tensor,
        among: Tensor | None,
        size: int,
        unit: int,
        skip: bool,
    ) -> None:
        whole = max(128, triton.next_power_of_2(scores.shape[1]))
        kernels.best_entries_kernel[(count,)](
            scores,
            out if among is None else among,
            out,
            self._batch.row_of_token,
            self._batch.positions,
            scores.stride(0),
            first,
            self._ratio,
            k,
            0 if among is None else among.shape[1],
            AMONG=among is not None,
            SIZE=max(size, 1),
            UNIT=unit,
            SKIP=skip,
            BLOCK=min(4096, whole),
            HELD=whole if whole <= HELD_PLACES else 0,
            num_warps=_CHOICE_WARPS,
            **options(count),
        )
