"""Writing DSpark checkpoints: config.json, shards of safetensors and their index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer_speculative.dspark.config import LLAMA, QWEN3, read_config
from deepinfer_speculative.dspark.weights import weight_rules

OF_TARGET: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
)


def draft_config(
    target: Mapping[str, Any],
    *,
    layers: int,
    block: int,
    taps: tuple[int, ...],
    mask_token: int,
    rank: int,
    norms: bool,
) -> dict[str, Any]:
    """The config.json of a draft for a target with this config.json.

    ``norms``: norms on query and key heads, as Qwen3 has them.
    """
    return {
        **{name: target[name] for name in OF_TARGET if target.get(name) is not None},
        "architectures": [QWEN3 if norms else LLAMA],
        "model_type": "qwen3" if norms else "llama",
        "num_hidden_layers": layers,
        "num_target_layers": target["num_hidden_layers"],
        "block_size": block,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * layers,
        "mask_token_id": mask_token,
        "target_layer_ids": list(taps),
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "markov_rank": rank,
        "markov_head_type": "vanilla",
    }


def save_draft(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], shard: int = 1 << 32
) -> None:
    """Write a checkpoint whose files hold at most ``shard`` bytes of tensors, or one tensor."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    groups: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if groups[-1] and sum(t.nbytes for t in groups[-1].values()) + tensor.nbytes > shard:
            groups.append({})
        groups[-1][name] = tensor.contiguous()
    count = len(groups)
    files = ["model.safetensors"]
    if count > 1:
        files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        where = {name: file for file, group in zip(files, groups, strict=True) for name in group}
        index = {"metadata": {}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    for file, group in zip(files, groups, strict=True):
        save_file(group, str(folder / file), metadata={"format": "pt"})
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    said = {**config, "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


def shapes_of(config: Mapping[str, Any], outer: bool = False) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint by its name; ``outer``: with its own embedding and head."""
    rules = weight_rules(read_config(config))
    return {
        name: shape
        for r in rules
        if outer or not r.parameter.startswith(("embed.", "head."))
        for name, shape in zip(r.sources, r.shapes, strict=True)
    }


def write_random_draft(
    folder: Path,
    config: Mapping[str, Any],
    seed: int = 0,
    *,
    outer: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """A checkpoint of random values for tests; the same seed gives the same file."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes_of(config, outer).items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            tensors[name] = (1 + 0.1 * noise).to(dtype)
        else:
            tensors[name] = (noise * 2.0 * shape[-1] ** -0.5).to(dtype)
    save_draft(folder, config, tensors)
    return folder
