"""What a planner knows of drafts: the confidences of each request's last blocks, and how far they
can be believed. :class:`Outlook`.
"""

from __future__ import annotations

from collections import deque
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
        self._blocks: dict[int, deque[Floats]] = {}
        self._drafted: dict[int, int] = {}
        self._usual: Floats | None = None
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
        for i in out.counts.nonzero()[0].tolist():
            generation = landed.generations[i]
            self._blocks.setdefault(generation, deque(maxlen=2)).append(said[i])
            self._drafted[generation] = drafted[i]

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
            if blocks:
                rows.append(i)
                newest.append(blocks[-1])
        if not rows:
            return
        blocks_said, seen = np.array(newest), len(rows)
        ran = self._position < verified[rows, None]
        stood = (ran & (self._position < counts[rows, None] - 1)).sum(0)
        said = (blocks_said * ran).sum(0)
        whole = blocks_said.sum(0)
        self.seen += seen
        self._usual = None
        if said.any():
            left = DECAY**seen
            self._stood = DOUBT + left * (self._stood - DOUBT) + stood
            self._said = DOUBT + left * (self._said - DOUBT) + said
            self._weight = left * self._weight + seen
            self._mean += (whole - seen * self._mean) / self._weight

    @property
    def factor(self) -> Floats:
        """float64[γ]: what stood over what was said to stand."""
        ratio: Floats = np.minimum(self._stood / self._said, 2.0)
        return ratio

    def survival(self, requests: Sequence[DraftView]) -> Floats:
        """float64[R, γ], not increasing along a row.

        A request of which no block has arrived counts as what is usual of late.
        """
        found, factor = self.usual(len(requests)), self.factor
        for i, r in enumerate(requests):
            blocks = self._blocks.get(r.generation)
            live = not self._exact and r.rows_ahead == 0
            if blocks and len(blocks) > live:
                found[i] = blocks[-1 - live] * factor
        result: Floats = np.minimum.accumulate(np.minimum(found, 1.0), axis=1)
        return result

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
