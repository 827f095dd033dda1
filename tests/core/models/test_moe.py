"""Which layers have experts, how their weights are joined, and what is refused."""

import pytest
import torch
from deepinfer.errors import ModelLoadError
from deepinfer.models.checkpoint import open_checkpoint
from deepinfer.models.qwen3_moe import Qwen3MoeAdapter
from deepinfer.models.source import resolve
from deepinfer.models.weights import join
from deepinfer.testing.tiny import tiny_config, write_tiny_checkpoint


def raw(**more):
    return tiny_config("qwen3_moe", **more)


@pytest.mark.parametrize(
    ("more", "sparse"),
    [
        ({}, (True, False, True)),
        ({"mlp_only_layers": []}, (True, True, True)),
        ({"mlp_only_layers": None, "decoder_sparse_step": 2}, (False, True, False)),
    ],
)
def test_sparse_layers(more, sparse):
    assert Qwen3MoeAdapter().config(raw(**more)).sparse == sparse


def test_shares_sum_to_one_only_if_the_config_says_so():
    adapter, silent = Qwen3MoeAdapter(), raw()
    del silent["norm_topk_prob"]
    assert adapter.config(raw()).moe.renorm
    assert not adapter.config(silent).moe.renorm


def test_more_choices_than_experts_are_refused():
    with pytest.raises(ModelLoadError, match="9 of 8 experts"):
        Qwen3MoeAdapter().config(raw(num_experts_per_tok=9))


def test_experts_keep_gate_and_up_together(tmp_path):
    checkpoint = open_checkpoint(resolve(str(write_tiny_checkpoint(tmp_path, "qwen3_moe"))))
    adapter = Qwen3MoeAdapter()
    rules = {r.parameter: r for r in adapter.weights(adapter.config(checkpoint.config))}
    fused = join(rules["layers.0.mlp.gate_up"], checkpoint, torch.float32, None)
    assert fused.shape == (8, 96, 64)
    for expert in (0, 7):
        for part, rows in (("gate", slice(0, 48)), ("up", slice(48, 96))):
            name = f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"
            assert torch.equal(fused[expert, rows], checkpoint.tensor(name, torch.float32))
    assert rules["layers.0.mlp.router.weight"].uses == ("linear", "route")
    assert "layers.1.mlp.router.weight" not in rules
