"""One safetensors file: a header that is checked in full, and bytes that are read on request.

Tensors are read into memory of the caller's, not mapped, so that a process's memory counts what it
keeps and nothing of the file. Low-bit types (F8_E4M3, F8_E8M0, I8 with two FP4 values) leave this
file as bytes only: a numeric conversion of them would be wrong without their scales.
"""

from __future__ import annotations

import json
import math
import os
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.errors import ModelLoadError

AGAIN: Final = "Fetch the file again."
FLOATS: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_BITS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_MAX_HEADER: Final = 100_000_000
_PIECE: Final = 1 << 22  # elements that are converted at a time


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a tensor of bytes lies: from byte ``begin`` of a file on."""

    path: Path
    begin: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a header; ``begin`` and ``end`` are bytes of the file."""

    storage: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Shard:
    """An open file. Reading from several threads is allowed.

    Raises:
        ModelLoadError: it cannot be read, is cut short, or its header is not sound.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries, self.header_bytes, self.size = read_header(path)
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def bytes_into(self, name: str, out: Tensor, begin: int = 0) -> None:
        """A tensor's bytes from its byte ``begin`` on into ``out``: uint8, contiguous, on the host.

        As many as it has elements.
        """
        entry = self.entries[name]
        assert out.dtype == torch.uint8 and begin + out.numel() <= entry.end - entry.begin, name
        self._read(name, entry.begin + begin, out)

    def tensor(self, name: str, dtype: torch.dtype, round_to: torch.dtype | None) -> Tensor:
        """A tensor of floats in ``dtype``; its bytes are converted piece by piece."""
        entry = self.entries[name]
        if entry.storage not in FLOATS:
            raise ModelLoadError(
                f"{self.path}: tensor {name!r} is stored as {entry.storage}, which is no number "
                "without its scales.",
                setting="model",
            )
        stored = FLOATS[entry.storage]
        out = torch.empty(entry.shape, dtype=dtype, device="cpu")
        flat = out.view(-1)
        if stored == dtype and round_to in (None, dtype):
            self._read(name, entry.begin, flat.view(torch.uint8))
            return out
        for begin in range(0, flat.numel(), _PIECE):
            piece = torch.empty(min(_PIECE, flat.numel() - begin), dtype=stored, device="cpu")
            self._read(name, entry.begin + begin * stored.itemsize, piece.view(torch.uint8))
            flat[begin : begin + piece.numel()] = piece if round_to is None else piece.to(round_to)
        return out

    def _read(self, name: str, begin: int, out: Tensor) -> None:
        """``out`` filled from byte ``begin`` of the file on."""
        whole: Any = out.numpy()
        view = memoryview(whole).cast("B") if out.numel() else memoryview(b"")
        done = 0
        while done < len(view):
            count = os.preadv(self._file, [view[done:]], begin + done)
            if count <= 0:
                raise ModelLoadError(
                    f"{self.path} ends inside tensor {name!r}: it was cut short since it was "
                    "opened.",
                    setting="model",
                    next_step=AGAIN,
                )
            done += count


def read_header(path: Path) -> tuple[dict[str, Entry], int, int]:
    """Entries by name, bytes before the data, size; ModelLoadError if an extent is not there."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length) if length <= min(size, _MAX_HEADER) else b""
    except OSError as why:
        raise ModelLoadError(f"{path} cannot be read: {why}.", setting="model") from why
    if size < 8 or len(header) != length:
        raise ModelLoadError(
            f"{path} is cut short or not a safetensors file: its header should end at byte "
            f"{8 + length}, the file has {size}.",
            setting="model",
            next_step=AGAIN,
        )
    try:
        entries = dict(_entries(json.loads(header), 8 + length))
        _check_order(entries, 8 + length)
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as why:
        raise ModelLoadError(
            f"{path} has a damaged safetensors header: {why}.", setting="model", next_step=AGAIN
        ) from why
    _check_size(path, entries, 8 + length, size)
    return entries, 8 + length, size


def _entries(header: Any, data: int) -> Iterator[tuple[str, Entry]]:
    """What a header says, each tensor by itself sound; the errors of a damaged one otherwise."""
    header.pop("__metadata__", None)
    for name, said in header.items():
        begin, end = said["data_offsets"]
        shape, storage = said["shape"], said["dtype"]
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"tensor {name!r} has the shape {shape!r}")
        if storage not in _BITS:
            raise ValueError(f"tensor {name!r} has the unknown type {storage!r}")
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
            raise ValueError(f"tensor {name!r} has the offsets {[begin, end]}")
        if (end - begin) * 8 != math.prod(shape) * _BITS[storage]:
            raise ValueError(
                f"tensor {name!r} of shape {shape} and type {storage} has {end - begin} bytes"
            )
        yield name, Entry(storage, tuple(shape), data + begin, data + end)


def _check_order(entries: Mapping[str, Entry], data: int) -> None:
    """Tensors lie side by side: no hole, no byte that belongs to two."""
    end = data
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            raise ValueError(f"tensor {name!r} begins at byte {entry.begin}, expected {end}")
        end = entry.end


def _check_size(path: Path, entries: Mapping[str, Entry], data: int, size: int) -> None:
    last = max(entries, key=lambda name: entries[name].end, default=None)
    end = data if last is None else entries[last].end
    if end != size:
        what = "is cut short" if end > size else "has bytes left over"
        where = "the header" if last is None else f"tensor {last!r}"
        raise ModelLoadError(
            f"{path} {what}: {where} ends at byte {end}, the file has {size}.",
            setting="model",
            next_step=AGAIN,
        )
