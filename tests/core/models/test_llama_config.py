"""Reading config.json: switches, windows, rotary scaling, and what is refused by name."""

import dataclasses
import math

import pytest
import torch
from deepinfer.api.kv import KVOptions
from deepinfer.errors import ModelLoadError, UnsupportedError
from deepinfer.layers import RopeConfig, rotary_table
from deepinfer.models.llama import LlamaAdapter
from deepinfer.models.registry import adapter_for, architectures_of
from deepinfer.testing.tiny import FAMILIES, tiny_config


def raw(family="llama", **more):
    return tiny_config(family, **more)


def test_defaults_are_those_of_the_family():
    given = raw()
    for name in ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta"):
        del given[name]
    config = LlamaAdapter().config(given)
    assert config.kv_heads == config.heads == 4
    assert config.head_dim == 16
    assert config.eps == 1e-6 and config.rope.theta == 10000.0
    assert config.windows == (None, None, None)
    assert not (config.tied or config.qkv_bias or config.o_bias or config.mlp_bias)
    assert config.max_model_len == config.max_position_embeddings == 512
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.heads = 1


@pytest.mark.parametrize(
    ("family", "more", "windows"),
    [
        ("mistral", {}, (8, 8, 8)),
        ("mistral", {"sliding_window": None}, (None,) * 3),
        ("llama", {"sliding_window": 8}, (None,) * 3),
    ],
)
def test_windows(family, more, windows):
    assert LlamaAdapter().config(raw(family, **more)).windows == windows


@pytest.mark.parametrize(
    ("more", "error", "text"),
    [
        ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act='gelu'"),
        ({"final_logit_softcapping": 30.0}, UnsupportedError, "final_logit_softcapping=30.0"),
        ({"quantization_config": {"quant_method": "awq"}}, UnsupportedError, "quantization_config"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, UnsupportedError, "'dynamic'"),
        ({"rope_scaling": {"type": "longrope"}}, UnsupportedError, "'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ModelLoadError, "low_freq"),
        ({"hidden_size": None}, ModelLoadError, "hidden_size=None"),
        ({"num_hidden_layers": "three"}, ModelLoadError, "num_hidden_layers='three'"),
        ({"num_key_value_heads": 3}, ModelLoadError, "4 attention heads for 3 KV heads"),
    ],
)
def test_refusals_name_the_field(more, error, text):
    with pytest.raises(error) as why:
        LlamaAdapter().config(raw(**more))
    assert text in str(why.value)


def test_layer_types_are_read_or_refused():
    adapter = adapter_for("Qwen3ForCausalLM")
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    sliding = {"use_sliding_window": True, "sliding_window": 6}
    assert adapter.config(raw("qwen3", layer_types=kinds, **sliding)).windows == (None, 6, None)
    with pytest.raises(UnsupportedError, match="linear_attention"):
        adapter.config(raw("qwen3", layer_types=["linear_attention"] * 3))
    with pytest.raises(ModelLoadError, match="no sliding_window"):
        adapter.config(raw("qwen3", layer_types=kinds))


def test_both_spellings_of_rotary_fields_agree():
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = RopeConfig.read({"rope_theta": 5000.0, "rope_scaling": scaling}, 16)
    new = RopeConfig.read({"rope_parameters": {**scaling, "rope_theta": 5000.0}}, 16)
    assert old == new and old.theta == 5000.0
    assert RopeConfig.read({"partial_rotary_factor": 0.5}, 16).dim == 8


def test_the_rotary_table_is_exact_far_out():
    table = rotary_table(RopeConfig(dim=4, theta=100.0), 100_001)
    angle = torch.tensor([100_000.0, 10_000.0], dtype=torch.float64)
    want = torch.cat((angle.cos(), angle.sin())).float()
    assert table.shape == (100_001, 4) and table.dtype == torch.float32
    assert torch.equal(table[100_000], want)


def test_kv_groups_follow_the_windows():
    adapter = LlamaAdapter()
    spec = adapter.kv_spec(adapter.config(raw()), KVOptions(dtype_bytes=4))
    (group,) = spec.groups
    assert (group.kind, group.layers, group.kv_heads, group.head_dim) == ("full", (0, 1, 2), 2, 16)
    assert spec.bytes_per_token == 2 * 2 * 16 * 4 * 3
    (sliding,) = adapter.kv_spec(adapter.config(raw("mistral")), KVOptions(dtype_bytes=2)).groups
    assert (sliding.kind, sliding.window) == ("window", 8)


def test_registry():
    for family in FAMILIES.values():
        (name,) = architectures_of(family)
        assert name in adapter_for(name).architectures
    with pytest.raises(UnsupportedError, match=r"'GPT2LMHeadModel'.*LlamaForCausalLM"):
        adapter_for("GPT2LMHeadModel")
    for broken in ({}, {"architectures": []}, {"architectures": "LlamaForCausalLM"}):
        with pytest.raises(ModelLoadError, match="no architecture"):
            architectures_of(broken)


def test_the_shop_window_loads_every_adapter():
    from deepinfer.api.specs import ModelSpec
    from deepinfer.builtin import deepinfer_provide
    from deepinfer.discovery import import_path

    for spec in deepinfer_provide():
        if isinstance(spec, ModelSpec):
            assert tuple(import_path(spec.load)().architectures) == spec.architectures


JUNK = (-1, 0, 10**30, "x", "5", 1.5, math.nan, True, [], [[1]], {"a": 1}, {})
FIELDS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta",
    "rope_scaling", "rope_parameters", "tie_word_embeddings", "attention_bias", "mlp_bias",
    "layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "mlp_only_layers",
    "decoder_sparse_step", "norm_topk_prob", "num_experts", "num_experts_per_tok",
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_of_the_wrong_kind_are_refused_or_mean_nothing(family):
    """Never another error: what a stranger's config.json says is no reason to stumble."""
    given = raw(family)
    adapter, refused = adapter_for(*architectures_of(given)), 0
    for name in FIELDS:
        for value in JUNK:
            try:
                adapter.config({**given, name: value})
            except (ModelLoadError, UnsupportedError) as why:
                refused += 1
                assert name in str(why) or "rotary" in str(why), (name, value, str(why))
    assert refused > 100


@pytest.mark.parametrize("name", ["num_hidden_layers", "head_dim", "max_position_embeddings"])
def test_a_size_that_no_model_has_is_refused_before_it_is_allocated(name):
    with pytest.raises(ModelLoadError, match=f"{name}=1000000000"):
        LlamaAdapter().config(raw(**{name: 10**9}))
