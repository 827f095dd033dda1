"""``plan_attention`` and ``attention``: tiles of a step, and how its pieces are walked."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from deepinfer_backend_cuda import hopper
from deepinfer_backend_cuda.kernels import attention as kernels
from deepinfer_backend_cuda.launch import empty_rows, exact, options, processors

PIECE = 256
"""Keys of a piece: the split of every row at every length, see ``kernels.attention``."""
PART_BYTES = 256 << 20
"""Bound of the partial results of a split launch."""


ALL = (1, 0)
"""The share of a launch that takes every request: fewest rows of one, most (0: any number)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step's attention reads: block_table int32[n, W], kv_lengths int64[n], cu_q int32[n+1].

    ``cuts``: tiles by height, number of tokens and share, made by the first layer; ``arrived``:
    zeros that a split launch counts its pieces in and leaves as zeros.
    """

    block_table: Tensor
    kv_lengths: Tensor
    cu_q: Tensor
    page_size: int
    cuts: dict[tuple[int, ...], tuple[int, Tensor, Tensor]] = field(default_factory=dict)
    arrived: dict[int, Tensor] = field(default_factory=dict)

    def counts(self, programs: int) -> Tensor:
        """int32[programs] for ``arrived``."""
        if programs not in self.arrived:
            self.arrived[programs] = self.cu_q.new_zeros(programs)
        return self.arrived[programs]

    def tiles(
        self, height: int, tokens: int, share: tuple[int, int] = ALL
    ) -> tuple[int, Tensor, Tensor]:
        """(how many at most, request of each, first row of each), of requests of a ``share``."""
        key = (height, tokens, *share)
        if key not in self.cuts:
            self.cuts[key] = self._cut(*key)
        return self.cuts[key]

    def bound(self, height: int, tokens: int) -> int:
        """No step of so many tokens has more tiles; each request's last one may be short."""
        return min(tokens, (tokens + (len(self.kv_lengths) + 1) * (height - 1)) // height)

    def _cut(
        self, height: int, tokens: int, fewest: int, largest: int
    ) -> tuple[int, Tensor, Tensor]:
        requests, most = len(self.kv_lengths), self.bound(height, tokens)
        if 0 < largest <= height:
            most = min(most, requests)
        request = self.cu_q.new_empty(most)
        first = self.cu_q.new_empty(most)
        kernels.tiles_kernel[(requests + 1,)](
            self.cu_q,
            request,
            first,
            requests,
            tokens,
            most,
            BQ=height,
            LEAST=fewest,
            MOST=largest,
            N=max(16, triton.next_power_of_2(requests)),
            BLOCK=128,
            num_warps=4,
            **options(tokens),
        )
        return most, request, first


def plan_attention(block_table: Tensor, kv_lengths: Tensor, cu_q: Tensor, page_size: int) -> Plan:
    """block_table int32[n, max_pages], kv_lengths int64[n], cu_q int32[n+1]; nothing is awaited."""
    return Plan(block_table.int().contiguous(), kv_lengths.long(), cu_q.int(), page_size)


@dataclass(frozen=True, slots=True)
class Tile:
    """How a step is launched: query rows (tokens times a head group) of a tile, warps, stages.

    Nothing here moves a bit in bfloat16; float32 has one tile for all steps.
    """

    rows: int
    warps: int
    stages: int


def keys_of(head_dim: int, dtype: torch.dtype) -> int:
    """BLOCK_N, a part of the definition: one for all steps of a head size and dtype."""
    return 64 if dtype is torch.bfloat16 and head_dim <= 128 else 32


def tile_of(group: int, head_dim: int, dtype: torch.dtype, decode: bool, programs: int) -> Tile:
    """``decode``: about one row for each request, so that a tile holds one head group.

    ``programs``: head groups of the step; many hide their latency behind each other.
    """
    least = max(16, triton.next_power_of_2(group))
    if dtype is not torch.bfloat16:
        return Tile(least, 4, 1)
    if decode:
        return Tile(least, 2 if programs >= 256 else 8 if programs >= 32 else 4, 2)
    return Tile(max(64, least), 4 if head_dim <= 128 else 8, 2)


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: Plan,
    scale: float,
    window: int | None = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """q [T, HQ, D], caches [pages, page_size, HKV, D] -> (o [T, HQ, D], lse float32[T, HQ]).

    Where some requests decode while others prefill, each kind has a launch of its own: a row that
    decodes would leave most of a prefill's tile empty.
    """
    tokens, (group, kv_heads) = len(q), (q.shape[1] // k_cache.shape[2], k_cache.shape[2])
    requests, options = len(plan.kv_lengths), (window, sink, softcap)

    def walk(
        tile: Tile, share: tuple[int, int], out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        programs = plan.bound(tile.rows // group, tokens) * kv_heads
        if share[1]:
            programs = min(tokens, requests) * kv_heads
        pieces = split(plan, programs, q.numel(), q.device)
        return launch(q, k_cache, v_cache, plan, scale, options, tile, pieces, share, out)

    few = tile_of(group, q.shape[2], q.dtype, True, min(tokens, requests) * kv_heads)
    if tokens <= requests:
        return walk(few, ALL)
    height = few.rows // group
    mixed = requests > 1 and q.dtype is torch.bfloat16
    share = (height + 1, 0) if mixed else ALL
    if window is None and softcap is None and _flashes(q, k_cache, v_cache, plan):
        out = _flash(q, k_cache, v_cache, plan, scale, sink, share)
    else:
        out = walk(tile_of(group, q.shape[2], q.dtype, False, tokens * kv_heads), share)
    return walk(few, (1, height), out) if mixed else out


def _flashes(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan) -> bool:
    """Hopper's kernel walks all pieces in one program, so it wants enough tiles."""
    if not hopper.serves(q.device) or not hopper.flashes(q, k_cache, v_cache):
        return False
    height = hopper.FLASH_ROWS * k_cache.shape[2] // q.shape[1]
    return 2 * plan.bound(height, len(q)) * k_cache.shape[2] >= processors(q.device)


def _flash(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: Plan,
    scale: float,
    sink: Tensor | None,
    share: tuple[int, int] = ALL,
) -> tuple[Tensor, Tensor]:
    if scale < 0:
        q, scale = -q, -scale
    o = empty_rows(q, q.shape)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    tiles = plan.tiles(hopper.FLASH_ROWS // (q.shape[1] // k_cache.shape[2]), len(q), share)
    step = plan.block_table, plan.kv_lengths, plan.cu_q
    hopper.flash(q, (k_cache, v_cache), tiles, step, scale, sink, (o, lse), PIECE)
    return o, lse


def launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: Plan,
    scale: float,
    options: tuple[int | None, Tensor | None, float | None],
    tile: Tile,
    pieces: int,
    share: tuple[int, int] = ALL,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """``attention`` in these tiles; ``pieces`` > 1: that many side by side, then merged. With a
    ``share`` other requests' rows of ``out`` stay as they are.
    """
    window, sink, softcap = options
    tokens, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    if out is None:
        lse = q.new_empty((tokens, heads), dtype=torch.float32)
        out = empty_rows(q, (tokens, heads, dim)), lse
    o, lse = out
    if not o.numel():
        return out
    if q.stride(2) != 1:
        q = q.contiguous()
    if scale < 0:
        q, scale = -q, -scale
    group = heads // kv_heads
    height = tile.rows // group
    wide = max(16, triton.next_power_of_2(dim))
    most, request, first = plan.tiles(height, tokens, share)
    part = state = arrived = lse
    if pieces > 1:
        part = lse.new_empty((tokens, heads, pieces, dim))
        state = lse.new_empty((tokens, heads, pieces, 2))
        arrived = plan.counts(most * kv_heads)
    kernels.attention_kernel[(most * kv_heads, pieces)](
        q,
        k_cache,
        v_cache,
        plan.block_table,
        plan.kv_lengths,
        plan.cu_q,
        request,
        first,
        o,
        lse,
        part,
        state,
        arrived,
        lse if sink is None else sink,
        float(scale),
        0.0 if softcap is None else float(softcap),
        0 if window is None else window,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        plan.block_table.stride(0),
        len(plan.kv_lengths),
        tokens,
        pieces,
        G=group,
        HKV=kv_heads,
        BQ=height,
        BM=tile.rows,
        D=dim,
        BD=wide,
        PAGE=plan.page_size,
        PIECE=PIECE,
        SINK=sink is not None,
        BLOCK_N=keys_of(dim, q.dtype),
        SPLIT=pieces > 1,
        CAP=softcap is not None,
        WINDOW=window is not None,
        EDGE_STAGES=tile.stages if window is not None else 1,
        PRECISION="ieee" if q.dtype is torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **exact(tokens),
    )
    return out


def split(plan: Plan, programs: int, elements: int, device: torch.device) -> int:
    """How many pieces run side by side: 1 where tiles fill the device, or partials would not fit.

    The choice moves no bit.
    """
    pieces = triton.cdiv(plan.block_table.shape[1] * plan.page_size, PIECE)
    if programs >= 2 * processors(device) or elements * pieces * 4 > PART_BYTES:
        return 1
    return max(1, int(pieces))
