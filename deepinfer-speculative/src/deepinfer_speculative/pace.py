"""How long steps really take, against the table: :class:`Paces`."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

RECENT: Final = 15
"""Steps of which a ratio is the median: an answer may be taken late (the host was busy, or nobody
asked for the last step of a load), and that says nothing of the device.
"""
LONGEST: Final = 64
"""Steps that may be on their way; more were given up."""
STALE: Final = 8
"""Steps after which a ratio that was not seen goes along with the other: what slows a machine slows
both kinds of steps, and how they differ was learnt when both were fresh. Were they more, a slow
time among them would be held against one kind when it ends.
"""
OLD: Final = 1024
"""Steps after which it is worth looking at the other kind again."""
KNOWN: Final = 5
"""Steps of each kind that show how they differ."""
DEAREST: Final = 4.0
"""They do not differ by more, nor does a step from those before it."""
FADES: Final = 0.995
"""What a step leaves of the weight of those before it in what draft rows add."""
DOUBT: Final = 0.05
"""Weight of the belief that draft rows add what the table says: that of some 20 pairs of steps."""
ODD: Final = 1.5
"""A step that differs by more from what is usual says nothing of draft rows."""
TILTS: Final = -0.5, 3.0
"""Least and most that draft rows may be found to add."""


class Pace:
    """Running ratios of measured to predicted seconds at one sort of load, of steps with drafting
    (True) and without.

    A table is measured on short texts and on a quiet machine; the ratio carries what is different,
    so that drafting and not drafting are compared as they are.

    A table errs most in what draft rows add, and how many are worth it hangs on that, so it is
    learnt apart: how the ratio of a drafting step goes with the share of its seconds that its draft
    rows have by the table, from pairs of steps that follow each other: a machine that is slow for a
    second is slow for both.

    Args:
        ratio: of a kind that was not seen yet, while the other was not either.

    Attributes:
        tilt: what draft rows add, over what the table says, less one; ``ratio`` is that of steps
            whose seconds are corrected so.
    """

    def __init__(self, ratio: float = 1.0) -> None:
        self.ratio = {True: ratio, False: ratio}
        self.tilt = 0.0
        self._before: tuple[int, float, float] | None = None
        self._slope, self._spread = 0.0, DOUBT
        self._took = {kind: deque[float](maxlen=RECENT) for kind in (True, False)}
        self._ages = {True: 0, False: 0}

    @property
    def compared(self) -> bool:
        """Both kinds of steps have been seen here, and not too long ago."""
        return self.knows(True) and self.knows(False) and max(self._ages.values()) < OLD

    def knows(self, drafting: bool) -> bool:
        """Enough steps of that kind have been seen here."""
        return len(self._took[drafting]) >= KNOWN

    def landed(
        self, drafting: bool, ratio: float, step: int = 0, share: float | None = None
    ) -> None:
        """A step of that kind took so many times what was predicted; ``share``: of its draft rows
        in that, None where its time says nothing of them.
        """
        old, other = self.ratio[drafting], not drafting
        if drafting and share is not None:
            self._learn(step, share, ratio / old)
            ratio /= 1.0 + self.tilt * share
        self._took[drafting].append(min(max(ratio, old / DEAREST), old * DEAREST))
        self._ages[drafting], self._ages[other] = 0, self._ages[other] + 1
        recent = sorted(self._took[drafting])
        self.ratio[drafting] = recent[(len(recent) - 1) // 2]
        if not self._took[other]:
            self.ratio[other] = self.ratio[drafting]
        elif self._ages[other] > STALE:
            change = self.ratio[drafting] / old
            self.ratio[other] *= change
            self._took[other] = deque((r * change for r in self._took[other]), maxlen=RECENT)

    def _learn(self, step: int, share: float, took: float) -> None:
        """What draft rows add."""
        usual = 1.0 + self.tilt * share
        if not usual / ODD < took < usual * ODD:
            return
        before, self._before = self._before, (step, share, took)
        if before is not None and before[0] == step - 1:
            more = share - before[1]
            self._slope = FADES * self._slope + more * (took - before[2])
            self._spread = DOUBT + FADES * (self._spread - DOUBT) + more * more
            self.tilt = min(max(self._slope / self._spread, TILTS[0]), TILTS[1])

    def measure_again(self, drafting: bool) -> None:
        """Steps of this kind were seen in what may have been another time."""
        self._took[drafting].clear()
        self._took[drafting].append(self.ratio[drafting])


class Paces:
    """One pace for each sort of load: how the table errs at one is not held against another, where
    both ratios begin as the one that was seen last.

    A step lasts from the answer before it, or from its own planning where the device had nothing to
    do, to its own.
    """

    def __init__(self) -> None:
        self._paces: dict[int, Pace] = {}
        self._open: dict[int, tuple[Pace, bool, float, float, float | None]] = {}
        self._last = 1.0

    def at(self, sort: int) -> Pace:
        """That of a sort of load (:func:`sort_of_load`)."""
        return self._paces.setdefault(sort, Pace(self._last))

    def expect(
        self,
        step: int,
        now: float,
        seconds: float,
        pace: Pace,
        drafting: bool,
        share: float | None = None,
    ) -> None:
        """A step was planned; ``seconds``: by the table; ``share``: of its draft rows in them."""
        if len(self._open) > LONGEST:
            self._open.clear()
        self._open[step] = pace, drafting, seconds, now, share

    def landed(self, step: int, now: float, before: float) -> None:
        """Its answer is here; ``before``: when that of the step before it was."""
        expected = self._open.pop(step, None)
        if expected is None or expected[2] <= 0:
            return
        pace, drafting, seconds, planned, share = expected
        pace.landed(drafting, (now - max(before, planned)) / seconds, step, share)
        self._last = pace.ratio[drafting]

    def forget(self, step: int) -> None:
        """Its answer says nothing of time."""
        self._open.pop(step, None)


def sort_of_load(requests: int) -> int:
    """Loads of one sort are within a factor of √2, about."""
    return round(2 * math.log2(max(requests, 1)))
