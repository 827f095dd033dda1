"""Batch ops: from rows of a plan to token rows, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.table import op


@op
def expand_rows(start: Tensor, count: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Rows to token rows. start int64[n], count int64[n] >= 0, total T >= 0.

    Returns (row_of_token int64[T], positions int64[T]): the tokens of row 0, then of row 1, …; the
    j-th token of row r has position ``start[r] + j``. Rows with count 0 have no token. Tokens
    beyond ``sum(count)`` are padding: row −1, position 0. Tokens beyond ``total`` are dropped.
    """
    token = torch.arange(total, device=start.device)
    if len(start) == 0:
        return torch.full_like(token, -1), torch.zeros_like(token)
    ends = count.cumsum(0)
    row = torch.searchsorted(ends, token, right=True)
    real = row < len(start)
    row = torch.where(real, row, 0)
    position = start[row] + token - (ends - count)[row]
    return torch.where(real, row, -1), torch.where(real, position, 0)
