"""The draft layers inside DeepSeek-V4.1 checkpoints, ``mtp.0`` to ``mtp.2``. V4.1 specification 6.

Three blocks of the target's own kind with a window alone. Their latents of the context come from
the target's streams before some late layers and lie, one record a token and layer, in the target's
pages; a block's rows see the last ``window`` of them and each other. Where the target skips late
layers on a prompt's beginning, nothing is there to make latents of; those rows lie outside the
window of any draft behind that prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from deepinfer.api.kv import Entry, KVGroup, KVSpec
from deepinfer.api.model import DeviceBatch, StepRequests, WeightRule
from deepinfer.api.speculative import DraftNeeds
from deepinfer.errors import ConfigError
from deepinfer.layers import Linear, RMSNorm, assign
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.fields import Fields
from deepinfer.models.deepseek_v41.layer import Layer
from deepinfer.models.deepseek_v41.rotary import frequencies, table
from deepinfer.models.deepseek_v41.rules import text_rules
from deepinfer.models.weights import LoadPlan, load_weights, size_of, weight_bytes
from deepinfer.ops.reference.latent import LatentParams, Window, turn
from deepinfer.ops.reference.sparse import read_entries
from torch import Tensor

from deepinfer_speculative.dspark.base import BlockDrafter
from deepinfer_speculative.dspark.calibrated import Temperatures

if TYPE_CHECKING:
    from deepinfer.api.model import KVPools, Model
    from deepinfer.api.speculative import DrafterContext, DrafterTarget, SlotView, StepTaps

_GROUP: Final = "dspark"
_KIND: Final = "fp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedConfig:
    """``layers``: the target's config with the draft's layers in place of its own; ``taps``: target
    layers before which streams are read; ``noise``: the id that stands for what is to be drafted.
    """

    layers: DeepseekV41Config
    block: int
    taps: tuple[int, ...]
    noise: int
    rank: int
    confident: bool = True
    confident_markov: bool = True

    @classmethod
    def read(cls, raw: Mapping[str, Any], target: DeepseekV41Config) -> CarriedConfig:
        """The ``dspark_…`` fields of a target's config.json; ModelLoadError names what is wrong,
        and ConfigError that there is no draft in it.
        """
        if not isinstance(target, DeepseekV41Config):
            raise ConfigError(
                "speculative: method 'mtp' drafts with what a DeepSeek-V4.1 checkpoint carries, "
                "and this one carries none.",
                setting="speculative",
                next_step="Name a draft checkpoint, or method 'ngram', which needs none.",
            )
        text = Fields(Fields(raw, "config.json").section("text_config"), "text_config")
        count = text.size("num_nextn_predict_layers")
        layers = replace(
            target,
            layers=count,
            ratios=(0,) * count,
            kv_sources=(),
            index_sources=(),
            candidates=None,
            engram=None,
            experts=text.size("dspark_n_routed_experts"),
            chosen=text.size("dspark_num_experts_per_tok"),
        )
        return cls(
            layers=layers,
            block=text.size("dspark_block_size"),
            taps=text.numbers("dspark_target_layer_ids"),
            noise=text.index("dspark_noise_token_id", target.vocab_size),
            rank=text.size("dspark_markov_rank"),
        )


def carried_rules(config: CarriedConfig) -> Iterator[WeightRule]:
    """Every parameter: the target's own rules for the layers, under other names, and the heads."""
    shape, last = config.layers, config.layers.layers - 1
    for rule in text_rules(shape):
        if rule.parameter.startswith("layers."):
            names = tuple(name.replace("layers.", "mtp.", 1) for name in rule.sources)
            yield replace(rule, sources=names)
    hidden, vocab = shape.hidden_size, shape.vocab_size

    def one(parameter: str, name: str, size: tuple[int, ...], uses: tuple[str, ...]) -> WeightRule:
        return WeightRule(parameter=parameter, sources=(name,), shapes=(size,), uses=uses)

    wide = (hidden, len(config.taps) * hidden)
    main = one("main", "mtp.0.main_proj.weight", wide, ("scaled_linear", "linear"))
    yield replace(main, stored="fp8")
    yield one("main_norm.weight", "mtp.0.main_norm.weight", (hidden,), ("rms_norm",))
    yield one("norm.weight", f"mtp.{last}.norm.weight", (hidden,), ("rms_norm",))
    markov = f"mtp.{last}.markov_head"
    size = (vocab, config.rank)
    yield one("w1.weight", f"{markov}.embed.weight", size, ("embedding",))
    yield one("w2.weight", f"{markov}.head.weight", size, ("linear", "embedding"))
    sure = (1, hidden + config.rank)
    # "route": it decides, so it is never quantised; float32 (spec 6.3).
    proj = one("sure.weight", f"mtp.{last}.confidence_head.proj.weight", sure, ("linear", "route"))
    yield replace(proj, exact=True)


