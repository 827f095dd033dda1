"""Heads that are published as ``pytorch_model.bin``, rewritten as safetensors.

``python -m deepinfer_speculative.eagle3.convert FOLDER OUT``. Nothing in the file is executed:
torch reads tensors out of it and refuses whatever else it holds.
"""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Sequence
from pathlib import Path

import torch
from deepinfer.errors import DeepInferError, ModelLoadError
from torch import Tensor

from deepinfer_speculative.dspark.save import save_draft


def convert(folder: Path, out: Path) -> None:
    """Write ``folder``'s config.json and ``*.bin`` files as a checkpoint into ``out``.

    Raises:
        ModelLoadError: a file is missing, or holds more than named tensors.
    """
    files = sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise ModelLoadError(f"{folder} holds no pytorch_model*.bin.", setting="model")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as why:
        raise ModelLoadError(f"{folder}/config.json cannot be read: {why}.") from why
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _tensors(file)
    save_draft(out, config, tensors)


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as why:
        raise ModelLoadError(f"{file} is no file of tensors: {why}", setting="model") from why
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise ModelLoadError(f"{file} holds more than named tensors.", setting="model")
    # Copies: tensors of one file may share memory, which safetensors does not write.
    return {str(name): tensor.clone() for name, tensor in found.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0 done, 1 failed."""
    parser = argparse.ArgumentParser(
        prog="python -m deepinfer_speculative.eagle3.convert",
        description="Rewrite an EAGLE-3 head's pytorch_model.bin as safetensors.",
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args(argv)
    try:
        convert(given.folder, given.out)
    except DeepInferError as why:
        parser.exit(1, f"error: {why.message}\n")
    print(f"wrote {given.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
