"""The draw: :class:`SampleRows` and :class:`Sampler`. House sections 6.4 and 7.5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRows:
    """One entry for each logits row, on the device.

    ``slot`` int64[m]; ``position`` int64[m]: absolute position of the token being drawn;
    ``seed`` int64[m] (64 bits); ``temperature``, ``top_p``, ``min_p`` float32[m]; ``top_k``
    int64[m]. ``filtered``: some row uses top-k, top-p or min-p. ``greedy``: every row has T = 0.
    """

    slot: torch.Tensor
    position: torch.Tensor
    seed: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    filtered: bool
    greedy: bool


class Sampler(Protocol):
    """Filtered logits to ids: ``argmax_v(z_v/T + G(seed, position, v))``; T = 0 is argmax."""

    def __call__(self, logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        """float32[m, V] to int64[m]."""
        ...

    def probs(self, logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        """The distribution that ``__call__`` draws from, float32[m, V]; for the ratio rule."""
        ...
