"""Batch ops: from rows of a plan to token rows, and what is kept of those, on the device."""

from __future__ import annotations

from collections.abc import Sequence

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


@op
def append_rows(
    parts: Sequence[Tensor], numbers: Sequence[Tensor], rows: Tensor, ints: Tensor, count: Tensor
) -> None:
    """A step's rows behind those that are kept, in place; where they go lies on the device.

    parts: one or more [T, H]; numbers: M >= 1 of int64[T]; rows [N, L·H] of the parts' type and
    ints int64[M, N], contiguous; count int64[1], from 0 to below 2³¹. The parts side by side become
    rows ``count`` to ``count + T − 1``, the numbers the same columns of ``ints``; then T is added
    to ``count``. Places from N on are not written, but counted.
    """
    tokens, most = len(parts[0]), len(rows)
    if tokens and most:
        # Rows without a place write what another one writes anyway, in the last place.
        row = torch.arange(tokens, device=count.device).minimum((most - 1 - count).clamp(min=0))
        place = (count + row).clamp(max=most - 1)
        fits = count < most
        new = torch.cat(tuple(parts), -1)[row]
        rows.index_copy_(0, place, torch.where(fits, new, rows[-1]))
        told = torch.stack(tuple(numbers))[:, row]
        ints.index_copy_(1, place, torch.where(fits, told, ints[:, -1:]))
    count += tokens
