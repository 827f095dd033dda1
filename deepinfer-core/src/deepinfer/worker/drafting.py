"""What the runner has where nobody speculates, and the taps of who does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.api.speculative import Drafts

if TYPE_CHECKING:
    from deepinfer.api.kv import KVSpec
    from deepinfer.api.model import DeviceBatch, Taps


class NullDrafter:
    """No speculation: a drafter of length 0, so that the runner has one path."""

    draft_len = 0
    taps: tuple[int, ...] = ()
    kv: KVSpec | None = None

    def allot(self, eligible: Tensor, k: int) -> Tensor:
        """No drafts to anyone."""
        return torch.zeros_like(eligible)

    def commit(self, taps: Taps | None, kept: Tensor) -> None:
        """Nothing to remember."""

    def propose(self, anchors: Tensor, slots: Tensor) -> Drafts:
        """int64[R, 0]."""
        return Drafts(anchors.new_zeros((len(anchors), 0)), None)


class HiddenTaps:
    """Hidden rows of a step, for a drafter; a :class:`api.model.Taps`.

    Attributes:
        layers: whose rows are wanted.
        hidden: layer -> [T, H] of this step.
        batch: this step's token rows.
        slot_of_token: int64[T].
    """

    def __init__(self, layers: tuple[int, ...], batch: DeviceBatch, slot_of_token: Tensor) -> None:
        self.layers = layers
        self.hidden: dict[int, Tensor] = {}
        self.batch = batch
        self.slot_of_token = slot_of_token

    def put(self, layer: int, hidden: Tensor) -> None:
        """Called by the model; the tensor must not change afterwards."""
        self.hidden[layer] = hidden
