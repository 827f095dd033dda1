"""From the host to the device without waiting for the device."""

from __future__ import annotations

from torch import Tensor, device


def to_device(tensor: Tensor, where: device) -> Tensor:
    """A CPU tensor there. A copy from ordinary memory would wait for all that is queued before
    it; one from pinned memory takes its place in the queue.
    """
    if where.type == "cpu":
        return tensor
    return tensor.pin_memory().to(where, non_blocking=True)
