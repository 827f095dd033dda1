"""What drafters from hidden states share: how ids are picked, confidences, who gets a step's rows.

A drafter of blocks adds how its context is written and how a block becomes hidden rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from deepinfer.api.sampler import SampleRows
from deepinfer.api.speculative import Drafts
from deepinfer.errors import ConfigError
from deepinfer.sampling.philox import DRAFT, gumbel
from torch import Tensor
from torch.nn.functional import pad

from deepinfer_speculative.allocation import SlotSurvival
from deepinfer_speculative.dspark.heads import confidence_logits, draft_steps
from deepinfer_speculative.options import take
from deepinfer_speculative.ratio import round_seed

if TYPE_CHECKING:
    from deepinfer.api.model import KVPools
    from deepinfer.api.speculative import DrafterContext, DrafterTarget, SlotView, StepTaps

    from deepinfer_speculative.dspark.calibrated import Temperatures
    from deepinfer_speculative.dspark.heads import Headed

MEMORY: Final = 32
"""Steps that "of late" means."""
WORTH: Final = 0.4
"""A head runs while so many of the requests have verified what it drafts, of late: it reads the
vocabulary's weights for all of them."""
FEW: Final = 2
"""For so many requests all heads run: one costs a per cent of their step, and a planner asks for as
many drafts as it has seen."""
EXPLORE: Final = 16
"""Drafts after which one head more is tried."""


class StateDrafter(ABC):
    """Drafts from the target's hidden states: how ids are picked, and who gets a step's rows.

    Options: ``draft_sampling``: ``coupled`` (usual): where the request samples, drafts are drawn
    with its temperature and filters and, under the exact rule, its own noise, so that the draft is
    what the target will likely draw; ``greedy``: always the best id.

    Under the ratio rule, ``coupled`` drafts have noise of their own, and what they were drawn from
    is kept: float32[max_num_seqs, γ, V].
    """

    def __init__(
        self,
        context: DrafterContext,
        target: DrafterTarget,
        draft_len: int,
        temperatures: Temperatures,
    ) -> None:
        self.draft_len = draft_len
        sampling = take(
            context.options, "draft_sampling", str, "coupled", among=("coupled", "greedy")
        )
        self._greedy = sampling == "greedy"
        self._sampler = target.sampler
        self._survival = SlotSurvival(context.max_num_seqs + 1, self.draft_len, target.device)
        self._temperatures = temperatures
        self._proposals: Tensor | None = None
        if (
            context.acceptance == "ratio" and not self._greedy
        ):  # the ratio rule asks what the drafts were drawn from
            shape = (context.max_num_seqs, self.draft_len, context.config.vocab_size)
            self._proposals = torch.zeros(shape, dtype=torch.float32, device=target.device)
        self._kv: KVPools | None = None
        self._slots: SlotView | None = None

    @abstractmethod
    def commit(self, taps: StepTaps | None, kept: Tensor) -> None:
        """Context of rows that are text now."""

    @abstractmethod
    def propose(self, anchors: Tensor, slots: Tensor) -> Drafts:
        """int64[R, γ] with calibrated confidences."""

    def bind(self, kv: KVPools, slots: SlotView) -> None:
        """The pages of the draft's layers, and the texts."""
        self._kv, self._slots = kv, slots

    def allot(self, slots: Tensor, eligible: Tensor, k: int) -> Tensor:
        """The drafts that most likely stand."""
        return self._survival.allot(slots, eligible, k)

    def proposal(self, slots: Tensor) -> Tensor | None:
        """What the last drafts of these slots were drawn from; None where all were best ids."""
        return None if self._proposals is None else self._proposals[slots]

    def _picks(self, slots: Tensor, view: SlotView) -> Any:
        """(k, logits float32[R, V]) to int64[R]: each draft as the request would draw it."""
        rows = self._rows_of(slots, view)

        def pick(k: int, logits: Tensor) -> Tensor:
            mine = replace(rows, position=rows.position + k)
            if self._proposals is None:
                return self._sampler(logits, mine)
            q = self._sampler.probs(logits, mine)
            self._proposals[slots, k] = q
            noise = gumbel(
                round_seed(rows.seed, rows.position - 1), mine.position, q.shape[1], DRAFT
            )
            return (q.log() + noise).argmax(1)

        return pick

    def _rows_of(self, slots: Tensor, view: SlotView) -> SampleRows:
        """The requests' parameters; positions are those of the first draft."""
        temperature = view.temperature[slots]
        if self._greedy:
            temperature = torch.zeros_like(temperature)
        top_k, top_p, min_p = view.top_k[slots], view.top_p[slots], view.min_p[slots]
        return SampleRows(
            slot=slots,
            position=view.length[slots],
            seed=view.seed[slots],
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            filtered=view.filtered and not self._greedy,
            greedy=view.greedy or self._greedy,
        )


