"""What a GGUF file means: its config and its tensors under Hugging Face names.

Where you are: between ``gguf.py`` (bytes) and ``checkpoint.py`` (the interface the models see).
Torch-free. Three quirks are undone here: rms eps is a float32, rope scaling of the llama3 kind is
a tensor of factors, and the rows of q and k are permuted in llama files (interleaved rope).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from deepinfer.errors import ModelLoadError
from deepinfer.models.gguf import GGUFFile, shortest

# general.architecture -> (Hugging Face class, model_type)
ARCHITECTURES: Final[Mapping[str, tuple[str, str]]] = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
}

_TOP: Final[Mapping[str, str]] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS: Final[Mapping[str, str]] = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
# Held as metadata in Hugging Face files, so they are read into the config and not listed.
_FACTORS: Final = "rope_freqs.weight"
_BLOCK: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a Hugging Face tensor lies: a stored tensor, one expert of it, heads to un-permute."""

    stored: str
    shape: tuple[int, ...]
    expert: int | None = None
    heads: int | None = None


def places(file: GGUFFile) -> dict[str, Place]:
    """Every tensor of the file under its Hugging Face name, in file order."""
    arch = architecture(file)
    found: dict[str, Place] = {}
    for stored in file.tensors:
        if stored != _FACTORS:
            found.update(_named(file, arch, stored))
    return found


def _named(file: GGUFFile, arch: str, stored: str) -> Iterator[tuple[str, Place]]:
    shape = file.tensors[stored].shape
    if stored in _TOP:
        yield _TOP[stored], Place(stored, shape)
        return
    match = _BLOCK.fullmatch(stored)
    layer, part, kind = match.groups() if match else ("", "", "")
    prefix = f"model.layers.{layer}."
    if part in _LAYER:
        heads = _permuted_heads(file, part) if arch == "llama" else None
        yield f"{prefix}{_LAYER[part]}.{kind}", Place(stored, shape, heads=heads)
    elif part in _EXPERTS and len(shape) == 3:
        for expert in range(shape[0]):
            name = f"{prefix}mlp.experts.{expert}.{_EXPERTS[part]}.{kind}"
            yield name, Place(stored, shape[1:], expert=expert)
    else:
        raise ModelLoadError(
            f"{file.path} holds tensor {stored!r}, which architecture {arch!r} does not have.",
            setting="model",
        )


def _permuted_heads(file: GGUFFile, part: str) -> int | None:
    keys = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
    if part not in keys:
        return None
    return _whole(file, keys[part], _whole(file, "attention.head_count"))


def architecture(file: GGUFFile) -> str:
    """``general.architecture``, or ModelLoadError naming the known ones."""
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelLoadError(
            f"{file.path} has the architecture {arch!r}; known are {known}.",
            setting="model",
            next_step="Use a model of one of these families, or its safetensors files.",
        )
    parts = file.metadata.get("split.count", 0)
    if parts > 1:
        raise ModelLoadError(
            f"{file.path} is one of {parts} parts of a split GGUF file.",
            setting="model",
            next_step="Merge the parts first (llama-gguf-split --merge).",
        )
    return str(arch)


_REQUIRED: Final = object()


def _get(file: GGUFFile, key: str, default: Any = _REQUIRED) -> Any:
    """A value under the architecture's own prefix; per-layer arrays only if all are equal."""
    full = f"{file.metadata['general.architecture']}.{key}"
    value = file.metadata.get(full, default)
    if value is _REQUIRED:
        raise ModelLoadError(f"{file.path} lacks the metadata key {full!r}.", setting="model")
    if isinstance(value, np.ndarray):
        if len(set(value.tolist())) != 1:
            raise ModelLoadError(
                f"{file.path}: {full!r} differs between layers, which is not supported.",
                setting="model",
            )
        value = value.tolist()[0]
    return value


def _whole(file: GGUFFile, key: str, default: Any = _REQUIRED) -> int:
    value = _get(file, key, default)
    if not isinstance(value, int) or not 0 <= value < 1 << 32:
        raise _bad_value(file, key, value, "a whole number")
    return value


def _number(file: GGUFFile, key: str, default: Any = _REQUIRED) -> float:
    value = _get(file, key, default)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise _bad_value(file, key, value, "a number")
    return value


def _bad_value(file: GGUFFile, key: str, value: Any, wanted: str) -> ModelLoadError:
    arch = file.metadata["general.architecture"]
    return ModelLoadError(
        f"{file.path}: '{arch}.{key}' is {value!r}, expected {wanted}.", setting="model"
    )


