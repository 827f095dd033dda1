"""Tiny EAGLE-3 checkpoints for tests, in the layouts that are published."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from deepinfer_speculative.dspark.save import OF_TARGET, save_draft
from deepinfer_speculative.eagle3.config import read_config
from deepinfer_speculative.eagle3.weights import D2T, LAYER, T2D, weight_rules


def head_config(
    target: Mapping[str, Any],
    *,
    vocab: int,
    layers: tuple[int, ...] | None = None,
    norms: bool = False,
    speculators: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """The config.json of a head for a target with this config.json.

    ``vocab``: ids that it drafts; ``layers``: ``eagle_aux_hidden_state_layer_ids``; ``norms``: on
    query and key heads; ``speculators``: in that library's layout; ``more``: further fields.
    """
    fields = {name: target[name] for name in OF_TARGET if target.get(name) is not None}
    fields |= {"model_type": "qwen3" if norms else "llama", "num_hidden_layers": 1}
    own: dict[str, Any] = {"draft_vocab_size": vocab, "tie_word_embeddings": False, **more}
    ids = {} if layers is None else {"eagle_aux_hidden_state_layer_ids": list(layers)}
    if not speculators:
        nested = {"eagle_config": {"use_aux_hidden_state": True, **ids}} if ids else {}
        return {"architectures": ["LlamaForCausalLMEagle3"], **fields, **own, **nested}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3"},
        "norm_before_residual": False,
        "transformer_layer_config": fields,
        **own,
        **ids,
    }


def shapes_of(
    config: Mapping[str, Any], target: Mapping[str, Any], layer: str = LAYER
) -> dict[str, tuple[int, ...]]:
    """Every tensor but the vocabulary's tables by its name, the embedding left out."""
    shape = SimpleNamespace(
        layers=target["num_hidden_layers"],
        vocab_size=target["vocab_size"],
        hidden_size=target["hidden_size"],
    )
    rules = weight_rules(read_config(config, shape), layer)
    return {
        name: size
        for r in rules
        if not (r.optional and r.parameter == "embed.weight")
        for name, size in zip(r.sources, r.shapes, strict=True)
    }


def vocabulary(ids: Tensor, size: int) -> dict[str, Tensor]:
    """``d2t`` and ``t2d`` of a head that drafts these ids (int64, ascending) of ``size``."""
    table = torch.zeros(size, dtype=torch.bool)
    table[ids] = True
    return {D2T: ids - torch.arange(len(ids)), T2D: table}


def write_random_head(
    folder: Path,
    config: Mapping[str, Any],
    target: Mapping[str, Any],
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """A checkpoint of random values; the same seed gives the same file.

    config, target: the head's and the target's config.json. Where the head drafts fewer ids, they
    are drawn too.
    """
    generator = torch.Generator().manual_seed(seed)
    layer = "layers.0" if "transformer_layer_config" in config else LAYER
    tensors = {}
    for name, shape in shapes_of(config, target, layer).items():
        noise = torch.randn(shape, generator=generator)
        value = 1 + 0.1 * noise if "norm" in name else noise * 2.0 * shape[-1] ** -0.5
        tensors[name] = value.to(dtype)
    vocab, size = config["draft_vocab_size"], target["vocab_size"]
    if vocab != size:
        drawn = torch.randperm(size, generator=generator)[:vocab].sort().values
        tensors |= vocabulary(drawn, size)
    save_draft(folder, config, tensors)
    return folder