class CarriedModel:
    """The draft layers; embedding and head are the target's."""

    def __init__(self, config: CarriedConfig, ops: Any, target: Any, length: int) -> None:
        """``length``: positions that blocks can have."""
        shape = config.layers
        self.config, self.ops = config, ops
        self.embed, self.head = target.embed, target.head
        self.layers = [Layer(shape, index, ops) for index in range(shape.layers)]
        self.main: Any = None
        self.main_norm, self.norm = RMSNorm(ops, shape.eps), RMSNorm(ops, shape.eps)
        self.w1, self.w2, self.sure = Linear(ops), Linear(ops), Linear(ops)
        context = ops.context
        device = None if context is None else context.device
        self.dtype = None if context is None else context.activation_dtype or context.dtype
        self.cos_sin = table(frequencies(shape.rotary, shape.theta), length, device)

    def load(self, parameter: str, value: Any) -> None:
        """Take one prepared parameter, by the name in its rule."""
        assign(self, parameter, value)

    def context(self, hidden: Mapping[int, Tensor], positions: Tensor) -> list[Tensor]:
        """Latents [T, d] of each layer, rotated, of target rows [T, D] of each tapped layer."""
        joined = torch.cat([hidden[tap] for tap in self.config.taps], -1)
        x = self.main_norm(self.ops.scaled_linear(joined, self.main))
        found = []
        for layer in self.layers:
            params = layer.attn.params()
            both = self.ops.scaled_linear(x, params.q_kv)  # queries of context rows go unused
            found.append(self._latent(both, params, positions))
        return found

    def block(self, ids: Tensor, rows: DeviceBatch, seen: list[Tensor], entries: Tensor) -> Tensor:
        """ids int64[T] of R blocks to [T, D] before the norm.

        seen: for each layer bfloat16[R, W + γ, d], of which the first W are context; the block's
        own latents are put behind. entries int32[T, W + γ − 1]: what each row sees of them, beside
        itself.
        """
        ops, streams = self.ops, self.config.layers.streams
        x = ops.embedding(ids, self.embed.weight).to(self.dtype)
        x = x[:, None].repeat(1, streams, 1)
        pre = torch.zeros(x.shape[:2], device=x.device)
        pre[:, 0] = 1
        text = torch.zeros_like(ids, dtype=torch.bool)
        for layer, pages in zip(self.layers, seen, strict=True):
            opened, mix = ops.hyper_open(x, pre, layer.attn_hyper.params())
            y = self._attention(opened, layer.attn.params(), rows, pages, entries)
            x = ops.hyper_merge(x, y, *mix[1:])
            opened, after = ops.hyper_open(x, mix[0], layer.ffn_hyper.params())
            y = ops.scaled_moe_block(opened, text, layer.moe.params())
            x, pre = ops.hyper_merge(x, y, *after[1:]), after[0]
        out: Tensor = ops.hyper_collapse(x, pre)
        return out

    def _latent(self, both: Tensor, params: LatentParams, positions: Tensor) -> Tensor:
        kv = self.ops.rms_norm(both[:, params.q_norm.shape[0] :], params.kv_norm, params.eps)
        return turn(self.ops, kv[:, None], positions, self.cos_sin)[:, 0]

    def _attention(
        self, x: Tensor, params: LatentParams, rows: DeviceBatch, pages: Tensor, entries: Tensor
    ) -> Tensor:
        """As the target's, but every row sees the same set: a window of one, and ``entries``."""
        ops, heads, size = self.ops, params.heads, params.q_norm.shape[0]
        both = ops.scaled_linear(x, params.q_kv)
        own = ops.quantize(self._latent(both, params, rows.positions), _KIND)
        block = self.config.block
        # Eight-bit values with a power of two as scale: bfloat16 holds them exactly.
        pages[:, -block:] = own.view(len(pages), block, -1).to(pages.dtype)
        c = ops.rms_norm(both[:, :size], params.q_norm, params.eps)
        q = ops.scaled_linear(c, params.q).view(len(c), heads, -1)
        q = turn(ops, q, rows.positions, self.cos_sin)
        window = Window(own, pages[:1, :1], rows, 1, False)
        scale: float = q.shape[2] ** -0.5
        o = ops.latent_attention(q, window, rows, params.sink, scale, pages, entries)
        o = turn(ops, o, rows.positions, self.cos_sin, backwards=True)
        groups = params.groups
        parts = o.view(len(o), groups, -1).transpose(0, 1).flatten(0, 1)
        offsets = torch.arange(groups + 1, device=o.device) * len(o)
        z = ops.grouped_linear(parts, params.out_a, offsets)
        z = z.view(groups, len(o), -1).transpose(0, 1).flatten(1)
        y: Tensor = ops.scaled_linear(z, params.out_b)
        return y


