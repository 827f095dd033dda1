"""The drafter ``dspark``: between the engine's steps and the backbone. Spec section 2."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from deepinfer.api.kv import KVGroup, KVSpec
from deepinfer.api.sampler import SampleRows
from deepinfer.api.speculative import DraftNeeds, Drafts
from deepinfer.errors import ConfigError
from deepinfer.models.checkpoint import open_checkpoint
from deepinfer.models.source import resolve
from deepinfer.models.weights import LoadPlan, load_weights, weight_bytes
from deepinfer.sampling.philox import DRAFT, gumbel
from torch import Tensor

from deepinfer_speculative.allocation import SlotSurvival
from deepinfer_speculative.dspark.backbone import Backbone, BlockRows
from deepinfer_speculative.dspark.calibrated import Temperatures
from deepinfer_speculative.dspark.config import DSparkConfig, check_target, read_config
from deepinfer_speculative.dspark.heads import confidence_logits, draft_steps
from deepinfer_speculative.dspark.weights import weight_rules
from deepinfer_speculative.options import take
from deepinfer_speculative.ratio import round_seed

if TYPE_CHECKING:
    from deepinfer.api.model import KVPools, Model
    from deepinfer.api.speculative import DrafterContext, DrafterTarget, SlotView, StepTaps
    from deepinfer.models.checkpoint import Checkpoint

DEMO: Final = "dspark-demo"


class DSparkDrafter:
    """Drafts a block from the target's hidden states.

    Options: ``draft_sampling``: ``coupled`` (usual): where the request samples, drafts are drawn
    with its temperature and filters and, under the exact rule, its own noise, so that the draft is
    what the target will likely draw; ``greedy``: always the best id. ``draft_candidates``: only so
    many best ids of each position are corrected by the Markov head, and others never drafted; 0
    (usual) is all. ``draft_head``: ``same`` (usual) or ``int8``, which quantises the vocabulary
    projection of the draft alone (backend ``cpu``): a quarter of the bytes that most of a draft's
    time goes into.
    """

    def __init__(self, context: DrafterContext, target: DrafterTarget) -> None:
        checkpoint, config = _open(context)
        self.config, self.draft_len = config, context.draft_length(config.block)
        self.taps = config.taps
        self._target, self._options = target, context.options
        self._sampling = take(
            context.options, "draft_sampling", str, "coupled", among=("coupled", "greedy")
        )
        self._candidates = take(context.options, "draft_candidates", int, 0, least=0)
        if self._candidates and not config.rank:
            raise ConfigError(
                "speculative: draft_candidates chooses what a Markov head corrects, and this draft "
                "has none.",
                setting="speculative",
            )
        self._model = _load(context, target, checkpoint, config, self.draft_len)
        self._pages = -(-config.block // context.page_size)  # of one block in scratch
        shape, size = config.shape, context.page_size
        pages = context.max_num_seqs * self._pages
        self._scratch = tuple(
            torch.zeros(
                (pages, size, shape.kv_heads, shape.head_dim),
                dtype=target.dtype,
                device=target.device,
            )
            for _ in range(2)
        )
        self._page_size = size
        self._survival = SlotSurvival(context.max_num_seqs, self.draft_len, target.device)
        self._temperatures = Temperatures.beside(
            _folder(context), context.acceptance, self.draft_len, target.device
        )
        self._draws = context.acceptance == "ratio" and self._sampling == "coupled"
        self._proposals: Tensor | None = None
        self._kv: KVPools | None = None
        self._slots: SlotView | None = None
        self._blocks: tuple[int, Any, Tensor] | None = None

    @classmethod
    def needs(cls, context: DrafterContext) -> DraftNeeds:
        """Hidden rows of the trained layers, and keys and values of the draft's own layers."""
        _, config = _open(context)
        shape, itemsize = config.shape, context.dtype.itemsize
        group = KVGroup(
            name="dspark",
            kind="full",
            layers=tuple(range(shape.layers)),
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            bytes_per_token=2 * shape.kv_heads * shape.head_dim * itemsize * shape.layers,
        )
        rules = [r for r in weight_rules(config) if not r.optional]
        return DraftNeeds(
            draft_len=context.draft_length(config.block),
            taps=config.taps,
            kv=KVSpec((group,), f"dspark-{itemsize}"),
            weight_bytes=weight_bytes(rules, context.dtype, True),
        )

    def bind(self, kv: KVPools, slots: SlotView) -> None:
        """The pages of the draft's layers, and the texts."""
        self._kv, self._slots = kv, slots

    def allot(self, slots: Tensor, eligible: Tensor, k: int) -> Tensor:
        """The drafts that most likely stand."""
        return self._survival.allot(slots, eligible, k)

    def commit(self, taps: StepTaps | None, kept: Tensor) -> None:
        """Context keys and values of rows that are text now."""
        if taps is None or not len(kept):
            return
        assert self._kv is not None, "bind comes first"
        slots = torch.where(kept, taps.batch.kv_slots, -1)
        self._model.write(taps.hidden, taps.batch.positions, slots, self._kv)

    def propose(self, anchors: Tensor, slots: Tensor) -> Drafts:
        """int64[R, γ] with calibrated confidences."""
        if not len(slots):
            return Drafts(anchors.new_zeros((0, self.draft_len)), None)
        assert self._kv is not None and self._slots is not None, "bind comes first"
        model, block, gamma = self._model, self.config.block, self.draft_len
        ids = anchors[:, None].repeat(1, block)
        ids[:, 1:] = self.config.mask_token
        hidden = model.block(ids.flatten(), self._rows(slots), self._kv)
        hidden = hidden.view(len(slots), block, -1)[:, :gamma].contiguous()
        base: Tensor = model.head(hidden.flatten(0, 1), torch.float32)
        base = base.view(len(slots), gamma, -1)
        picks = _Picks(self, slots, self._slots)
        drafts, embeddings = draft_steps(model, base, anchors, picks, self._candidates)
        z = confidence_logits(model, hidden, embeddings)
        sure = None
        if z is not None:
            sure = self._temperatures.confidence(z, self._slots.temperature[slots])
        self._survival.put(slots, sure)
        return Drafts(drafts, sure)

    def proposal(self, slots: Tensor) -> Tensor | None:
        """What the last drafts of these slots were drawn from; None where all were best ids."""
        return None if self._proposals is None else self._proposals[slots]

    def _rows(self, slots: Tensor) -> BlockRows:
        """Positions and attention of the blocks behind these texts."""
        assert self._slots is not None
        view, block, ops = self._slots, self.config.block, self._model.ops
        size = self._page_size
        start = (view.length[slots] - 1).clamp(min=0)
        place = torch.arange(block, device=slots.device)
        table = view.pages[:, : -(-view.longest // size)][slots].repeat_interleave(block, 0)
        length = start.repeat_interleave(block, 0)
        rows = torch.arange(len(length) + 1, dtype=torch.int32, device=slots.device)
        plan, written = self._block_plan(len(slots), rows)
        return BlockRows(
            positions=(start[:, None] + place).flatten(),
            context=ops.plan_attention(table, length, rows, size),
            block=plan,
            slots=written,
            scratch=(self._scratch[0], self._scratch[1]),
        )

    def _block_plan(self, count: int, rows: Tensor) -> tuple[Any, Tensor]:
        """Attention of ``count`` blocks over themselves, and where their keys go."""
        if self._blocks is not None and self._blocks[0] == count:
            return self._blocks[1], self._blocks[2]
        block, pages = self.config.block, self._pages
        mine = torch.arange(count * pages, device=rows.device).view(count, pages)
        table = mine.int().repeat_interleave(block, 0)
        length = torch.full((count * block,), block, dtype=torch.int64, device=rows.device)
        plan = self._model.ops.plan_attention(table, length, rows, self._page_size)
        place = torch.arange(block, device=rows.device)
        written = (mine[:, :1] * self._page_size + place).flatten()
        self._blocks = count, plan, written
        return plan, written

    def keep_proposal(self, k: int, slots: Tensor, q: Tensor) -> None:
        """q float32[R, V]: what draft k + 1 was drawn from."""
        if self._proposals is None:
            shape = (len(self._survival.table), self.draft_len, q.shape[1])
            self._proposals = torch.zeros(shape, dtype=torch.float32, device=q.device)
        self._proposals[slots, k] = q

    @property
    def greedy(self) -> bool:
        """Drafts are always the best ids."""
        return self._sampling == "greedy"

    @property
    def independent(self) -> bool:
        """Drafts are drawn with noise of their own."""
        return self._draws

    @property
    def sampler(self) -> Any:
        """The engine's."""
        return self._target.sampler


class _Picks:
    """Chooses each draft as the request would: (k, logits float32[R, V]) to int64[R]."""

    def __init__(self, drafter: DSparkDrafter, slots: Tensor, view: SlotView) -> None:
        self._drafter, self._slots = drafter, slots
        length, temperature = view.length[slots], view.temperature[slots]
        if drafter.greedy:
            temperature = torch.zeros_like(temperature)
        top_k, top_p, min_p = view.top_k[slots], view.top_p[slots], view.min_p[slots]
        greedy, filtered = drafter.greedy, not drafter.greedy
        if slots.device.type == "cpu" and not greedy:  # looking at values costs nothing here
            greedy = not bool(temperature.any())
            filtered = bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any())
        self._rows = SampleRows(
            slot=slots,
            position=length,
            seed=view.seed[slots],
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            filtered=filtered,
            greedy=greedy,
        )

    def __call__(self, k: int, logits: Tensor) -> Tensor:
        rows, drafter = replace(self._rows, position=self._rows.position + k), self._drafter
        if not drafter.independent:
            ids: Tensor = drafter.sampler(logits, rows)
            return ids
        q = drafter.sampler.probs(logits, rows)
        drafter.keep_proposal(k, self._slots, q)
        seed = round_seed(rows.seed, self._rows.position - 1)
        drawn: Tensor = (q.log() + gumbel(seed, rows.position, q.shape[1], DRAFT)).argmax(1)
        return drawn


def _folder(context: DrafterContext) -> str:
    """Where the draft lies."""
    if DEMO in (context.method, context.model):
        return str(Path(__file__).parent.parent / "models" / DEMO)
    if context.model is None:
        raise ConfigError(
            f"speculative: method {context.method!r} needs a draft checkpoint.",
            setting="speculative",
            next_step="Give model=PATH, or dspark-demo for the demo model.",
        )
    return context.model


def _open(context: DrafterContext) -> tuple[Checkpoint, DSparkConfig]:
    checkpoint = open_checkpoint(resolve(_folder(context)))
    config = read_config(checkpoint.config)
    check_target(config, checkpoint.config, context.config)
    return checkpoint, config


def _load(
    context: DrafterContext,
    target: DrafterTarget,
    checkpoint: Checkpoint,
    config: DSparkConfig,
    draft_len: int,
) -> Backbone:
    """The draft in the engine's type; embedding and head are the target's if it has none."""
    length = context.config.max_model_len + config.block + 1
    model = Backbone(config, target.ops, length)
    load_weights(
        cast("Model", model),  # of a model, loading needs ``load`` alone
        weight_rules(config),
        checkpoint,
        target.ops,
        target.dtype,
        plan=LoadPlan(known=()),
    )
    model.share(target.model)
    kind = take(context.options, "draft_head", str, "same", among=("same", "int8"))
    if kind == "int8":
        model.head = _int8_head(context, target, checkpoint, model)
    return model


def _int8_head(
    context: DrafterContext, target: DrafterTarget, checkpoint: Checkpoint, model: Backbone
) -> Any:
    """The same projection with weights of eight bits: drafts move a little, texts never."""
    from deepinfer.layers import Linear

    if target.ops.origin["linear"] != "cpu":
        raise ConfigError(
            "speculative: draft_head='int8' is built for backend 'cpu' alone.",
            setting="speculative",
            next_step="Leave it at 'same'.",
        )
    from deepinfer.native.weights import prepare_linear, unpack

    head = Linear(target.ops)
    head.weight = prepare_linear(unpack(model.head.weight), "int8")
    return head
