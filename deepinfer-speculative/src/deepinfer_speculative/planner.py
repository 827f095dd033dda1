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
from typing import TYPE_CHECKING, Final

import numpy as np
from deepinfer.api.speculative import DraftChoice
from numpy.typing import NDArray

from deepinfer_speculative import costs
from deepinfer_speculative.options import take
from deepinfer_speculative.outlook import Outlook
from deepinfer_speculative.pace import Pace
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
"""While it pauses, a planner looks only every so many steps: on a CPU its time is the model's."""


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
        self._proposed = True  # at the first step there are no drafts, whatever is said of them
        self._drafting = True
        self._wait = FIRST_WAIT
        self._since = 0
        self._trial = TRIAL
        self._begun = False
        self._load = 0
        self._edge = 1.0
        self._edges = 0
        self.counts = {"steps": 0, "steps_with_drafts": 0, "steps_without_drafting": 0, "rows": 0}

    def choose(self, facts: DraftFacts) -> DraftChoice:
        """K, and whether to draft behind the step."""
        if self._sleeps(facts):
            return self._plain(facts)
        most = np.array([r.most_drafts for r in facts.decoding], np.int64)
        eligible = np.clip(most, 0, self.draft_len)
        self._outlook.forget(facts.decoding)
        there = np.minimum(eligible, self._outlook.drafted(facts.decoding))
        everything = min(int(there.sum()), facts.room)
        choice = self._choose(facts, eligible, everything)
        self._proposed = choice.propose
        self.counts["steps"] += 1
        self.counts["steps_with_drafts"] += choice.rows > 0
        self.counts["steps_without_drafting"] += not choice.propose
        self.counts["rows"] += choice.rows
        return choice

    def observe(self, landed: DraftsLanded) -> None:
        """Learn from a step's answer."""
        self._pace.landed(landed.out.step, landed.now)
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

    def _sleeps(self, facts: DraftFacts) -> bool:
        """A step of a pause in which there is nothing to decide."""
        requests = len(facts.decoding) + facts.emitting
        due = self._since % LOOK == 0 or self._changed(requests)
        return self._paused and self._table is not None and not due

    def _plain(self, facts: DraftFacts) -> DraftChoice:
        """A step without drafts."""
        assert self._table is not None
        self._since += 1
        self.counts["steps"] += 1
        self.counts["steps_without_drafting"] += 1
        if not facts.prefill_tokens:
            seconds = float(self._table.plain(np.array(len(facts.decoding))))
            self._pace.expect(facts.step, facts.now, seconds, False)
        return DraftChoice(0, propose=False)

    def _changed(self, requests: int) -> bool:
        return abs(requests - self._load) > 0.25 * self._load

    def _choose(
        self, facts: DraftFacts, eligible: NDArray[np.int64], everything: int
    ) -> DraftChoice:
        if self._table is None:
            return DraftChoice(everything)
        survival = self._outlook.survival(facts.decoding)
        gains = ranked(survival, eligible)[: facts.room]
        requests = len(facts.decoding) + facts.emitting
        propose = self._mode == "cap" or self._pays(survival, eligible, facts)
        tokens = len(facts.decoding) + facts.prefill_tokens
        seconds = self._table.steps(tokens, len(gains), requests, propose)
        seconds *= self._pace.ratio[True]
        rate = throughput(gains, len(facts.decoding) + facts.emitting, np.maximum(seconds, 1e-9))
        rows = causal_rows(rate) if self._causal else best_rows(rate, self._min_gain)
        if self._trial and self._drafting and self._mode == "adaptive":
            few = -(-len(facts.decoding) // 4)
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

    def _pays(self, survival: Floats, eligible: NDArray[np.int64], facts: DraftFacts) -> bool:
        """Whether the next step should have drafts, at the load that it will have."""
        assert self._table is not None
        requests = len(facts.decoding) + facts.emitting
        if not requests:
            return self._drafting
        if self._drafting and self._outlook.seen:
            gains = ranked(survival, eligible)
            fresh = self._outlook.usual(facts.emitting)
        else:
            gains = np.zeros(0)
            fresh = self._outlook.usual(requests)
        gains = np.sort(np.concatenate((gains, fresh.ravel())))[::-1]
        ratio = self._pace.ratio
        drafted = self._table.steps(requests, len(gains), requests, True) * ratio[True]
        on = float(throughput(gains, requests, np.maximum(drafted, 1e-9)).max())
        plain = max(float(self._table.plain(np.array(requests))) * ratio[False], 1e-9)
        trial = float(drafted[min(-(-requests // 4), len(drafted) - 1)])
        dear = int(TRIAL * max(trial / plain - 1.0, 0.0) / PRICE)
        return self._switch(on, requests / plain, requests, dear)

    def _switch(self, on: float, off: float, requests: int, dear: int) -> bool:
        """Stop and come back, with trials that become rarer while they do not pay.

        ``dear``: steps over which the time that a trial costs must be spread.
        """
        self._since += 1
        if not self._begun:  # nothing is known of the drafts yet: usual ones must promise something
            self._begun = True
            self._drafting = on > off
        changed = self._changed(requests)
        if changed:
            self._wait, self._load, self._edges = FIRST_WAIT, requests, 0
        if self._drafting:
            over = changed and on < WORTH * off  # tried at another load: no reason to go on
            if self._trial and not over:
                self._trial -= 1
                return True  # what was expected before anything was seen is no measure
            self._edges += 1
            self._edge += (on / off - self._edge) / min(self._edges, MEMORY)
            if self._edge >= WORTH:
                self._wait = FIRST_WAIT
                return True
            self._drafting, self._since = False, 0
            return False
        better = on > RETURN * off and (changed or self._since >= FIRST_WAIT)
        if better or self._since >= max(self._wait, dear):
            self._wait = min(2 * self._wait, LONGEST_WAIT)
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
        f"{identity} {context.max_num_seqs} {context.max_tokens}",
        lambda: costs.profile(
            context.measure, context.draft_len, context.max_num_seqs, context.max_tokens, budget
        ),
    )
