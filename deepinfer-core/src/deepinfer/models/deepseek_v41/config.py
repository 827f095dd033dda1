"""DeepSeek-V4.1's config.json: every field read by name, every field that is not built refused.

Specification, section 1 (fields), 3.12 (what truncation needs) and 12 (what the formats need).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deepinfer.errors import ModelLoadError, UnsupportedError
from deepinfer.models.deepseek_v41.engram_hash import EngramShape
from deepinfer.models.deepseek_v41.fields import Fields
from deepinfer.models.deepseek_v41.images import VisionConfig
from deepinfer.models.deepseek_v41.rotary import Yarn
from deepinfer.ops.reference.sparse import Blocks

RATIOS: Final = (0, 1, 2)

_HARMLESS: Final = frozenset(
    {"model_type", "initializer_range", "attention_dropout", "use_cache", "dtype", "torch_dtype"}
)
_TOP: Final = frozenset(
    {
        *("architectures", "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"),
        *("image_token_id", "auto_map", "_name_or_path", "tie_word_embeddings"),
    }
)
_DRAFT: Final = frozenset(
    {
        *("num_nextn_predict_layers", "dspark_block_size", "dspark_noise_token_id"),
        *("dspark_target_layer_ids", "dspark_markov_rank", "dspark_n_routed_experts"),
        "dspark_num_experts_per_tok",
    }
)
_ENGRAM: Final = (
    *("engram_max_ngram_size", "engram_n_heads", "engram_vocab_size", "engram_head_dim"),
    *("engram_compressed_vocab_size", "engram_pad_token_id"),
)
_ONLY: Final[Mapping[str, Any]] = {
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_shared_experts": 1,
}
_STORAGE: Final[Mapping[str, Any]] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV41Config:
    """Sizes and schedule of the text model.

    ``ratios``: each layer's, 0 for a window alone. ``kv_sources``: layers that own a compressor,
    its entries and index keys; ``index_sources``: layers that choose entries. ``candidates``: which
    index source keeps blocks for the later ones, and how many. ``image_token``: the id of all rows
    of an image, −1 in a model without ``vision``. ``max_model_len``: positions that
    the engine will use. ``tokenizer``: the file that Engram's ids follow from.
    """

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    head_dim: int
    rotary: int
    q_lora: int
    o_groups: int
    o_lora: int
    window: int
    ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    index_heads: int
    index_dim: int
    index_topk: int
    candidates: tuple[int, Blocks] | None
    theta: float
    compress_theta: float
    yarn: Yarn
    eps: float
    streams: int
    sinkhorn_iters: int
    sinkhorn_eps: float
    experts: int
    chosen: int
    expert_size: int
    expert_scale: float
    expert_limit: float
    engram: EngramShape | None
    engram_width: int
    image_token: int
    vision: VisionConfig | None
    max_position_embeddings: int
    max_model_len: int
    tokenizer: Path | None = None

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> DeepseekV41Config:
        """From config.json.

        Raises:
            ModelLoadError: a field is missing, or fields contradict each other.
            UnsupportedError: a field asks for what is not built; it is named.
        """
        top = Fields(raw, "config.json")
        text = Fields(top.section("text_config"), "text_config")
        storage = Fields(top.section("quantization_config"), "quantization_config")
        text.only(_ONLY)
        storage.only(_STORAGE)
        vision = VisionConfig.read({"vision_config": top.maybe("vision_config")})
        layers, vocab_size = text.size("num_hidden_layers"), text.size("vocab_size")
        engram = _engram(text, vocab_size)
        config = cls(
            vocab_size=vocab_size,
            hidden_size=text.size("hidden_size"),
            layers=layers,
            heads=text.size("num_attention_heads"),
            head_dim=text.size("head_dim"),
            rotary=text.size("qk_rope_head_dim"),
            q_lora=text.size("q_lora_rank"),
            o_groups=text.size("o_groups"),
            o_lora=text.size("o_lora_rank"),
            window=text.size("sliding_window"),
            ratios=text.numbers("compress_ratios")[:layers],
            kv_sources=text.numbers("kv_source_layer_ids"),
            index_sources=text.numbers("index_source_layer_ids"),
            index_heads=text.size("index_n_heads"),
            index_dim=text.size("index_head_dim"),
            index_topk=text.size("index_topk"),
            candidates=_candidates(text, layers),
            theta=text.real("rope_theta"),
            compress_theta=text.real("compress_rope_theta"),
            yarn=_yarn(Fields(text.section("rope_scaling"), "rope_scaling")),
            eps=text.real("rms_norm_eps"),
            streams=text.size("hc_mult"),
            sinkhorn_iters=text.size("hc_sinkhorn_iters"),
            sinkhorn_eps=text.real("hc_eps"),
            experts=text.size("n_routed_experts"),
            chosen=text.size("num_experts_per_tok"),
            expert_size=text.size("moe_intermediate_size"),
            expert_scale=text.real("routed_scaling_factor"),
            expert_limit=text.real("swiglu_limit"),
            engram=engram,
            engram_width=text.size("engram_head_dim") if engram else 0,
            image_token=top.index("image_token_id", vocab_size) if vision else -1,
            vision=vision,
            max_position_embeddings=text.size("max_position_embeddings"),
            max_model_len=text.size("max_position_embeddings"),
            tokenizer=None if (file := top.maybe("tokenizer_file")) is None else Path(str(file)),
        )
        text.refuse_rest(_HARMLESS | _DRAFT)
        storage.refuse_rest(frozenset())
        top.refuse_rest(_HARMLESS | _TOP)
        config.check()
        return config

    @property
    def last_source(self) -> int:
        """The last layer that owns entries, −1 if none does: later ones may be truncated."""
        return max(self.kv_sources, default=-1)

    def kv_source(self, layer: int) -> int | None:
        """Whose entries a layer reads."""
        return _latest(self.kv_sources, layer) if self.ratios[layer] else None

    def publishes(self, layer: int) -> Blocks | None:
        """The blocks that an index source keeps for later ones."""
        return self.candidates[1] if self.candidates and self.candidates[0] == layer else None

    def block_size(self, layer: int) -> int:
        """Of the blocks that an index source chooses from, 0 where it chooses from everything."""
        if self.candidates is None or layer <= self.candidates[0]:
            return 0
        return self.candidates[1].size

    def check(self) -> None:
        """Refuse a schedule or sizes that contradict themselves, by name."""
        self._check_schedule()
        self._check_sizes()

    def _check_schedule(self) -> None:
        if len(self.ratios) < self.layers:
            raise _wrong(
                "compress_ratios", f"names {len(self.ratios)} ratios for {self.layers} layers"
            )
        other = sorted(set(self.ratios) - set(RATIOS))
        if other:
            raise UnsupportedError(
                f"The model's compress_ratios ask for {other}; 0, 1 and 2 are built.",
                setting="compress_ratios",
            )
        for name, sources in (
            ("kv_source_layer_ids", self.kv_sources),
            ("index_source_layer_ids", self.index_sources),
        ):
            self._check_layers(name, sources)
            for layer, ratio in enumerate(self.ratios):
                source = _latest(sources, layer)
                if ratio and (source is None or self.ratios[source] != ratio):
                    raise _wrong(name, f"gives layer {layer} no source of its ratio {ratio}")
        missing = sorted(set(self.kv_sources) - set(self.index_sources))
        if missing:
            raise _wrong("index_source_layer_ids", f"lacks the KV sources {missing}")
        if self.candidates is not None:
            self._check_candidates(*self.candidates)
        if self.engram is not None:
            self._check_layers("engram_layer_ids", self.engram.layers)

    def _check_layers(self, name: str, layers: tuple[int, ...]) -> None:
        if list(layers) != sorted(set(layers)) or any(not 0 <= x < self.layers for x in layers):
            raise _wrong(name, f"must be ascending layers below {self.layers}, not {list(layers)}")
        if name != "engram_layer_ids" and any(not self.ratios[x] for x in layers):
            raise _wrong(name, "names a layer whose compress_ratio is 0")

    def _check_candidates(self, source: int, blocks: Blocks) -> None:
        if source != self.last_source:
            raise UnsupportedError(
                f"candidate_source_layer_id={source} is not the last KV source "
                f"{self.last_source}; only that is built.",
                setting="candidate_source_layer_id",
            )
        if (blocks.kept - 1) * blocks.size + 1 < self.index_topk:
            raise _wrong(
                "candidate_topk_blocks",
                f"keeps {blocks.kept} blocks of {blocks.size}: too few for {self.index_topk}",
            )

    def _check_sizes(self) -> None:
        widths = {
            "hidden_size": self.hidden_size,
            "q_lora_rank": self.q_lora,
            "moe_intermediate_size": self.expert_size,
            "head_dim": self.head_dim,
            "index_head_dim": self.index_dim,
            "engram_head_dim": self.engram_width,
            "o_lora_rank": self.o_groups * self.o_lora,
        }
        for name, width in widths.items():
            if width % 32:
                raise _wrong(name, f"contracts {width} values; FP8 and FP4 need a multiple of 32")
        if self.heads % self.o_groups:
            raise _wrong("o_groups", f"{self.o_groups} does not divide {self.heads} heads")
        if (self.heads * self.head_dim // self.o_groups) % 32:
            raise _wrong("o_groups", "leaves groups that are no multiple of 32 wide")
        if self.rotary % 2 or self.rotary > min(self.head_dim, self.index_dim):
            raise _wrong("qk_rope_head_dim", f"{self.rotary} is odd or wider than a head")
        if self.chosen > self.experts:
            raise _wrong("num_experts_per_tok", f"chooses {self.chosen} of {self.experts} experts")


def _latest(sources: tuple[int, ...], layer: int) -> int | None:
    return max((s for s in sources if s <= layer), default=None)


def _candidates(text: Fields, layers: int) -> tuple[int, Blocks] | None:
    if text.value("candidate_source_layer_id") < 0:
        text.leave("candidate_topk_blocks", "candidate_block_size")
        return None
    source = text.index("candidate_source_layer_id", layers)
    return source, Blocks(text.size("candidate_topk_blocks"), text.size("candidate_block_size"))


def _yarn(scaling: Fields) -> Yarn:
    scaling.only({"rope_type": "yarn"})
    yarn = Yarn(
        factor=scaling.real("factor"),
        beta_fast=scaling.real("beta_fast"),
        beta_slow=scaling.real("beta_slow"),
        original=scaling.size("original_max_position_embeddings"),
    )
    scaling.refuse_rest(frozenset())
    return yarn


def _engram(text: Fields, vocab_size: int) -> EngramShape | None:
    layers, rows = text.numbers("engram_layer_ids"), text.numbers("engram_num_embeddings")
    if len(layers) != len(rows):
        raise _wrong("engram_num_embeddings", f"names {len(rows)} tables for {len(layers)} layers")
    if not layers:
        text.leave(*_ENGRAM)
        return None
    return EngramShape(
        layers=layers,
        rows=rows,
        max_ngram=text.size("engram_max_ngram_size"),
        heads=text.size("engram_n_heads"),
        vocab_size=text.size("engram_vocab_size"),
        compressed_tokens=text.size("engram_compressed_vocab_size"),
        pad_token=text.index("engram_pad_token_id", vocab_size),
    )


def _wrong(setting: str, what: str) -> ModelLoadError:
    return ModelLoadError(f"The model's config.json has {setting} that {what}.", setting=setting)
