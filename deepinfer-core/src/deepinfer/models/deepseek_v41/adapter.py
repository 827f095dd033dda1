"""What core must know of DeepSeek-V4.1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from deepinfer.api.kv import KVOptions, KVSpec
from deepinfer.api.model import WeightRule
from deepinfer.api.parallel import ParallelContext
from deepinfer.errors import UnsupportedError
from deepinfer.models.deepseek_v41.cache import kv_spec
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.images import PictureReader, VisionConfig
from deepinfer.models.deepseek_v41.model import DeepseekV41Model
from deepinfer.models.deepseek_v41.rules import UNREAD, text_rules
from deepinfer.models.deepseek_v41.vision import vision_rules
from deepinfer.ops.table import OpSet


class DeepseekV41Adapter:
    """``DeepseekV41ForCausalLM``: its text model, and the tower of checkpoints that see.

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
        if parallel.world.size > 1:
            raise UnsupportedError(
                f"DeepSeek-V4.1 runs on one rank, not on {parallel.world.size}.", setting="model"
            )
        return DeepseekV41Model(config, ops)

    def weights(self, config: DeepseekV41Config) -> Iterator[WeightRule]:
        yield from text_rules(config)
        if config.vision is not None:
            for rule in vision_rules(config.vision, config.hidden_size):
                yield replace(rule, parameter=f"vision.{rule.parameter}")

    def image_reader(self, raw: Mapping[str, Any]) -> PictureReader | None:
        vision = VisionConfig.read(raw)
        return None if vision is None else PictureReader(vision, int(raw["image_token_id"]))
