"""Every tensor of a DeepSeek-V4.1 checkpoint, by a config.json: names, shapes, storage, statistics.

Specification 8.1 (the released configuration gives its 96,085 tensors and 475.24 GiB) and 12 (the
spread of released weights, so that activations of a random model behave). :func:`draw` makes one.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor

from deepinfer.ops.lowbit import FP4_VALUES, TILE

Storage = Literal["BF16", "F32", "fp8", "fp4", "table"]
DTYPES: Final[Mapping[str, torch.dtype]] = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.uint8,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,
}
# Mean of a norm's weights; std of a projection in multiples of fan_in^−½; std of other tensors.
# Two are not the released ones (embedding 0.12, wo_b 1.9): with random layers those drown the token
# in attention's average, and greedy texts repeat one id.
_NORMS: Final = {"attn_norm": 0.025, "ffn_norm": 0.2, "q_norm": 0.97, "kv_norm": 0.4}
_INNER_NORMS: Final = {"compressor.norm": 0.6, "k_norm": 0.5}
_PROJECTIONS: Final = (
    (r"indexer\.wq_b|compressor\.wgate", 1.6),
    (r"engram\.wkv", 0.1),
    (r"attn\.wq_a|attn\.wo_a", 1.6),
    (r"attn\.wq_b", 0.95),
    (r"attn\.wkv", 1.8),
    (r"attn\.wo_b", 0.5),
    (r"ffn\.gate", 2.9),
    (r"\.w[13]", 1.5),
    (r"\.w2", 1.05),
    (r"^head|markov_head\.head", 2.0),
)
_SPREADS: Final = (
    (r"^embed\.weight|^image_", 0.7),
    (r"engram\.embed|markov_head\.embed|attn_sink", 1.0),
    (r"gate\.bias_vl", 0.3),
    (r"gate\.bias", 0.2),
    (r"hc_\w+_base", 0.6),
    (r"\.bias$", 0.1),
)
_JITTER: Final = 1.5  # tiles differ in spread by 2^±this, so that a wrong scale shows
_JITTER_RMS: Final = math.sqrt(math.sinh(_JITTER * math.log(4)) / (_JITTER * math.log(4)))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of values ``shape``; a low-bit one is stored as ``….weight`` and ``….scale``."""

    name: str
    shape: tuple[int, ...]
    storage: Storage = "BF16"

    def stored(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """(name, shape, type) of what lies in the file."""
        if self.storage in ("BF16", "F32"):
            yield self.name, self.shape, self.storage
            return
        rows, columns = self.shape
        codes = (rows, columns // 2) if self.storage == "fp4" else (rows, columns)
        tiles = -(-rows // TILE) if self.storage == "fp8" else rows
        yield self.name, codes, "I8" if self.storage == "fp4" else "F8_E4M3"
        yield f"{self.name.removesuffix('.weight')}.scale", (tiles, -(-columns // TILE)), "F8_E8M0"

    @property
    def nbytes(self) -> int:
        """In the file."""
        return sum(math.prod(shape) * DTYPES[kind].itemsize for _, shape, kind in self.stored())


def tensors(config: Mapping[str, Any]) -> Iterator[TensorSpec]:
    """Every tensor that a checkpoint of this config.json has, drafts and vision with it."""
    text = config["text_config"]
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    vision = bool(config["vision_config"]["num_hidden_layers"])
    yield TensorSpec("embed.weight", (vocab, hidden))
    for layer in range(text["num_hidden_layers"]):
        yield from _block(text, f"layers.{layer}", text["n_routed_experts"], vision)
        yield from _sources(text, layer)
        yield from _engram(text, layer)
    yield TensorSpec("norm.weight", (hidden,))
    yield TensorSpec("head.weight", (vocab, hidden))
    for draft in range(text["num_nextn_predict_layers"]):
        yield from _block(text, f"mtp.{draft}", text["dspark_n_routed_experts"], vision)
    if text["num_nextn_predict_layers"]:
        yield from _draft_ends(text)
    if vision:
        yield from _vision(config["vision_config"], hidden)


def _block(text: Mapping[str, Any], name: str, experts: int, vision: bool) -> Iterator[TensorSpec]:
    """Attention, hyper-connections and experts: what every layer has."""
    hidden, heads, width = text["hidden_size"], text["num_attention_heads"], text["head_dim"]
    rank, streams = text["q_lora_rank"], text["hc_mult"]
    out = text["o_groups"] * text["o_lora_rank"]
    mixes = (2 + streams) * streams
    yield TensorSpec(f"{name}.attn.attn_sink", (heads,), "F32")
    yield TensorSpec(f"{name}.attn.wq_a.weight", (rank, hidden), "fp8")
    yield TensorSpec(f"{name}.attn.q_norm.weight", (rank,))
    yield TensorSpec(f"{name}.attn.wq_b.weight", (heads * width, rank), "fp8")
    yield TensorSpec(f"{name}.attn.wkv.weight", (width, hidden), "fp8")
    yield TensorSpec(f"{name}.attn.kv_norm.weight", (width,))
    yield TensorSpec(f"{name}.attn.wo_a.weight", (out, heads * width // text["o_groups"]), "fp8")
    yield TensorSpec(f"{name}.attn.wo_b.weight", (hidden, out), "fp8")
    for part in ("attn", "ffn"):
        yield TensorSpec(f"{name}.{part}_norm.weight", (hidden,))
        yield TensorSpec(f"{name}.hc_{part}_fn", (mixes, streams * hidden), "F32")
        yield TensorSpec(f"{name}.hc_{part}_base", (mixes,), "F32")
        yield TensorSpec(f"{name}.hc_{part}_scale", (3,), "F32")
    yield TensorSpec(f"{name}.ffn.gate.weight", (experts, hidden))
    yield TensorSpec(f"{name}.ffn.gate.bias", (experts,), "F32")
    if vision:
        yield TensorSpec(f"{name}.ffn.gate.bias_vl", (experts,), "F32")
    yield from _expert(text, f"{name}.ffn.shared_experts", "fp8")
    for expert in range(experts):
        yield from _expert(text, f"{name}.ffn.experts.{expert}", "fp4")


def _expert(text: Mapping[str, Any], name: str, storage: Storage) -> Iterator[TensorSpec]:
    hidden, inner = text["hidden_size"], text["moe_intermediate_size"]
    yield TensorSpec(f"{name}.w1.weight", (inner, hidden), storage)
    yield TensorSpec(f"{name}.w3.weight", (inner, hidden), storage)
    yield TensorSpec(f"{name}.w2.weight", (hidden, inner), storage)


def _sources(text: Mapping[str, Any], layer: int) -> Iterator[TensorSpec]:
    """Compressor and indexer, where a layer is a source of one."""
    hidden, width, index = text["hidden_size"], text["head_dim"], text["index_head_dim"]
    name = f"layers.{layer}.attn"
    if layer in text["kv_source_layer_ids"]:
        yield TensorSpec(f"{name}.compressor.wkv.weight", (width, hidden))
        if text["compress_ratios"][layer] > 1:
            yield TensorSpec(f"{name}.compressor.wgate.weight", (width, hidden))
        yield TensorSpec(f"{name}.compressor.norm.weight", (width,))
        yield TensorSpec(f"{name}.indexer.wk.weight", (index, width))
        yield TensorSpec(f"{name}.indexer.k_norm.weight", (index,))
    if layer in text["index_source_layer_ids"]:
        heads, rank = text["index_n_heads"], text["q_lora_rank"]
        yield TensorSpec(f"{name}.indexer.wq_b.weight", (heads * index, rank), "fp8")
        yield TensorSpec(f"{name}.indexer.weights_proj.weight", (heads, hidden))


def _engram(text: Mapping[str, Any], layer: int) -> Iterator[TensorSpec]:
    if layer not in text["engram_layer_ids"]:
        return
    name, hidden, streams = f"layers.{layer}.engram", text["hidden_size"], text["hc_mult"]
    rows = text["engram_num_embeddings"][text["engram_layer_ids"].index(layer)]
    width = text["engram_head_dim"]
    columns = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
    yield TensorSpec(f"{name}.embed.weight", (rows, width), "table")
    yield TensorSpec(f"{name}.wkv.weight", ((streams + 1) * hidden, columns * width), "fp8")
    yield TensorSpec(f"{name}.q_weight", (streams, hidden))
    yield TensorSpec(f"{name}.k_weight", (streams, hidden))


def _draft_ends(text: Mapping[str, Any]) -> Iterator[TensorSpec]:
    """What the first and the last draft layer have beside a block."""
    hidden, vocab, rank = text["hidden_size"], text["vocab_size"], text["dspark_markov_rank"]
    wide = len(text["dspark_target_layer_ids"]) * hidden
    last = f"mtp.{text['num_nextn_predict_layers'] - 1}"
    yield TensorSpec("mtp.0.main_proj.weight", (hidden, wide), "fp8")
    yield TensorSpec("mtp.0.main_norm.weight", (hidden,))
    yield TensorSpec(f"{last}.norm.weight", (hidden,))
    yield TensorSpec(f"{last}.markov_head.embed.weight", (vocab, rank))
    yield TensorSpec(f"{last}.markov_head.head.weight", (vocab, rank))
    yield TensorSpec(f"{last}.confidence_head.proj.weight", (1, hidden + rank))


def _vision(vision: Mapping[str, Any], hidden: int) -> Iterator[TensorSpec]:
    width, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    yield from (TensorSpec(f"image_{part}", (hidden,)) for part in ("start", "end", "newline"))
    yield from _biased("vision.patch_embed.proj", (width, 3 * patch * patch))
    for block in range(vision["num_hidden_layers"]):
        name = f"vision.blocks.{block}"
        yield TensorSpec(f"{name}.norm1.weight", (width,))
        yield TensorSpec(f"{name}.norm2.weight", (width,))
        yield from _biased(f"{name}.attn.wqkv", (3 * width, width))
        yield from _biased(f"{name}.attn.wo", (width, width))
        yield TensorSpec(f"{name}.mlp.w1.weight", (2 * inner, width))
        yield TensorSpec(f"{name}.mlp.w2.weight", (width, inner))
    yield TensorSpec("vision.norm.weight", (width,))
    yield from _biased("aligner.w1", (hidden, width * vision["downsample_ratio"] ** 2))
    yield from _biased("aligner.w2", (hidden, hidden))


def _biased(name: str, shape: tuple[int, int]) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", shape)
    yield TensorSpec(f"{name}.bias", shape[:1])


def draw(spec: TensorSpec, seed: int, device: torch.device | str = "cpu") -> list[Tensor]:
    """Random tensors in the order of ``stored``; low-bit ones as uint8.

    They depend on ``seed``, the name and the kind of device, not on what else is drawn.
    """
    generator = torch.Generator(device)
    generator.manual_seed(zlib.crc32(f"{seed} {spec.name}".encode()))
    noise = torch.randn(spec.shape, generator=generator, device=device)
    mean, spread = _statistics(spec)
    if spec.storage in ("BF16", "F32"):
        return [(mean + spread * noise).to(DTYPES[spec.storage])]
    height = TILE if spec.storage == "fp8" else 1
    tiles = [-(-spec.shape[0] // height), -(-spec.shape[1] // TILE)]
    jitter = torch.rand(tiles, generator=generator, device=device) * 2 * _JITTER - _JITTER
    noise.mul_(_spread_out(jitter.exp2() * (spread / _JITTER_RMS), height, spec.shape))
    return _encode(noise, height, 6.0 if spec.storage == "fp4" else 448.0)


def _encode(values: Tensor, height: int, top: float) -> list[Tensor]:
    """Codes and E8M0 scales of values [N, K] in tiles of ``height`` rows and 32 columns."""
    rows, columns = values.shape
    down, across = -(-rows // height), -(-columns // TILE)
    padded = values.new_zeros(down * height, across * TILE)
    padded[:rows, :columns] = values
    most = padded.view(down, height, across, TILE).abs().amax((1, 3))
    exponent = (most / top).clamp(min=2.0**-126).log2().ceil()
    scaled = values.div_(_spread_out(exponent.exp2(), height, values.shape))
    if top == 448.0:
        codes = scaled.clamp_(-top, top).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        steps = torch.tensor(FP4_VALUES, device=values.device)
        nearest = torch.bucketize(scaled.abs(), (steps[1:] + steps[:-1]) / 2)
        nibbles = (nearest + 8 * (scaled < 0)).to(torch.uint8)
        codes = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    return [codes, (exponent + 127).to(torch.uint8)]


def _spread_out(tiles: Tensor, height: int, shape: Sequence[int]) -> Tensor:
    """One number for each tile to one for each value."""
    wide = tiles.repeat_interleave(height, 0).repeat_interleave(TILE, 1)
    return wide[: shape[0], : shape[1]]


def _statistics(spec: TensorSpec) -> tuple[float, float]:
    """Mean and standard deviation."""
    name = spec.name
    for norm, mean in {**_INNER_NORMS, **_NORMS}.items():
        if name.endswith(f"{norm}.weight"):
            return mean, 0.2 * mean
    if re.search(r"(norm\d?|engram\.[qk]_)\.?weight$", name):
        return 1.0, 0.2
    if name.endswith("_scale"):
        return 0.8, 0.1
    for pattern, spread in _SPREADS:
        if re.search(pattern, name):
            return 0.0, spread
    multiples = (times for pattern, times in _PROJECTIONS if re.search(pattern, name))
    return 0.0, next(multiples, 1.0) * spec.shape[-1] ** -0.5
