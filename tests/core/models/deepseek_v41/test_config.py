"""config.json: every field by name; what is unknown, unbuilt or contradictory is refused."""

from __future__ import annotations

import pytest
from deepinfer.errors import DeepInferError, ModelLoadError, UnsupportedError
from deepinfer.models.deepseek_v41.adapter import DeepseekV41Adapter
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.ops.table import EXACT_WEIGHTS
from deepinfer.testing.v41_config import full_width_config, released_config, tiny_v41_config
from deepinfer.testing.v41_tensors import tensors


def read(raw=None, **text):
    raw = raw or released_config()
    raw["text_config"] = {**raw["text_config"], **text}
    return DeepseekV41Config.read(raw)


def test_the_released_schedule():
    """Specification 1.3."""
    config = read()
    assert config.last_source == 20
    assert [config.kv_source(i) for i in (0, 1, 2, 7, 8, 13, 19, 20, 39)] == [
        None, None, 2, 2, 8, 8, 14, 20, 20,
    ]  # fmt: skip
    assert config.publishes(20) == (2048, 8)
    assert config.publishes(14) is None
    assert [config.block_size(i) for i in (2, 14, 20, 24, 36)] == [0, 0, 0, 8, 8]
    assert len(config.ratios) == 40
    assert config.engram.rows == (384006168, 384016682)


@pytest.mark.parametrize(
    "raw",
    [released_config(), tiny_v41_config(), full_width_config(4)],
    ids=["released", "tiny", "four_layers"],
)
def test_rules_read_every_tensor_but_drafts(raw):
    """Of the inventory in specification 8.1, which was written down apart from the rules."""
    stored = {spec.name: tuple(spec.shape) for spec in tensors(raw)}
    adapter = DeepseekV41Adapter()
    rules = list(adapter.weights(adapter.config(raw)))
    read = [pair for r in rules for pair in zip(r.sources, r.shapes, strict=True)]
    assert len(read) == len(dict(read)), "a tensor is read twice"
    assert len({r.parameter for r in rules}) == len(rules)
    left = {name: shape for name, shape in stored.items() if not name.startswith(adapter.unread)}
    assert dict(read) == left


REFUSED = {
    "compress_ratios": [0] * 2 + [4] * 41,
    "num_key_value_heads": 2,
    "hidden_act": "gelu",
    "attention_bias": True,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "n_shared_experts": 2,
    "tie_word_embeddings": True,
    "o_bias": False,
    "candidate_source_layer_id": 14,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_built_is_refused_by_name(name):
    with pytest.raises(UnsupportedError) as why:
        read(**{name: REFUSED[name]})
    assert why.value.setting == name
    assert name in why.value.message


WRONG = {
    "hidden_size": 5121,
    "q_lora_rank": 1290,
    "head_dim": 500,
    "index_head_dim": 40,
    "moe_intermediate_size": 100,
    "engram_head_dim": 250,
    "o_groups": 7,
    "o_lora_rank": 1023.0,
    "qk_rope_head_dim": 256,
    "num_experts_per_tok": 400,
    "kv_source_layer_ids": [8, 2, 14, 20],
    "index_source_layer_ids": [2, 14, 20, 24],
    "candidate_topk_blocks": 60,
    "candidate_source_layer_id": 20.5,
    "engram_layer_ids": [1, 40],
    "engram_num_embeddings": [12],
    "rms_norm_eps": 0,
    "vocab_size": None,
    "sliding_window": True,
    "rope_scaling": None,
    "index_topk": "512",
}


@pytest.mark.parametrize("name", WRONG)
def test_contradictions_are_named(name):
    with pytest.raises(ModelLoadError) as why:
        read(**{name: WRONG[name]})
    assert why.value.setting == name


@pytest.mark.parametrize("count", [-1, "vocab_size", 10**30, 2.0, 0.5, True, None, "1"])
@pytest.mark.parametrize("name", ["image_token_id", "engram_pad_token_id"])
def test_ids_lie_in_the_vocabulary(name, count):
    raw = released_config()
    given = raw["text_config"]["vocab_size"] if count == "vocab_size" else count
    where = raw if name == "image_token_id" else raw["text_config"]
    where[name] = given
    with pytest.raises(ModelLoadError) as why:
        DeepseekV41Config.read(raw)
    assert why.value.setting == name


@pytest.mark.parametrize("given", [0, -1.0, float("inf"), float("nan"), 10**400, None, True, "1"])
@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta", "swiglu_limit"])
def test_reals_are_finite_and_above_0(name, given):
    with pytest.raises(ModelLoadError) as why:
        read(**{name: given})
    assert why.value.setting == name
    assert len(str(why.value)) < 300


def test_exact_weights_are_never_quantised():
    """What a rule keeps in float32, ``quantization="int8"`` may not round either."""
    rules = list(DeepseekV41Adapter().weights(read()))
    exact = [r for r in rules if r.exact and "linear" in r.uses]
    assert any("compressor" in r.parameter for r in exact)
    assert all(EXACT_WEIGHTS.intersection(r.uses) for r in exact)
    routers = [r for r in rules if r.parameter.endswith("moe.router")]
    assert len(routers) == 40 and all("route" in r.uses for r in routers)


def test_sources_have_their_readers_ratio():
    with pytest.raises(ModelLoadError, match="layer 20 no source of its ratio 1"):
        read(kv_source_layer_ids=[2, 8, 14, 21], index_source_layer_ids=[2, 8, 14, 21, 24])


def test_other_parts_are_read_by_name_too():
    for section, field, value in (
        ("quantization_config", "weight_block_size", [128, 128]),
        ("quantization_config", "scale_fmt", "float"),
        ("quantization_config", "ignored_layers", []),
        ("text_config", "rope_scaling", {"rope_type": "linear", "factor": 2}),
    ):
        raw = released_config()
        raw[section] = {**raw[section], field: value}
        with pytest.raises(DeepInferError) as why:
            DeepseekV41Config.read(raw)
        assert field in str(why.value) or "rope_type" in str(why.value)
    with pytest.raises(UnsupportedError, match="adapter_config"):
        DeepseekV41Config.read({**released_config(), "adapter_config": {}})
    with pytest.raises(ModelLoadError, match="text_config"):
        DeepseekV41Config.read({"architectures": ["DeepseekV41ForCausalLM"]})


def test_models_without_engram_or_candidates():
    config = read(engram_layer_ids=[], engram_num_embeddings=[], candidate_source_layer_id=-1)
    assert config.engram is None
    assert config.candidates is None
    assert config.block_size(24) == 0
