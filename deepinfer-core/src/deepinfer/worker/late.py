"""The rows that late layers run: :func:`late_batch`, for models that truncate compactly.

Where you are: beside ``batch``. A prompt's rows below its floor are taken out of a step after the
last layer that writes what later text reads of them. How many leave is known from the plan and the
floors on the host, so shapes are too; which rows of the step stay is tensor arithmetic.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from deepinfer.api.plan import DECODE

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from deepinfer.api.model import DeviceBatch
    from deepinfer.ops.table import OpSet


def rows_below(array: NDArray[np.int32], floors: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64[n]: leading token rows of each plan row that lie below its slot's floor.

    Decode rows lie behind the prompt, so they never do.
    """
    start, count = array[:, 1].astype(np.int64), array[:, 2].astype(np.int64)
    below = np.clip(floors[array[:, 0]] - start, 0, count)
    return np.where(start == DECODE, 0, below)


def late_batch(
    batch: DeviceBatch, ops: OpSet, below: Tensor, dropped: int
) -> tuple[DeviceBatch, Tensor]:
    """(the step without rows below their floor, its rows' places in the whole step).

    Args:
        batch: the whole step, with ``requests``.
        ops: serves ``expand_rows``.
        below: int64[n], from :func:`rows_below`.
        dropped: their sum.

    Rows that are sampled, and padding, stay in the same order; T may become 0.
    """
    requests = batch.requests
    assert requests is not None
    first = requests.cu_q[:-1].long() + below
    count = requests.cu_q[1:].long() - first
    total = len(batch.ids) - dropped
    row, place = ops.expand_rows(first, count, total)
    # Padding is behind all rows, there and here.
    place = torch.where(row < 0, torch.arange(total, device=row.device) + dropped, place)
    gone = below.cumsum(0)  # dropped rows up to and with each request; −1 reads all of them
    starts, ends = requests.starts + below, count.cumsum(0)
    cu_q = torch.cat((ends.new_zeros(1), ends)).int()
    late = replace(
        batch,
        ids=batch.ids[place],
        positions=batch.positions[place],
        row_of_token=row,
        kv_slots=batch.kv_slots[place],
        logit_rows=batch.logit_rows - gone[batch.row_of_token[batch.logit_rows]],
        requests=replace(requests, cu_q=cu_q, starts=starts),
        history=None if batch.history is None else batch.history[place],
    )
    return late, place
