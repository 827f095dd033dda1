"""Llama and Mistral: a decoder described once, in ops. Last stop of the reading tour.

``LlamaAdapter`` tells core what it must know of the family: how to read config.json, how the KV
cache is laid out, which checkpoint tensors become which parameters, and how to build the model.
The Qwen families are this decoder with other switches, or with other feed-forward blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from deepinfer.api.kv import KVGroup, KVOptions, KVSpec
from deepinfer.api.model import DeviceBatch, KVPools, Taps, WeightRule
from deepinfer.api.parallel import ParallelContext
from deepinfer.layers import (
    MLP,
    Attention,
    AttentionShape,
    Linear,
    RMSNorm,
    RopeConfig,
    assign,
    rotary_table,
)
from deepinfer.models.fields import decoder_fields, flag, only_plain_kv, required, size, windows
from deepinfer.models.rules import attention_rules, mlp_rules, outer_rules
from deepinfer.ops.reference.blocks import LayerParams
from deepinfer.ops.table import OpSet

MLPFactory = Callable[["LlamaConfig", int, OpSet, ParallelContext], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes and switches. ``windows``: each layer's sliding window. ``max_model_len``: positions
    that the engine will use (``dataclasses.replace`` it before ``build``).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    max_position_embeddings: int
    max_model_len: int
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


class DecoderLayer:
    """Attention and a feed-forward block, each behind a norm.

    The residual travels beside the rows, so that adding to it and the next norm are one op.
    """

    def __init__(
        self, config: LlamaConfig, index: int, mlp: Any, ops: OpSet, parallel: ParallelContext
    ) -> None:
        shape = AttentionShape(
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            window=config.windows[index],
            norm_eps=config.eps if config.qk_norm else None,
        )
        self.input_norm = RMSNorm(ops, config.eps)
        self.attn = Attention(shape, ops, parallel)
        self.post_norm = RMSNorm(ops, config.eps)
        self.mlp = mlp

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        batch: DeviceBatch,
        kv: tuple[Tensor, Tensor],
        cos_sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.attn.behind(self.input_norm, x, residual, batch, kv, cos_sin)
        y, residual = self.mlp.behind(self.post_norm, x, residual)
        return y, residual

    def tail(
        self,
        x: Tensor,
        residual: Tensor | None,
        batch: DeviceBatch,
        kv: tuple[Tensor, Tensor],
        cos_sin: Tensor,
    ) -> Tensor:
        """The last layer's output [m, H], of the rows that are looked at."""
        x, residual = self.attn.tail_behind(self.input_norm, x, residual, batch, kv, cos_sin)
        if len(x):
            x, residual = self.mlp.behind(self.post_norm, x, residual)
        return x + residual

    def params(self) -> LayerParams | None:
        """The layer as ``decoder_layers`` takes it; None if it is not that, or on several ranks."""
        mlp = self.mlp.params(self.post_norm) if isinstance(self.mlp, MLP) else None
        if mlp is None or self.attn.tp.size > 1:
            return None
        return LayerParams(self.attn.params(self.input_norm), mlp)


