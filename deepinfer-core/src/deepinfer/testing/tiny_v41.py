"""Random DeepSeek-V4.1 checkpoints: tiny ones in files, layers of real width made on a device.

For tests, backend authors and benches. :func:`write_checkpoint` writes the released format, drafts
and vision with it, holding one tensor at a time; ``deepinfer make-tiny deepseek-v41`` is its door.
A layer of real width has 7 GB, so :func:`full_width_layer` makes one where it is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from deepinfer.errors import ConfigError, UnsupportedError
from deepinfer.models.registry import adapter_for
from deepinfer.models.shards import Extent
from deepinfer.models.weights import join
from deepinfer.ops.lowbit import BlockScaled
from deepinfer.testing.tiny import write_byte_level
from deepinfer.testing.v41_config import derived, full_width_config, tiny_v41_config
from deepinfer.testing.v41_tensors import DTYPES, TensorSpec, draw, tensors

__all__ = [
    "GeneratedCheckpoint",
    "full_width_config",
    "full_width_layer",
    "tiny_v41_config",
    "write_checkpoint",
    "write_tiny_v41",
]

# The first three have their released ids; the draft's noise token is 3 and the image token 10.
SPECIALS: Final = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜deepseek_image｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    "<｜fim▁hole｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁end｜>",
)
_TOKENIZER: Final[Mapping[str, Any]] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": SPECIALS[0],
    "eos_token": SPECIALS[1],
    "pad_token": SPECIALS[2],
    "add_bos_token": False,
    "add_eos_token": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 1048576,
}


def write_tiny_v41(
    path: Path | str,
    seed: int = 0,
    *,
    overrides: Mapping[str, Any] | None = None,
    shards: int = 1,
) -> Path:
    """Write a checkpoint of :func:`tiny_v41_config` with ``overrides``; returns its directory."""
    return write_checkpoint(path, tiny_v41_config(overrides), seed, shards=shards)


def write_checkpoint(
    path: Path | str,
    config: Mapping[str, Any],
    seed: int = 0,
    *,
    shards: int = 1,
    device: torch.device | str = "cpu",
) -> Path:
    """Write config.json, tokenizer, ``shards`` files of weights and their index.

    Args:
        config: as config.json; what Engram derives from it and the tokenizer is filled in.
        seed: of the weights; the same seed and kind of device give the same files.
        shards: how many files, of about equal size; the Engram tables come last, as released.
        device: where the values are drawn.
    """
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    config = write_config(directory, config)
    specs = sorted(tensors(config), key=lambda spec: spec.storage == "table")
    files = _split(specs, shards)
    weight_map: dict[str, str] = {}
    for number, part in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        with (directory / name).open("wb") as file:
            _write_shard(file, part, seed, device)
        weight_map |= {stored: name for spec in part for stored, _, _ in spec.stored()}
    total = sum(spec.nbytes for spec in specs)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return directory


def write_config(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Write tokenizer and config.json; returns the latter with the derived fields."""
    check_config(config)
    write_byte_level(directory, SPECIALS, min(config["text_config"]["vocab_size"], 512))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(_TOKENIZER, indent=1, ensure_ascii=False), "utf-8"
    )
    whole = derived(config, directory / "tokenizer.json")
    (directory / "config.json").write_text(json.dumps(whole, indent=1))
    return whole


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse by name what is no configuration of the family; derived fields are not looked at.

    Raises:
        DeepInferError: what the model refuses, or a field of drafts or vision that is no size.
    """
    text = config["text_config"]
    tables = text.get("engram_layer_ids")
    rows = [1] * len(tables) if isinstance(tables, list) else []
    filled = {**config, "text_config": {**text, "engram_num_embeddings": rows}}
    adapter = adapter_for(config["architectures"][0])
    adapter.config(filled)
    try:
        size_of(config)
    except (TypeError, ValueError, KeyError, IndexError) as why:
        raise ConfigError(f"The configuration describes no checkpoint: {why!r}.") from why


def size_of(config: Mapping[str, Any]) -> int:
    """Bytes of weights that a checkpoint of this config has, without Engram tables."""
    text = {**config["text_config"]}
    text["engram_num_embeddings"] = [0] * len(text["engram_layer_ids"])
    return sum(spec.nbytes for spec in tensors({**config, "text_config": text}))


def _split(specs: Sequence[TensorSpec], count: int) -> list[list[TensorSpec]]:
    """Runs of about equal bytes; each has at least one tensor."""
    if not 1 <= count <= len(specs):
        raise UnsupportedError(
            f"shards={count}: this checkpoint can be split in 1 to {len(specs)} files.",
            setting="shards",
        )
    files: list[list[TensorSpec]] = [[] for _ in range(count)]
    total, before = sum(spec.nbytes for spec in specs), 0
    for number, spec in enumerate(specs):
        wanted = before * count // total
        # No file stays empty: neither before this tensor nor for want of tensors behind it.
        used = sum(map(bool, files))
        least = max(count - (len(specs) - number), 0)
        files[max(min(wanted, used), least)].append(spec)
        before += spec.nbytes
    return files


def _write_shard(
    file: BinaryIO, specs: Sequence[TensorSpec], seed: int, device: torch.device | str
) -> None:
    """The safetensors format: a header with each tensor's place, then their bytes."""
    # Wide types first, so that every tensor lies aligned to its own size.
    order = sorted(specs, key=lambda spec: -next(DTYPES[k].itemsize for *_, k in spec.stored()))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in order:
        for name, shape, kind in spec.stored():
            begin, end = end, end + math.prod(shape) * DTYPES[kind].itemsize
            header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for spec in order:
        for tensor in draw(spec, seed, device):
            flat: Any = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
            file.write(memoryview(flat))


