"""Checkpoints: config and weights of a model, one tensor at a time, under Hugging Face names.

Where you are: ``source.resolve`` found the files, the model's weight rules ask for tensors by
name; this file is between them and knows two kinds, safetensors and GGUF. Opening checks that
every declared byte is there; ``tensor`` streams from a file mapping, so a load needs the memory
of its destination plus about one tensor.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from deepinfer.errors import ModelLoadError
from deepinfer.models import gguf_arch
from deepinfer.models.gguf import GGUFFile, file_fingerprint
from deepinfer.models.gguf_quants import dequantize_into
from deepinfer.models.source import ModelSource

_AGAIN: Final = "Fetch the file again."
_MAX_HEADER: Final = 100_000_000


class Checkpoint(Protocol):
    """What a model loads from.

    ``config`` and ``generation_config`` are raw dictionaries in Hugging Face naming. ``tied`` says
    that the output projection is the embedding. Reading tensors from several threads is allowed.
    """

    config: dict[str, Any]
    generation_config: dict[str, Any]
    tied: bool

    def names(self) -> tuple[str, ...]:
        """All tensor names, in file order."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape, without reading the data."""
        ...

    def tensor(
        self, name: str, dtype: torch.dtype, *, round_to: torch.dtype | None = None
    ) -> torch.Tensor:
        """The tensor in ``dtype``, contiguous, in memory of its own.

        ``round_to`` rounds the values to a narrower dtype first: float32 arithmetic on weights
        that were stored as bfloat16, as recorded references have it.
        """
        ...

    def fingerprint(self) -> str:
        """A stable hash that identifies the weights; no times, no paths."""
        ...


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Open what ``resolve`` found.

    Raises:
        ModelLoadError: a file is missing, cut short or malformed, or its kind is unknown.
    """
    if source.kind == "gguf":
        return GGUFCheckpoint(source.path)
    return SafetensorsCheckpoint(source.path)


class GGUFCheckpoint:
    """A GGUF file, dequantised while loading."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        self.config: dict[str, Any] = gguf_arch.config(self._file)
        self.generation_config: dict[str, Any] = gguf_arch.generation_config(self._file)
        self.tied: bool = self.config["tie_word_embeddings"]
        self._places = gguf_arch.places(self._file)

    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._place(name).shape

    def _place(self, name: str) -> gguf_arch.Place:
        if name not in self._places:
            raise _no_tensor(self._file.path, name)
        return self._places[name]

    def tensor(
        self, name: str, dtype: torch.dtype, *, round_to: torch.dtype | None = None
    ) -> torch.Tensor:
        place = self._place(name)
        info = self._file.tensors[place.stored]
        raw = self._file.raw(place.stored)
        if place.expert is not None:
            rows = place.shape[0]
            raw = raw[place.expert * rows : (place.expert + 1) * rows]
        if place.heads is not None:
            # One row per output feature, also for a bias, which is stored as a single row.
            raw = _unpermuted(raw.reshape(place.shape[0], -1), place.heads, self._file.path, name)
        columns = place.shape[-1] if len(place.shape) > 1 else place.shape[0] // raw.shape[0]
        out = torch.empty(raw.shape[0], columns, dtype=round_to or dtype)
        dequantize_into(raw, info.quant, out, f"{self._file.path}: tensor {place.stored!r}")
        return out.reshape(place.shape).to(dtype)

    def fingerprint(self) -> str:
        return self._file.fingerprint()


def _unpermuted(raw: Any, heads: int, path: Path, name: str) -> Any:
    """Undo the row order of interleaved rope: pairs lie side by side, halves are wanted."""
    rows = raw.shape[0]
    if rows % (2 * heads):
        raise ModelLoadError(
            f"{path}: {name!r} has {rows} rows, which {heads} heads do not divide.", setting="model"
        )
    return raw.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows, -1)


