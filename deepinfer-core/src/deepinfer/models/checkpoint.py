"""Checkpoints: config and weights of a model, one tensor at a time, under Hugging Face names.

Where you are: ``source.resolve`` found the files, the model's weight rules ask for tensors by
name; this file is between them and knows two kinds, safetensors and GGUF. Opening checks that
every declared byte is there; reading a tensor needs the memory of its destination and little more.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any, Protocol

import torch

from deepinfer.errors import ModelLoadError
from deepinfer.models import gguf_arch
from deepinfer.models.gguf import GGUFFile, file_fingerprint
from deepinfer.models.gguf_quants import dequantize_into
from deepinfer.models.shards import AGAIN, Extent, Shard, read_header
from deepinfer.models.source import ModelSource


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

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        ...

    def storage(self, name: str) -> str:
        """How a tensor is stored, in the words of safetensors (``BF16``, ``F8_E4M3``, ``I8``).

        Of a file with quantised types of its own, which ``tensor`` decodes: ``F32``.
        """
        ...

    def bytes_into(self, name: str, out: torch.Tensor, begin: int = 0) -> None:
        """A tensor's bytes as they are stored, from its byte ``begin`` on, into contiguous uint8.

        ``out`` has as many elements as bytes are wanted.
        """
        ...

    def extent(self, name: str) -> Extent:
        """Where a tensor's bytes lie, for those who read it piece by piece."""
        ...

    def fingerprint(self) -> str:
        """A stable hash that identifies the weights; no times, no paths."""
        ...


def open_checkpoint(source: ModelSource, load_format: str = "auto") -> Checkpoint:
    """Open what ``resolve`` found; of ``dummy`` weights only the config is read.

    Raises:
        ModelLoadError: a file is missing, cut short or malformed, or its kind is unknown.
    """
    if load_format == "dummy":
        return ConfigCheckpoint(source)
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

    def file(self, name: str) -> Path:
        return self._file.path

    def storage(self, name: str) -> str:
        return "F32"

    def bytes_into(self, name: str, out: torch.Tensor, begin: int = 0) -> None:
        raise self._not_so(name)

    def extent(self, name: str) -> Extent:
        raise self._not_so(name)

    def _not_so(self, name: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self._file.path} is a GGUF file, and {name!r} can be read from safetensors only.",
            setting="model",
        )

    def fingerprint(self) -> str:
        return self._file.fingerprint()


def _unpermuted(raw: Any, heads: int, path: Path, name: str) -> Any:
    """Undo the row order of interleaved rope: pairs lie side by side, halves are wanted."""
    rows = raw.shape[0]
    if not heads or rows % (2 * heads):
        raise ModelLoadError(
            f"{path}: {name!r} has {rows} rows, which {heads} heads do not divide.", setting="model"
        )
    return raw.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows, -1)


class SafetensorsCheckpoint:
    """A Hugging Face directory: config.json with one or several safetensors files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.config: dict[str, Any]
        self.generation_config: dict[str, Any]
        self.config, self.generation_config = _configs(directory)
        self._shards: dict[str, Shard] = {}
        self._home: dict[str, Shard] = {}
        for name, file in _weight_map(directory).items():
            self._home[name] = self._shard_with(name, file)
        tie = _tied(self.config)
        self.tied: bool = "lm_head.weight" not in self._home if tie is None else tie

    def _shard_with(self, name: str, file: str) -> Shard:
        if file not in self._shards:
            self._shards[file] = Shard(self._directory / file)
        shard = self._shards[file]
        if name not in shard.entries:
            raise ModelLoadError(
                f"{shard.path} holds no tensor {name!r}, which the index places there.",
                setting="model",
                next_step=f"{AGAIN} If that does not help, the index is of another model.",
            )
        return shard

    def names(self) -> tuple[str, ...]:
        return tuple(self._home)

    def _shard(self, name: str) -> Shard:
        if name not in self._home:
            raise _no_tensor(self._directory, name)
        return self._home[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shard(name).entries[name].shape

    def tensor(
        self, name: str, dtype: torch.dtype, *, round_to: torch.dtype | None = None
    ) -> torch.Tensor:
        return self._shard(name).tensor(name, dtype, round_to)

    def file(self, name: str) -> Path:
        return self._shard(name).path

    def storage(self, name: str) -> str:
        return self._shard(name).entries[name].storage

    def bytes_into(self, name: str, out: torch.Tensor, begin: int = 0) -> None:
        self._shard(name).bytes_into(name, out, begin)

    def extent(self, name: str) -> Extent:
        shard = self._shard(name)
        entry = shard.entries[name]
        return Extent(shard.path, entry.begin, entry.shape)

    def fingerprint(self) -> str:
        import hashlib

        parts = [_fingerprint(self._shards[file]) for file in sorted(self._shards)]
        return hashlib.sha256("".join(parts).encode()).hexdigest()


class ConfigCheckpoint:
    """No weights: what a config.json, or a GGUF file's header, says of a model."""

    def __init__(self, source: ModelSource) -> None:
        self._path = source.path
        self.config: dict[str, Any]
        self.generation_config: dict[str, Any]
        if source.kind == "gguf":
            file = GGUFCheckpoint(source.path)
            self.config, self.generation_config = file.config, file.generation_config
        else:
            self.config, self.generation_config = _configs(source.path)
        self.tied: bool = bool(_tied(self.config))

    def names(self) -> tuple[str, ...]:
        return ()

    def shape(self, name: str) -> tuple[int, ...]:
        raise _no_tensor(self._path, name)

    def tensor(
        self, name: str, dtype: torch.dtype, *, round_to: torch.dtype | None = None
    ) -> torch.Tensor:
        raise _no_tensor(self._path, name)

    def file(self, name: str) -> Path:
        raise _no_tensor(self._path, name)

    def storage(self, name: str) -> str:
        raise _no_tensor(self._path, name)

    def bytes_into(self, name: str, out: torch.Tensor, begin: int = 0) -> None:
        raise _no_tensor(self._path, name)

    def extent(self, name: str) -> Extent:
        raise _no_tensor(self._path, name)

    def fingerprint(self) -> str:
        """Of the config: KV of dummy weights is nobody else's."""
        import hashlib

        said = json.dumps(self.config, sort_keys=True, default=str)
        return hashlib.sha256(f"dummy {said}".encode()).hexdigest()


def _configs(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json, and generation_config.json or nothing."""
    generation = directory / "generation_config.json"
    config = read_json(directory / "config.json")
    return config, read_json(generation) if generation.exists() else {}


def _tied(config: dict[str, Any]) -> bool | None:
    """Whether config.json ties the head to the embedding; None if it does not say."""
    nested = config.get("text_config")
    said = {**(nested if isinstance(nested, dict) else {}), **config}
    tie = said.get("tie_word_embeddings")
    return None if tie is None else bool(tie)


def _fingerprint(shard: Shard) -> str:
    with (
        shard.path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        return file_fingerprint(data, shard.size, shard.header_bytes)


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
    return {name: file for file in files for name in read_header(directory / file)[0]}


def _index_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} holds no 'weight_map'.", setting="model", next_step=AGAIN)
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
