"""One opened GPU: futures through pinned memory, graphs, memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from deepinfer.errors import DeviceLostError
from deepinfer.sampling.transfer import keep
from torch import Tensor

from deepinfer_backend_cuda.graphs import Graphs, cuda
from deepinfer_backend_cuda.kernel_cache import KernelCache


class CudaDevice:
    """GPU ``rank``. Work runs on the stream that is current on the calling thread.

    ``kernels``: where its compiled kernels lie, if that is a folder of this package's;
    ``releases``: what gives memory back where it is short.
    """

    def __init__(self, rank: int) -> None:
        self.torch_device = torch.device("cuda", rank)
        self.kernels: KernelCache | None = None
        self.releases: list[Callable[[], None]] = []
        self._graphs: Graphs | None = Graphs(self.torch_device)

    @property
    def seconds(self) -> dict[str, float]:
        """Spent on kernels so far: compiling them, and loading compiled ones."""
        if self.kernels is None:
            return {}
        return {f"kernels {how}": spent for how, spent in self.kernels.seconds.items()}

    def future(self, *tensors: Tensor) -> CudaFuture:
        """Copies that take their place in the stream: what is queued later comes later."""
        return CudaFuture(tensors, self.torch_device)

    def capture(self, fn: Callable[..., Any], shape: int) -> Callable[..., Any]:
        """A CUDA graph of ``fn()``, which is run once before; its outputs are overwritten by the
        next replay. ``shape`` is the caller's business: a graph has the shapes it was made with.
        """
        assert self._graphs is not None, "the device is closed"
        return self._graphs.capture(fn)

    def record(self, fn: Callable[[], Any]) -> Callable[[], Any]:
        """The same without running it: everything that ``fn`` launches has been compiled."""
        assert self._graphs is not None, "the device is closed"
        return self._graphs.record(fn)

    def free_bytes(self) -> int:
        """What the driver has free, and what torch holds of it without using it."""
        with torch.cuda.device(self.torch_device):
            free, _ = torch.cuda.mem_get_info()
            held = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return free + held

    def release(self) -> None:
        """Give back what can be made again: graphs, and blocks that torch holds unused."""
        torch.cuda.synchronize(self.torch_device)  # a replay may be under way
        for release in self.releases:
            release()
        if self._graphs is not None:
            self._graphs.forget()
        torch.cuda.empty_cache()

    def measure(self, work: Callable[[], object]) -> int:
        """Run ``work``; the bytes by which the memory that torch holds grew, all given back."""
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.torch_device)
        try:
            work()
            torch.cuda.synchronize(self.torch_device)
            return torch.cuda.memory_reserved(self.torch_device) - before
        finally:
            torch.cuda.empty_cache()

    def explain(self, error: Exception) -> Exception:
        """``error``, or in plain words that the GPU cannot be used any more in this process."""
        return explained(error, self.torch_device)

    def synchronize(self) -> None:
        """Wait for everything that was queued."""
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        """Wait, then give cached memory back to the driver, if there is one that listens."""
        if self._graphs is None:
            return
        self._graphs = None
        self.releases.clear()
        with contextlib.suppress(RuntimeError):  # of a lost GPU
            torch.cuda.synchronize(self.torch_device)
            torch.cuda.empty_cache()


class CudaFuture:
    """Tensors on their way to the host."""

    def __init__(self, tensors: tuple[Tensor, ...], device: torch.device) -> None:
        self._tensors = tuple(map(_copied, tensors))
        self._device = device
        self._arrived = cuda.Event()
        self._arrived.record(torch.cuda.current_stream(device))

    def result(self) -> tuple[Tensor, ...]:
        """Wait for the copies.

        Raises:
            DeviceLostError: what was queued before them has ended the GPU's work for good.
        """
        try:
            self._arrived.synchronize()
        except RuntimeError as why:
            raise explained(why, self._device) from why
        return tuple(t.clone() for t in self._tensors)  # pinned ones are nobody else's

    def done(self) -> bool:
        """Whether ``result()`` returns, or raises, at once."""
        try:
            return bool(self._arrived.query())
        except RuntimeError:
            return True

    def __del__(self) -> None:
        try:
            self._arrived.query()
        except (RuntimeError, AttributeError):  # the GPU is lost, or was before the copies began
            for tensor in getattr(self, "_tensors", ()):
                keep(tensor)


def _copied(tensor: Tensor) -> Tensor:
    """On its way to pinned memory."""
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    try:
        return pinned.copy_(tensor.detach(), non_blocking=True)
    except RuntimeError:
        keep(pinned)
        raise


def explained(error: Exception, device: torch.device) -> Exception:
    """A clearer error for one after which the driver answers nothing any more; else the same."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as why:
        said = (str(why).splitlines() or [""])[0]
        return DeviceLostError(
            f"{device} cannot be used any more: {said}.",
            next_step="Start the process again: CUDA does not recover within one.",
        )
    return error
