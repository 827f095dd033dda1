"""The slot table: where every running request stands, on the device.

Where you are: below ``batch``. A decode row of a plan says only "slot 7"; text, length, pages,
limit, seed and sampling parameters are looked up here, on the device, so planning a step needs
nothing of the step before. The host keeps what no step changes (:class:`RowParams`) and an upper
bound of each length, from which shapes are cut.

Drafts lie in the token table right behind the text, where the next step runs them as ordinary
tokens; what of them was not accepted is overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deepinfer.api.plan import DECODE
from deepinfer.sampling.transfer import to_device
from deepinfer.worker.kvpool import lazy_zeros

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from deepinfer.api.plan import Admit, BatchPlan, RowParams

COLD = 1e-5
"""Temperatures below this are greedy: z/T would leave float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotShape:
    """Sizes of a table. ``max_len``: longest text; ``draft_len``: γ."""

    slots: int
    max_len: int
    page_size: int
    vocab_size: int
    draft_len: int = 0


class SlotTable:
    """Device tensors indexed by slot; only the runner's thread touches them.

    Attributes:
        tokens: int32[slots + 1, max_len + γ + 1]: text, then drafts.
        pages: int32[slots + 1, max_pages].
        length, limit, seed, top_k, drafted, floor: int64[slots + 1]; ``drafted`` is how many drafts
            lie behind the text, ``floor`` where late layers begin.
        temperature, top_p, min_p: float32[slots + 1].
        params: the parameters of each slot's request, on the host.
        bound: int64[slots] on the host: no length is above it after the steps so far.
        floors: int64[slots], ``floor`` on the host.
        version: counts plans that admit; what was derived from slots holds while it stands still.
        greedy, filtered: of those whom the drafter is asked for, see ``api.speculative.SlotView``.
        nobody: a slot behind those of requests: a text that has reached its limit.
    """

    def __init__(self, shape: SlotShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self.width = shape.max_len + shape.draft_len + 1
        self.nobody = shape.slots
        max_pages = -(-self.width // shape.page_size)
        tokens = lazy_zeros((shape.slots + 1) * self.width, torch.int32, device)
        self.tokens = tokens.view(-1, self.width)  # most texts end long before max_len
        self.pages = torch.zeros((shape.slots + 1, max_pages), dtype=torch.int32, device=device)
        # One matrix for each type, so that entering slots is two writes.
        self._ints = torch.zeros((6, shape.slots + 1), dtype=torch.int64, device=device)
        self._ints[:2, self.nobody] = 1
        columns = self._ints.unbind(0)
        self.length, self.limit, self.seed, self.top_k, self.drafted, self.floor = columns
        self._floats = torch.ones((3, shape.slots + 1), dtype=torch.float32, device=device)
        self.temperature, self.top_p, self.min_p = self._floats.unbind(0)
        self.params: list[RowParams | None] = [None] * shape.slots
        self.bound = np.zeros(shape.slots, np.int64)
        self.floors = np.zeros(shape.slots, np.int64)
        self._limit = np.zeros(shape.slots, np.int64)
        self.version = 0
        self.greedy, self.filtered = False, True
        self._longest: int | None = None

    def apply(self, plan: BatchPlan) -> None:
        """Admissions, page writes, and the host's bounds after this plan's rows."""
        if plan.admits:
            self._admit(plan.admits)
        if len(plan.pages):
            self._write_pages(plan.pages)
        rows = plan.rows.array
        gain = np.where(rows[:, 1] == DECODE, rows[:, 2], rows[:, 3])
        slots = rows[:, 0]
        self.bound[slots] = np.minimum(self.bound[slots] + gain, self._limit[slots])

    @property
    def longest(self) -> int:
        """No text is longer after the steps so far; at least 1."""
        if self._longest is not None:
            return self._longest
        return max(1, int(self.bound.max(initial=1)))

    @contextmanager
    def no_longer_than(self, longest: int) -> Iterator[None]:
        """Inside, ``longest`` says so: what is recorded there serves all such texts."""
        self._longest = longest
        try:
            yield
        finally:
            self._longest = None

    def params_of(self, slots: Sequence[int]) -> list[RowParams]:
        """The parameters of running requests."""
        found = [self.params[slot] for slot in slots]
        assert all(params is not None for params in found), "a row of a slot that nobody entered"
        return found  # type: ignore[return-value]

    def commit(self, slot: Tensor, length: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Append the first ``counts`` int64[R] of ``tokens`` int64[R, w] to texts of ``length``.

        All w are written: what lies behind the new length is nobody's.
        """
        place = (slot * self.width + length)[:, None]
        if tokens.shape[1] > 1:
            place = place + torch.arange(tokens.shape[1], device=self.device)
        self.tokens.view(-1).index_put_((place,), tokens.int())
        self.length.index_put_((slot,), length + counts)

    def anchors(self, slot: Tensor) -> Tensor:
        """int64[R]: the last token of each text, which the next step runs first."""
        return self.tokens[slot, self.length[slot] - 1].long()

    def set_drafts(self, slot: Tensor, drafts: Tensor, count: Tensor | None = None) -> None:
        """``drafts`` int64[R, γ] of the next step, of which ``count`` int64[R] are any."""
        place = (slot * self.width + self.length[slot])[:, None] + torch.arange(
            drafts.shape[1], device=self.device
        )
        self.tokens.view(-1).index_put_((place,), drafts.int())
        if count is None:
            self.drafted.index_fill_(0, slot, drafts.shape[1])
        else:
            self.drafted.index_put_((slot,), count)

    def no_drafts(self, slot: Tensor) -> None:
        """The next step has none."""
        self.drafted.index_fill_(0, slot, 0)

    def drafts(self, slot: Tensor, length: Tensor, width: int) -> Tensor:
        """int64[R, width]: what lies behind texts of ``length``."""
        if not width:
            return length.new_empty((len(length), 0))
        place = (slot * self.width + length)[:, None] + torch.arange(width, device=self.device)
        return self.tokens.view(-1)[place].long()

    def before(self, slot: Tensor, position: Tensor, count: int) -> Tensor:
        """int64[T, count]: the ids right before positions int64[T], nearest first, −1 for none."""
        place = position[:, None] - 1 - torch.arange(count, device=self.device)
        found = self.tokens.view(-1)[slot[:, None] * self.width + place.clamp(min=0)]
        return torch.where(place >= 0, found.long(), -1)

    def _admit(self, admits: Sequence[Admit]) -> None:
        """All of a plan at once: each way to the device costs as much as many rows."""
        ints = np.empty((7, len(admits)), np.int64)
        floats = np.empty((3, len(admits)), np.float32)
        for i, admit in enumerate(admits):
            slot, p, count = admit.slot, admit.params, len(admit.tokens)
            assert count < admit.limit <= self.shape.max_len, "the brain checks lengths"
            seed = (admit.seed & ((1 << 64) - 1) ^ (1 << 63)) - (1 << 63)  # the same bits, signed
            ints[:, i] = slot, count, admit.limit, seed, p.top_k, 0, admit.floor
            floats[:, i] = 0.0 if p.temperature < COLD else p.temperature, p.top_p, p.min_p
            self.params[slot] = p
            self.bound[slot], self._limit[slot] = count, admit.limit
            self.floors[slot] = admit.floor
        places = [admit.slot * self.width + np.arange(len(admit.tokens)) for admit in admits]
        text = np.concatenate(places), np.concatenate([admit.tokens for admit in admits])
        where, ids = to_device(torch.from_numpy(np.stack(text)), self.device)
        self.tokens.view(-1).index_copy_(0, where, ids.int())
        told = to_device(torch.from_numpy(ints), self.device)
        self._ints.index_copy_(1, told[0], told[1:])
        self._floats.index_copy_(1, told[0], to_device(torch.from_numpy(floats), self.device))
        self.version += 1

    def _write_pages(self, pages: NDArray[np.int32]) -> None:
        place = pages[:, 0].astype(np.int64) * self.pages.shape[1] + pages[:, 1]
        # In order: of several writes to one place the last stands.
        _, last = np.unique(place[::-1], return_index=True)
        keep = len(place) - 1 - last
        told = torch.from_numpy(np.stack((place[keep], pages[keep, 2])))
        where, page = to_device(told, self.device)
        self.pages.view(-1).index_copy_(0, where, page.int())
