"""What a planner knows of drafts: the confidences of each request's last blocks, and how far they
can be believed. :class:`Outlook`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from deepinfer.api.speculative import DraftsLanded, DraftView

Floats = NDArray[np.float64]
DECAY: Final = 0.995
"""What a block leaves of the weight of those before it: a memory of some 200 blocks."""
DOUBT: Final = 2.0
"""Weight of the belief that confidences are right, in verified drafts."""


class Outlook:
    """Expected survivals, request by request, from what has arrived.

    A block's survival is what its drafter said (1 where it said nothing, 0 where it drafted
    nothing), times a factor for each position: drafts that stood over drafts that were said to
    stand, of late. So a drafter without confidences, or with crude ones, is corrected by facts.

    Args:
        gamma: the draft length.
        exact: the equality rule: any block may be looked at. Else the block that the step will
            verify may not, nor anything that was made of its tokens.
    """

    def __init__(self, gamma: int, exact: bool) -> None:
        self.gamma = gamma
        self._exact = exact
        self._position = np.arange(gamma)
        self._blocks: dict[int, tuple[Floats, Floats | None]] = {}  # the last and that before it
        self._drafted: dict[int, int] = {}
        self._usual: Floats | None = None
        self._factor: Floats | None = None
        self._stood = np.full(gamma, DOUBT)
        self._said = np.full(gamma, DOUBT)
        self._mean = np.cumprod(np.full(gamma, 0.7))
        self._weight = DOUBT
        self.seen = 0

    def observe(self, landed: DraftsLanded) -> None:
        """A step's confidences, and what became of the drafts that it verified."""
        out = landed.out
        if out.drafts is None:
            return
        if out.verified is not None and landed.decodes:
            self._learn(landed, out.verified[: landed.decodes])
        said: Floats = np.ones((len(out.counts), self.gamma))
        if out.confidence is not None:
            said = out.confidence.astype(np.float64)
            said[~(said >= 0.0)] = 0.0  # NaN, too
            said.cumprod(axis=1, out=said)
        if out.drafted is not None:
            said[self._position >= out.drafted[:, None]] = 0.0
        drafted = (said > 0).sum(1).tolist()
        blocks, nothing = self._blocks, (None, None)
        rows = zip(landed.generations, out.counts.tolist(), said, drafted, strict=True)
        for generation, count, block, many in rows:
            if count:
                blocks[generation] = block, blocks.get(generation, nothing)[0]
                self._drafted[generation] = many

    def clear(self) -> None:
        """Nothing is drafted now, so nothing is known of any request when it is again."""
        self._blocks.clear()
        self._drafted.clear()

    def _learn(self, landed: DraftsLanded, verified: NDArray[np.int32]) -> None:
        """The newest block of each request is the one whose drafts this step ran."""
        counts = landed.out.counts[: len(verified)]
        rows, newest = [], []
        for i in ((verified > 0) & (counts > 0)).nonzero()[0].tolist():
            blocks = self._blocks.get(landed.generations[i])
            if blocks is not None:
                rows.append(i)
                newest.append(blocks[0])
        if not rows:
            return
        blocks_said, seen = np.array(newest), len(rows)
        ran = verified[rows]
        stood = (self._position < np.minimum(ran, counts[rows] - 1)[:, None]).sum(0)
        said = (blocks_said * (self._position < ran[:, None])).sum(0)
        self.seen += seen
        self._usual = self._factor = None
        if said.any():
            left = DECAY**seen
            self._stood = DOUBT + left * (self._stood - DOUBT) + stood
            self._said = DOUBT + left * (self._said - DOUBT) + said
            self._weight = left * self._weight + seen
            self._mean += (blocks_said.sum(0) - seen * self._mean) / self._weight

    @property
    def factor(self) -> Floats:
        """float64[γ]: what stood over what was said to stand."""
        if self._factor is None:
            self._factor = np.minimum(self._stood / self._said, 2.0)
        return self._factor

    def survival(self, requests: Sequence[DraftView]) -> Floats:
        """float64[R, γ], not increasing along a row.

        A request of which no block has arrived counts as what is usual of late.
        """
        found, unknown = [], []
        for i, r in enumerate(requests):
            block, before = self._blocks.get(r.generation, (None, None))
            if not self._exact and r.rows_ahead == 0:
                block = before
            if block is None:
                unknown.append(i)
            found.append(self._mean if block is None else block)
        if not found:
            return np.empty((0, self.gamma))
        result: Floats = np.array(found) * self.factor
        if unknown:
            result[unknown] = self.usual(1)
        np.minimum(result, 1.0, out=result)
        return np.minimum.accumulate(result, axis=1, out=result)

    def drafted(self, requests: Sequence[DraftView]) -> NDArray[np.int64]:
        """int64[R]: how many drafts each had when last seen; γ where nothing was seen."""
        return np.array([self._drafted.get(r.generation, self.gamma) for r in requests], np.int64)

    def usual(self, requests: int) -> Floats:
        """The same for requests of which nothing is known: what is usual of late."""
        if self._usual is None:
            usual = np.clip(self.factor * self._mean, 0.0, 1.0)
            self._usual = np.minimum.accumulate(usual)
        return np.repeat(self._usual[None], requests, 0)

    def forget(self, requests: Sequence[DraftView]) -> None:
        """Keep only what is known of these."""
        if len(self._blocks) > 2 * len(requests) + 64:
            running = {r.generation for r in requests}
            self._blocks = {g: b for g, b in self._blocks.items() if g in running}
            self._drafted = {g: n for g, n in self._drafted.items() if g in running}