class GeneratedCheckpoint:
    """A checkpoint that lies nowhere: every tensor is drawn when it is asked for.

    It gives what a checkpoint written with the same config, seed and kind of device would; tensors
    lie on ``device``. Engram tables, which the engine maps from files, it does not have.
    """

    tied = False

    def __init__(self, config: Mapping[str, Any], seed: int, device: torch.device | str) -> None:
        self.config: dict[str, Any] = dict(config)
        self.generation_config: dict[str, Any] = {}
        self._seed, self._device = seed, device
        self._specs: dict[str, tuple[TensorSpec, int]] = {
            name: (spec, part)
            for spec in tensors(config)
            if spec.storage != "table"
            for part, (name, _, _) in enumerate(spec.stored())
        }
        self._drawn: tuple[str, list[Tensor]] = ("", [])

    def names(self) -> tuple[str, ...]:
        return tuple(self._specs)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name)[1]

    def storage(self, name: str) -> str:
        return self._stored(name)[2]

    def file(self, name: str) -> Path:
        return Path("generated")

    def tensor(
        self, name: str, dtype: torch.dtype, *, round_to: torch.dtype | None = None
    ) -> Tensor:
        drawn = self._draw(name)
        return drawn.to(round_to or drawn.dtype).to(dtype)

    def bytes_into(self, name: str, out: Tensor, begin: int = 0) -> None:
        drawn = self._draw(name).view(torch.uint8).view(-1)
        out.copy_(drawn[begin : begin + out.numel()].view_as(out))

    def extent(self, name: str) -> Extent:
        raise UnsupportedError(f"{name!r} lies in no file.", setting="model")

    def fingerprint(self) -> str:
        return f"generated-{self._seed}"

    def _stored(self, name: str) -> tuple[str, tuple[int, ...], str]:
        spec, part = self._specs[name]
        return list(spec.stored())[part]

    def _draw(self, name: str) -> Tensor:
        """A weight's codes and scales are drawn together; the pair is kept until the next."""
        spec, part = self._specs[name]
        if self._drawn[0] != spec.name:
            self._drawn = (spec.name, draw(spec, self._seed, self._device))
        return self._drawn[1][part]


def full_width_layer(
    config: Mapping[str, Any],
    layer: int,
    device: torch.device | str,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Tensor | BlockScaled]:
    """A layer's parameters as the loader gives them with weights kept as stored, made on a device.

    Args:
        config: a whole config.json, such as :func:`full_width_config` with :func:`write_config`.
        dtype: of what is not low-bit (nor kept in float32).

    Returns:
        Parameters by the names in the model's weight rules, without ``layers.N.``; Engram's table
        is left out, since it lies in host memory.
    """
    checkpoint = GeneratedCheckpoint(config, seed, device)
    return dict(_layer(checkpoint, config, f"layers.{layer}.", dtype, torch.device(device)))


def _layer(
    checkpoint: GeneratedCheckpoint,
    config: Mapping[str, Any],
    prefix: str,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[str, Tensor | BlockScaled]]:
    adapter = adapter_for(config["architectures"][0])
    for rule in adapter.weights(adapter.config(config)):
        if rule.parameter.startswith(prefix) and rule.stored != "table":
            joined = join(rule, checkpoint, dtype, dequantize=False, device=device)
            assert isinstance(joined, Tensor | BlockScaled)
            yield rule.parameter.removeprefix(prefix), joined
