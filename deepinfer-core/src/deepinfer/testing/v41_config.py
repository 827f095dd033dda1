"""config.json files of DeepSeek-V4.1: the released one, a tiny one, and a few layers of real width.

Specification, sections 1 and 12. What follows from the rest of a file (the rows of Engram's tables,
its count of compressed tokens) is filled in by :func:`derived`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from deepinfer.errors import ConfigError
from deepinfer.models.deepseek_v41.engram_hash import EngramShape, bucket_primes, token_map

RELEASED_LAYERS: Final = 40
_RELEASED_TEXT: Final[Mapping[str, Any]] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 129280,
    "hidden_size": 5120,
    "moe_intermediate_size": 2304,
    "num_hidden_layers": RELEASED_LAYERS,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "compress_rope_theta": 160000,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 128,
    "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
    "dspark_num_experts_per_tok": 3,
}
_RELEASED: Final[Mapping[str, Any]] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 129264,
    "text_config": _RELEASED_TEXT,
    "vision_config": {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    },
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
}
_TINY: Final[Mapping[str, Any]] = {
    "image_token_id": 10,
    "text_config": {
        "vocab_size": 512,
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_attention_heads": 4,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_lora_rank": 64,
        "o_groups": 2,
        "max_position_embeddings": 8192,
        "rope_scaling": {"factor": 4, "original_max_position_embeddings": 32},
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "index_n_heads": 4,
        "index_head_dim": 64,
        "index_topk": 8,
        "candidate_topk_blocks": 3,
        "candidate_block_size": 4,
        "engram_vocab_size": 100,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "dspark_block_size": 2,
        "dspark_noise_token_id": 3,
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
    },
    "vision_config": {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_image_tokens": 64,
        "min_pixels": 7056,
    },
}
# Real layers without the 100 GB of each table, and without the rooms beside them.
_FULL_WIDTH: Final[Mapping[str, Any]] = {
    "text_config": {"engram_vocab_size": 10000},
    "vision_config": {"num_hidden_layers": 0},
}


def released_config() -> dict[str, Any]:
    """The released config.json (specification 1.1)."""
    return copy.deepcopy(dict(_RELEASED))


def tiny_v41_config(overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The tiny configuration: six layers, one of each kind, and a draft layer.

    ``overrides`` are set on top, field by field also inside the nested parts. The context is longer
    than the specification's 128 tokens, so that texts have room.
    """
    tiny = _merged(_merged(_RELEASED, {"text_config": schedule(6, drafts=1)}), _TINY)
    return _merged(tiny, overrides or {})


def full_width_config(layers: int, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """``layers`` layers of released width: hidden 5120, 384 experts; Engram tables of 240,000 rows.

    No drafts and no vision. 40 layers have the released schedule.
    """
    shape = {} if layers == RELEASED_LAYERS else schedule(layers, drafts=0)
    wide = _merged(_merged(_RELEASED, {"text_config": shape}), _FULL_WIDTH)
    drafts = {"num_nextn_predict_layers": 0, "compress_ratios": None}
    ratios = wide["text_config"]["compress_ratios"][:layers]
    wide = _merged(wide, {"text_config": {**drafts, "compress_ratios": ratios}})
    return _merged(wide, overrides or {})


def schedule(layers: int, drafts: int) -> dict[str, Any]:
    """Which layer is what, for a model of that many: the released pattern, shrunk.

    A window layer, then as many of ratio 2 as half of the rest, then ratio 1, which begin with the
    candidates and index anew two layers later and every fourth after that. One layer has ratio 2.
    """
    window = 1 if layers > 2 else 0
    pairs = max((layers - window) // 2, 1)
    late = window + pairs
    sources = [window, late] if late < layers else [window]
    again = list(range(late + 2, layers, 4))
    ratios = [0] * window + [2] * pairs + [1] * (layers - late)
    return {
        "num_hidden_layers": layers,
        "compress_ratios": ratios + [0] * drafts,
        "kv_source_layer_ids": sources,
        "index_source_layer_ids": sources + again,
        "candidate_source_layer_id": late if late < layers else -1,
        "engram_layer_ids": list(range(min(sources[-1], 2))),
        "num_nextn_predict_layers": drafts,
        "dspark_target_layer_ids": list(range(max(layers - 2, 0), layers)),
    }


def derived(config: Mapping[str, Any], tokenizer: Path) -> dict[str, Any]:
    """A config with what Engram takes from its other fields and from a ``tokenizer.json``."""
    text = config["text_config"]
    compressed = int(token_map(tokenizer, text["vocab_size"]).max()) + 1
    shape = EngramShape(
        layers=tuple(text["engram_layer_ids"]),
        rows=(),
        max_ngram=text["engram_max_ngram_size"],
        heads=text["engram_n_heads"],
        vocab_size=text["engram_vocab_size"],
        compressed_tokens=compressed,
        pad_token=text["engram_pad_token_id"],
    )
    rows = bucket_primes(shape).flatten(1).sum(1).tolist() if shape.layers else []
    known = {"engram_num_embeddings": rows, "engram_compressed_vocab_size": compressed}
    return _merged(config, {"text_config": known})


def _merged(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """``top`` on ``base``: mappings field by field, all else whole."""
    out = copy.deepcopy(dict(base))
    for name, value in top.items():
        below = out.get(name)
        if not isinstance(below, Mapping):
            out[name] = copy.deepcopy(value)
        elif isinstance(value, Mapping):
            out[name] = _merged(below, value)
        else:
            raise ConfigError(f"{name}={value!r}: a JSON object is needed here.", setting=name)
    return out
