"""Names and shapes of a DSpark checkpoint's tensors (spec 1.4), and what reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from deepinfer.api.model import WeightRule
from deepinfer.models.rules import rule

from deepinfer_speculative.dspark.config import DSparkConfig


def weight_rules(config: DSparkConfig) -> Iterator[WeightRule]:
    """All tensors. Embedding and head may be missing: the target's are used then."""
    shape = config.shape
    vocab, hidden = shape.vocab_size, shape.hidden_size
    outer = [("embed", "embed_tokens", "embedding"), ("head", "lm_head", "linear")]
    for mine, theirs, use in outer:
        made = rule(f"{mine}.weight", [(f"{theirs}.weight", (vocab, hidden))], (use,))
        yield replace(made, optional=True)
    yield rule("fc.weight", [("fc.weight", (hidden, len(config.taps) * hidden))], ("linear",))
    for name in ("hidden_norm", "norm"):
        yield rule(f"{name}.weight", [(f"{name}.weight", (hidden,))], ("rms_norm",))
    for index in range(shape.layers):
        yield from _layer(config, index)
    yield from _heads(config)


def _layer(config: DSparkConfig, index: int) -> Iterator[WeightRule]:
    """Keys and values apart from queries: rows of context have no queries."""
    shape, at = config.shape, f"layers.{index}"
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for mine, theirs in (("input_norm", "input_layernorm"), ("post", "post_attention_layernorm")):
        yield rule(f"{at}.{mine}.weight", [(f"{at}.{theirs}.weight", (hidden,))], ("rms_norm",))
    pair = [(f"{at}.self_attn.{n}_proj.weight", (kv, hidden)) for n in ("k", "v")]
    yield rule(f"{at}.q.weight", [(f"{at}.self_attn.q_proj.weight", (q, hidden))], ("linear",))
    yield rule(f"{at}.kv.weight", pair, ("linear",))
    yield rule(f"{at}.o.weight", [(f"{at}.self_attn.o_proj.weight", (hidden, q))], ("linear",))
    if shape.qk_norm:
        for name in ("q_norm", "k_norm"):
            source = [(f"{at}.self_attn.{name}.weight", (shape.head_dim,))]
            yield rule(f"{at}.{name}.weight", source, ("rms_norm",))
    uses = ("mlp_block", "gated_mlp", "linear")
    two = [(f"{at}.mlp.{n}_proj.weight", (inner, hidden)) for n in ("gate", "up")]
    yield rule(f"{at}.gate_up.weight", two, uses)
    yield rule(f"{at}.down.weight", [(f"{at}.mlp.down_proj.weight", (hidden, inner))], uses)


def _heads(config: DSparkConfig) -> Iterator[WeightRule]:
    if config.rank:
        size = (config.shape.vocab_size, config.rank)
        yield rule("w1.weight", [("markov_head.markov_w1.weight", size)], ("embedding",))
        yield rule("w2.weight", [("markov_head.markov_w2.weight", size)], ("linear", "embedding"))
    if config.confident:
        name, width = "confidence_head.proj", config.confidence_width
        # "route": it decides, so it is never quantised; float32 (spec 1.3).
        made = rule("sure.weight", [(f"{name}.weight", (1, width))], ("linear", "route"))
        yield replace(made, exact=True)
        yield replace(rule("sure.bias", [(f"{name}.bias", (1,))], ()), exact=True, optional=True)
