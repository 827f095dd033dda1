"""From the host to the device without waiting for the device."""

from __future__ import annotations

import ctypes

from torch import Tensor, device


def to_device(tensor: Tensor, where: device) -> Tensor:
    """A CPU tensor there. A copy from ordinary memory would wait for all that is queued before
    it; one from pinned memory takes its place in the queue.
    """
    if where.type == "cpu":
        return tensor
    pinned = tensor.pin_memory()
    try:
        return pinned.to(where, non_blocking=True)
    except RuntimeError:
        keep(pinned)
        raise


def keep(pinned: Tensor) -> None:
    """Never free this tensor: of a lost GPU. torch asks the driver about pinned memory that it gets
    back, and where the driver answers nothing any more, that ends the process.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pinned))
