"""Drafting as graphs, where the device has them: a draft is some hundred small launches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

Made = tuple[Tensor, Tensor | None]
"""ids int64[R, γ] and confidences float32[R, γ]."""
Make = Callable[[Tensor, Tensor], Made]
"""Of anchors and slots int64[R]; it reads nothing else that a step makes."""


@dataclass(slots=True)
class _Stage:
    """Standing inputs of a graph, and its replay once it is recorded."""

    inputs: Tensor
    replay: Callable[[], Made] | None = None


class Recorded:
    """Runs a function of a step's requests launch by launch the first time that a number of
    requests comes, then records it, and from there on replays it.

    Args:
        capture: the device's, see ``api.speculative.DrafterTarget``.
        most: requests of the largest graph.
    """

    def __init__(
        self, capture: Callable[[Callable[[], Any], int], Callable[[], Any]], most: int
    ) -> None:
        self._capture, self._most = capture, most
        self._stages: dict[Hashable, _Stage] = {}
        self._spread: dict[int, Tensor] = {}

    def __call__(self, key: Hashable, anchors: Tensor, slots: Tensor, make: Make) -> Made:
        """``make(anchors, slots)``; ``key``: what else it depends on. What comes back is
        overwritten by the next call.
        """
        count = len(slots)
        tier = 1 << (count - 1).bit_length()
        if tier > self._most:
            return make(anchors, slots)
        stage = self._stages.get((tier, key))
        if stage is None:
            self._stages[tier, key] = _Stage(slots.new_zeros((2, tier)))
            return make(anchors, slots)
        # Places without a request do again what the first one does, so nothing is written wrong.
        if count not in self._spread:
            place = torch.arange(tier, device=slots.device)
            self._spread[count] = torch.where(place < count, place, 0)
        torch.index_select(torch.stack((anchors, slots)), 1, self._spread[count], out=stage.inputs)
        if stage.replay is None and not self._record(stage, make, tier):
            return make(anchors, slots)
        assert stage.replay is not None
        ids, confidence = stage.replay()
        return ids[:count], None if confidence is None else confidence[:count]

    def _record(self, stage: _Stage, make: Make, tier: int) -> bool:
        """False where there is no memory for it: drafts go on launch by launch then."""
        try:
            stage.replay = self._capture(lambda: make(*stage.inputs.unbind(0)), tier)
        except torch.OutOfMemoryError:
            log.warning("No memory for graphs of drafts: they are launched kernel by kernel.")
            self._most = 0
            self._stages.clear()
            return False
        return True
