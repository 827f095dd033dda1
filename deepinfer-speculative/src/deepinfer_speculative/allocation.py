"""Who gets a step's draft rows, on the device: the K slots of highest survival. Spec 4.4.

A slot (r, j) is draft j+1 of request r; its survival is the probability that it and all drafts
before it stand. The gain of verifying it is just that, and it never exceeds that of the slot before
it, so the K best slots are a prefix of each request.
"""

from __future__ import annotations

import torch
from torch import Tensor


def allocate(survival: Tensor, eligible: Tensor, k: int) -> Tensor:
    """Rank slots by (−survival, position, row) and count each row's winners.

    survival float32[R, γ] (where one is above the one before it, it counts as that); eligible
    int64[R] in 0 … γ; k >= 0. Returns int64[R]: prefix lengths, at most ``eligible`` each and
    ``min(k, Σ eligible)`` in all. Does not wait for the host. NaN counts as 0. Ties go to the lower
    position, then to the lower row: so a later slot never displaces an earlier one of its own
    request.
    """
    rows, gamma = survival.shape
    if rows == 1:
        return eligible.clamp(max=k)
    position = torch.arange(gamma, device=survival.device)
    mine = position[None] < eligible[:, None]
    score = torch.nan_to_num(survival, nan=0.0).clamp(min=0.0).cummin(1).values
    score = torch.where(mine, score, -1.0).t().reshape(-1)  # position first, then row
    order = torch.sort(score, descending=True, stable=True).indices
    won = torch.zeros(rows * gamma, dtype=torch.int64, device=survival.device)
    won.index_fill_(0, order[:k], 1)
    return (won.view(gamma, rows).t() * mine).sum(1)


class SlotSurvival:
    """Survivals of the drafts that lie behind each text, by slot.

    Args:
        slots: how many slots the engine has.
        gamma: the draft length.
        device: where the table lies.
    """

    def __init__(self, slots: int, gamma: int, device: torch.device) -> None:
        self.table = torch.zeros((slots, gamma), dtype=torch.float32, device=device)

    def put(self, slots: Tensor, confidence: Tensor | None) -> None:
        """New drafts for ``slots`` int64[R]: confidence float32[R, γ]; None: all certain."""
        if confidence is None:
            ones = torch.ones(self.table.shape[1], device=self.table.device)
            self.table.index_put_((slots,), ones.expand(len(slots), -1))
        else:
            self.table.index_put_((slots,), confidence.float().cumprod(1))

    def allot(self, slots: Tensor, eligible: Tensor, k: int) -> Tensor:
        """:func:`allocate` for these slots."""
        return allocate(self.table[slots], eligible, k)
