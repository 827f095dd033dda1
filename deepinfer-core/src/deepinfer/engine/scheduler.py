"""Who runs what in the next step: :class:`Scheduler`. Fourth stop of the reading tour.

``plan`` makes a :class:`~deepinfer.api.plan.BatchPlan` from bounds alone, so it never waits for
the device: first the decodes that may still need a token, then the next chunks of running
prefills, then admissions in policy order. Only a decode can run out of pages on its way (a request
enters when its whole text fits), and then the policy names who gives way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from deepinfer.api.plan import DECODE, Admit, BatchPlan, RowBlock
from deepinfer.api.policy import Budget, StepFacts
from deepinfer.engine.cache import Admission, KVCache
from deepinfer.engine.request import Ahead, RequestState, Status
from deepinfer.errors import PluginError

if TYPE_CHECKING:
    from deepinfer.api.policy import Policy
    from deepinfer.api.speculative import DraftPlanner
    from deepinfer.config import EngineConfig


class _Draft:
    """A plan in the making."""

    __slots__ = (
        "admits",
        "constrained",
        "decoding",
        "draft_rows",
        "left",
        "pages",
        "prefill_left",
        "prefilling",
        "rows",
        "slots",
    )

    def __init__(self, budget: Budget, draft_rows: int) -> None:
        self.left = budget.tokens
        self.prefill_left = budget.prefill_tokens
        self.draft_rows = draft_rows
        self.decoding: list[RequestState] = []
        self.slots: list[int] = []
        self.prefilling: list[RequestState] = []
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.admits: list[Admit] = []
        self.pages: list[tuple[int, int, int]] = []
        self.constrained = False


class Scheduler:
    """Queues, and one plan a step.

    ``planned`` are the requests of the last plan, row by row; the first ``decodes`` decode.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: KVCache,
        policy: Policy,
        planner: DraftPlanner | None,
        draft_len: int,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.cache = cache
        self.policy = policy
        self.planner = planner
        self.clock = clock
        self.draft_len = draft_len
        self.waiting: list[RequestState] = []
        self.loading: list[RequestState] = []
        self.running: list[RequestState] = []
        self.planned: list[RequestState] = []
        self.decodes = 0
        self.preemptions = 0
        self.cached_tokens = 0
        self._steps = 0
        self._sorted = True
        self._last: tuple[list[int], int, RowBlock] | None = None

    # Requests come and go.

    def add(self, r: RequestState) -> None:
        """Queue a request that can fit (the engine has checked)."""
        self.waiting.append(r)
        self._sorted = False

    def finish(self, r: RequestState) -> None:
        """It needs no more rows. Its pages come back when what is in flight has arrived."""
        for queue in (self.running, self.waiting, self.loading):
            if r in queue:
                queue.remove(r)
                break
        r.status = Status.FINISHED
        if r.pages:
            self.cache.keep(r)
        self.cache.settle(r)

    def preempt(self, r: RequestState) -> None:
        """Take its pages; it keeps its tokens, queues first and computes again."""
        self.preemptions += 1
        r.output.metrics.preemptions += 1
        self.running.remove(r)
        r.status = Status.PREEMPTED
        self.waiting.insert(0, r)
        self._sorted = False
        self.cache.settle(r)

    # The step.

    def plan(self) -> BatchPlan | None:
        """The next step, or None if nothing can run now."""
        if not (self.running or self.waiting or self.loading):
            return None
        facts = self._facts()
        budget = self._budget(facts)
        draft = _Draft(budget, self._draft_rows(facts, budget))
        self._decodes(draft)
        self._chunks(draft)
        self._loaded(draft)
        self._admissions(draft)
        if not draft.decoding and not draft.prefilling:
            return None
        return self._build(draft)

    def _facts(self) -> StepFacts:
        prefilling = sum([r.prefilled < r.prefill_to for r in self.running])
        return StepFacts(
            now=self.clock(),
            waiting=len(self.waiting),
            running=len(self.running),
            decoding=len(self.running) - prefilling,
            free_pages=self.cache.pool.free,
            max_tokens=self.config.max_num_batched_tokens,
            max_rows=self.config.max_num_seqs,
        )

    def _budget(self, facts: StepFacts) -> Budget:
        asked = self.policy.budget(facts)
        tokens = min(asked.tokens, facts.max_tokens)
        return Budget(tokens, min(asked.prefill_tokens, tokens), asked.draft_rows)

    def _draft_rows(self, facts: StepFacts, budget: Budget) -> int:
        """Draft rows of the whole step; they come out of the token budget, anchors first."""
        if not self.draft_len:
            return 0
        room = budget.tokens - facts.decoding
        most = min(room, budget.draft_rows, self.draft_len * facts.decoding)
        return max(0, most if self.planner is None else min(most, self.planner.rows(facts)))

    def _decodes(self, draft: _Draft) -> None:
        """One row for each running request whose text may not be complete yet."""
        most = 1 + min(self.draft_len, draft.draft_rows)
        ahead = Ahead(1, most, -1)
        page_size, slack = self.cache.page_size, most - 1
        draft.left -= draft.draft_rows
        decoding, slots = draft.decoding, draft.slots
        for r in list(self.running):
            if r.prefilled < r.prefill_to or r.status is not Status.RUNNING:
                continue
            length = len(r.tokens)
            if length + r.ahead_lo >= r.request.limit:
                continue  # what is in flight certainly completes it
            if draft.left <= 0:
                break
            if length + r.ahead_hi + slack > len(r.pages) * page_size and not self._grow(
                draft, r, min(r.request.limit, length + r.ahead_hi + slack)
            ):
                continue
            draft.left -= 1
            r.in_flight.append(ahead)
            r.ahead_lo += 1
            r.ahead_hi += most
            decoding.append(r)
            slots.append(r.slot)
            if r.grammar is not None:
                draft.constrained = True

    def _chunks(self, draft: _Draft) -> None:
        for r in self.running:
            if r.prefilled < r.prefill_to:
                self._chunk(draft, r)

    def _chunk(self, draft: _Draft, r: RequestState) -> None:
        """The next part of a prefill; the last one emits a token."""
        n = min(draft.left, draft.prefill_left, r.prefill_to - r.prefilled)
        if n <= 0:
            return
        start = r.prefilled
        r.prefilled = end = start + n
        emits = int(end == r.prefill_to)
        replay = max(0, min(n, r.chain.hit - start))
        r.launch(Ahead(emits, emits, end))
        draft.left -= n
        draft.prefill_left -= n
        draft.prefilling.append(r)
        draft.rows.append((r.slot, start, n, emits, replay))
        if emits and r.grammar is not None:
            draft.constrained = True

    # Admission.

    def _admissions(self, draft: _Draft) -> None:
        """In the policy's order; who does not fit holds up those behind, so nobody starves."""
        if not self.waiting or not self.cache.slots:
            return
        self._sort()
        entered: list[RequestState] = []
        for r in self.waiting:
            if draft.left <= 0 or draft.prefill_left <= 0 or not self.cache.slots:
                break
            if r.in_flight or r.status is not Status.WAITING:
                break  # preempted, and something of it is still on its way
            admission = self.cache.admit(r)
            if admission is Admission.ASK_AGAIN:
                continue
            if admission is Admission.NO_ROOM:
                break
            entered.append(r)
            if admission is Admission.LOADS:
                self.loading.append(r)
            else:
                self._enter(draft, r)
        if entered:
            gone = set(entered)
            self.waiting = [r for r in self.waiting if r not in gone]

    def _loaded(self, draft: _Draft) -> None:
        """Requests whose pages have come from a store."""
        for r in [r for r in self.loading if r.status is not Status.LOADING]:
            if draft.left <= 0 or draft.prefill_left <= 0:
                return
            self.loading.remove(r)
            self._enter(draft, r)

    def _enter(self, draft: _Draft, r: RequestState) -> None:
        """It has a slot and pages for its whole text: tell the device, and run what fits."""
        request, start = r.request, self.cache.start(r)
        r.status = Status.RUNNING
        r.prefilled, r.prefill_to, r.drafts = start, len(r.tokens), []
        self.running.append(r)
        self.cached_tokens += start
        metrics = r.output.metrics
        if metrics.first_scheduled is None:
            metrics.first_scheduled = self.clock()
            metrics.cached_tokens = start
        tokens = np.array(r.tokens, np.int32)
        draft.admits.append(Admit(r.slot, tokens, request.limit, request.seed, request.row_params))
        draft.pages.extend([(r.slot, i, page) for i, page in enumerate(r.pages)])
        self._chunk(draft, r)

    def _sort(self) -> None:
        """Ask the policy again only when the queue has changed: an order depends on it alone."""
        if self._sorted:
            return
        ordered = list(self.policy.order(tuple(self.waiting)))
        if len(ordered) != len(self.waiting) or {id(r) for r in ordered} != {
            id(r) for r in self.waiting
        }:
            raise PluginError(
                f"Policy {type(self.policy).__name__}: order() must return the waiting requests, "
                "each once, in another order.",
                setting="scheduling_policy",
            )
        self.waiting = [r for r in ordered if isinstance(r, RequestState)]
        self._sorted = True

    # Room for decodes.

    def _grow(self, draft: _Draft, r: RequestState, want: int) -> bool:
        """Pages for ``want`` positions, from others if need be; False: it waits this step."""
        held = len(r.pages)
        if r.request.limit <= held * self.cache.page_size:
            return True
        while not self.cache.reserve(r, want):
            need = self.cache.pages_for(want) - held
            if self.cache.coming() + self.cache.pool.free >= need:
                return False  # enough is coming back: nobody has to give way for it
            victim = self._victim()
            if victim is r:
                return False
            self._withdraw(draft, victim)
            self.preempt(victim)
        draft.pages.extend([(r.slot, i, r.pages[i]) for i in range(held, len(r.pages))])
        return True

    def _victim(self) -> RequestState:
        victim = self.policy.victim(tuple(self.running))
        for r in self.running:
            if r is victim:
                return r
        raise PluginError(
            f"Policy {type(self.policy).__name__}: victim() must return one of the running "
            f"requests, not {victim!r}.",
            setting="scheduling_policy",
        )

    def _withdraw(self, draft: _Draft, r: RequestState) -> None:
        """Take a victim's row and page writes out of the plan in the making."""
        if r not in draft.decoding:
            return
        at = draft.decoding.index(r)
        del draft.decoding[at], draft.slots[at]
        r.recall()
        draft.left += 1
        draft.pages = [write for write in draft.pages if write[0] != r.slot]

    # The plan.

    def _build(self, draft: _Draft) -> BatchPlan:
        self.planned = draft.decoding + draft.prefilling
        self.decodes = len(draft.decoding)
        pages = np.array(draft.pages, np.int32).reshape(-1, 3)
        prefill_tokens = sum([row[2] for row in draft.rows])
        draft_rows = min(draft.draft_rows, self.draft_len * len(draft.decoding))
        self._steps += 1
        return BatchPlan(
            step=self._steps,
            admits=tuple(draft.admits),
            rows=self._rows(draft),
            pages=pages,
            draft_rows=draft_rows,
            shape=prefill_tokens + len(draft.decoding) + draft_rows,
            constrained=draft.constrained,
        )

    def _rows(self, draft: _Draft) -> RowBlock:
        """Decodes first. The block of a steady batch of decodes is made once."""
        count = 1 + min(self.draft_len, draft.draft_rows)
        last = self._last
        if not draft.rows and last is not None and last[0] == draft.slots and last[1] == count:
            return last[2]
        decodes = len(draft.slots)
        array = np.empty((decodes + len(draft.rows), 5), np.int32)
        array[:decodes, 0] = draft.slots
        array[:decodes, 1:] = (DECODE, count, 1, 0)
        if draft.rows:
            array[decodes:] = draft.rows
        array.flags.writeable = False
        block = RowBlock(array)
        self._last = None if draft.rows else (draft.slots, count, block)
        return block
