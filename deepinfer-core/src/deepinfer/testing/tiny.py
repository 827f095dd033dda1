"""Tiny random checkpoints in the layout of Hugging Face directories, written without its library.

For tests of models, loaders and engines, ours and a plugin's: a few thousand parameters, a real
config.json, safetensors, and a tokenizer.json that knows a few hundred pieces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

VOCAB: Final = 320

_BASE: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA: Final = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
_EXPERTS: Final = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}
FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": _LLAMA,
    "llama-mha": {**_LLAMA, "num_key_value_heads": 4},
    "llama-mqa": {**_LLAMA, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama-bias": {**_LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama3": {
        **_LLAMA,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama-linear": {**_LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama-yarn": {
        **_LLAMA,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "mistral": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 8,
    },
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": _EXPERTS,
}


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """A family's config.json, with fields set on top."""
    return {**_BASE, **FAMILIES[family], **overrides}


def write_tiny_checkpoint(
    path: Path | str,
    family: str = "llama",
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    overrides: Mapping[str, Any] | None = None,
    tokenizer: bool = True,
) -> Path:
    """Write a checkpoint of one of :data:`FAMILIES`; returns its directory.

    Args:
        seed: of the weights; the same seed gives the same file.
        overrides: config.json fields to set on top of the family's.
    """
    from safetensors.torch import save_file

    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    config = {**tiny_config(family, **(overrides or {})), "torch_dtype": str(dtype)[6:]}
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: _fill(name, shape, generator).to(dtype) for name, shape in tensor_shapes(config)
    }
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    if tokenizer:
        write_tiny_tokenizer(directory, config["vocab_size"])
    return directory


def _fill(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Values large enough that heads and experts differ: a mix-up has to show in the logits."""
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.1 * noise
    return noise * (0.1 if name.endswith(".bias") else 2.0 * shape[-1] ** -0.5)


def tensor_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of a checkpoint, by its Hugging Face name."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        yield from _layer_shapes(config, layer, f"model.layers.{layer}")
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def _layer_shapes(
    config: Mapping[str, Any], layer: int, name: str
) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, kind = config["hidden_size"], config["model_type"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    bias = bool(config.get("attention_bias"))
    yield f"{name}.input_layernorm.weight", (hidden,)
    yield f"{name}.post_attention_layernorm.weight", (hidden,)
    for part, rows in (("q", q), ("k", kv), ("v", kv)):
        yield f"{name}.self_attn.{part}_proj.weight", (rows, hidden)
        if bias or kind == "qwen2":
            yield f"{name}.self_attn.{part}_proj.bias", (rows,)
    yield f"{name}.self_attn.o_proj.weight", (hidden, q)
    if bias:
        yield f"{name}.self_attn.o_proj.bias", (hidden,)
    if kind in ("qwen3", "qwen3_moe"):
        yield f"{name}.self_attn.q_norm.weight", (config["head_dim"],)
        yield f"{name}.self_attn.k_norm.weight", (config["head_dim"],)
    step = config.get("decoder_sparse_step", 1)
    sparse = "num_experts" in config and (layer + 1) % step == 0
    if not sparse or layer in config.get("mlp_only_layers", ()):
        yield from _mlp_shapes(f"{name}.mlp", hidden, config["intermediate_size"], config)
        return
    yield f"{name}.mlp.gate.weight", (config["num_experts"], hidden)
    for expert in range(config["num_experts"]):
        inner = config["moe_intermediate_size"]
        yield from _mlp_shapes(f"{name}.mlp.experts.{expert}", hidden, inner, config)


def _mlp_shapes(
    name: str, hidden: int, inner: int, config: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    for part, shape in (
        ("gate", (inner, hidden)),
        ("up", (inner, hidden)),
        ("down", (hidden, inner)),
    ):
        yield f"{name}.{part}_proj.weight", shape
        if config.get("mlp_bias"):
            yield f"{name}.{part}_proj.bias", shape[:1]


def write_tiny_tokenizer(directory: Path, vocab_size: int = VOCAB) -> None:
    """A byte-level BPE tokenizer: three special tokens, 256 bytes, and pairs of letters.

    Any text can be encoded, and every id below ``vocab_size`` stands for something.
    """
    write_byte_level(directory, ("<pad>", "<s>", "</s>"), vocab_size)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def write_byte_level(directory: Path, specials: Sequence[str], vocab_size: int) -> None:
    """The ``tokenizer.json`` of :func:`write_tiny_tokenizer`, with other special tokens first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*specials, *letters])}
    merges = []
    for a, b in _pairs():
        if len(vocab) >= vocab_size:
            break
        merges.append((a, b))
        vocab[a + b] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    tokenizer.save(str(directory / "tokenizer.json"))


def _pairs() -> Iterator[tuple[str, str]]:
    letters = "etaoinshrdlucmfwypvbgk"
    yield from ((a, b) for a in letters for b in letters)
