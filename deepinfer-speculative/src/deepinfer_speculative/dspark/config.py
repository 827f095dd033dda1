"""config.json of a DSpark draft, as released for Qwen3 (spec 1.4): what is not built is refused.

The released file is the target's config with the draft's fields over it. Others nest the same
fields under ``dspark_config`` or ``dflash_config``; both are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from deepinfer.errors import ModelLoadError, UnsupportedError
from deepinfer.models.fields import decoder_fields, flag, required, size
from deepinfer.models.llama import LlamaConfig

from deepinfer_speculative.fields import refuse, refuse_target

QWEN3: Final = "Qwen3DSparkModel"
LLAMA: Final = "LlamaDSparkModel"
ARCHITECTURES: Final = (QWEN3, LLAMA)
"""The second is the first without norms on query and key heads, for Llama-shaped targets."""
LONGEST: Final = 1024
"""Block sizes are some 5 to 16; engines draft 64 tokens at most."""
_NESTED: Final = ("dflash_config", "dspark_config")
_FIELDS: Final = frozenset(
    {
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "num_target_layers",
        "num_anchors",
        "enable_confidence_head",
        "confidence_head_with_markov",
        "markov_rank",
        "markov_head_type",
        "sample_from_anchor",
    }
)
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "sample_from_anchor": (None, True),
    "markov_head_type": (None, "vanilla"),
    "is_neox_style": (None, True),
    "use_sliding_window": (None, False),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "embedding_scale": (None, 1, 1.0),
}
_PREFIXES: Final = ("dspark_", "dflash_", "markov_", "confidence_", "draft_", "dflash", "dspark")


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkConfig:
    """A draft's sizes. ``shape``: its decoder layers. ``block``: trained block size; ``taps``:
    target layers whose output it reads (−1: the embedding's); ``rank``: of the Markov head, 0
    without one; ``confident``: it has a confidence head, which reads the Markov embedding too if
    ``confident_markov``.
    """

    shape: LlamaConfig
    block: int
    mask_token: int
    taps: tuple[int, ...]
    rank: int
    confident: bool
    confident_markov: bool

    @property
    def confidence_width(self) -> int:
        """Columns of the confidence projection."""
        return self.shape.hidden_size + (self.rank if self.confident_markov else 0)


def read_config(raw: Mapping[str, Any]) -> DSparkConfig:
    """A draft's config.json.

    Raises:
        UnsupportedError: it asks for something that is not built; all such fields are named.
        ModelLoadError: a field is missing or no number.
    """
    fields = _flat(raw)
    vocab = fields.get("draft_vocab_size")
    other = [] if vocab in (None, fields.get("vocab_size")) else [f"draft_vocab_size={vocab!r}"]
    step = "Drafts in the format of the released Qwen3 checkpoints are read."
    refuse(fields, _NEUTRAL, {*_FIELDS, "draft_vocab_size"}, _PREFIXES, other, step)
    layers = required(fields, "num_hidden_layers")
    named = fields.get("architectures")
    qk_norm = not (isinstance(named, list) and LLAMA in named)
    head_dim = {"head_dim": size(fields, "head_dim", 128)} if qk_norm else {}
    shape = LlamaConfig(
        **decoder_fields({**fields, **head_dim}), windows=(None,) * layers, qk_norm=qk_norm
    )
    rank = size(fields, "markov_rank", 0, least=0)
    confident = flag(fields, "enable_confidence_head", True)
    with_markov = flag(fields, "confidence_head_with_markov", True) and rank > 0
    return DSparkConfig(
        shape=shape,
        block=_block(fields),
        mask_token=_mask(fields, shape.vocab_size),
        taps=_taps(fields),
        rank=rank,
        confident=confident,
        confident_markov=confident and with_markov,
    )


def check_target(config: DSparkConfig, raw: Mapping[str, Any], target: Any) -> None:
    """Raise ConfigError unless the draft was made for a target of this shape.

    ``raw``: the draft's config.json; ``target``: the target's config, as its adapter reads it.
    """
    wrong = [
        f"{name} is {mine}, the target's {theirs}"
        for name, mine, theirs in (
            ("vocab_size", config.shape.vocab_size, target.vocab_size),
            ("hidden_size", config.shape.hidden_size, target.hidden_size),
            ("num_target_layers", _flat(raw).get("num_target_layers") or target.layers,
             target.layers),
        )
        if mine != theirs
    ]  # fmt: skip
    last = max(config.taps)
    if last >= target.layers - 1:
        wrong.append(f"target_layer_ids has {last}, the last before the target's end is "
                     f"{target.layers - 2}")  # fmt: skip
    refuse_target(wrong)


def _flat(raw: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(raw)
    for name in _NESTED:
        nested = fields.pop(name, None)
        if nested is None:
            continue
        if not isinstance(nested, Mapping):
            raise ModelLoadError(f"The draft's {name} is no mapping.", setting=name)
        unknown = sorted(set(nested) - _FIELDS - set(_NEUTRAL) - {"draft_vocab_size"})
        if unknown:
            raise UnsupportedError(
                f"The draft's {name} has {', '.join(unknown)}, which is not known.", setting=name
            )
        fields |= nested
    return fields


def _block(fields: Mapping[str, Any]) -> int:
    """Rows of a block lie in memory for every request that may run, so it has a bound."""
    block = required(fields, "block_size")
    if block > LONGEST:
        raise ModelLoadError(
            f"The draft's block_size={block}: at most {LONGEST} are read.", setting="block_size"
        )
    return block


def _mask(fields: Mapping[str, Any], vocab: int) -> int:
    value = fields.get("mask_token_id")
    if type(value) is not int or not 0 <= value < vocab:
        raise ModelLoadError(
            f"The draft's mask_token_id={value!r} is no id below {vocab}.", setting="mask_token_id"
        )
    return value


def _taps(fields: Mapping[str, Any]) -> tuple[int, ...]:
    ids = fields.get("target_layer_ids")
    fine = isinstance(ids, list) and ids and all(type(i) is int and i >= -1 for i in ids)
    if not isinstance(ids, list) or not fine or len(set(ids)) != len(ids):
        raise ModelLoadError(
            f"The draft's target_layer_ids={ids!r} are no different layers from -1 on.",
            setting="target_layer_ids",
        )
    return tuple(ids)
