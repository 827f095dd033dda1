"""Engram tables: rows of a checkpoint file, read where they lie and never loaded as a whole.

The two tables of the released model take 189 GiB and a token reads 24 rows of each, so they stay
in the file, mapped; the system's page cache holds the rows that are asked for again. ``prefetch``
tells the system which rows come next while something else is computed. Specification 5.4, 8.2.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
import weakref
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.errors import ModelLoadError
from deepinfer.models.shards import Extent
from deepinfer.ops.lowbit import TILE, e4m3, e8m0

_NAN: Final = 255
_WAITING: Final = 8  # hints that may wait: a disk that is further behind gains nothing by more


class MappedTable:
    """A table [rows, width] of E4M3 values with one E8M0 scale for each row and 32 columns.

    Opening reads nothing. Tables of two engines on one file are independent. ``close`` may be
    called twice, and runs by itself when a table is dropped; afterwards it cannot be read.

    Args:
        name: what messages call the table.
        codes: bytes [rows, width].
        scales: bytes [rows, width / 32].
    """

    def __init__(self, name: str, codes: Extent, scales: Extent) -> None:
        self.name = name
        self.rows, self.width = codes.shape
        assert scales.shape == (self.rows, self.width // TILE), name
        self._regions = (_Region(codes), _Region(scales))
        self._prefetcher = _Prefetcher(self._regions)
        self._close = weakref.finalize(self, self._prefetcher.stop)

    @property
    def mapped_bytes(self) -> int:
        """Of the file; how much of them lies in memory is the system's business."""
        return self.rows * (self.width + self.width // TILE)

    def gather(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows by number, dequantised and side by side.

        Args:
            rows: int64[T, cols], each within the table, on any device.

        Returns:
            ``dtype``[T, cols · width] on the device of ``rows``; exact in float32 and bfloat16.

        Raises:
            ModelLoadError: one of their scales is NaN.
        """
        assert self._close.alive, f"{self.name} is closed"
        wanted = _on_host(rows)
        codes, scales = (torch.from_numpy(region.take(wanted)) for region in self._regions)
        self._refuse_nan(scales, wanted)
        factor = e8m0(scales.to(rows.device)).repeat_interleave(TILE, -1)
        values = (e4m3(codes.to(rows.device)) * factor).to(dtype)
        return values.view(rows.shape[0], rows.shape[1] * self.width)

    def prefetch(self, rows: Tensor) -> None:
        """Have the system read these rows from the disk; returns at once. Only a hint.

        Args:
            rows: int64 of any shape, in host memory or it is waited for.
        """
        assert self._close.alive, f"{self.name} is closed"
        self._prefetcher.hint(_on_host(rows))

    def close(self) -> None:
        """End the prefetching thread and give the mapping and the files back."""
        self._close()

    def _refuse_nan(self, scales: Tensor, rows: NDArray[np.int64]) -> None:
        bad = (scales == _NAN).any(-1)
        if bool(bad.any()):
            row = int(rows[int(bad.nonzero()[0])])
            raise ModelLoadError(
                f"The table {self.name!r} has a NaN scale in row {row}.",
                setting="model",
                next_step="Fetch its file again.",
            )


def _on_host(rows: Tensor) -> NDArray[np.int64]:
    flat: NDArray[np.int64] = rows.detach().cpu().numpy().reshape(-1)
    return flat


class _Region:
    """The mapped bytes of one tensor [rows, width], and a file to give advice on."""

    def __init__(self, extent: Extent) -> None:
        rows, self.width = extent.shape
        self.begin = extent.begin
        self.file: int | None = os.open(extent.path, os.O_RDONLY)
        skip = extent.begin % mmap.ALLOCATIONGRANULARITY
        length, start = skip + rows * self.width, extent.begin - skip
        mapping = mmap.mmap(self.file, length, access=mmap.ACCESS_READ, offset=start)
        if hasattr(mmap, "MADV_RANDOM"):
            # Hashed rows have no neighbours worth reading: a fault fetches its page alone.
            mapping.madvise(mmap.MADV_RANDOM)
        flat = np.frombuffer(mapping, np.uint8, rows * self.width, skip)
        self._rows: NDArray[np.uint8] | None = flat.reshape(rows, self.width)

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Copies of rows [n, width]; IndexError outside the table."""
        assert self._rows is not None
        if rows.size and int(rows.min()) < 0:
            raise IndexError(f"row {int(rows.min())} of a table")
        taken: NDArray[np.uint8] = np.take(self._rows, rows, axis=0)
        return taken

    def advise(self, rows: NDArray[np.int64]) -> None:
        """Ask for the pages of these rows, neighbours in one call."""
        assert self.file is not None
        page = mmap.PAGESIZE
        first = (self.begin + rows * self.width) // page
        last = (self.begin + (rows + 1) * self.width - 1) // page
        pages = np.unique(np.concatenate((first, last)))
        starts = np.flatnonzero(np.diff(pages, prepend=-2) > 1)
        counts = np.diff(starts, append=pages.size)
        for begin, count in zip(pages[starts].tolist(), counts.tolist(), strict=True):
            os.posix_fadvise(self.file, begin * page, count * page, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        # The mapping goes with the last array on it, which a gather in flight may still hold.
        self._rows = None
        if self.file is not None:
            os.close(self.file)
            self.file = None


class _Prefetcher:
    """A thread, from the first hint on, that passes hints to the system."""

    def __init__(self, regions: tuple[_Region, ...]) -> None:
        self._regions = regions
        self._hints: queue.Queue[NDArray[np.int64] | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None

    def hint(self, rows: NDArray[np.int64]) -> None:
        """Queue a hint, or drop it where too many wait or the system takes none."""
        if not hasattr(os, "posix_fadvise"):
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engram-prefetch", daemon=True)
            self._thread.start()
        if not self._hints.full():
            self._hints.put(rows)

    def _run(self) -> None:
        while (rows := self._hints.get()) is not None:
            for region in self._regions:
                region.advise(rows)

    def stop(self) -> None:
        """End the thread, then let the regions go."""
        if self._thread is not None:
            self._hints.put(None)
            self._thread.join()
        for region in self._regions:
            region.close()
