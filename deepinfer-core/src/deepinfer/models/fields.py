"""Reading config.json by name: what is missing or not understood is refused, never guessed.

A field that this version does not know may be harmless (a dropout) or may change every logit.
``NEUTRAL`` lists those that are known to change the mathematics, with the values that do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from deepinfer.api.kv import KVOptions
from deepinfer.errors import ModelLoadError, UnsupportedError
from deepinfer.layers.rotary import RopeConfig

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None, []),
    "use_qk_norm": (None, False),
    "use_parallel_residual": (None, False),
    "clip_qkv": (None,),
    "alibi": (None, False),
    "is_encoder_decoder": (None, False),
    "quantization_config": (None,),
}
_LAYER_TYPES = ("full_attention", "sliding_attention")


def refuse_unknown(raw: Mapping[str, Any]) -> None:
    """Refuse, all at once, fields whose value changes the mathematics in a way not built here."""
    found = [
        f"{name}={raw[name]!r}"
        for name, fine in NEUTRAL.items()
        if name in raw and raw[name] not in fine
    ]
    if found:
        raise UnsupportedError(
            f"The model's config.json asks for {', '.join(found)}, which is not built.",
            setting=found[0].split("=")[0],
        )


def required(raw: Mapping[str, Any], name: str) -> int:
    """A positive size that a config must state."""
    value = raw.get(name)
    if not isinstance(value, int) or value < 1:
        raise ModelLoadError(
            f"The model's config.json has {name}={value!r}; a positive number is needed.",
            setting=name,
        )
    return value


def optional(raw: Mapping[str, Any], name: str, default: Any) -> Any:
    """A field with a default; null counts as absent."""
    value = raw.get(name)
    return default if value is None else value


def windows(
    raw: Mapping[str, Any], layers: int, window: int | None, first: int = 0
) -> tuple[int | None, ...]:
    """The sliding window of every layer: from ``layer_types``, else ``window`` from layer ``first``
    on.
    """
    kinds = raw.get("layer_types")
    if kinds is None:
        return tuple(window if index >= first else None for index in range(layers))
    unknown = sorted(set(kinds) - set(_LAYER_TYPES))
    if unknown or len(kinds) != layers:
        raise UnsupportedError(
            f"The model's layer_types name {', '.join(unknown) or len(kinds)} for {layers} layers; "
            f"{' and '.join(_LAYER_TYPES)} are built.",
            setting="layer_types",
        )
    if window is None and "sliding_attention" in kinds:
        raise ModelLoadError(
            "The model's layer_types ask for sliding_attention, but it has no sliding_window.",
            setting="sliding_window",
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def decoder_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What every decoder of this kind reads from config.json in the same way."""
    refuse_unknown(raw)
    hidden, heads = required(raw, "hidden_size"), required(raw, "num_attention_heads")
    head_dim = optional(raw, "head_dim", hidden // heads)
    kv_heads = optional(raw, "num_key_value_heads", heads)
    length = optional(raw, "max_position_embeddings", 2048)
    if heads % kv_heads:
        raise ModelLoadError(
            f"The model's config.json has {heads} attention heads for {kv_heads} KV heads; "
            "the first must be a multiple of the second.",
            setting="num_key_value_heads",
        )
    return {
        "vocab_size": required(raw, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": required(raw, "intermediate_size"),
        "layers": required(raw, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "eps": float(optional(raw, "rms_norm_eps", 1e-6)),
        "rope": RopeConfig.read(raw, head_dim),
        "max_position_embeddings": length,
        "max_model_len": length,
        "tied": bool(optional(raw, "tie_word_embeddings", False)),
    }


def only_plain_kv(options: KVOptions) -> None:
    """Refuse storage and truncation in a family that keeps keys and values of every row.

    Truncation that comes from the environment, or by default, is left out without a word.
    """
    for name in sorted(options.asked):
        raise UnsupportedError(
            f"{name} has no effect on this model: all its layers run on every row of a prompt.",
            setting=name,
            next_step="Leave it out.",
        )
    if options.cache_dtype != "auto":
        raise UnsupportedError(
            f"kv_cache_dtype={options.cache_dtype!r}: this model stores KV in the engine's dtype.",
            setting="kv_cache_dtype",
            next_step="Leave it at 'auto'.",
        )
