"""config.json of an EAGLE-3 head: flat, or as speculators has it; what is not built is refused.

Flat files (the authors', SpecForge's, AngelSlim's) describe the head's one layer as if it were a
model; speculators nests that under ``transformer_layer_config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from deepinfer.errors import ModelLoadError, UnsupportedError
from deepinfer.models.fields import decoder_fields, flag, required, size
from deepinfer.models.llama import LlamaConfig

from deepinfer_speculative.fields import refuse, refuse_target

_IDS: Final = "eagle_aux_hidden_state_layer_ids"
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "bias": (None, False),
    "is_causal": (None, True),
    "pretraining_tp": (None, 1),
    "model_type": (None, "llama", "qwen3", "eagle3"),
    "use_aux_hidden_state": (None, True),
    "use_input_layernorm_in_first_layer": (None, True),
    "use_last_layernorm": (None, True),
    "use_mtp_layernorm": (None, False),
    "next_layer_regular": (None, True),
    "parallel_draft_step": (None, 1),
    "parallel_draft_heads_num_layers": (None, 0),
}
_KNOWN: Final = frozenset(
    {
        _IDS,
        "draft_vocab_size",
        "eagle_config",
        "embed_requires_grad",
        "fc_norm",
        "norm_before_fc",
        "norm_before_residual",
        "norm_output",
    }
)
_PREFIXES: Final = ("draft_", "eagle", "embed_", "fc_", "mask_", "norm_", "parallel", "truncated_")
_NESTED: Final = ("eagle_config", "transformer_layer_config", "speculators_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """A head's sizes. ``shape``: its layer's, with the target's vocabulary. ``vocab``: ids that it
    can draft; ``taps``: target layers whose output it reads, ascending (−1: the embedding's);
    ``target_hidden``: the target's width. ``norm_before_fc``: a norm over all that it reads;
    ``fc_norm``: one over the rows of each layer; ``norm_before_residual``: the residual begins
    behind the norm of hidden states; ``norm_output``: the next draft reads rows behind the final
    norm.
    """

    shape: LlamaConfig
    vocab: int
    taps: tuple[int, ...]
    target_hidden: int
    norm_before_fc: bool
    fc_norm: bool
    norm_before_residual: bool
    norm_output: bool


def read_config(raw: Mapping[str, Any], target: Any) -> Eagle3Config:
    """A head's config.json; ``target``: the target's config, as its adapter reads it.

    Raises:
        UnsupportedError: it asks for something that is not built; all such fields are named.
        ModelLoadError: a field is missing or has no sensible value.
        ConfigError: the head was made for another target.
    """
    fields = _flat(raw)
    step = "EAGLE-3 heads of one layer, as their authors publish them, are read."
    refuse(fields, _NEUTRAL, _KNOWN, _PREFIXES, _more(fields), step)
    qk_norm = fields.get("model_type") == "qwen3"
    head_dim = {"head_dim": size(fields, "head_dim", 128)} if qk_norm else {}
    shape = LlamaConfig(**decoder_fields({**fields, **head_dim}), windows=(None,), qk_norm=qk_norm)
    config = Eagle3Config(
        shape=shape,
        vocab=required(fields, "draft_vocab_size"),
        taps=_taps(fields, target.layers),
        target_hidden=size(fields, "target_hidden_size", shape.hidden_size),
        norm_before_fc=flag(fields, "norm_before_fc"),
        fc_norm=flag(fields, "fc_norm"),
        norm_before_residual=flag(fields, "norm_before_residual"),
        norm_output=flag(fields, "norm_output"),
    )
    _check_target(config, target)
    return config


def _flat(raw: Mapping[str, Any]) -> dict[str, Any]:
    """All fields in one mapping; those of the file itself go before nested ones."""
    parts: dict[str, Mapping[str, Any]] = {}
    for name in _NESTED:
        part = raw.get(name)
        if part is not None and not isinstance(part, Mapping):
            raise ModelLoadError(f"The head's {name} is no mapping.", setting=name)
        parts[name] = part or {}
    unknown = sorted(set(parts["eagle_config"]) - set(_NEUTRAL) - {_IDS})
    if unknown:
        raise UnsupportedError(
            f"The head's eagle_config has {', '.join(unknown)}, which is not known.",
            setting="eagle_config",
        )
    algorithm = parts["speculators_config"].get("algorithm", "eagle3")
    if algorithm != "eagle3":
        raise UnsupportedError(
            f"The head's speculators_config says algorithm={algorithm!r}; eagle3 is read.",
            setting="speculators_config",
        )
    if parts["transformer_layer_config"] and "norm_before_residual" not in raw:
        # The library's own default changed, and the other choice gives a useless head.
        raise ModelLoadError(
            "The head's config.json lacks norm_before_residual.", setting="norm_before_residual"
        )
    own = {name: value for name, value in raw.items() if name not in _NESTED}
    return {**parts["transformer_layer_config"], **parts["eagle_config"], **own}


def _more(fields: Mapping[str, Any]) -> list[str]:
    """What is not built and takes more than a look at one value."""
    found = []
    if fields.get("num_hidden_layers") not in (None, 1):
        found.append(f"num_hidden_layers={fields['num_hidden_layers']!r}")
    if fields.get("sliding_window") is not None and fields.get("use_sliding_window") is not False:
        found.append(f"sliding_window={fields['sliding_window']!r}")
    if fields.get("fc_norm") and fields.get("norm_before_fc"):
        found.append("fc_norm and norm_before_fc at once")
    return found


def _taps(fields: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Layers whose *output* is read, as the engine counts: ``i − 1`` for the input of layer i.

    Without a list they are the inputs of layers 2, n/2 and n − 3. Lists are published in two ways:
    one that begins with 1 names outputs, any other names inputs.
    """
    ids = fields.get(_IDS)
    if not ids:
        found = [2, layers // 2, layers - 3]
        if found[0] < found[1] < found[2]:
            return tuple(i - 1 for i in found)
        raise ModelLoadError(
            f"The head's config.json lacks {_IDS}, and a target of {layers} layers has no low, "
            "middle and high one.",
            setting=_IDS,
        )
    fine = isinstance(ids, list) and all(type(i) is int and 0 <= i <= layers for i in ids)
    if not fine or len(set(ids)) != len(ids):
        raise ModelLoadError(
            f"The head's {_IDS}={ids!r} are no different layers of a target of {layers}.",
            setting=_IDS,
        )
    return tuple(sorted(i if ids[0] == 1 else i - 1 for i in ids))


def _check_target(config: Eagle3Config, target: Any) -> None:
    mine = {
        "vocab_size": (config.shape.vocab_size, target.vocab_size),
        "target_hidden_size": (config.target_hidden, target.hidden_size),
    }
    wrong = [f"{name} is {a}, the target's {b}" for name, (a, b) in mine.items() if a != b]
    if config.taps[-1] >= target.layers:
        wrong.append(f"{_IDS} asks for what follows the target's {target.layers} layers")
    refuse_target(wrong)
    if config.vocab > config.shape.vocab_size:
        raise ModelLoadError(
            f"The head's draft_vocab_size={config.vocab} is above its vocab_size="
            f"{config.shape.vocab_size}.",
            setting="draft_vocab_size",
        )
