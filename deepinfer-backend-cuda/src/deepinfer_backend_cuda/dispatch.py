"""Rows by expert: a stable sort of the slots, and tiles of rows, both on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from deepinfer_backend_cuda.kernels import moe as kernels
from deepinfer_backend_cuda.launch import options


class Sorted(NamedTuple):
    """Slots in the order of their experts: ``order`` int64[S], ``place`` int32[S] its inverse,
    ``offsets`` int64[E+1].
    """

    order: Tensor
    place: Tensor
    offsets: Tensor


class Tiles(NamedTuple):
    """``tile`` int32[count, 2]: expert (−1: none) and first row of each tile of ``rows`` rows."""

    tile: Tensor
    rows: int


def permute(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """ids int32[T, k] -> (order int64[T·k], offsets int64[E+1])."""
    found = sort(ids, num_experts)
    return found.order, found.offsets


def sort(ids: Tensor, num_experts: int) -> Sorted:
    """The slots of ids int32[T, k], sorted stably by expert."""
    flat = ids.reshape(-1)
    order = torch.empty(len(flat), dtype=torch.int64, device=ids.device)
    place = torch.empty(len(flat), dtype=torch.int32, device=ids.device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int64, device=ids.device)
    kernels.sort_kernel[(num_experts + 1,)](
        flat,
        order,
        place,
        offsets,
        len(flat),
        num_experts,
        BLOCK=1024,
        num_warps=4,
        **options(len(ids)),
    )
    return Sorted(order, place, offsets)


def tiles(offsets: Tensor, slots: int, rows: int) -> Tiles:
    """Tiles of so many rows; each expert's last one may be short."""
    experts = len(offsets) - 1
    most = min(slots, slots // rows + experts)
    tile = torch.empty((most, 2), dtype=torch.int32, device=offsets.device)
    if most:
        kernels.expert_tiles_kernel[(experts + 1,)](
            offsets,
            tile,
            experts,
            most,
            BM=rows,
            N=triton.next_power_of_2(experts),
            BLOCK=128,
            num_warps=4,
            **options(slots),
        )
    return Tiles(tile, rows)
