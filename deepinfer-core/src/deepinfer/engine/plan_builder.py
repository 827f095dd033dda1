"""A plan in the making: :class:`PlanBuilder`. What ``scheduler.py`` decides is written down here.

One builder lives for one step. It counts the budget down and turns rows, entries and page writes
into the blocks of a :class:`~deepinfer.api.plan.BatchPlan`; it decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deepinfer.api.plan import DECODE, Admit, BatchPlan, RowBlock
from deepinfer.engine.request import Ahead, RequestState

if TYPE_CHECKING:
    from deepinfer.api.policy import Budget
    from deepinfer.api.speculative import DraftChoice
    from deepinfer.engine.snapshots import Snapshots


class PlanBuilder:
    """Rows of one step: ``decoding`` with their ``slots``, and ``prefilling`` with their rows.

    ``width``: the rows of a decode, its anchor and the most drafts it may run. ``left`` and
    ``prefill_left``: tokens that may still be given out.
    """

    __slots__ = (
        "admits",
        "constrained",
        "decoding",
        "drafts",
        "left",
        "pages",
        "prefill_left",
        "prefilling",
        "rows",
        "slots",
        "width",
    )

    def __init__(self, budget: Budget, drafts: DraftChoice, draft_len: int) -> None:
        self.left = budget.tokens - drafts.rows
        self.prefill_left = budget.prefill_tokens
        self.drafts = drafts
        self.width = 1 + min(draft_len, drafts.rows)
        self.decoding: list[RequestState] = []
        self.slots: list[int] = []
        self.prefilling: list[RequestState] = []
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.admits: list[Admit] = []
        self.pages: list[tuple[int, int, int]] = []
        self.constrained = False

    @property
    def may_prefill(self) -> bool:
        """Some budget is left for prompts."""
        return self.left > 0 and self.prefill_left > 0

    def enter(self, r: RequestState) -> None:
        """A request takes its slot: tokens, parameters, images and pages go to the device."""
        request = r.request
        admit = Admit(
            slot=r.slot,
            tokens=np.array(r.tokens, np.int32),
            limit=request.limit,
            seed=request.seed,
            params=request.row_params,
            floor=r.floor,
            images=tuple(image for image in request.images if image.stop > r.prefilled),
        )
        self.admits.append(admit)
        self.write_pages(r, 0)

    def write_pages(self, r: RequestState, first: int) -> None:
        """The device learns of the request's pages from index ``first``."""
        self.pages.extend([(r.slot, i, r.pages[i]) for i in range(first, len(r.pages))])

    def chunk(self, r: RequestState) -> None:
        """The next part of a prefill, as far as the budget goes; the last one emits a token.

        It stops where the request's state is wanted (``Chain.cuts``).
        """
        start = r.prefilled
        stop = min((cut for cut in r.chain.cuts if cut > start), default=r.prefill_to)
        n = min(self.left, self.prefill_left, stop - start)
        if n <= 0:
            return
        r.prefilled = end = start + n
        emits = int(end == r.prefill_to)
        replay = max(0, min(n, r.chain.hit - start))
        r.launch(Ahead(emits, emits, end))
        self.left -= n
        self.prefill_left -= n
        self.prefilling.append(r)
        self.rows.append((r.slot, start, n, emits, replay))
        if emits and r.grammar is not None:
            self.constrained = True

    def withdraw(self, r: RequestState) -> None:
        """A victim's row and page writes leave the plan."""
        if r not in self.decoding:
            return
        at = self.decoding.index(r)
        del self.decoding[at], self.slots[at]
        r.recall()
        self.left += 1
        self.pages = [write for write in self.pages if write[0] != r.slot]

    def build(self, memory: RowMemory, snapshots: Snapshots) -> BatchPlan | None:
        """The plan, decodes first, with the state to copy; None if no row is in it."""
        decodes = len(self.decoding)
        if not decodes and not self.rows:
            return None
        memory.steps += 1
        draft_rows = min(self.drafts.rows, (self.width - 1) * decodes)
        saves, restores = snapshots.take()
        return BatchPlan(
            step=memory.steps,
            admits=tuple(self.admits),
            rows=memory.block(self),
            pages=np.array(self.pages, np.int32).reshape(-1, 3),
            draft_rows=draft_rows,
            shape=decodes + draft_rows + sum([row[2] for row in self.rows]),
            constrained=self.constrained,
            saves=saves,
            restores=restores,
            keep=self.drafts.keep,
            propose=self.drafts.propose,
        )


class RowMemory:
    """What one plan leaves for the next: the number of steps, and the rows of steady decodes.

    While nothing but the same decodes runs, their block is made once.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._slots: list[int] = []
        self._width = 0
        self._block: RowBlock | None = None

    def block(self, builder: PlanBuilder) -> RowBlock:
        """The builder's rows; nobody may write to them."""
        slots, rows, width = builder.slots, builder.rows, builder.width
        same = not rows and width == self._width and slots == self._slots
        if same and self._block is not None:
            return self._block
        decodes = len(slots)
        array = np.empty((decodes + len(rows), 5), np.int32)
        array[:decodes, 0] = slots
        array[:decodes, 1:] = (DECODE, width, 1, 0)
        if rows:
            array[decodes:] = rows
        array.flags.writeable = False
        block = RowBlock(array)
        self._slots, self._width, self._block = slots, width, None if rows else block
        return block
