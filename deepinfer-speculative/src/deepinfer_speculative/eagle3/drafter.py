"""The drafter ``eagle3``: a head beside a dense target, which drafts token by token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
import torch.nn.functional as F
from deepinfer.api.kv import KVGroup, KVSpec
from deepinfer.api.speculative import DraftNeeds, Drafts
from deepinfer.errors import ConfigError
from deepinfer.models.checkpoint import open_checkpoint
from deepinfer.models.source import resolve
from deepinfer.models.weights import LoadPlan, load_weights, weight_bytes
from torch import Tensor

from deepinfer_speculative.dspark.backbone import DraftRows
from deepinfer_speculative.dspark.base import StateDrafter
from deepinfer_speculative.dspark.calibrated import Temperatures
from deepinfer_speculative.eagle3.config import Eagle3Config, read_config
from deepinfer_speculative.eagle3.head import Eagle3Head
from deepinfer_speculative.eagle3.weights import TABLES, layer_name, read_targets, weight_rules

if TYPE_CHECKING:
    from deepinfer.api.model import Model
    from deepinfer.api.speculative import DrafterContext, DrafterTarget, SlotView, StepTaps
    from deepinfer.models.checkpoint import Checkpoint

USUAL: Final = 3
"""Draft length where nobody asks for another; heads have no longest one."""


class _Opened(NamedTuple):
    folder: Path
    checkpoint: Checkpoint
    config: Eagle3Config


class Eagle3Drafter(StateDrafter):
    """Of a checkpoint in a public format of EAGLE-3.

    Drafts form a chain, not a tree. Confidence is the head's own probability of the id that it
    drafted, at temperature 1 and among all ids that it can draft; a calibration beside the weights
    scales its log-odds.

    The state of the last token that the target ran is kept for each slot: the pair that it belongs
    to has its token one step later.
    """

    def __init__(self, context: DrafterContext, target: DrafterTarget) -> None:
        opened = _open(context)
        gamma = context.draft_length(None, USUAL)
        temperatures = Temperatures.asked(context, str(opened.folder), gamma, target.device)
        super().__init__(context, target, gamma, temperatures)
        config, shape = opened.config, opened.config.shape
        self.config, self.taps = config, config.taps
        length = context.config.max_model_len + gamma + 1
        self._head = _load(opened, target, length)
        ids = read_targets(opened.checkpoint, config)
        self._ids = None if ids is None else ids.to(target.device)
        self._spare = context.max_num_seqs  # a row that nobody reads
        self._states = torch.zeros(
            (context.max_num_seqs + 1, shape.hidden_size),
            dtype=self._head.dtype or target.dtype,
            device=target.device,
        )
        self._page_size = context.page_size
        self._pages = -(-gamma // context.page_size)  # of one chain in scratch
        pages = context.max_num_seqs * self._pages
        size = (pages, context.page_size, shape.kv_heads, shape.head_dim)
        self._scratch = (
            torch.zeros(size, dtype=target.dtype, device=target.device),
            torch.zeros(size, dtype=target.dtype, device=target.device),
        )
        self._chains: tuple[int, list[Any], Tensor] | None = None

    @classmethod
    def needs(cls, context: DrafterContext) -> DraftNeeds:
        """Hidden rows of three layers, and keys and values of one layer.

        A prefix hit runs its last token again: the pair behind it needs that token's state.
        """
        opened = _open(context)
        shape, itemsize = opened.config.shape, context.dtype.itemsize
        group = KVGroup(
            name="eagle3",
            kind="full",
            layers=(0,),
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            bytes_per_token=2 * shape.kv_heads * shape.head_dim * itemsize,
            replay=1,
        )
        rules = [r for r in _rules(opened) if not r.optional]
        return DraftNeeds(
            draft_len=context.draft_length(None, USUAL),
            taps=opened.config.taps,
            # Of another head's keys and values none may be found.
            kv=KVSpec((group,), f"eagle3-{itemsize}-{opened.checkpoint.fingerprint()[:16]}"),
            weight_bytes=weight_bytes(rules, context.dtype, True),
        )

    def commit(self, taps: StepTaps | None, kept: Tensor) -> None:
        """Pairs of rows that are text now, and the state that the next pair begins with."""
        if taps is None or not len(kept):
            return
        assert self._kv is not None, "bind comes first"
        batch, slot = taps.batch, taps.slot_of_token
        states = self._head.states(taps.hidden)
        follows = (slot[1:] == slot[:-1]) & (batch.positions[1:] == batch.positions[:-1] + 1)
        follows = F.pad(follows, (1, 0))  # the row before it is that of the token before it
        before = torch.where(follows[:, None], states.roll(1, 0), self._states[slot])
        slots = torch.where(kept, batch.kv_slots, -1)
        self._head.write(batch.ids, before, batch.positions, self._kv.layer(0), slots)
        last = kept & ~F.pad((follows & kept)[1:], (0, 1))
        self._states[torch.where(last, slot, self._spare)] = states

    def propose(self, anchors: Tensor, slots: Tensor) -> Drafts:
        """int64[R, γ]: each draft and the state that it came from give the next."""
        if not len(slots):
            return Drafts(anchors.new_zeros((0, self.draft_len)), None)
        assert self._kv is not None and self._slots is not None, "bind comes first"
        picks, pages = self._picks(slots, self._slots), self._kv.layer(0)
        ids, states = anchors, self._states[slots]
        drafted, sure = [], []
        for k, rows in enumerate(self._rows(slots, self._slots)):
            normed, states = self._head.step(ids, states, rows, pages)
            logits: Tensor = self._head.head(normed, torch.float32)
            total = logits.logsumexp(1)
            logits = self._whole(logits)
            ids = picks(k, logits)
            drafted.append(ids)
            sure.append(log_odds(logits.gather(1, ids[:, None])[:, 0] - total))
        confidence = self._temperatures.confidence(
            torch.stack(sure, 1), self._slots.temperature[slots]
        )
        self._survival.put(slots, confidence)
        return Drafts(torch.stack(drafted, 1), confidence)

    def _whole(self, logits: Tensor) -> Tensor:
        """float32[R, vocab] to [R, V]: −inf for ids that the head cannot draft."""
        if self._ids is None:
            return logits
        full = logits.new_full((len(logits), self.config.shape.vocab_size), -torch.inf)
        return full.index_copy_(1, self._ids, logits)

    def _rows(self, slots: Tensor, view: SlotView) -> list[DraftRows]:
        """Positions and attention of every place of the chains behind these texts."""
        ops, size, count = self._head.ops, self._page_size, len(slots)
        start = (view.length[slots] - 1).clamp(min=0)
        table = view.pages[:, : -(-view.longest // size)][slots]
        each = torch.arange(count + 1, dtype=torch.int32, device=slots.device)
        context = ops.plan_attention(table, start, each, size)
        chains, first = self._chain_plans(count, each)
        return [
            DraftRows(start + k, context, chain, first + k, self._scratch)
            for k, chain in enumerate(chains)
        ]

    def _chain_plans(self, count: int, each: Tensor) -> tuple[list[Any], Tensor]:
        """Attention of ``count`` chains over themselves, place by place, and where their keys
        begin in scratch.
        """
        if self._chains is not None and self._chains[0] == count:
            return self._chains[1], self._chains[2]
        size = self._page_size
        mine = torch.arange(count * self._pages, device=each.device).view(count, self._pages)
        length = torch.ones(count, dtype=torch.int64, device=each.device)
        plan = self._head.ops.plan_attention
        plans = [plan(mine.int(), length * k, each, size) for k in range(1, self.draft_len + 1)]
        self._chains = count, plans, mine[:, 0] * size
        return self._chains[1], self._chains[2]


def log_odds(logp: Tensor) -> Tensor:
    """log(p / (1 − p)) of log p; p counts as at most 1 − 1e-6."""
    logp = logp.clamp(max=-1e-6)
    return logp - torch.log(-torch.expm1(logp))


def _open(context: DrafterContext) -> _Opened:
    if context.model is None:
        raise ConfigError(
            f"speculative: method {context.method!r} needs a draft checkpoint.",
            setting="speculative",
            next_step="Give model=PATH or a hub id.",
        )
    source = resolve(context.model, setting="speculative")
    checkpoint = open_checkpoint(source)
    return _Opened(source.path, checkpoint, read_config(checkpoint.config, context.config))


def _rules(opened: _Opened) -> list[Any]:
    return list(weight_rules(opened.config, layer_name(opened.checkpoint.names())))


def _load(opened: _Opened, target: DrafterTarget, length: int) -> Eagle3Head:
    """The head in the engine's type; embedding and vocabulary are the target's if it has none."""
    head = Eagle3Head(opened.config, target.ops, length)
    load_weights(
        cast("Model", head),  # of a model, loading needs ``load`` alone
        _rules(opened),
        opened.checkpoint,
        target.ops,
        target.dtype,
        plan=LoadPlan(known=TABLES),
    )
    head.share(target.model)
    return head