class BlockDrafter(StateDrafter):
    """Drafts a block in one pass.

    A further option, ``draft_candidates``: only so many best ids of each position are corrected by
    the Markov head, and others never drafted; 0 (usual) is all.

    Args:
        block: the trained block, which always runs whole; drafts are its first rows.
        model: the heads.
    """

    def __init__(
        self,
        context: DrafterContext,
        target: DrafterTarget,
        block: int,
        model: Headed,
        temperatures: Temperatures,
    ) -> None:
        super().__init__(context, target, context.draft_length(block), temperatures)
        self._model = model
        self._heads = _Heads(self.draft_len)
        self._candidates = take(context.options, "draft_candidates", int, 0, least=0)
        if self._candidates and not model.config.rank:
            raise ConfigError(
                "speculative: draft_candidates chooses what a Markov head corrects, and this draft "
                "has none.",
                setting="speculative",
            )

    @abstractmethod
    def write(self, taps: StepTaps, slots: Tensor, kv: KVPools) -> None:
        """Context of the step's rows into the pages; slots int64[T], −1 writes nothing."""

    @abstractmethod
    def hidden(
        self, anchors: Tensor, slots: Tensor, view: SlotView, kv: KVPools
    ) -> tuple[Tensor, Tensor]:
        """([R, γ, H] for the vocabulary head, [R, γ, H] for the confidence head), R >= 1."""

    def allot(self, slots: Tensor, eligible: Tensor, k: int) -> Tensor:
        """The drafts that most likely stand; on a CPU also how many are worth making."""
        won = super().allot(slots, eligible, k)
        view = self._slots
        if won.device.type == "cpu" and len(won) and view is not None:  # looking costs nothing here
            left = view.limit[slots] - view.length[slots] - 1
            if int(left.max()) >= self.draft_len:  # else texts end, and that says nothing
                self._heads.verified(won.tolist())
        return won

    def commit(self, taps: StepTaps | None, kept: Tensor) -> None:
        """Context of rows that are text now."""
        if taps is None or not len(kept):
            return
        assert self._kv is not None, "bind comes first"
        self.write(taps, torch.where(kept, taps.batch.kv_slots, -1), self._kv)

    def propose(self, anchors: Tensor, slots: Tensor) -> Drafts:
        """int64[R, γ] with calibrated confidences.

        Heads run as far as drafts are verified of late, all others are none.
        """
        if not len(slots):
            return Drafts(anchors.new_zeros((0, self.draft_len)), None)
        assert self._slots is not None and self._kv is not None, "bind comes first"
        view = self._slots
        gamma = self.draft_len if len(slots) <= FEW else self._heads.next()
        self.settle(self._kv)
        ids, confidence = self._made(anchors, slots, view, gamma)
        if short := self.draft_len - gamma:
            ids = pad(ids, (0, short))
            made = (torch.arange(self.draft_len, device=ids.device) < gamma).float()
            whole = made.expand(ids.shape)
            confidence = whole if confidence is None else pad(confidence, (0, short))
        self._survival.put(slots, confidence)
        return Drafts(ids, confidence, torch.full_like(anchors, gamma) if short else None)

    def settle(self, kv: KVPools) -> None:
        """Write what of the context still waits: drafts are about to read it."""

    def _made(
        self, anchors: Tensor, slots: Tensor, view: SlotView, gamma: int
    ) -> tuple[Tensor, Tensor | None]:
        """γ drafts of each, int64[R, γ], and calibrated confidences float32[R, γ]."""
        assert self._kv is not None, "bind comes first"
        model = self._model
        rows, sure = self.hidden(anchors, slots, view, self._kv)
        if gamma < self.draft_len:
            rows, sure = rows[:, :gamma].contiguous(), sure[:, :gamma].contiguous()
        base: Tensor = model.head(rows.flatten(0, 1), torch.float32)
        base = base.view(len(slots), gamma, -1)
        ids, embeddings = draft_steps(
            model, base, anchors, self._picks(slots, view), self._candidates
        )
        z = confidence_logits(model, sure, embeddings)
        if z is None:
            return ids, None
        return ids, self._temperatures.confidence(z, view.temperature[slots])


class _Heads:
    """How many heads of a block run: all, until it is known what is verified of their drafts."""

    def __init__(self, draft_len: int) -> None:
        self._shares = [deque((1.0,), maxlen=MEMORY) for _ in range(draft_len)]
        self._made, self._turn = draft_len, 0
        self._known = False

    def verified(self, counts: list[int]) -> None:
        """Of the last drafts so many of each request are verified."""
        self._known = True
        for depth, shares in enumerate(self._shares[: self._made]):
            shares.append(sum(count > depth for count in counts) / len(counts))

    def next(self) -> int:
        """For the next drafts."""
        if not self._known:
            return self._made
        worth = 0
        for shares in self._shares:
            if sum(shares) < WORTH * len(shares):
                break
            worth += 1
        self._turn += 1
        more = worth + (self._turn % EXPLORE == 0)
        self._made = min(max(more, 1), len(self._shares))
        return self._made
