"""The ordinary draw: what every room means by "the token that is sampled on this row".

Where you are: after the logits stages (``pipeline``), before acceptance (``verify``). Filters and
draw are two ops; which implementation serves them is the engine's op set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from deepinfer.api.sampler import SampleRows
    from deepinfer.ops.table import OpSet


class GumbelSampler:
    """``argmax_v(z_v/T + G(seed, position, v))`` over what top-k, top-p and min-p leave.

    Args:
        ops: serves ``filter_top`` and ``gumbel_argmax``.
    """

    def __init__(self, ops: OpSet) -> None:
        self._ops = ops

    def __call__(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """float32[m, V] to int64[m]. ``logits`` is not changed."""
        kept = self._filter(logits, rows)
        ids: Tensor = self._ops.gumbel_argmax(kept, rows.temperature, rows.seed, rows.position)
        return ids

    def probs(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """The distribution that ``__call__`` draws from, float32[m, V]; one-hot at T = 0."""
        kept = self._filter(logits, rows)
        kept = torch.where(kept.isnan(), -torch.inf, kept)
        cold = rows.temperature[:, None] == 0
        hot = torch.softmax(kept / torch.where(cold, 1.0, rows.temperature[:, None]), 1)
        best = torch.zeros_like(hot).scatter_(1, kept.argmax(1, keepdim=True), 1.0)
        return torch.where(cold, best, hot)

    def _filter(self, logits: Tensor, rows: SampleRows) -> Tensor:
        if not rows.filtered or rows.greedy:
            return logits
        kept: Tensor = self._ops.filter_top(
            logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p
        )
        return kept
