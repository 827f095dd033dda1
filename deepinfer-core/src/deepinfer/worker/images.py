"""Images of running prompts: :class:`SlotImages` makes their rows and lays them into steps.

Where you are: beside ``batch``. An image is seen once, whole, when the first of its positions runs,
and its rows are kept until the prompt is past it; so a chunk may cut a span anywhere, and a prefix
hit may end inside it. Who is admitted again after giving way brings his images again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.sampling.transfer import to_device

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from deepinfer.api.plan import Admit, Image


class SlotImages:
    """Images by slot, from admission until all their positions have run.

    Args:
        see: an image's rows [tokens, H] from its pixels, ``SeeingModel.see``.
        device: where it sees.
    """

    def __init__(self, see: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self._see = see
        self._device = device
        self._open: dict[int, list[Image]] = {}
        self._rows: dict[tuple[int, int], Tensor] = {}  # of (slot, start)

    def admit(self, admits: Sequence[Admit]) -> None:
        """New requests bring theirs; what the slot's last one has left is dropped."""
        for admit in admits:
            self._drop(admit.slot, self._open.pop(admit.slot, []))
            if admit.images:
                self._open[admit.slot] = list(admit.images)

    def of_step(self, rows: NDArray[np.int32], cu_q: Tensor) -> tuple[Tensor, Tensor] | None:
        """What a step's chunks hold of images: (token rows int64[k], [k, H]); None if nothing.

        Args:
            rows: the plan's, int32[n, 5].
            cu_q: int32[n+1], where each begins among the token rows.
        """
        if not self._open:
            return None
        index, parts = list[Tensor](), list[Tensor]()
        for row, (slot, start, count, _, _) in enumerate(rows.tolist()):
            for image in self._open.get(slot, ()):
                first, end = max(start, image.start), min(start + count, image.stop)
                if first < end:
                    place = torch.arange(first - start, end - start, device=self._device)
                    index.append(cu_q[row] + place)
                    whole = self._rows_of(slot, image)
                    parts.append(whole[first - image.start : end - image.start])
            self._pass(slot, start + count)
        return (torch.cat(index), torch.cat(parts)) if index else None

    def _rows_of(self, slot: int, image: Image) -> Tensor:
        key = slot, image.start
        if key not in self._rows:
            pixels = to_device(torch.from_numpy(image.pixels), self._device)
            self._rows[key] = self._see(pixels)
        return self._rows[key]

    def _pass(self, slot: int, end: int) -> None:
        """The slot's prompt has run up to ``end``."""
        images = self._open.get(slot)
        if images is None:
            return
        left = [image for image in images if image.stop > end]
        self._drop(slot, [image for image in images if image.stop <= end])
        if left:
            self._open[slot] = left
        else:
            del self._open[slot]

    def _drop(self, slot: int, images: Sequence[Image]) -> None:
        for image in images:
            self._rows.pop((slot, image.start), None)
