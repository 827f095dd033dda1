"""Qwen3, dense: Qwen2 without biases, with a norm on every query and key head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer.models.fields import decoder_fields, flag, size
from deepinfer.models.llama import LlamaConfig
from deepinfer.models.qwen2 import Qwen2Adapter


class Qwen3Adapter(Qwen2Adapter):
    """``Qwen3ForCausalLM``."""

    architectures: tuple[str, ...] = ("Qwen3ForCausalLM",)
    name = "qwen3"

    def config(self, raw: Mapping[str, Any]) -> LlamaConfig:
        raw = {**raw, "head_dim": size(raw, "head_dim", 128)}
        bias = flag(raw, "attention_bias")
        return LlamaConfig(
            **decoder_fields(raw),
            windows=self.windows(raw),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
        )
