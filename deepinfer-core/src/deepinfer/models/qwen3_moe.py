"""Qwen3-MoE: the Qwen3 decoder with experts in most layers.

A layer has experts if its number is not in ``mlp_only_layers`` and (number + 1) is a multiple of
``decoder_sparse_step``; the others have the dense block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer.api.model import WeightRule
from deepinfer.api.parallel import ParallelContext
from deepinfer.errors import ModelLoadError, shown
from deepinfer.layers import MLP, MoE, MoEShape
from deepinfer.models.fields import decoder_fields, flag, required, size
from deepinfer.models.llama import LlamaConfig, LlamaModel
from deepinfer.models.qwen3 import Qwen3Adapter
from deepinfer.models.rules import attention_rules, mlp_rules, outer_rules, rule
from deepinfer.ops.table import OpSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(LlamaConfig):
    """``sparse``: which layers have experts; ``expert_size``: the inner size of one."""

    moe: MoEShape
    expert_size: int
    sparse: tuple[bool, ...]


class Qwen3MoeAdapter(Qwen3Adapter):
    """``Qwen3MoeForCausalLM``."""

    architectures: tuple[str, ...] = ("Qwen3MoeForCausalLM",)
    name = "qwen3_moe"

    def config(self, raw: Mapping[str, Any]) -> Qwen3MoeConfig:
        layers, dense = required(raw, "num_hidden_layers"), raw.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise ModelLoadError(
                f"The model's config.json has mlp_only_layers={shown(dense)}; a list is needed.",
                setting="mlp_only_layers",
            )
        step = size(raw, "decoder_sparse_step", 1)
        bias = flag(raw, "attention_bias")
        moe = MoEShape(
            experts=required(raw, "num_experts"),
            chosen=required(raw, "num_experts_per_tok"),
            renorm=flag(raw, "norm_topk_prob"),
        )
        if moe.chosen > moe.experts:
            raise ModelLoadError(
                f"The model's config.json chooses {moe.chosen} of {moe.experts} experts.",
                setting="num_experts_per_tok",
            )
        return Qwen3MoeConfig(
            **decoder_fields(raw),
            windows=self.windows(raw),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
            moe=moe,
            expert_size=required(raw, "moe_intermediate_size"),
            sparse=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        )

    def build(self, config: LlamaConfig, ops: OpSet, parallel: ParallelContext) -> LlamaModel:
        return LlamaModel(config, ops, parallel, _block)

    def weights(self, config: LlamaConfig) -> Iterator[WeightRule]:
        assert isinstance(config, Qwen3MoeConfig)
        yield from outer_rules(config)
        for index, sparse in enumerate(config.sparse):
            yield from attention_rules(config, index)
            yield from expert_rules(config, index) if sparse else mlp_rules(config, index)


def _block(config: LlamaConfig, index: int, ops: OpSet, parallel: ParallelContext) -> MLP | MoE:
    assert isinstance(config, Qwen3MoeConfig)
    return MoE(config.moe, ops, parallel) if config.sparse[index] else MLP(ops, parallel)


def expert_rules(config: Qwen3MoeConfig, index: int) -> Iterator[WeightRule]:
    """A layer's router and experts: gate and up of an expert side by side, experts stacked."""
    ours, theirs = f"layers.{index}.mlp", f"model.layers.{index}.mlp"
    count, hidden, inner = config.moe.experts, config.hidden_size, config.expert_size
    experts = [f"{theirs}.experts.{e}" for e in range(count)]
    router = [(f"{theirs}.gate.weight", (count, hidden))]
    pairs = [(f"{e}.{n}_proj.weight", (inner, hidden)) for e in experts for n in ("gate", "up")]
    downs = [(f"{e}.down_proj.weight", (hidden, inner)) for e in experts]
    yield rule(f"{ours}.router.weight", router, ("linear", "route"))
    uses = ("moe", "grouped_linear")
    yield rule(f"{ours}.gate_up", pairs, uses, view=(count, 2 * inner, hidden))
    yield rule(f"{ours}.down", downs, uses, view=(count, hidden, inner))