class CarriedDrafter(BlockDrafter):
    """Of the draft that a V4.1 checkpoint carries."""

    def __init__(self, context: DrafterContext, target: DrafterTarget) -> None:
        config = CarriedConfig.read(context.raw, context.config)
        length = context.config.max_model_len + config.block + 1
        model = CarriedModel(config, target.ops, target.model, length)
        load_weights(
            cast("Model", model),  # of a model, loading needs ``load`` alone
            carried_rules(config),
            context.checkpoint,
            target.ops,
            target.dtype,
            plan=LoadPlan(dequantize=not _as_stored(target.model, context.config)),
        )
        gamma = context.draft_length(config.block)
        temperatures = Temperatures.asked(context, None, gamma, target.device)
        super().__init__(context, target, config.block, model, temperatures)
        self.taps, self._carried, self._page_size = config.taps, model, context.page_size

    @classmethod
    def needs(cls, context: DrafterContext) -> DraftNeeds:
        """Streams before late layers, and a record of eight-bit latents a token and layer."""
        config = CarriedConfig.read(context.raw, context.config)
        shape = config.layers
        entry = Entry(width=shape.head_dim + shape.head_dim // 32, dtype="uint8")
        group = KVGroup(
            name=_GROUP,
            kind="full",
            layers=tuple(range(shape.layers)),
            entry=entry,
            bytes_per_token=entry.nbytes * shape.layers,
        )
        return DraftNeeds(
            draft_len=context.draft_length(config.block),
            taps=config.taps,
            kv=KVSpec((group,), "dspark-v41"),
            weight_bytes=weight_bytes(carried_rules(config), context.dtype, True),
        )

    def write(self, taps: StepTaps, slots: Tensor, kv: KVPools) -> None:
        """Latents of the draft's layers."""
        found = self._carried.context(taps.hidden, taps.batch.positions)
        for index, latent in enumerate(found):
            self._carried.ops.latent_write(latent, kv.tensor(_GROUP, index), slots, _KIND)

    def hidden(
        self, anchors: Tensor, slots: Tensor, view: SlotView, kv: KVPools
    ) -> tuple[Tensor, Tensor]:
        """The vocabulary head reads normed rows, the confidence head the rows before the norm."""
        model, config = self._carried, self._carried.config
        block, start = config.block, (view.length[slots] - 1).clamp(min=0)
        ids = anchors[:, None].repeat(1, block)
        ids[:, 1:] = config.noise
        seen, there = self._context(slots, start, view, kv)
        rows = block_rows(ids.flatten(), start, block)
        out = model.block(ids.flatten(), rows, seen, visible(there, block))
        out = out.view(len(slots), block, -1)[:, : self.draft_len].contiguous()
        normed: Tensor = model.norm(out.flatten(0, 1))
        return normed.view(out.shape), out

    def _context(
        self, slots: Tensor, start: Tensor, view: SlotView, kv: KVPools
    ) -> tuple[list[Tensor], Tensor]:
        """(bfloat16[R, W + γ, d] of each layer, bool[R, W]): the window before each anchor."""
        model, size = self._carried, self._page_size
        window, block = model.config.layers.window, model.config.block
        place = start[:, None] - window + torch.arange(window, device=slots.device)
        there, place = place >= 0, place.clamp(min=0)
        page = view.pages[slots[:, None], place // size].long()
        flat, ops = page * size + place % size, model.ops
        seen = []
        for index in range(len(model.layers)):
            cache = kv.tensor(_GROUP, index)
            values = read_entries(ops, cache, flat.flatten(), _KIND, torch.bfloat16)
            values = values.view(len(slots), window, -1)
            spare = values.new_zeros((len(slots), block, values.shape[2]))
            seen.append(torch.cat((values, spare), 1))
        return seen, there


def block_rows(ids: Tensor, start: Tensor, block: int) -> DeviceBatch:
    """R blocks from positions ``start`` int64[R] as rows that are a request each."""
    place = torch.arange(block, device=ids.device)
    positions = (start[:, None] + place).flatten()
    count = len(ids)
    row = torch.arange(count, device=ids.device)
    zero = torch.zeros_like(row)
    requests = StepRequests(
        cu_q=torch.arange(count + 1, dtype=torch.int32, device=ids.device),
        starts=positions,
        block_table=(row // block).int()[:, None],
        blocks=zero,
        floors=zero,
    )
    return DeviceBatch(
        ids=ids,
        positions=positions,
        row_of_token=row,
        kv_slots=torch.full_like(row, -1),
        attn=None,
        logit_rows=row[:0],
        requests=requests,
    )


def visible(there: Tensor, block: int) -> Tensor:
    """int32[R·γ, W + γ − 1]: for each row what is there of the context, and the other rows.

    there bool[R, W]. −1: nothing.
    """
    rows, window = there.shape
    place = torch.arange(window, device=there.device)
    context = torch.where(there, place, -1).repeat_interleave(block, 0)
    mine, other = (torch.arange(n, device=there.device) for n in (block, block - 1))
    others = window + other + (other >= mine[:, None])  # all but the row itself
    return torch.cat((context, others.repeat(rows, 1)), 1).int()


def _as_stored(model: Any, config: DeepseekV41Config) -> bool:
    """Whether the target keeps its low-bit weights as they are: then the draft does."""
    count = prod((config.experts, 2 * config.expert_size, config.hidden_size))
    return size_of(model.layers[0].moe.gate_up) < count
