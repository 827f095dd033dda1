"""The planner: how many drafts a step verifies, and whether it drafts for the next. No torch.

Where you are: brain side, asked by the scheduler before each step. What it decides changes speed
only (under the equality rule). ``static`` verifies everything that was drafted (rows for drafts
that are not there would be padding, so it goes by what was there when last seen). ``adaptive``
takes the K of highest expected throughput by measured costs, stops drafting where that does not pay
and tries again now and then (``switch``). ``cap`` verifies everything and lets as many drafts stand
as ``adaptive`` would have verified, which shows what trimming costs.
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
from deepinfer_speculative.pace import DEAREST, LONGEST, Paces, sort_of_load
from deepinfer_speculative.schedule import best_rows, causal_rows, ranked, throughput
from deepinfer_speculative.switch import TRIAL, Switch

if TYPE_CHECKING:
    from deepinfer.api.speculative import DraftFacts, DraftsLanded, PlannerContext

    from deepinfer_speculative.costs import CostTable
    from deepinfer_speculative.schedule import Floats

log = logging.getLogger(__name__)

PRICE: Final = 0.0025
"""Share of the time that trials may cost, but for the first (``switch.EARLY``): where drafting is
dear, they are rare."""
LEAST: Final = 0.1
"""Share of a step of a trial that is lost at least, whatever drafts promise."""
BEHIND: Final = 3
"""Steps that a trial goes on for behind its last decision, as answers come late."""
LOOK, LOOK_SHORT = 8, 32
"""While it pauses, a planner looks only every so many steps: its time is that of steps. More where
steps are short and drafts were tried and did not pay.
"""
CALM: Final = 2
"""Steps behind one with a prompt or of another number of requests that are no measure either: the
host comes late with them, and answers are taken late."""
RESTLESS: Final = 32
"""Steps without a measure after which any is one."""
LONG: Final = 0.01
"""Seconds of a step from which on that does not show."""

AGAIN: Final = 3
"""Steps that repeat a choice where steps are short and requests many: working it out takes a tenth
of such a step, and how many drafts are worth it in all hardly changes from one to the next.
"""
MANY: Final = 8
"""Requests from which on that holds: the confidences of few go up and down together."""


class _Repeated(NamedTuple):
    """A choice that stands for some steps more: rows for so many requests, seconds by the table."""

    rows: int
    requests: int
    seconds: float


class _Booked(NamedTuple):
    """A step with drafts, or that drafts, on its way: planned when, for how many requests, seconds
    without drafts.
    """

    switch: Switch
    now: float
    requests: int
    plain: float


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
        self._paces = Paces()
        self._switches: dict[int, Switch] = {}  # by sort of load
        self._sort, self._enters = 0, False
        self._switch = self._at(self._sort)
        self._table = None if context.mode == "static" else _table(context)
        self._prospects: dict[int, _Prospect] = {}  # by requests
        self._booked: dict[int, _Booked] = {}  # by step, those of trials on their way
        self._again = _Repeated(0, 1, 0.0)
        self._left = 0  # steps that it stands for
        self._proposed = True  # at the first step there are no drafts, whatever is said of them
        self._requests = 0  # of the last step
        self._calm = 0  # steps since requests came or went
        self._restless = 0  # steps since one was a measure
        self._step = self._hold = 0  # of the last question, and the steps that need none after it
        self.counts = {"steps": 0, "steps_with_drafts": 0, "steps_without_drafting": 0, "rows": 0}

    def choose(self, facts: DraftFacts) -> DraftChoice:
        """K, and whether to draft behind the step."""
        self._paces.forget(facts.step)  # if it was planned before and came to nothing
        self._booked.pop(facts.step, None)
        held = min(max(facts.step - self._step - 1, 0), self._hold)
        self._switch.since += held
        requests = facts.running + facts.emitting
        calm = requests == self._requests and not facts.prefill_tokens
        self._requests, self._calm = requests, self._calm + held + 1 if calm else 0
        if requests:
            sort = sort_of_load(requests)
            self._enters, self._sort = sort != self._sort, sort
            self._switch = self._at(sort)
            self._left = 0 if self._enters else self._left
        if self._paused:
            choice = self._pausing(facts)
        elif self._left:
            choice = self._repeated(facts)
        else:
            choice = self._drafted(facts)
        self._proposed, self._step, self._hold = choice.propose, facts.step, choice.hold
        self.counts["steps"] += held + 1
        self.counts["steps_with_drafts"] += choice.rows > 0
        self.counts["steps_without_drafting"] += held + (not choice.propose)
        self.counts["rows"] += choice.rows
        return choice

    def _is_measure(self, facts: DraftFacts, seconds: float) -> bool:
        """Of a step that should take so long: what prompts take is no measure of steps, nor, where
        they are short, what ends and admissions do; unless there is nothing else to go by.
        """
        calm = self._calm >= CALM or seconds >= LONG
        good = calm and not facts.prefill_tokens
        self._restless = 0 if good else self._restless + 1
        return good or (self._restless > RESTLESS and facts.running > 0)

    def _at(self, sort: int) -> Switch:
        """The switch of a sort of load."""
        if sort not in self._switches:
            self._switches[sort] = Switch(self._paces.at(sort))
        return self._switches[sort]

    def _repeated(self, facts: DraftFacts) -> DraftChoice:
        """The same again, for as many of each request."""
        last, self._left = self._again, self._left - 1
        if self._is_measure(facts, last.seconds) and facts.running == last.requests:
            self._paces.expect(facts.step, facts.now, last.seconds, self._switch.pace, True)
        return DraftChoice(min(last.rows * facts.running // last.requests, facts.room))

    def _drafted(self, facts: DraftFacts) -> DraftChoice:
        """A step that may have drafts."""
        most = [min(max(r.most_drafts, 0), self.draft_len) for r in facts.decoding]
        eligible = np.array(most, np.int64)
        self._outlook.forget(facts.decoding)
        there = np.minimum(eligible, self._outlook.drafted(facts.decoding))
        everything = min(int(there.sum()), facts.room)
        return self._choose(facts, eligible, everything)

    def observe(self, landed: DraftsLanded) -> None:
        """Learn from a step's answer."""
        step = self._booked.pop(landed.out.step, None)
        if landed.out.counts.any() and not landed.out.warming:
            self._paces.landed(landed.out.step, landed.now, landed.before)
            if step is not None:
                took = (landed.now - max(landed.before, step.now)) / step.plain
                step.switch.paid += took - int(landed.out.counts.sum()) / step.requests
        else:  # if of texts that have ended: nobody hurries to take it
            self._paces.forget(landed.out.step)
        if self._paused:
            self._outlook.clear()
        elif self._left < 2:  # else the choice that asks for it is some steps away
            self._outlook.observe(landed)

    def report(self) -> dict[str, float]:
        """Counters; at this load: the running ratios of measured to predicted time, the state."""
        ratio = self._switch.pace.ratio
        return {
            **self.counts,
            "drafting": float(self._switch.drafting),
            "time_ratio_drafting": ratio[True],
            "time_ratio_plain": ratio[False],
        }

    @property
    def _paused(self) -> bool:
        """Adaptive, and neither is anything drafted nor was it before the last step."""
        return self._mode == "adaptive" and not (self._switch.drafting or self._proposed)

    def _pausing(self, facts: DraftFacts) -> DraftChoice:
        """A step of a pause: it has no drafts, and may be the last without drafting behind it."""
        assert self._table is not None
        count, switch = facts.running, self._switch
        requests = count + facts.emitting
        seconds = self._table.plain_of(count + facts.prefill_tokens)
        every = LOOK_SHORT if switch.failed and seconds < LONG else LOOK
        if requests and (switch.since % every == 0 or self._enters):
            back = self._comes_back(requests)
        else:
            switch.since += 1
            back = False
        hold = 0
        seconds += self._table.draft_of(requests) if back else 0.0
        if self._is_measure(facts, seconds):
            # Until it looks again; while it learns what steps without drafts take, it sees each.
            hold = 0 if back or switch.glancing else -switch.since % every
            self._paces.expect(facts.step, facts.now, seconds, switch.pace, back)
        if back:
            self._book(facts, count)
        return DraftChoice(0, propose=back, hold=hold)

    def _book(self, facts: DraftFacts, count: int) -> None:
        """Of a step of a trial it is wanted what it costs."""
        if not count or facts.prefill_tokens:
            return
        assert self._table is not None
        plain = max(self._table.plain_of(count) * self._switch.pace.ratio[False], 1e-9)
        if len(self._booked) > LONGEST:
            self._booked.clear()
        self._booked[facts.step] = _Booked(self._switch, facts.now, count, plain)

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
        pace = self._switch.pace
        seconds = self._table.steps(tokens, len(gains), requests, propose)
        rate = throughput(gains, requests, self._corrected(seconds))
        rows = causal_rows(rate) if self._causal else best_rows(rate, self._min_gain)
        if self._switch.trial and self._switch.drafting and self._mode == "adaptive":
            few = -(-decoding // 4)
            rows = max(rows, min(len(gains), few))  # a trial has to show something
        if not self._proposed:
            rows = 0  # there are none
        if self._mode == "cap":
            return DraftChoice(everything, keep=rows)
        predicted = float(seconds[rows])
        # Where drafting ends, a step that verifies the last drafts is of neither kind.
        if self._is_measure(facts, predicted) and (propose or not rows):
            # How long a short one takes hangs on the host, and on the answer before it.
            share = 1.0 - float(seconds[0]) / predicted if predicted >= LONG else None
            self._paces.expect(facts.step, facts.now, predicted, pace, propose, share)
        if self._switch.trial or (rows and not propose):
            self._book(facts, decoding)
        elif propose and self._proposed and decoding >= MANY and predicted < LONG:
            self._again, self._left = _Repeated(rows, decoding, predicted), AGAIN
        return DraftChoice(rows, propose=propose)

    def _corrected(self, seconds: Floats) -> Floats:
        """The table's, of steps with 0, 1, … drafts, with what these were seen to add."""
        tilt = self._switch.pace.tilt
        corrected: Floats = seconds + tilt * (seconds - seconds[0]) if tilt else seconds
        return np.maximum(corrected, 1e-9)

    def _pays(self, gains: Floats, facts: DraftFacts) -> bool:
        """Whether the next step should have drafts, at the load that it will have; ``gains``: what
        the drafts that there may be now promise.
        """
        assert self._table is not None
        requests = len(facts.decoding) + facts.emitting
        if not requests:
            return self._switch.drafting
        fresh = facts.emitting
        if not (self._switch.drafting and self._outlook.seen):
            gains, fresh = gains[:0], requests
        if fresh:
            usual = self._outlook.usual(fresh).ravel()
            gains = np.sort(np.concatenate((gains, usual)))[::-1]
        return self._weighed(self._prospect(gains, requests), requests)

    def _prospect(self, gains: Floats, requests: int) -> _Prospect:
        """Of steps with drafts of these survivals and without, by the table."""
        assert self._table is not None
        drafted = self._corrected(self._table.steps(requests, len(gains), requests, True))
        return _Prospect(
            rate=float(throughput(gains, requests, drafted).max()),
            plain=max(self._table.plain_of(requests), 1e-9),
            trial=float(drafted[min(-(-requests // 4), len(drafted) - 1)]),
        )

    def _weighed(self, prospect: _Prospect, requests: int) -> bool:
        """The same as times are of late."""
        drafted, plain = (max(self._switch.pace.ratio[kind], 1e-9) for kind in (True, False))
        drafted = min(drafted, DEAREST * plain)
        plain *= prospect.plain
        on, off = prospect.rate / drafted, requests / plain
        longer = prospect.trial * drafted / plain
        lost = longer - 1.0  # of steps without drafts
        if prospect.plain >= LONG:  # and else its tokens do not make up for the host's time
            lost = min(lost, longer * max(1.0 - on / off, LEAST))
        return self._switch.decide(
            on,
            off,
            self._enters,
            dear=int(max((TRIAL + BEHIND) * lost, self._switch.paid, 0.0) / PRICE),
            usual=lambda: self._usual(requests).rate / drafted,
        )


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
        f"{identity} {context.max_num_seqs} {context.max_tokens} {context.graph_rows}",
        lambda: costs.profile(
            context.measure,
            context.draft_len,
            context.max_num_seqs,
            context.max_tokens,
            budget,
            context.graph_rows,
        ),
    )
