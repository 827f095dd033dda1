"""Which checkpoint tensors become which parameters of the text model. Specification 8.1.

Pairs that read the same rows are joined: (wq_a, wkv), (w1, w3), (compressor wkv, wgate). All their
heights are multiples of 32, so FP8 tiles stay whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from deepinfer.api.model import WeightRule
from deepinfer.models.deepseek_v41.config import DeepseekV41Config

UNREAD = ("mtp.",)
"""Beginnings of checkpoint names that the model leaves unread: drafting."""

Source = tuple[str, tuple[int, ...]]
_BLOCK = "latent_attention_block"
_SCALED = (_BLOCK, "scaled_linear", "linear")
_DENSE = (_BLOCK, "linear")
_MOE = "scaled_moe_block"


def text_rules(config: DeepseekV41Config) -> Iterator[WeightRule]:
    """Every parameter of the text model."""
    outer = (config.vocab_size, config.hidden_size)
    yield _rule("embed.weight", [("embed.weight", outer)], ("embedding",), shard=0)
    yield _rule("norm.weight", [("norm.weight", outer[1:])], ("rms_norm",))
    yield _rule("head.weight", [("head.weight", outer)], ("linear",), shard=0)
    for layer in range(config.layers):
        yield from _hyper_rules(config, layer)
        yield from _attention_rules(config, layer)
        yield from _moe_rules(config, layer)
        if config.engram is not None and layer in config.engram.layers:
            yield from _engram_rules(config, layer)


def _hyper_rules(config: DeepseekV41Config, layer: int) -> Iterator[WeightRule]:
    n, hidden = config.streams, config.hidden_size
    mixes = (2 + n) * n
    for part in ("attn", "ffn"):
        ours, theirs = f"layers.{layer}.{part}_hyper", f"layers.{layer}.hc_{part}"
        fn = [(f"{theirs}_fn", (mixes, n * hidden))]
        yield _rule(f"{ours}.fn", fn, ("hyper_open", "hyper_mix", "linear"), exact=True)
        yield _rule(f"{ours}.base", [(f"{theirs}_base", (mixes,))], (), exact=True)
        yield _rule(f"{ours}.scale", [(f"{theirs}_scale", (3,))], (), exact=True)
        norm = [(f"layers.{layer}.{part}_norm.weight", (hidden,))]
        yield _rule(f"{ours}.norm", norm, ("hyper_open", "rms_norm"))


def _attention_rules(config: DeepseekV41Config, layer: int) -> Iterator[WeightRule]:
    name = f"layers.{layer}.attn"
    hidden, lora, wide = config.hidden_size, config.q_lora, config.heads * config.head_dim
    low = config.o_groups * config.o_lora
    group = wide // config.o_groups
    latent = (config.head_dim, hidden)
    pair = [(f"{name}.wq_a.weight", (lora, hidden)), (f"{name}.wkv.weight", latent)]
    yield _rule(f"{name}.q_kv", pair, _SCALED, stored="fp8")
    yield _rule(f"{name}.q_norm", [(f"{name}.q_norm.weight", (lora,))], (_BLOCK, "rms_norm"))
    norm = [(f"{name}.kv_norm.weight", (config.head_dim,))]
    yield _rule(f"{name}.kv_norm", norm, (_BLOCK, "rms_norm"))
    yield _rule(
        f"{name}.q", [(f"{name}.wq_b.weight", (wide, lora))], _SCALED, stored="fp8", shard=0
    )
    out_a = [(f"{name}.wo_a.weight", (low, group))]
    view = (config.o_groups, config.o_lora, group)
    uses = (_BLOCK, "grouped_linear")
    yield _rule(f"{name}.out_a", out_a, uses, stored="fp8", view=view, shard=0)
    out_b = [(f"{name}.wo_b.weight", (hidden, low))]
    yield _rule(f"{name}.out_b", out_b, _SCALED, stored="fp8", shard=1)
    yield _rule(f"{name}.sink", [(f"{name}.attn_sink", (config.heads,))], (), exact=True)
    if layer in config.kv_sources:
        yield from _compressor_rules(config, layer)
    if layer in config.index_sources:
        yield from _indexer_rules(config, layer)


def _compressor_rules(config: DeepseekV41Config, layer: int) -> Iterator[WeightRule]:
    name = f"layers.{layer}.attn.compressor"
    size, index = config.head_dim, config.index_dim
    parts = ("wkv",) if config.ratios[layer] == 1 else ("wkv", "wgate")
    rows = [(f"{name}.{part}.weight", (size, config.hidden_size)) for part in parts]
    pooled = len(parts) == 2
    uses = (_BLOCK, "compress", "linear") if pooled else _DENSE
    yield _rule(f"{name}.kv", rows, uses, exact=pooled)
    yield _rule(f"{name}.norm", [(f"{name}.norm.weight", (size,))], (_BLOCK, "rms_norm"))
    theirs = f"layers.{layer}.attn.indexer"
    yield _rule(f"{name}.key", [(f"{theirs}.wk.weight", (index, size))], _DENSE)
    norm = [(f"{theirs}.k_norm.weight", (index,))]
    yield _rule(f"{name}.key_norm", norm, (_BLOCK, "rms_norm"))


def _indexer_rules(config: DeepseekV41Config, layer: int) -> Iterator[WeightRule]:
    name = f"layers.{layer}.attn.indexer"
    rows = config.index_heads * config.index_dim
    query = [(f"{name}.wq_b.weight", (rows, config.q_lora))]
    yield _rule(f"{name}.q", query, _SCALED, stored="fp8")
    weights = [(f"{name}.weights_proj.weight", (config.index_heads, config.hidden_size))]
    yield _rule(f"{name}.weights", weights, _DENSE)


def _moe_rules(config: DeepseekV41Config, layer: int) -> Iterator[WeightRule]:
    ours, theirs = f"layers.{layer}.moe", f"layers.{layer}.ffn"
    count, hidden, inner = config.experts, config.hidden_size, config.expert_size
    router = [(f"{theirs}.gate.weight", (count, hidden))]
    yield _rule(f"{ours}.router", router, (_MOE, "linear", "route"))
    yield _rule(f"{ours}.bias", [(f"{theirs}.gate.bias", (count,))], (), exact=True)
    if config.vision is not None:
        image_bias = [(f"{theirs}.gate.bias_vl", (count,))]
        yield _rule(f"{ours}.image_bias", image_bias, (), exact=True)
    experts = [f"{theirs}.experts.{e}" for e in range(count)]
    pairs = [(f"{e}.{w}.weight", (inner, hidden)) for e in experts for w in ("w1", "w3")]
    downs = [(f"{e}.w2.weight", (hidden, inner)) for e in experts]
    uses = (_MOE, "scaled_moe", "grouped_scaled_linear", "grouped_linear")
    view = (count, 2 * inner, hidden)
    yield _rule(f"{ours}.gate_up", pairs, uses, stored="fp4", view=view)
    yield _rule(f"{ours}.down", downs, uses, stored="fp4", view=(count, hidden, inner))
    shared = f"{theirs}.shared_experts"
    both = [(f"{shared}.{w}.weight", (inner, hidden)) for w in ("w1", "w3")]
    dense = (_MOE, "scaled_linear", "linear")
    yield _rule(f"{ours}.shared_gate_up", both, dense, stored="fp8", shard=0)
    down = [(f"{shared}.w2.weight", (hidden, inner))]
    yield _rule(f"{ours}.shared_down", down, dense, stored="fp8", shard=1)


def _engram_rules(config: DeepseekV41Config, layer: int) -> Iterator[WeightRule]:
    name, shape, hidden = f"layers.{layer}.engram", config.engram, config.hidden_size
    assert shape is not None
    rows = shape.rows[shape.layers.index(layer)]
    table = [(f"{name}.embed.weight", (rows, config.engram_width))]
    yield _rule(f"{name}.table", table, (), stored="table")
    both = ((config.streams + 1) * hidden, shape.columns * config.engram_width)
    uses = ("engram_block", "scaled_linear", "linear")
    yield _rule(f"{name}.kv", [(f"{name}.wkv.weight", both)], uses, stored="fp8")
    for part in ("q_weight", "k_weight"):
        yield _rule(f"{name}.{part}", [(f"{name}.{part}", (config.streams, hidden))], ())


def _rule(
    parameter: str,
    sources: Sequence[Source],
    uses: tuple[str, ...],
    *,
    stored: Literal["fp8", "fp4", "table"] | None = None,
    view: tuple[int, ...] | None = None,
    shard: int | None = None,
    exact: bool = False,
) -> WeightRule:
    names, shapes = zip(*sources, strict=True)
    return WeightRule(
        parameter=parameter,
        sources=names,
        shapes=shapes,
        uses=uses,
        stored=stored,
        view=view,
        shard=shard,
        exact=exact,
    )
