"""Names and shapes of an EAGLE-3 head's tensors, what reads them, and the table of its ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from deepinfer.api.model import WeightRule
from deepinfer.errors import ModelLoadError
from deepinfer.models.rules import rule
from torch import Tensor

from deepinfer_speculative.eagle3.config import Eagle3Config

if TYPE_CHECKING:
    from deepinfer.models.checkpoint import Checkpoint

D2T: Final = "d2t"
T2D: Final = "t2d"
TABLES: Final = (D2T, T2D)
"""``d2t`` int64[vocab]: target id minus draft id; ``t2d`` bool[V] says the same the other way."""
LAYER: Final = "midlayer"
"""The layer's name; ``layers.0`` in files of speculators."""


def layer_name(names: tuple[str, ...]) -> str:
    """What a checkpoint calls the layer."""
    return "layers.0" if any(name.startswith("layers.0.") for name in names) else LAYER


def weight_rules(config: Eagle3Config, layer: str = LAYER) -> Iterator[WeightRule]:
    """All tensors but the tables. The embedding may be missing, and the head where it drafts every
    id: the target's are used then.
    """
    shape = config.shape
    hidden, width = shape.hidden_size, len(config.taps) * config.target_hidden
    own = rule(
        "embed.weight", [("embed_tokens.weight", (shape.vocab_size, hidden))], ("embedding",)
    )
    yield replace(own, optional=config.target_hidden == hidden)
    head = rule("head.weight", [("lm_head.weight", (config.vocab, hidden))], ("linear",))
    shared = config.vocab == shape.vocab_size and config.target_hidden == hidden
    yield replace(head, optional=shared and not shape.tied)
    yield rule("fc.weight", [("fc.weight", (hidden, width))], ("linear",))
    if config.norm_before_fc:
        yield rule("joined_norm.weight", [("input_norm.weight", (width,))], ("rms_norm",))
    for i in range(len(config.taps) if config.fc_norm else 0):
        size = (config.target_hidden,)
        yield rule(f"state_norms.{i}.weight", [(f"fc_norm.{i}.weight", size)], ("rms_norm",))
    yield rule("norm.weight", [("norm.weight", (hidden,))], ("rms_norm",))
    yield from _layer(config, layer)


def _layer(config: Eagle3Config, name: str) -> Iterator[WeightRule]:
    """Keys and values apart from queries: rows of context have no queries."""
    shape = config.shape
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = [("input_norm", "input_layernorm"), ("hidden_norm", "hidden_norm")]
    for mine, theirs in (*norms, ("post", "post_attention_layernorm")):
        yield rule(f"layer.{mine}.weight", [(f"{name}.{theirs}.weight", (hidden,))], ("rms_norm",))
    at = f"{name}.self_attn"
    pair = [(f"{at}.{n}_proj.weight", (kv, 2 * hidden)) for n in ("k", "v")]
    yield rule("layer.q.weight", [(f"{at}.q_proj.weight", (q, 2 * hidden))], ("linear",))
    yield rule("layer.kv.weight", pair, ("linear",))
    yield rule("layer.o.weight", [(f"{at}.o_proj.weight", (hidden, q))], ("linear",))
    if shape.qk_norm:
        for mine in ("q_norm", "k_norm"):
            source = [(f"{at}.{mine}.weight", (shape.head_dim,))]
            yield rule(f"layer.{mine}.weight", source, ("rms_norm",))
    uses = ("mlp_block", "gated_mlp", "linear")
    two = [(f"{name}.mlp.{n}_proj.weight", (inner, hidden)) for n in ("gate", "up")]
    yield rule("layer.gate_up.weight", two, uses)
    yield rule("layer.down.weight", [(f"{name}.mlp.down_proj.weight", (hidden, inner))], uses)


def read_targets(checkpoint: Checkpoint, config: Eagle3Config) -> Tensor | None:
    """int64[vocab]: the target's id of each draft id; None where they are the same.

    Raises:
        ModelLoadError: there is no table and the vocabularies differ, or it is none.
    """
    whole = config.vocab == config.shape.vocab_size
    if D2T not in checkpoint.names():
        if whole:
            return None
        raise ModelLoadError(
            f"The head has {config.vocab} ids of {config.shape.vocab_size}, and no tensor 'd2t' "
            "that says which.",
            setting="speculative",
        )
    shape, stored = checkpoint.shape(D2T), checkpoint.storage(D2T)
    if shape != (config.vocab,) or stored != "I64":
        raise ModelLoadError(
            f"The head's d2t is {stored} {shape}, expected I64 ({config.vocab},).",
            setting="speculative",
        )
    table = torch.empty(config.vocab, dtype=torch.int64, device="cpu")
    checkpoint.bytes_into(D2T, table.view(torch.uint8))
    ids = table + torch.arange(config.vocab, device="cpu")
    fine = bool((ids >= 0).all() & (ids < config.shape.vocab_size).all())
    if not fine or len(set(ids.tolist())) != len(ids):
        raise ModelLoadError(
            f"The head's d2t does not lead to different ids below {config.shape.vocab_size}.",
            setting="speculative",
        )
    return None if bool((table == 0).all()) and whole else ids
