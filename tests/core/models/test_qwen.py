"""What the Qwen families add to the decoder."""

import pytest
from deepinfer.models.qwen2 import Qwen2Adapter
from deepinfer.models.qwen3 import Qwen3Adapter
from deepinfer.testing.tiny import tiny_config


def raw(family, **more):
    return tiny_config(family, **more)


def test_qwen2_has_biases_on_query_key_and_value_only():
    adapter = Qwen2Adapter()
    config = adapter.config(raw("qwen2"))
    assert config.qkv_bias and not config.o_bias and not config.qk_norm
    names = {s for rule in adapter.weights(config) for s in rule.sources}
    assert "model.layers.0.self_attn.k_proj.bias" in names
    assert "model.layers.0.self_attn.o_proj.bias" not in names


def test_qwen3_norms_heads_and_has_its_own_head_size():
    adapter = Qwen3Adapter()
    given = raw("qwen3")
    del given["head_dim"]
    config = adapter.config(given)
    assert config.head_dim == 128 and config.qk_norm and not config.qkv_bias
    rules = {rule.parameter: rule for rule in adapter.weights(config)}
    assert rules["layers.1.attn.q_norm.weight"].shapes == ((128,),)
    assert rules["layers.1.attn.qkv.weight"].shapes == ((512, 64), (256, 64), (256, 64))


@pytest.mark.parametrize(
    ("more", "windows"),
    [
        ({}, (None, None, None)),
        ({"sliding_window": 8}, (None, None, None)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (None, 8, 8)),
        ({"use_sliding_window": True}, (None, None, None)),  # from layer 28 on
    ],
)
def test_windows_begin_at_a_layer(more, windows):
    assert Qwen2Adapter().config(raw("qwen2", **more)).windows == windows
