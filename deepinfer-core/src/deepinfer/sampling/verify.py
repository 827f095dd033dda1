"""Acceptance by equality: a draft stands iff it is what the ordinary sampler draws on its row.

Where you are: between the sampler and the slot table. Nothing here knows of masks or penalties:
they are in the logits, so grammar and penalties compose with speculation by themselves, and the
text is the same whatever was drafted and however much of it was verified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from deepinfer.api.sampler import Sampler, SampleRows
    from deepinfer.ops.table import OpSet


def line_grid(lengths: Tensor, width: int) -> Tensor:
    """int64[R, width]: which logits row holds each row's j-th draw, −1 where there is none.

    Logits rows stand in order: 1 + lengths[0] of the first row, then those of the second, ….
    """
    j = torch.arange(width, device=lengths.device)
    first = (lengths + 1).cumsum(0) - lengths - 1
    return torch.where(j <= lengths[:, None], first[:, None] + j, -1)


class EqualityVerifier:
    """Logits rows and drafts to emitted tokens, by equality.

    Args:
        ops: serves ``accept_prefix``.
        sampler: draws on every row.
    """

    def __init__(self, ops: OpSet, sampler: Sampler) -> None:
        self._ops = ops
        self._sampler = sampler

    def verify(
        self, logits: Tensor, rows: SampleRows, drafts: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draw on every logits row and accept the drafts that were drawn too.

        ``drafts`` int64[R, γ], ``lengths`` int64[R]: how many of them each row ran; logits rows as
        in :func:`line_grid`, those behind the last are padding.

        Returns:
            tokens int64[R, 1+γ], of which the first counts int64[R] are emitted.
        """
        sampled = self._sampler(logits, rows)
        width = drafts.shape[1] + 1
        if width == 1:
            return sampled[: len(lengths), None], torch.ones_like(lengths)
        tokens = sampled[line_grid(lengths, width).clamp(min=0)]
        return tokens, self._ops.accept_prefix(tokens, drafts, lengths)
