"""What core must know of DeepSeek-V4.1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deepinfer.api.kv import KVOptions, KVSpec
from deepinfer.api.model import WeightRule
from deepinfer.api.parallel import ParallelContext
from deepinfer.models.deepseek_v41.cache import kv_spec
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.model import DeepseekV41Model
from deepinfer.models.deepseek_v41.rules import UNREAD, text_rules
from deepinfer.ops.table import OpSet


class DeepseekV41Adapter:
    """``DeepseekV41ForCausalLM``: its text model.

    Attributes:
        unread: beginnings of checkpoint names that may stay unread; any other is an error.
    """

    architectures: tuple[str, ...] = ("DeepseekV41ForCausalLM",)
    unread: tuple[str, ...] | None = UNREAD

    def config(self, raw: Mapping[str, Any]) -> DeepseekV41Config:
        return DeepseekV41Config.read(raw)

    def kv_spec(self, config: DeepseekV41Config, options: KVOptions) -> KVSpec:
        return kv_spec(config, options)

    def build(
        self, config: DeepseekV41Config, ops: OpSet, parallel: ParallelContext
    ) -> DeepseekV41Model:
        return DeepseekV41Model(config, ops)

    def weights(self, config: DeepseekV41Config) -> Iterator[WeightRule]:
        return text_rules(config)
