"""The planner: how many drafts a step verifies, and whether it drafts for the next. No torch.

Where you are: brain side, asked by the scheduler before each step. What it decides changes speed
only (under the equality rule). ``static`` verifies everything that was drafted (rows for drafts
that are not there would be padding, so it goes by what was there when last seen). ``adaptive``
takes the K of highest expected throughput by measured costs, stops drafting where that does not pay
and tries again now and then. ``cap`` verifies everything and lets as many drafts stand as
``adaptive`` would have verified, which shows what trimming costs.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from deepinfer.api.speculative import DraftChoice
from numpy.typing import NDArray

from deepinfer_speculative import costs
from deepinfer_speculative.options import take
from deepinfer_speculative.outlook import Outlook
from deepinfer_speculative.pace import DEAREST, Pace, sort_of_load
from deepinfer_speculative.schedule import best_rows, causal_rows, ranked, throughput

if TYPE_CHECKING:
    from deepinfer.api.speculative import DraftFacts, DraftsLanded, PlannerContext

    from deepinfer_speculative.costs import CostTable
    from deepinfer_speculative.schedule import Floats

log = logging.getLogger(__name__)

FIRST_WAIT: Final = 32
LONGEST_WAIT: Final = 1024
"""Steps without drafts before they are tried again; doubled each time it does not pay."""
TRIAL: Final = 6
"""Steps of a trial: a few answers are one step behind."""
GLANCE: Final = 8
"""Steps without drafts, now and then at each sort of load, that show what they take there: from
drafting steps alone nobody can tell whether the table errs or the machine is slow. Drafting goes on
behind them, and is judged by what it takes then.
"""
PRICE: Final = 0.005
"""Share of the time that trials may cost: where drafting is dear, they are rare from the start."""
RETURN: Final = 1.03
"""Drafting comes back where it promises so much more than steps without."""
WORTH: Final = 0.99
"""It stops where it gives less than this share of what steps without give, of late: drafts of some
methods come in bursts, and looking for them costs little."""
MEMORY: Final = 8
"""Steps that "of late" means."""
LOOK: Final = 8
"""While it pauses, a planner looks only every so many steps: its time is that of steps."""


class _Prospect(NamedTuple):
    """By the table: tokens a second with the best number of drafts; seconds of a step without
    drafts, and of one of a trial.
    """

    rate: float
    plain: float
    trial: float


class Planner:
    """A :class:`~deepinfer.api.speculative.DraftPlanner`.

    Options: ``costs``, a file with a cost table (:mod:`.costs`); ``profile_seconds``, how long
    measuring one may take where none is kept (usual 8; 0: never; then nothing is trimmed);
    ``min_gain``, verify all unless trimming promises so much more (usual 0); ``walk``: ``global``
    takes the best K of all, ``causal`` the paper's first local one.

    Attributes:
        counts: what happened so far; see :meth:`report`.
    """

    def __init__(self, context: PlannerContext) -> None:
        self.draft_len = context.draft_len
        self._mode = context.mode
        self._min_gain = take(context.options, "min_gain", float, 0.0, least=0.0)
        walk = take(context.options, "walk", str, "global", among=("global", "causal"))
        self._causal = walk == "causal"
        self._outlook = Outlook(context.draft_len, context.acceptance == "exact")
        self._pace = Pace()
        self._table = None if context.mode == "static" else _table(context)
        self._prospects: dict[int, _Prospect] = {}  # by requests
        self._proposed = True  # at the first step there are no drafts, whatever is said of them
        self._drafting = True
        self._wait, self._since = FIRST_WAIT, 0
        self._failed = False  # a trial at this load
        self._failures: dict[int, tuple[int, int]] = {}  # by sort of load: wait and since
        self._trial = TRIAL
        self._glance = 0
        self._begun = False
        self._step = self._hold = 0  # of the last question, and the steps that need none after it
        self._load = 0
        self._edge = 1.0
        self._edges = 0
        self.counts = {"steps": 0, "steps_with_drafts": 0, "steps_without_drafting": 0, "rows": 0}

    def choose(self, facts: DraftFacts) -> DraftChoice:
        """K, and whether to draft behind the step."""
        self._pace.forget(facts.step)  # if it was planned before and came to nothing
        held = min(max(facts.step - self._step - 1, 0), self._hold)
        self._since += held
        choice = self._pausing(facts) if self._paused else self._drafted(facts)
        self._proposed, self._step, self._hold = choice.propose, facts.step, choice.hold
        self.counts["steps"] += held + 1
        self.counts["steps_with_drafts"] += choice.rows > 0
        self.counts["steps_without_drafting"] += held + (not choice.propose)
        self.counts["rows"] += choice.rows
        return choice

    def _drafted(self, facts: DraftFacts) -> DraftChoice:
        """A step that may have drafts."""
        most = np.array([r.most_drafts for r in facts.decoding], np.int64)
        eligible = np.clip(most, 0, self.draft_len)
        self._outlook.forget(facts.decoding)
        there = np.minimum(eligible, self._outlook.drafted(facts.decoding))
        everything = min(int(there.sum()), facts.room)
        return self._choose(facts, eligible, everything)

    def observe(self, landed: DraftsLanded) -> None:
        """Learn from a step's answer."""
        if landed.out.counts.any() and not landed.out.warming:
            self._pace.landed(landed.out.step, landed.now, landed.before)
        else:  # if of texts that have ended: nobody hurries to take it
            self._pace.forget(landed.out.step)
        if self._paused:
            self._outlook.clear()
        else:
            self._outlook.observe(landed)

    def report(self) -> dict[str, float]:
        """Counters, the running ratios of measured to predicted time, and the state."""
        ratio = self._pace.ratio
        return {
            **self.counts,
            "drafting": float(self._drafting),
            "time_ratio_drafting": ratio[True],
            "time_ratio_plain": ratio[False],
        }

    @property
    def _paused(self) -> bool:
        """Adaptive, and neither is anything drafted nor was it before the last step."""
        return self._mode == "adaptive" and not (self._drafting or self._proposed)

    def _pausing(self, facts: DraftFacts) -> DraftChoice:
        """A step of a pause: it has no drafts, and may be the last without drafting behind it."""
        assert self._table is not None
        count = facts.running
        requests = count + facts.emitting
        if requests and (self._since % LOOK == 0 or self._changed(requests)):
            back = self._comes_back(requests)
        else:
            self._since += 1
            back = False
        hold = 0
        if not facts.prefill_tokens:
            hold = 0 if back or self._glance else -self._since % LOOK  # until it looks again
            seconds = self._table.plain_of(count)
            seconds += self._table.draft_of(requests) if back else 0.0
            self._pace.expect(facts.step, facts.now, seconds, back)
        return DraftChoice(0, propose=back, hold=hold)

    def _comes_back(self, requests: int) -> bool:
        """While a pause goes on nothing is learnt of drafts, so what usual ones promise is worked
        out once for each load.
        """
        if requests not in self._prospects:
            self._prospects[requests] = self._usual(requests)
        back = self._weighed(self._prospects[requests], requests)
        if back:
            self._prospects.clear()
        return back

    def _usual(self, requests: int) -> _Prospect:
        gains = np.sort(self._outlook.usual(requests).ravel())[::-1]
        return self._prospect(gains, requests)

    def _changed(self, requests: int) -> bool:
        return abs(requests - self._load) > 0.25 * self._load

    def _choose(
        self, facts: DraftFacts, eligible: NDArray[np.int64], everything: int
    ) -> DraftChoice:
        if self._table is None:
            return DraftChoice(everything)
        decoding = len(facts.decoding)
        every = ranked(self._outlook.survival(facts.decoding), eligible)
        gains = every[: facts.room]
        requests = decoding + facts.emitting
        propose = self._mode == "cap" or self._pays(every, facts)
        tokens = decoding + facts.prefill_tokens
        seconds = self._table.steps(tokens, len(gains), requests, propose)
        seconds *= self._pace.ratio[True]
        rate = throughput(gains, requests, np.maximum(seconds, 1e-9))
        rows = causal_rows(rate) if self._causal else best_rows(rate, self._min_gain)
        if self._trial and self._drafting and self._mode == "adaptive":
            few = -(-decoding // 4)
            rows = max(rows, min(len(gains), few))  # a trial has to show something
        if not self._proposed:
            rows = 0  # there are none
        if self._mode == "cap":
            return DraftChoice(everything, keep=rows)
        drafting = propose or rows > 0
        if not facts.prefill_tokens:
            plain = seconds[rows] / self._pace.ratio[True]
            self._pace.expect(facts.step, facts.now, float(plain), drafting)
        return DraftChoice(rows, propose=propose)

    def _pays(self, gains: Floats, facts: DraftFacts) -> bool:
        """Whether the next step should have drafts, at the load that it will have; ``gains``: what
        the drafts that there may be now promise.
        """
        assert self._table is not None
        requests = len(facts.decoding) + facts.emitting
        if not requests:
            return self._drafting
        fresh = facts.emitting
        if not (self._drafting and self._outlook.seen):
            gains, fresh = gains[:0], requests
        if fresh:
            usual = self._outlook.usual(fresh).ravel()
            gains = np.sort(np.concatenate((gains, usual)))[::-1]
        return self._weighed(self._prospect(gains, requests), requests)

    def _prospect(self, gains: Floats, requests: int) -> _Prospect:
        """Of steps with drafts of these survivals and without, by the table."""
        assert self._table is not None
        drafted = np.maximum(self._table.steps(requests, len(gains), requests, True), 1e-9)
        return _Prospect(
            rate=float(throughput(gains, requests, drafted).max()),
            plain=max(self._table.plain_of(requests), 1e-9),
            trial=float(drafted[min(-(-requests // 4), len(drafted) - 1)]),
        )

    def _weighed(self, prospect: _Prospect, requests: int) -> bool:
        """The same as times are of late."""
        if self._changed(requests):
            self._pace.another_load(requests)
        drafted, plain = (max(self._pace.ratio[kind], 1e-9) for kind in (True, False))
        drafted = min(drafted, DEAREST * plain)
        plain *= prospect.plain
        dear = int(TRIAL * max(prospect.trial * drafted / plain - 1.0, 0.0) / PRICE)
        return self._switch(prospect.rate / drafted, requests / plain, requests, dear)

    def _switch(self, on: float, off: float, requests: int, dear: int) -> bool:
        """Stop and come back, with trials that become rarer while they do not pay; at a load at
        which they did not, only with one that is due there.

        ``dear``: steps over which the time that a trial costs must be spread.
        """
        self._since += 1
        if not self._begun:  # nothing is known of the drafts yet: usual ones must promise something
            self._begun = True
            self._drafting = on > off
        changed = self._changed(requests)
        if changed:
            if self._failed:
                self._failures[sort_of_load(self._load)] = self._wait, self._since
            known = self._failures.get(sort_of_load(requests))
            self._failed = known is not None
            self._wait, self._since = known or (FIRST_WAIT, 0)
            self._load, self._edges, self._glance = requests, 0, 0
        if self._drafting:
            if changed and (self._failed or on < WORTH * off):  # what paid at another load
                self._drafting = False
                return False
            if self._trial:
                self._trial -= 1
                return True  # what was expected before anything was seen is no measure
            self._edges += 1
            self._edge += (on / off - self._edge) / min(self._edges, MEMORY)
            if self._edge >= WORTH and self._edges >= MEMORY and not self._pace.compared:
                self._drafting, self._glance, self._since = False, GLANCE, 0
            elif self._edge >= WORTH:
                self._wait, self._failed = FIRST_WAIT, False
                self._failures.pop(sort_of_load(requests), None)
            else:
                # Of texts that are about to end nothing is to be learnt.
                usual = self._usual(requests).rate / max(self._pace.ratio[True], 1e-9)
                self._drafting, self._failed, self._since = False, usual < WORTH * off, 0
            return self._drafting
        if self._glance:
            if self._since >= self._glance:
                self._glance, self._edges, self._since = 0, 0, 0
                self._drafting, self._trial = True, TRIAL
                self._pace.measure_again(True)
            return self._drafting
        promised = on > RETURN * off and (changed or self._since >= FIRST_WAIT)
        if (promised and not self._failed) or self._since >= max(self._wait, dear):
            self._wait, self._since = min(2 * self._wait, LONGEST_WAIT), 0
            self._drafting, self._trial, self._edges = True, TRIAL, 0
        return self._drafting


def _table(context: PlannerContext) -> CostTable | None:
    options = context.options
    path = take(options, "costs", str, "")
    if path:
        return costs.load(Path(path))
    budget = take(options, "profile_seconds", float, 8.0, least=0.0)
    if not budget:
        log.warning("Speculation has no cost table (profile_seconds=0): nothing is trimmed.")
        return None
    identity = f"{context.identity} γ={context.draft_len} {context.acceptance}"
    return costs.cached(
        context.cache_dir,
        f"{identity} {context.max_num_seqs} {context.max_tokens} whole steps",
        lambda: costs.profile(
            context.measure, context.draft_len, context.max_num_seqs, context.max_tokens, budget
        ),
    )
