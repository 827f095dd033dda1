"""How long steps really take, against the table: :class:`Pace`."""

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
STALE: Final = 32
"""Steps after which a ratio that was not seen goes along with the other: what slows a machine slows
both kinds of steps, and how they differ was learnt when both were fresh."""
OLD: Final = 1024
"""Steps after which it is worth looking at the other kind again."""
KNOWN: Final = 5
"""Steps of each kind at a load that show how they differ there."""
DEAREST: Final = 4.0
"""They do not differ by more, nor does a step from those before it."""


def sort_of_load(requests: int) -> int:
    """Loads of one sort are within a factor of √2, about."""
    return round(2 * math.log2(max(requests, 1)))


class Pace:
    """Running ratios of measured to predicted seconds, of steps with and without drafting.

    A table is measured on short texts and on a quiet machine; the ratio carries what is different,
    so that drafting and not drafting are compared as they are. A step lasts from the answer before
    it, or from its own planning where the device had nothing to do, to its own.
    """

    def __init__(self) -> None:
        self.ratio = {True: 1.0, False: 1.0}
        self._took = {kind: deque[float](maxlen=RECENT) for kind in (True, False)}
        self._ages = {True: 0, False: 0}
        self._last = True  # the kind that was seen last
        self._open: dict[int, tuple[bool, float, float]] = {}
        self._load = 0
        self._dearer: dict[int, float] = {}  # how steps with drafting err over those without

    def expect(self, step: int, now: float, seconds: float, drafting: bool) -> None:
        """A step was planned; ``seconds``: by the table."""
        if len(self._open) > LONGEST:
            self._open.clear()
        self._open[step] = (drafting, seconds, now)

    def landed(self, step: int, now: float, before: float) -> None:
        """Its answer is here; ``before``: when that of the step before it was."""
        expected = self._open.pop(step, None)
        if expected is None or expected[1] <= 0:
            return
        drafting, seconds, planned = expected
        took = now - max(before, planned)
        old, recent = self.ratio[drafting], self._took[drafting]
        recent.append(min(max(took / seconds, old / DEAREST), old * DEAREST))
        self.ratio[drafting] = sorted(recent)[(len(recent) - 1) // 2]
        self._last, other = drafting, not drafting
        self._ages[drafting], self._ages[other] = 0, self._ages[other] + 1
        if not self._took[other]:
            self._guess(other)
        elif self._ages[other] <= STALE:
            if min(map(len, self._took.values())) >= KNOWN:
                dearer = self.ratio[True] / max(self.ratio[False], 1e-9)
                self._dearer[self._load] = min(max(dearer, 1.0 / DEAREST), DEAREST)
        else:
            self.ratio[other] *= self.ratio[drafting] / old
            self.measure_again(other)

    @property
    def compared(self) -> bool:
        """Both kinds of steps have been seen at a load of this sort, one soon after the other, and
        not too long ago.
        """
        return self._load in self._dearer and max(self._ages.values()) < OLD

    def forget(self, step: int) -> None:
        """Its answer says nothing of time."""
        self._open.pop(step, None)

    def measure_again(self, drafting: bool) -> None:
        """Steps of this kind were seen in what may have been another time."""
        self._took[drafting].clear()
        self._took[drafting].append(self.ratio[drafting])

    def another_load(self, requests: int) -> None:
        """What was seen says how the table errs at one load; at another only how fast the machine
        is: both ratios are the one that was seen last, until they are seen here. How the two
        differed when they were last seen at such a load is remembered.
        """
        self._load = sort_of_load(requests)
        self._guess(not self._last)
        for kind, took in self._took.items():
            self._ages[kind] = 0
            took.clear()

    def _guess(self, kind: bool) -> None:
        """Of a kind that was not seen at this load, from the other."""
        dearer = self._dearer.get(self._load, 1.0)
        self.ratio[kind] = self.ratio[not kind] * (dearer if kind else 1.0 / dearer)
