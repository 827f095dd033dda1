"""Options that every launch has, by how many rows its step has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

CHAINED_ROWS = 128
"""Steps of at most so many rows overlap launches (``kernels.chain``): they are short of time
between kernels; longer ones are not, and measured no faster.
"""
_GPU = not triton.knobs.runtime.interpret


def options(rows: int) -> dict[str, Any]:
    """For a launch of a step of ``rows`` rows."""
    chained = _GPU and rows <= CHAINED_ROWS
    return {"CHAIN": chained, "launch_pdl": chained}


def exact(rows: int) -> dict[str, Any]:
    """The same; no multiply-add is contracted in one kernel that is not in another."""
    return {"enable_fp_fusion": False, **options(rows)}


def empty_rows(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Uninitialised [T, …], contiguous, in storage of whole tiles (:func:`rows_behind`)."""
    rows = shape[0]
    tile = 384  # tiles of 128 and of 192 rows
    if rows <= 256:
        tile = next(size for size in (8, 16, 32, 64, 128) if rows <= size or size == 128)
    return like.new_empty((-(-rows // tile) * tile, *shape[1:]))[:rows]


def rows_behind(x: Tensor, box: int) -> int:
    """Rows of x [M, K] that boxes of ``box`` rows may copy: as many more as its storage holds.

    The copy engine takes up to three times as long over a box that reaches behind the rows that
    it is told of. What is copied from there becomes rows of the product that nobody stores.
    """
    wanted = -(-len(x) // box) * box
    if wanted == len(x):
        return wanted
    left = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return max(len(x), min(wanted, (left - x.shape[1]) // x.stride(0) + 1))


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 4 stand in where none is."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
