"""Options that every launch has, by how many rows its step has."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton

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


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 4 stand in where none is."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
