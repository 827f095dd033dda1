"""Whether anything is drafted at a load: :class:`Switch`. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from deepinfer_speculative.pace import OLD

if TYPE_CHECKING:
    from deepinfer_speculative.pace import Pace

FIRST_WAIT: Final = 32
LONGEST_WAIT: Final = 4096
"""Steps without drafts before they are tried again."""
RARER: Final = 4
"""What these are multiplied by each time it does not pay."""
EARLY: Final = 512
"""However dear trials are, the first one comes again after so many steps, the next after
``RARER`` times as many, and so on: what a few steps have shown may be a machine that was busy just
then.
"""
TRIAL: Final = 6
"""Steps of a trial: a few answers are one step behind."""
GLANCE: Final = 8
"""Steps without drafts, now and then, that show what they take: from drafting steps alone nobody
can tell whether the table errs or the machine is slow. Drafting goes on behind them, and is judged
by what it takes then.
"""
SOON: Final = 8
"""Steps of a pause that began although drafts are worth it: texts were about to end."""
RETURN: Final = 1.03
"""Drafting comes back where it promises so much more than steps without."""
WORTH: Final = 0.99
"""It stops where it gives less than this share of what steps without give, of late: drafts of some
methods come in bursts, and looking for them costs little."""
MEMORY: Final = 8
"""Steps that "of late" means."""


class Switch:
    """Stops drafting and comes back, at one sort of load; others have books of their own, so that
    loads which change every few steps are judged like any. Trials become rarer while drafts do not
    pay, and behind one that failed only the next that is due brings them back.

    Attributes:
        drafting: the last decision.
        trial: steps left of a trial; what was expected before anything was seen is no measure.
        glancing: steps are looked at that do not draft.
        failed: the last trial did not pay; only the next that is due brings drafts back.
        since: steps without drafts; whoever decides nothing for a step counts it here.
        paid: steps without drafts that could have been run in the time of the last trial and what
            came of it, beyond those that give as many tokens; whoever sees steps counts it here.
    """

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.drafting, self.glancing, self.failed = True, False, False
        self.trial, self.since, self.paid = TRIAL, 0, 0.0
        self._begun = False
        self._wait = FIRST_WAIT
        self._tried = 0  # trials that were due
        self._edge = 1.0  # what drafting gives over what steps without give, of late
        self._edges = 0
        self._glance_due = 0  # steps until there may be one
        self._returned = False  # from a pause, and steps without drafts were not seen since

    def decide(
        self, on: float, off: float, enters: bool, dear: int, usual: Callable[[], float]
    ) -> bool:
        """Tokens a second with drafts, as far as these requests have room for any, and without.

        ``enters``: the step before was at another load; ``dear``: steps over which what a trial
        costs must be spread; ``usual``: ``on`` with drafts for everybody, as they are of late.
        """
        self.since += 1
        self._glance_due -= 1
        if not self._begun:  # nothing is known of the drafts yet: usual ones must promise something
            self._begun, self.drafting = True, on > off
        if self.drafting:
            self._judge(on, off, usual)
        elif self.glancing:
            if self.since >= GLANCE:
                self._try()
        else:
            promised = on > RETURN * off and (enters or self.since >= SOON)
            due = max(self._wait, min(dear, EARLY * RARER**self._tried))
            if (promised and not self.failed) or self.since >= due:
                self._wait = min(RARER * self._wait, LONGEST_WAIT)
                self._tried += self.since >= due
                self._returned = True
                self._try()
        return self.drafting

    def _try(self) -> None:
        self.pace.measure_again(True)
        self.drafting, self.glancing = True, False
        self.trial, self.since, self._edges, self.paid = TRIAL, 0, 0, 0.0

    def _may_glance(self) -> bool:
        return self._glance_due <= 0 and self.pace.knows(True) and not self.pace.compared

    def _judge(self, on: float, off: float, usual: Callable[[], float]) -> None:
        """While it drafts."""
        if self.trial:
            self.trial -= 1
            return
        self._edges += 1
        self._edge += (on / off - self._edge) / min(self._edges, MEMORY)
        if self._edge < WORTH:
            # Of texts that are about to end nothing is to be learnt.
            self.drafting, self.since, self.failed = False, 0, usual() < WORTH * off
        elif self._edges >= MEMORY and (self._returned or self._may_glance()):
            # What was compared in a trial may have been a slow time and a quick one.
            self.drafting, self.since, self.glancing, self._returned = False, 0, True, False
            self._glance_due = OLD
        else:
            self._wait, self.failed = FIRST_WAIT, False
