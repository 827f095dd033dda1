"""Prompt lookup: what followed the text's last tokens when they stood there before.

No weights, any model, any device: where outputs repeat their prompt (summaries, edits, code) or
themselves, long drafts stand; elsewhere nothing is drafted. The idea is Saxena's prompt lookup
decoding (2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from deepinfer.api.speculative import DraftNeeds, Drafts
from deepinfer.errors import ConfigError
from torch import Tensor

from deepinfer_speculative.allocation import SlotSurvival
from deepinfer_speculative.options import take

if TYPE_CHECKING:
    from deepinfer.api.model import KVPools
    from deepinfer.api.speculative import DrafterContext, DrafterTarget, SlotView, StepTaps

_FIRST = (0.0, 0.35, 0.55, 0.75)
"""How sure the first draft is, by the length of the match; the planner corrects by what stands."""
_LATER = 0.85


class NgramDrafter:
    """Finds the latest earlier place where the last ``prompt_lookup_max`` … ``prompt_lookup_min``
    tokens (usual: 3 … 1) stand, the longest match first, and drafts what follows it there.

    Where the place is so near that the text ends first, the draft goes on with its own beginning: a
    text with a period is continued with that period. Everything is arithmetic on the slot table.
    """

    taps: tuple[int, ...] = ()

    @classmethod
    def needs(cls, context: DrafterContext) -> DraftNeeds:
        """No layers, no KV, no weights."""
        if context.model is not None:
            raise ConfigError(
                f"speculative: method 'ngram' takes no model (model={context.model!r}).",
                setting="speculative",
                next_step="Leave it out, or name another method.",
            )
        return DraftNeeds(draft_len=context.draft_length(None))

    def __init__(self, context: DrafterContext, target: DrafterTarget) -> None:
        self.draft_len = self.needs(context).draft_len
        self._most = take(context.options, "prompt_lookup_max", int, 3, least=1)
        self._least = take(context.options, "prompt_lookup_min", int, 1, least=1)
        if self._least > self._most:
            raise ConfigError(
                f"speculative: prompt_lookup_min={self._least} is above "
                f"prompt_lookup_max={self._most}.",
                setting="speculative",
            )
        first = torch.tensor(_FIRST, device=target.device)
        self._first = first
        self._survival = SlotSurvival(context.max_num_seqs, self.draft_len, target.device)
        self._slots: SlotView | None = None

    def bind(self, kv: KVPools, slots: SlotView) -> None:
        """Only the texts are read."""
        self._slots = slots

    def allot(self, slots: Tensor, eligible: Tensor, k: int) -> Tensor:
        """The longest matches first."""
        return self._survival.allot(slots, eligible, k)

    def commit(self, taps: StepTaps | None, kept: Tensor) -> None:
        """The slot table is all that is remembered."""

    def propose(self, anchors: Tensor, slots: Tensor) -> Drafts:
        """int64[R, γ], all of a row's or none of them."""
        assert self._slots is not None, "bind comes first"
        length = self._slots.length[slots]
        text = self._slots.tokens[:, : self._slots.longest].index_select(0, slots).long()
        matched, end = latest_match(text, length, self._most)
        found = matched >= self._least
        place = torch.arange(self.draft_len, device=text.device)
        period = (length - 1 - end).clamp(min=1)
        ids = text.gather(1, (end + 1)[:, None] + place % period[:, None])
        confidence = torch.full(ids.shape, _LATER, device=text.device)
        confidence[:, 0] = self._first[matched.clamp(max=len(_FIRST) - 1)]
        confidence = torch.where(found[:, None], confidence, 0.0)
        self._survival.put(slots, confidence)
        return Drafts(ids, confidence, torch.where(found, self.draft_len, 0))


def latest_match(text: Tensor, length: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Where the last tokens of each text stood before.

    text int64[R, W], of which ``length`` int64[R] >= 1 are the text. Returns (matched int64[R], end
    int64[R]): how many of the last ``most`` tokens stand before and with position ``end`` too, at
    the latest such place of the longest match; (0, 0) if not even the last one does.
    """
    width = text.shape[1]
    place = torch.arange(width, device=text.device)
    run = torch.ones_like(text, dtype=torch.bool)
    total = torch.zeros_like(text)
    for back in range(most):
        own = (length - 1 - back)[:, None]
        token = text.gather(1, own.clamp(min=0))
        same = torch.zeros_like(run)
        same[:, back:] = text[:, : width - back] == token
        run &= same & (own >= 0)
        total += run
    total = torch.where(place < (length - 1)[:, None], total, 0)
    best = (total * width + place).amax(1)
    matched = best // width
    return matched, torch.where(matched > 0, best % width, 0)
