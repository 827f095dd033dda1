"""Qwen2 and Qwen2.5: the Llama decoder with biases on query, key and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer.models.fields import decoder_fields, required, size, windows
from deepinfer.models.llama import LlamaAdapter, LlamaConfig


class Qwen2Adapter(LlamaAdapter):
    """``Qwen2ForCausalLM``."""

    architectures: tuple[str, ...] = ("Qwen2ForCausalLM",)
    name = "qwen2"

    def config(self, raw: Mapping[str, Any]) -> LlamaConfig:
        return LlamaConfig(**decoder_fields(raw), windows=self.windows(raw), qkv_bias=True)

    def windows(self, raw: Mapping[str, Any]) -> tuple[int | None, ...]:
        """Only with ``use_sliding_window``, and only from layer ``max_window_layers`` on."""
        window = size(raw, "sliding_window", 4096) if raw.get("use_sliding_window") else None
        first = size(raw, "max_window_layers", 28, least=0)
        return windows(raw, required(raw, "num_hidden_layers"), window, first)