def config(file: GGUFFile) -> dict[str, Any]:
    """The metadata as a Hugging Face ``config.json`` would say it."""
    arch = architecture(file)
    name, model_type = ARCHITECTURES[arch]
    embedding = _require(file, "token_embd.weight")
    heads = _whole(file, "attention.head_count")
    if heads == 0:
        raise _bad_value(file, "attention.head_count", 0, "at least one")
    hidden = _whole(file, "embedding_length")
    made: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": _whole(file, "feed_forward_length", 0),
        "num_hidden_layers": _whole(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _whole(file, "attention.head_count_kv", heads),
        "head_dim": _whole(file, "attention.key_length", hidden // heads),
        "max_position_embeddings": _whole(file, "context_length"),
        "rms_norm_eps": _number(file, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _number(file, "rope.freq_base", 10000.0),
        "vocab_size": embedding[0],
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": _dtype(file),
    }
    scaling = _rope_scaling(file, made)
    if scaling is not None:
        made["rope_scaling"] = scaling
    window = _whole(file, "attention.sliding_window", 0)
    if window:
        made["sliding_window"] = window
    made.update(_experts(file, arch))
    return {**made, **_token_ids(file)}


def _dtype(file: GGUFFile) -> str:
    """The dtype that ``auto`` means: the stored one if it is 16 bits wide, else bfloat16."""
    return "float16" if file.tensors["token_embd.weight"].quant == "F16" else "bfloat16"


def _require(file: GGUFFile, name: str) -> tuple[int, ...]:
    if name not in file.tensors:
        raise ModelLoadError(f"{file.path} holds no tensor {name!r}.", setting="model")
    return file.tensors[name].shape


def _experts(file: GGUFFile, arch: str) -> dict[str, Any]:
    count = _whole(file, "expert_count", 0)
    if not count:
        return {}
    if arch != "qwen3moe":
        raise ModelLoadError(
            f"{file.path}: a mixture of {count} experts in architecture {arch!r} is not supported.",
            setting="model",
        )
    return {
        "num_experts": count,
        "num_experts_per_tok": _whole(file, "expert_used_count"),
        "moe_intermediate_size": _whole(file, "expert_feed_forward_length"),
        # qwen3moe always renormalises; older files do not say so.
        "norm_topk_prob": bool(_whole(file, "expert_weights_norm", True)),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _rope_scaling(file: GGUFFile, made: Mapping[str, Any]) -> dict[str, Any] | None:
    if _FACTORS in file.tensors:
        return _llama3_scaling(file, made)
    kind = _get(file, "rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelLoadError(
            f"{file.path}: rope scaling {kind!r} is unknown; known are none, linear, yarn and "
            "llama3 factors.",
            setting="model",
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _number(file, "rope.scaling.factor")}
    original = _whole(file, "rope.scaling.original_context_length", 0)
    if kind == "yarn" and original:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(file: GGUFFile, made: Mapping[str, Any]) -> dict[str, Any]:
    """Find the llama3 parameters whose factors are the stored ones.

    The file holds the divisors of the frequencies. Low and high factor are 1 and 4 in every
    released model; the original length is 8192 in all but conversions of other models.
    """
    factors = file.raw(_FACTORS).view(np.float32).reshape(-1)
    factor = shortest(float(factors.max()))
    for original in (8192, 4096, 2048, 16384, 32768):
        expected = _llama3_factors(made, factor, original)
        if expected.shape == factors.shape and np.allclose(expected, factors, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    raise ModelLoadError(
        f"{file.path}: the rope factors in {_FACTORS!r} follow no known llama3 scaling.",
        setting="model",
    )


def _llama3_factors(made: Mapping[str, Any], factor: float, original: int) -> Any:
    half = int(made["head_dim"]) // 2
    wavelength = 2 * math.pi * made["rope_theta"] ** (np.arange(half) / half)
    smooth = np.clip((original / wavelength - 1.0) / 3.0, 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _token_ids(file: GGUFFile) -> dict[str, Any]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {name: file.token_id(key) for name, key in keys.items()}
    return {name: value for name, value in found.items() if value is not None}


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """Token ids; ``eos_token_id`` is a list where the file names an end of turn as well."""
    made = _token_ids(file)
    ends = [made["eos_token_id"]] if "eos_token_id" in made else []
    for key in ("eot", "eom"):
        extra = file.token_id(key)
        if extra is not None and extra not in ends:
            ends.append(extra)
    if ends:
        made["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return made
