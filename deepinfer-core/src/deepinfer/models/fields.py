"""Reading config.json by name: what is missing or not understood is refused, never guessed.

A field that this version does not know may be harmless (a dropout) or may change every logit.
``NEUTRAL`` lists those that are known to change the mathematics, with the values that do not.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

from deepinfer.api.kv import KVOptions
from deepinfer.errors import ModelLoadError, UnsupportedError, shown
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
_MOST: Final = 2**28
"""No size of a model is beyond: what is would be allocated before anything else is looked at."""
_MOST_LAYERS: Final = 2**16


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
    return _whole(name, raw.get(name), 1)


def size(raw: Mapping[str, Any], name: str, default: int, least: int = 1) -> int:
    """A size with a default, ``least`` or more; null counts as absent."""
    return _whole(name, optional(raw, name, default), least)


def real(raw: Mapping[str, Any], name: str, default: float) -> float:
    """A number from 0 on with a default; null counts as absent."""
    value = optional(raw, name, default)
    fine = isinstance(value, int | float) and not isinstance(value, bool)
    if not fine or not 0 <= value <= sys.float_info.max:
        raise _wrong(name, value, "a number, 0 or more,")
    return float(value)


def flag(raw: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A switch with a default; null counts as absent."""
    value = optional(raw, name, default)
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def layer_kinds(raw: Mapping[str, Any]) -> list[str] | None:
    """``layer_types``: a text for each layer; None where it is absent."""
    kinds = raw.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(type(k) is str for k in kinds)):
        raise _wrong("layer_types", kinds, "a list of texts")
    return kinds


def _whole(name: str, value: Any, least: int) -> int:
    most = _MOST_LAYERS if name == "num_hidden_layers" else _MOST
    if type(value) is not int or not least <= value <= most:
        kind = "a positive number" if least else "a number, 0 or more,"
        over = type(value) is int and value > most
        raise _wrong(name, value, f"{kind} up to {most}" if over else kind)
    return value


def _wrong(name: str, value: Any, expected: str) -> ModelLoadError:
    return ModelLoadError(
        f"The model's config.json has {name}={shown(value)}; {expected} is needed.", setting=name
    )


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
    kinds = layer_kinds(raw)
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
    """What every decoder of this kind reads from config.json in the same way.

    Raises:
        UnsupportedError: a field changes the mathematics in a way that is not built.
        ModelLoadError: a field is missing, of another type or out of every range.
    """
    refuse_unknown(raw)
    hidden, heads = required(raw, "hidden_size"), required(raw, "num_attention_heads")
    head_dim = size(raw, "head_dim", hidden // heads)
    kv_heads = size(raw, "num_key_value_heads", heads)
    length = size(raw, "max_position_embeddings", 2048)
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
        "eps": real(raw, "rms_norm_eps", 1e-6),
        "rope": RopeConfig.read(raw, head_dim),
        "max_position_embeddings": length,
        "max_model_len": length,
        "tied": flag(raw, "tie_word_embeddings"),
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
