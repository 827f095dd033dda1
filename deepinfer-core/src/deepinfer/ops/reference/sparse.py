"""Which compressed entries a query reads: scores of index keys, candidate blocks, the best k.

DeepSeek-V4.1's indexer (specification 3.7 to 3.9). A request's entry j stands for tokens
``j·ratio … (j+1)·ratio−1`` and is visible to a query at p iff ``j < (p+1) // ratio``. Index queries
and keys are quantised to FP4 in groups of 32 with power-of-two scales, so the products of a group
add up exactly in float32 in any order: a score has the same bits however its row and key are
tiled, and the groups and heads are then added one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from deepinfer.api.model import DeviceBatch
from deepinfer.ops.lowbit import TILE
from deepinfer.ops.table import op

INDEX: Final = "mxfp4"  # how index keys and queries are quantised
_ROWS: Final = 64
_KEYS: Final = 8192
_NEAR: Final = 1 << 17  # elements of products that a core has at hand while it adds them up
_LEAST: Final = 512  # keys in a product of many rows
_SCRATCH: Final = 1 << 22  # elements that one intermediate of a tile may have


class Blocks(NamedTuple):
    """The first level of a two-level index: ``kept`` blocks of ``size`` entries."""

    kept: int
    size: int


class Picks(NamedTuple):
    """int32, ascending, −1 where there are fewer: ``entries`` [T, k] of the row's request,
    ``blocks`` [T, kept] that later indexers choose from, None where none were asked for.
    """

    entries: Tensor
    blocks: Tensor | None = None


def entry_slots(batch: DeviceBatch, per_page: int, request: Tensor, entries: Tensor) -> Tensor:
    """Flat places of entries in a growing group's cache. request int64[n], entries int64[n, m]."""
    assert batch.requests is not None
    table = batch.requests.block_table
    page = (entries // per_page).clamp(0, table.shape[1] - 1)
    return table[request[:, None], page].long() * per_page + entries % per_page


def read_entries(ops: Any, cache: Tensor, slots: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Entries at flat places, as values: slots int64[...] -> [..., d]."""
    found = cache.flatten(0, 1)[slots]
    if found.dtype != torch.uint8:
        return found.to(dtype)
    values: Tensor = ops.unpack_rows(found, kind, dtype)
    return values


@op
def select_sparse(
    ops: Any,
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
    """The k visible entries of each row with the highest score, ties to the lowest entry.

    q [T, HI, DI]: rotated and quantised queries, w float32[T, HI]; cache [pages, per_page, width]:
    index keys, records of kind mxfp4 or bfloat16 values; ``score = Σ_h w_h · relu(q_h · key)`` in
    float32, heads in ascending order.

    ``publish``: also keep the best blocks by the highest score in them; the block of the newest
    visible entry is always among them. ``candidates``: choose only from these blocks of
    ``block_size`` entries. An entry whose score is −∞ is never chosen. Rows that no request owns
    choose nothing. Scratch memory does not grow with T; it does with the longest request.
    """
    found = _Found.empty(len(q), k, publish, q.device)
    assert batch.requests is not None
    bounds = batch.requests.cu_q.tolist()
    for request, (begin, end) in enumerate(pairwise(bounds)):
        if begin == end:
            continue
        visible = (batch.positions[begin:end] + 1) // ratio
        most, blocks = int(visible.max()), None if candidates is None else candidates.blocks
        tiles = list(_tiles(begin, end, most))
        keys = _Keys(ops, cache, batch, request, most, once=len(tiles) > 1)
        for rows in tiles:
            seen = visible[rows.start - begin : rows.stop - begin]
            level = None if blocks is None else blocks[rows].long()
            _select(found, rows, (q[rows], w[rows]), seen, keys, level, block_size)
    return Picks(found.entries, found.blocks)


class _Found(NamedTuple):
    """What is filled in, tile by tile."""

    entries: Tensor
    blocks: Tensor | None
    publish: Blocks | None

    @classmethod
    def empty(cls, rows: int, k: int, publish: Blocks | None, device: torch.device) -> _Found:
        def none(width: int) -> Tensor:
            return torch.full((rows, width), -1, dtype=torch.int32, device=device)

        return cls(none(k), None if publish is None else none(publish.kept), publish)


class _Keys:
    """A request's first ``count`` index keys, as values. ``once``: dequantised once, and kept for
    the next tile of rows, records in bfloat16: exact, and half as large.
    """

    def __init__(
        self, ops: Any, cache: Tensor, batch: DeviceBatch, request: int, count: int, once: bool
    ) -> None:
        self._ops = ops
        self._count = count
        self._cache = cache
        self._batch = batch
        self._request = request
        self._once = once
        self._known: dict[int, Tensor] = {}

    def tile(self, number: int) -> Tensor:
        """[≤ _KEYS, DI]: from number·_KEYS on."""
        found = self._known.get(number)
        if found is None:
            records = self._cache.dtype == torch.uint8
            begin = number * _KEYS
            end = min(begin + _KEYS, self._count)
            dtype = torch.bfloat16 if records and self._once else torch.float32
            found = self._range(begin, end, dtype if records else self._cache.dtype)
            if self._once:
                self._known[number] = found
        return found

    def at(self, entries: Tensor) -> Tensor:
        """Entries int64[n, m] -> float32[n, m, DI]."""
        request = torch.tensor([self._request], device=entries.device).expand(len(entries))
        slots = entry_slots(self._batch, self._cache.shape[1], request, entries)
        return read_entries(self._ops, self._cache, slots, INDEX, torch.float32)

    def _range(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Entries begin … end−1, page by page."""
        assert self._batch.requests is not None
        per_page = self._cache.shape[1]
        first = begin // per_page
        pages = self._batch.requests.block_table[self._request, first : -(-end // per_page)]
        found = self._cache[pages.long()].flatten(0, 1)
        found = found[begin - first * per_page : end - first * per_page]
        if found.dtype != torch.uint8:
            return found.to(dtype)
        values: Tensor = self._ops.unpack_rows(found, INDEX, dtype)
        return values


def _tiles(begin: int, end: int, entries: int) -> Iterator[slice]:
    rows = max(1, min(_ROWS, _SCRATCH // max(entries, 1)))
    for first in range(begin, end, rows):
        yield slice(first, min(first + rows, end))


def _select(
    found: _Found,
    rows: slice,
    query: tuple[Tensor, Tensor],
    visible: Tensor,
    keys: _Keys,
    level: Tensor | None,
    size: int,
) -> None:
    """One tile of one request's rows. Bits do not depend on which of the ways is taken."""
    k, most = found.entries.shape[1], int(visible.max())
    if level is not None and level.shape[1] * size < most:
        _select_among(found, rows, query, visible, keys, level, size)
        return
    hidden = torch.arange(most, device=visible.device) >= visible[:, None]
    publish = found.publish
    blocks = 0 if publish is None else -(-most // publish.size)
    if most <= k and (publish is None or blocks <= publish.kept):
        scores = hidden.new_zeros(hidden.shape, dtype=torch.float32)  # all that are seen are chosen
    else:
        scores = _scores(query, keys, most)
    scores.masked_fill_(hidden, -torch.inf)
    if level is not None:
        scores.masked_fill_(~_members(level, size, most), -torch.inf)
    found.entries[rows] = places(best(scores, k), k)
    if publish is not None and found.blocks is not None:
        found.blocks[rows] = _best_blocks(scores, visible, publish)


def _select_among(
    found: _Found,
    rows: slice,
    query: tuple[Tensor, Tensor],
    visible: Tensor,
    keys: _Keys,
    level: Tensor,
    size: int,
) -> None:
    """The same where few blocks remain: only their keys are read and scored."""
    q, w = query
    k, width = found.entries.shape[1], level.shape[1] * size
    step = max(1, _SCRATCH // (width * q.shape[2]))
    for begin in range(0, len(q), step):
        part = slice(begin, begin + step)
        block = level[part]
        entry = (block[..., None] * size + torch.arange(size, device=q.device)).flatten(1)
        shown = (block >= 0).repeat_interleave(size, 1) & (entry < visible[part, None])
        entry = torch.where(shown, entry, 0)
        scores = _weigh(_own_dots(q[part], keys.at(entry)), w[part]).masked_fill(~shown, -torch.inf)
        at = places(best(scores, k), k).long()
        chosen = torch.where(at >= 0, entry.gather(1, at.clamp(min=0)), -1)
        first = rows.start + begin
        found.entries[first : first + len(at)] = chosen.int()


def _scores(query: tuple[Tensor, Tensor], keys: _Keys, entries: int) -> Tensor:
    """float32[r, entries]. A few keys at a time, so that their products need not leave the core."""
    q, w = query
    rows, heads = q.shape[:2]
    groups = q.float().reshape(rows, heads, -1, TILE).permute(2, 0, 1, 3).flatten(1, 2)
    scores = q.new_empty((rows, entries), dtype=torch.float32)
    step = min(_KEYS, max(_LEAST, _NEAR // (rows * heads)), entries)
    scratch = scores.new_empty((2, rows * heads * step))
    for begin in range(0, entries, _KEYS):
        tile = keys.tile(begin // _KEYS)[: entries - begin]
        for first in range(0, len(tile), step):
            some = tile[first : first + step].float()
            at = slice(begin + first, begin + first + len(some))
            dots = _shared_dots(groups, some, scratch).view(rows, heads, len(some))
            _weigh(dots, w, scores[:, at])
    return scores


def _shared_dots(groups: Tensor, keys: Tensor, scratch: Tensor) -> Tensor:
    """float32 groups [G, R, 32] with keys [m, G·32] -> [R, m]; lies in scratch float32[2, ≥ R·m].

    A group's products are exact, see above; groups are added one after the other.
    """
    rows, count = groups.shape[1], len(keys)
    total, part = scratch[:, : rows * count].view(2, rows, count).unbind(0)
    for number in range(len(groups)):
        two = keys[:, number * TILE : (number + 1) * TILE].T
        torch.mm(groups[number], two, out=part if number else total)
        if number:
            total += part
    return total


def _own_dots(q: Tensor, keys: Tensor) -> Tensor:
    """The same where each row has its own keys: q [r, HI, DI], [r, m, DI] -> float32[r, HI, m]."""
    total: Tensor | None = None
    for begin in range(0, q.shape[2], TILE):
        one, two = q[..., begin : begin + TILE].float(), keys[..., begin : begin + TILE]
        part = one @ two.transpose(1, 2)
        total = part if total is None else total + part
    assert total is not None
    return total


def _weigh(dots: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
    """Σ_h w[r, h] · relu(dots[r, h, m]), head after head. Changes dots."""
    dots.clamp_(min=0)
    total = torch.mul(dots[:, 0], w[:, :1], out=out)
    for head in range(1, w.shape[1]):
        total += dots[:, head].mul_(w[:, head : head + 1])
    return total


def best(scores: Tensor, k: int) -> Tensor:
    """bool[r, n]: the k highest of each row, ties to the lowest place, −∞ never. No sort of n."""
    if scores.shape[1] <= k:
        return scores > -torch.inf
    top = torch.topk(scores, k + 1, dim=-1).values
    kth = top[:, k - 1 : k]
    chosen = scores >= kth.clamp(min=torch.finfo(scores.dtype).min)
    # Only where the next one ties are there more than k.
    crowded = (top[:, k] == kth[:, 0]).nonzero()[:, 0]
    if len(crowded):
        room = k - (top[crowded] > kth[crowded]).sum(-1, keepdim=True)
        tied = scores[crowded] == kth[crowded]
        chosen[crowded] &= ~tied | (tied.cumsum(-1, dtype=torch.int32) <= room)
    return chosen


def places(chosen: Tensor, k: int) -> Tensor:
    """bool[r, n] with at most k true in a row -> int32[r, k]: where, ascending, then −1."""
    row, at = chosen.nonzero(as_tuple=True)
    counts = torch.bincount(row, minlength=len(chosen))
    slot = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    out = torch.full((len(chosen), k), -1, dtype=torch.int32, device=chosen.device)
    out[row, slot] = at.int()
    return out


def _members(level: Tensor, size: int, entries: int) -> Tensor:
    """Blocks int64[r, c] -> bool[r, entries]: whether an entry lies in one of its row's."""
    count = -(-entries // size)
    kept = torch.zeros((len(level), count + 1), dtype=torch.bool, device=level.device)
    kept.scatter_(1, torch.where((level >= 0) & (level < count), level, count), True)
    return kept[:, :count].repeat_interleave(size, 1)[:, :entries]


def _best_blocks(scores: Tensor, visible: Tensor, publish: Blocks) -> Tensor:
    """int32[r, kept]: blocks by the highest score in them, the newest visible entry's first."""
    size = publish.size
    padded = torch.nn.functional.pad(scores, (0, -scores.shape[1] % size), value=-torch.inf)
    top = padded.view(len(scores), -1, size).amax(-1)
    if top.shape[1]:
        newest = (visible - 1).clamp(min=0) // size
        forced = torch.where(visible > 0, torch.inf, -torch.inf)[:, None]
        top.scatter_(1, newest[:, None], torch.maximum(forced, top.gather(1, newest[:, None])))
    return places(best(top, publish.kept), publish.kept)