class SafetensorsCheckpoint:
    """A Hugging Face directory: config.json with one or several safetensors files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.config: dict[str, Any] = read_json(directory / "config.json")
        self.generation_config: dict[str, Any] = {}
        if (directory / "generation_config.json").exists():
            self.generation_config = read_json(directory / "generation_config.json")
        self._shards: dict[str, _Shard] = {}
        self._home: dict[str, _Shard] = {}
        for name, file in _weight_map(directory).items():
            self._home[name] = self._shard_with(name, file)
        tie = self.config.get("tie_word_embeddings")
        self.tied: bool = "lm_head.weight" not in self._home if tie is None else bool(tie)

    def _shard_with(self, name: str, file: str) -> _Shard:
        if file not in self._shards:
            self._shards[file] = _Shard(self._directory / file)
        shard = self._shards[file]
        if name not in shard.entries:
            raise ModelLoadError(
                f"{shard.path} holds no tensor {name!r}, which the index places there.",
                setting="model",
                next_step=_AGAIN,
            )
        return shard

    def names(self) -> tuple[str, ...]:
        return tuple(self._home)

    def _shard(self, name: str) -> _Shard:
        if name not in self._home:
            raise _no_tensor(self._directory, name)
        return self._home[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._shard(name).entries[name]["shape"])

    def tensor(
        self, name: str, dtype: torch.dtype, *, round_to: torch.dtype | None = None
    ) -> torch.Tensor:
        stored = self._shard(name).tensor(name)
        rounded = stored if round_to is None else stored.to(round_to)
        # A copy, because the stored tensor is a view of the file mapping.
        return rounded.to(dtype, copy=rounded is stored)

    def fingerprint(self) -> str:
        import hashlib

        parts = [self._shards[file].fingerprint() for file in sorted(self._shards)]
        return hashlib.sha256("".join(parts).encode()).hexdigest()


class _Shard:
    """One safetensors file; the header is checked before any library maps the data."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries, self.header_bytes, self.size = _read_header(path)
        self._handle = _mapped(path)

    def tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._handle.get_tensor(name)
        return tensor

    def fingerprint(self) -> str:
        with (
            self.path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return file_fingerprint(data, self.size, self.header_bytes)


def _mapped(path: Path) -> Any:
    """The library's handle, whose own checks cover dtypes and shapes."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except SafetensorError as why:
        raise ModelLoadError(
            f"{path} has a damaged safetensors header: {why}.", setting="model", next_step=_AGAIN
        ) from why


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
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
            next_step=_AGAIN,
        )
    entries = _entries(path, header)
    _check_extents(path, entries, 8 + length, size)
    return entries, 8 + length, size


def _entries(path: Path, header: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        for entry in entries.values():
            start, end = entry["data_offsets"]
            if not 0 <= start <= end or not isinstance(entry["shape"], list):
                raise ValueError(f"bad extent {entry}")
    except (ValueError, AttributeError, TypeError, KeyError) as why:
        raise ModelLoadError(
            f"{path} has a damaged safetensors header: {why}.", setting="model", next_step=_AGAIN
        ) from why
    return dict(entries)


def _check_extents(path: Path, entries: Mapping[str, Any], start: int, size: int) -> None:
    last, end = "the header", 0
    for name, entry in entries.items():
        if entry["data_offsets"][1] > end:
            last, end = f"tensor {name!r}", entry["data_offsets"][1]
    if start + end != size:
        what = "is cut short" if start + end > size else "has bytes left over"
        raise ModelLoadError(
            f"{path} {what}: {last} ends at byte {start + end}, the file has {size}.",
            setting="model",
            next_step=_AGAIN,
        )


def _weight_map(directory: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index or from the files themselves."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return _index_map(index)
    files = sorted(f.name for f in directory.glob("*.safetensors"))
    if "model.safetensors" in files:
        files = ["model.safetensors"]
    if not files:
        raise ModelLoadError(
            f"{directory} holds no *.safetensors file{_other_weights(directory)}.",
            setting="model",
            next_step="Convert the weights to safetensors, or name a GGUF file.",
        )
    return {name: file for file in files for name in _read_header(directory / file)[0]}


def _index_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} holds no 'weight_map'.", setting="model", next_step=_AGAIN)
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (index.parent / file).exists()]
    if missing:
        raise ModelLoadError(
            f"{index} names {len(files)} files, of which {len(missing)} are missing: "
            f"{', '.join(missing[:4])}{' …' if len(missing) > 4 else ''}.",
            setting="model",
            next_step="Fetch the missing files.",
        )
    return weight_map


def _other_weights(directory: Path) -> str:
    others = [f.name for f in sorted(directory.glob("*.bin")) + sorted(directory.glob("*.gguf"))]
    return f" (it does hold {', '.join(others[:3])})" if others else ""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model directory, or ModelLoadError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as why:
        raise ModelLoadError(f"{path} cannot be read: {why}.", setting="model") from why
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object.", setting="model")
    return value


def _no_tensor(path: Path, name: str) -> ModelLoadError:
    return ModelLoadError(f"{path} holds no tensor {name!r}.", setting="model")