class LlamaModel:
    """Embedding, layers, final norm, head."""

    def __init__(
        self, config: LlamaConfig, ops: OpSet, parallel: ParallelContext, mlp: MLPFactory
    ) -> None:
        device = None if ops.context is None else ops.context.device
        self.ops = ops
        self._cuts = {"attention_block", "decoder_layers"} <= ops.of_parts
        self.embed = Linear(ops)
        self.activation_dtype = None if ops.context is None else ops.context.activation_dtype
        self.layers = [
            DecoderLayer(config, index, mlp(config, index, ops, parallel), ops, parallel)
            for index in range(config.layers)
        ]
        self.norm = RMSNorm(ops, config.eps)
        self.head = self.embed if config.tied else Linear(ops)
        self.cos_sin = rotary_table(config.rope, config.max_model_len, device)

    def load(self, parameter: str, value: Any) -> None:
        assign(self, parameter, value)

    def forward(self, batch: DeviceBatch, kv: KVPools, taps: Taps | None = None) -> Tensor:
        x: Tensor = self.ops.embedding(batch.ids, self.embed.weight).to(self.activation_dtype)
        if taps is not None and -1 in taps.layers:
            taps.put(-1, x)
        last = len(self.layers) - 1
        tapped = taps is not None and last in taps.layers
        if batch.tail is None or tapped or not self._cuts:
            x, residual = self._through(last + 1, x, batch, kv, taps)
            return x if residual is None else x + residual
        x, residual = self._through(last, x, batch, kv, taps)
        return self.layers[last].tail(x, residual, batch, kv.layer(last), self.cos_sin)

    def _through(
        self, count: int, x: Tensor, batch: DeviceBatch, kv: KVPools, taps: Taps | None
    ) -> tuple[Tensor, Tensor | None]:
        """Rows and residual behind the first ``count`` layers; no residual: they are joined."""
        plain = self._plain
        if plain is not None:
            run, layers = self.ops.decoder_layers, plain[count]
            if not layers:
                return x, None
            more = () if taps is None else (taps,)
            return run(x, layers, batch, kv, self.cos_sin, *more), None
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers[:count]):
            x, residual = layer(x, residual, batch, kv.layer(index), self.cos_sin)
            if taps is not None and index in taps.layers:
                taps.put(index, x + residual)
        return x, residual

    @cached_property
    def _plain(self) -> dict[int, tuple[LayerParams, ...]] | None:
        """All layers, and all but the last, by their number, if they are one op; asked from the
        first step on, when they are loaded. A backend knows them again by their identity.
        """
        layers = tuple(params for layer in self.layers if (params := layer.params()) is not None)
        count = len(self.layers)
        return {count: layers, count - 1: layers[:-1]} if len(layers) == count else None

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden), torch.float32)


def dense_mlp(config: LlamaConfig, index: int, ops: OpSet, parallel: ParallelContext) -> MLP:
    """The feed-forward block of every layer here."""
    return MLP(ops, parallel)


class LlamaAdapter:
    """``LlamaForCausalLM`` and ``MistralForCausalLM``."""

    architectures: tuple[str, ...] = ("LlamaForCausalLM", "MistralForCausalLM")
    unread: tuple[str, ...] | None = None
    name = "llama"

    def config(self, raw: Mapping[str, Any]) -> LlamaConfig:
        bias = flag(raw, "attention_bias")
        return LlamaConfig(
            **decoder_fields(raw),
            windows=self.windows(raw),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=flag(raw, "mlp_bias"),
        )

    def windows(self, raw: Mapping[str, Any]) -> tuple[int | None, ...]:
        """Mistral's layers all slide, by 4096 where its config is silent; null means none do."""
        mistral = raw.get("model_type") == "mistral"
        absent = raw.get("sliding_window", ...) is None  # null: no window; left out: the usual one
        window = size(raw, "sliding_window", 4096) if mistral and not absent else None
        return windows(raw, required(raw, "num_hidden_layers"), window)

    def kv_spec(self, config: LlamaConfig, options: KVOptions) -> KVSpec:
        """One group for each window; keys and values as they leave the rotation."""
        only_plain_kv(options)
        dtype_bytes = options.dtype_bytes
        row = 2 * config.kv_heads * config.head_dim * dtype_bytes
        groups = []
        for window in dict.fromkeys(config.windows):
            layers = tuple(i for i, w in enumerate(config.windows) if w == window)
            groups.append(
                KVGroup(
                    name="full" if window is None else f"window-{window}",
                    kind="full" if window is None else "window",
                    layers=layers,
                    kv_heads=config.kv_heads,
                    head_dim=config.head_dim,
                    bytes_per_token=row * len(layers),
                    window=window,
                )
            )
        return KVSpec(tuple(groups), f"{self.name}-kv-{dtype_bytes}")

    def build(self, config: LlamaConfig, ops: OpSet, parallel: ParallelContext) -> LlamaModel:
        return LlamaModel(config, ops, parallel, dense_mlp)

    def weights(self, config: LlamaConfig) -> Iterator[WeightRule]:
        yield from outer_rules(config)
        for index in range(config.layers):
            yield from attention_rules(config, index)
            yield from mlp_rules(config, index)
