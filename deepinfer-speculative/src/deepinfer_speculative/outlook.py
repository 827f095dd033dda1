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
        self._rows: dict[int, int] = {}  # of each generation, in the arrays below; row 0: of none
        self._free: list[int] = []
        self._said = np.full((1, gamma), np.nan)  # of the last block
        self._before = np.full((1, gamma), np.nan)  # of that before it, NaN where there is none
        self._many = np.full(1, gamma)  # drafts of the last block
        self._usual: Floats | None = None
        self._factor: Floats | None = None
        self._stood = np.full(gamma, DOUBT)
        self._told = np.full(gamma, DOUBT)
        self._mean = np.cumprod(np.full(gamma, 0.7))
        self._weight = DOUBT
        self.seen = 0
        self._last = 0  # step whose blocks are known

    def observe(self, landed: DraftsLanded) -> None:
        """A step's confidences, and what became of the drafts that it verified, if those were seen.

        A few calls for all requests: where steps are short, this is a tenth of their time.
        """
        out = landed.out
        if out.drafts is None:
            return
        generations = landed.generations
        follows, self._last = out.step == self._last + 1, out.step
        if follows and out.verified is not None and landed.decodes:
            self._learn(landed, out.verified[: landed.decodes])
        if out.confidence is None:
            said = np.ones((len(out.counts), self.gamma))
        else:
            said = np.fmax(out.confidence, 0.0, dtype=np.float64)  # NaN, too
            said.cumprod(axis=1, out=said)
        if out.drafted is not None and len(said) and out.drafted.min() < self.gamma:
            said[self._position >= out.drafted[:, None]] = 0.0
        emits = out.counts > 0
        if not emits.all():
            said = said[emits]
            generations = [g for g, some in zip(generations, emits.tolist(), strict=True) if some]
        rows = [self._row(generation) for generation in generations]
        if not self._exact:
            self._before[rows] = self._said[rows]
        self._said[rows] = said
        self._many[rows] = (said > 0).sum(1)

    def _row(self, generation: int) -> int:
        """Of a request whose block has arrived."""
        row = self._rows.get(generation)
        if row is None:
            if not self._free:
                size = len(self._many)
                self._free = list(range(size, 2 * size))
                more = np.full((size, self.gamma), np.nan)
                self._said = np.concatenate((self._said, more))
                self._before = np.concatenate((self._before, more))
                self._many = np.concatenate((self._many, np.full(size, self.gamma)))
            row = self._rows[generation] = self._free.pop()
            self._said[row] = self._before[row] = np.nan
        return row

    def _found(self, generations: Sequence[int]) -> NDArray[np.int64]:
        """Their rows; 0 for those of which no block has arrived."""
        known = self._rows
        return np.array([known.get(generation, 0) for generation in generations], np.int64)

    def clear(self) -> None:
        """Nothing is drafted now, so nothing is known of any request when it is again."""
        self._free += self._rows.values()
        self._rows.clear()

    def _learn(self, landed: DraftsLanded, verified: NDArray[np.int32]) -> None:
        """The newest block of each request is the one whose drafts this step ran."""
        counts = landed.out.counts[: len(verified)]
        rows = self._found(landed.generations[: len(verified)])
        good = (verified > 0) & (counts > 0) & (rows > 0)
        seen = int(good.sum())
        if not seen:
            return
        if seen < len(rows):
            rows, verified, counts = rows[good], verified[good], counts[good]
        blocks = self._said[rows]
        stood = (self._position < np.minimum(verified, counts - 1)[:, None]).sum(0)
        said = (blocks * (self._position < verified[:, None])).sum(0)
        self.seen += seen
        self._usual = self._factor = None
        if said.any():
            left = DECAY**seen
            self._stood = DOUBT + left * (self._stood - DOUBT) + stood
            self._told = DOUBT + left * (self._told - DOUBT) + said
            self._weight = left * self._weight + seen
            self._mean += (blocks.sum(0) - seen * self._mean) / self._weight

    @property
    def factor(self) -> Floats:
        """float64[γ]: what stood over what was said to stand."""
        if self._factor is None:
            self._factor = np.minimum(self._stood / self._told, 2.0)
        return self._factor

    def survival(self, requests: Sequence[DraftView]) -> Floats:
        """float64[R, γ], not increasing along a row.

        A request of which no block has arrived counts as what is usual of late.
        """
        rows = self._found([r.generation for r in requests])
        result: Floats = self._said[rows]
        if not self._exact:
            live = np.array([r.rows_ahead == 0 for r in requests], bool)
            result[live] = self._before[rows][live]
        unknown = np.isnan(result[:, 0])
        result *= self.factor
        if unknown.any():
            result[unknown] = self.usual(1)
        np.minimum(result, 1.0, out=result)
        return np.minimum.accumulate(result, axis=1, out=result)

    def drafted(self, requests: Sequence[DraftView]) -> NDArray[np.int64]:
        """int64[R]: how many drafts each had when last seen; γ where nothing was seen."""
        return self._many[self._found([r.generation for r in requests])]

    def usual(self, requests: int) -> Floats:
        """The same for requests of which nothing is known: what is usual of late."""
        if self._usual is None:
            usual = np.clip(self.factor * self._mean, 0.0, 1.0)
            self._usual = np.minimum.accumulate(usual)
        return np.repeat(self._usual[None], requests, 0)

    def forget(self, requests: Sequence[DraftView]) -> None:
        """Keep only what is known of these."""
        if len(self._rows) > 2 * len(requests) + 64:
            running = {r.generation for r in requests}
            for generation in [g for g in self._rows if g not in running]:
                self._free.append(self._rows.pop(generation))
