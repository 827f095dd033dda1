"""Weight rules that decoders share: checkpoint names on the right, our parameters on the left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from deepinfer.api.model import WeightRule

if TYPE_CHECKING:
    from deepinfer.models.llama import LlamaConfig


def outer_rules(config: LlamaConfig) -> Iterator[WeightRule]:
    """Embedding, final norm and head; a tied head is one parameter with two readers."""
    shape = (config.vocab_size, config.hidden_size)
    uses = ("linear", "embedding") if config.tied else ("embedding",)
    yield rule("embed.weight", [("model.embed_tokens.weight", shape)], uses, shard=0)
    yield rule("norm.weight", [("model.norm.weight", shape[1:])], ("rms_norm",))
    if not config.tied:
        yield rule("head.weight", [("lm_head.weight", shape)], ("linear",), shard=0)


def attention_rules(config: LlamaConfig, index: int) -> Iterator[WeightRule]:
    """A layer's norms and attention: query, key and value rows joined."""
    ours, theirs = f"layers.{index}", f"model.layers.{index}"
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden = config.hidden_size
    parts = [(f"{theirs}.self_attn.{n}_proj", rows) for n, rows in (("q", q), ("k", kv), ("v", kv))]
    out = f"{theirs}.self_attn.o_proj"
    norms = [("input_norm", "input_layernorm"), ("post_norm", "post_attention_layernorm")]
    for mine, name in norms:
        yield rule(f"{ours}.{mine}.weight", [(f"{theirs}.{name}.weight", (hidden,))], ("rms_norm",))
    weights = [(f"{name}.weight", (rows, hidden)) for name, rows in parts]
    uses = ("attention_block", "linear")
    yield rule(f"{ours}.attn.qkv.weight", weights, uses, shard=0)
    yield rule(f"{ours}.attn.o.weight", [(f"{out}.weight", (hidden, q))], uses, shard=1)
    if config.qkv_bias:
        biases = [(f"{name}.bias", (rows,)) for name, rows in parts]
        yield rule(f"{ours}.attn.qkv.bias", biases, (), shard=0)
    if config.o_bias:
        yield rule(f"{ours}.attn.o.bias", [(f"{out}.bias", (hidden,))], ())
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            source = [(f"{theirs}.self_attn.{name}.weight", (config.head_dim,))]
            yield rule(f"{ours}.attn.{name}.weight", source, ("rms_norm",))


def mlp_rules(config: LlamaConfig, index: int) -> Iterator[WeightRule]:
    """A layer's feed-forward block: gate and up rows joined."""
    ours, theirs = f"layers.{index}.mlp", f"model.layers.{index}.mlp"
    hidden, inner = config.hidden_size, config.intermediate_size
    pair = [f"{theirs}.gate_proj", f"{theirs}.up_proj"]
    weights = [(f"{name}.weight", (inner, hidden)) for name in pair]
    down = [(f"{theirs}.down_proj.weight", (hidden, inner))]
    uses = ("linear",) if config.mlp_bias else ("mlp_block", "gated_mlp", "linear")
    yield rule(f"{ours}.gate_up.weight", weights, uses, shard=0)
    yield rule(f"{ours}.down.weight", down, uses, shard=1)
    if config.mlp_bias:
        biases = [(f"{name}.bias", (inner,)) for name in pair]
        yield rule(f"{ours}.gate_up.bias", biases, (), shard=0)
        yield rule(f"{ours}.down.bias", [(f"{theirs}.down_proj.bias", (hidden,))], ())


def rule(
    parameter: str,
    sources: Sequence[tuple[str, tuple[int, ...]]],
    uses: tuple[str, ...],
    shard: int | None = None,
    view: tuple[int, ...] | None = None,
) -> WeightRule:
    """A rule from (checkpoint name, shape) pairs, joined along dimension 0."""
    names, shapes = zip(*sources, strict=True)
    return WeightRule(
        parameter=parameter, sources=names, shapes=shapes, uses=uses, shard=shard, view=view
    )
