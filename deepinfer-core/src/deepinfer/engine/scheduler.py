"""Who runs what in the next step: :class:`Scheduler`. Fourth stop of the reading tour.

``plan`` makes a :class:`~deepinfer.api.plan.BatchPlan` from bounds alone, so it never waits for
the device: first the decodes that may still need a token, then the next chunks of running
prefills, then admissions in policy order. Only a decode can run out of pages on its way (a request
enters when its whole text fits), and then the policy names who gives way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, overload

from deepinfer.api.policy import Budget, StepFacts
from deepinfer.api.speculative import DraftChoice, DraftFacts, DraftsLanded
from deepinfer.engine.cache import Admission, KVCache
from deepinfer.engine.plan_builder import PlanBuilder, RowMemory
from deepinfer.engine.policy import checked_budget, checked_order, checked_victim
from deepinfer.engine.request import Ahead, LandedDrafts, RequestState, Status

if TYPE_CHECKING:
    from deepinfer.api.executor import ModelFacts
    from deepinfer.api.plan import BatchPlan, StepOutput
    from deepinfer.api.policy import Policy
    from deepinfer.api.speculative import DraftPlanner
    from deepinfer.config import EngineConfig

NO_DRAFTS: Final = DraftChoice(0, propose=False)
PLENTY: Final = 8
"""Free pages for each request that decodes, from which on they are given out before they are
needed."""


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
        facts: ModelFacts,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.cache = cache
        self.policy = policy
        self.planner = planner
        self.clock = clock
        self.draft_len = facts.draft_len
        self.max_tokens = config.max_num_batched_tokens or facts.step_tokens
        self.waiting: list[RequestState] = []
        self.loading: list[RequestState] = []
        self.running: list[RequestState] = []
        self.planned: list[RequestState] = []
        self.decodes = 0
        self.preemptions = 0
        self.cached_tokens = 0
        self._rows = RowMemory()
        self._generations = itertools.count(1)
        self._drafted = False
        self._hold, self._held = 0, 0
        self._unseen: set[int] = set()
        self._landed = 0.0
        self._sorted = True  # the policy is asked again only when the queue has changed

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
            self.cache.snapshots.leaves(r, True)
        self.cache.settle(r)

    def preempt(self, r: RequestState) -> None:
        """Take its pages; it keeps its tokens, queues first and computes again."""
        self.preemptions += 1
        r.output.metrics.preemptions += 1
        self.running.remove(r)
        r.status = Status.PREEMPTED
        self.cache.snapshots.leaves(r, False)
        self.waiting.insert(0, r)
        self._sorted = False
        self.cache.settle(r)

    # The step.

    def plan(self) -> BatchPlan | None:
        """The next step, or None if nothing can run now."""
        self.planned, self.decodes = [], 0
        if not (self.running or self.waiting or self.loading):
            return None
        facts = self._facts()
        budget = checked_budget(self.policy, facts)
        drafts = self._drafts(facts, budget) if self.draft_len else NO_DRAFTS
        build = PlanBuilder(budget, drafts, self.draft_len)
        self.cache.snapshots.copy()
        self._decodes(build)
        self.cache.snapshots.copy()  # of those who gave way
        self._chunks(build)
        self._loaded(build)
        self._admissions(build)
        plan = build.build(self._rows, self.cache.snapshots)
        if plan is not None:
            self.planned = build.decoding + build.prefilling
            self.decodes = len(build.decoding)
        return plan

    def _facts(self) -> StepFacts:
        prefilling = sum([r.prefilled < r.prefill_to for r in self.running])
        return StepFacts(
            now=self.clock(),
            waiting=len(self.waiting),
            running=len(self.running),
            decoding=len(self.running) - prefilling,
            free_pages=self.cache.pool.free,
            max_tokens=self.max_tokens,
            max_rows=self.config.max_num_seqs,
        )

    def _drafts(self, facts: StepFacts, budget: Budget) -> DraftChoice:
        """Draft rows of the whole step; they come out of the token budget, anchors first."""
        same = self._hold and facts.running == facts.decoding == self._held
        if same and next(self._prompts_waiting(), None) is None:
            self._hold -= 1
            self._unseen.add(self._rows.steps + 1)
            return NO_DRAFTS
        self._unseen.discard(self._rows.steps + 1)
        decoding = _Decoding(self.running)
        room = max(0, min(budget.tokens - facts.decoding, budget.draft_rows))
        if self.planner is None:
            return DraftChoice(self._most(decoding, room))
        tokens = emitting = 0
        if facts.waiting or facts.decoding < facts.running:
            tokens, emitting = self._prompts_beside(budget, facts.decoding)
        choice = self.planner.choose(
            DraftFacts(
                step=self._rows.steps + 1,
                now=facts.now,
                decoding=decoding,
                prefill_tokens=tokens,
                emitting=emitting,
                room=room,
                running=facts.decoding,
            )
        )
        self._hold, self._held = 0, facts.decoding
        if choice.rows <= 0:
            self._hold = 0 if choice.propose else choice.hold
            return choice._replace(rows=0)
        return choice._replace(rows=min(self._most(decoding, room), choice.rows))

    def _most(self, decoding: Sequence[RequestState], room: int) -> int:
        """Draft rows that texts and the budget have room for."""
        return min(room, sum([min(self.draft_len, r.most_drafts) for r in decoding]))

    def _prompts_beside(self, budget: Budget, decoding: int) -> tuple[int, int]:
        """Tokens of prompts that the step will likely run, and how many prompts end with it."""
        left = total = max(0, min(budget.prefill_tokens, budget.tokens - decoding))
        emitting = 0
        for tokens in self._prompts_left():
            emitting += tokens <= left
            left -= min(tokens, left)
            if not left:
                break
        return total - left, emitting

    def _prompts_left(self) -> Iterator[int]:
        """Tokens that prompts still have to run, those first that run already."""
        for r in self.running:
            if r.prefilled < r.prefill_to:
                yield r.prefill_to - r.prefilled
        yield from self._prompts_waiting()

    def _prompts_waiting(self) -> Iterator[int]:
        """The same of those that may enter."""
        free = self.cache.pool.free
        for r in self.waiting[: len(self.cache.slots)]:
            found = self.cache.likely(r)
            free -= self.cache.pages_for(len(r.tokens)) - found // self.cache.page_size
            if free < 0 or r.status is not Status.WAITING:
                return  # it holds up those behind
            yield len(r.tokens) - found

    def _decodes(self, build: PlanBuilder) -> None:
        """One row for each running request whose text may not be complete yet.

        The hottest loop of the host: a steady row costs a few comparisons and two appends.
        """
        width, page_size = build.width, self.cache.page_size
        ahead, slack = Ahead(1, width, -1), width - 1
        decoding, slots = build.decoding, build.slots
        for r in list(self.running):
            if r.prefilled < r.prefill_to or r.status is not Status.RUNNING:
                continue
            length = len(r.tokens)
            if length + r.ahead_lo >= r.request.limit:
                continue  # what is in flight certainly completes it
            if build.left <= 0:
                break
            want = length + r.ahead_hi + slack
            if want > len(r.pages) * page_size and not self._grow(build, r, want):
                continue
            build.left -= 1
            r.in_flight.append(ahead)
            r.ahead_lo += 1
            r.ahead_hi += width
            decoding.append(r)
            slots.append(r.slot)
            if r.grammar is not None:
                build.constrained = True
        if build.pages and self.cache.pool.free >= PLENTY * len(decoding):
            self._grow_ahead(build)

    def _grow_ahead(self, build: PlanBuilder) -> None:
        """One of many gets a page in nearly every step, and each time the device has to be told:
        where there are plenty, all get theirs at once, and most steps tell nothing.
        """
        cache, page_size = self.cache, self.cache.page_size
        for r in build.decoding:
            held = len(r.pages)
            want = min(len(r.tokens) + r.ahead_hi + page_size, r.request.limit)
            if want > held * page_size and cache.reserve(r, want):
                build.write_pages(r, held)

    def _chunks(self, build: PlanBuilder) -> None:
        for r in self.running:
            if r.prefilled < r.prefill_to:
                self._chunk(build, r)

    def _chunk(self, build: PlanBuilder, r: RequestState) -> None:
        before = r.prefilled
        build.chunk(r)
        if r.prefilled > before:
            self.cache.snapshots.chunked(r)

    def land(self, planned: list[RequestState], out: StepOutput) -> None:
        """A step has arrived: move the bounds, publish full pages, give back what waited for it.

        Only pages whose tokens are emitted and whose KV this step has written are published.
        """
        # While nobody drafts, drafts cost no more than this line.
        news = self.draft_len and (out.drafts is not None or self._drafted)
        self._drafted = out.drafts is not None
        landed = LandedDrafts(out) if news else None
        decodes = 0
        cache, page_size = self.cache, self.cache.page_size
        for i, r in enumerate(planned):
            lo, hi, written = r.in_flight.popleft()
            r.ahead_lo -= lo
            r.ahead_hi -= hi
            decodes += written < 0
            if r.status is not Status.FINISHED:
                if landed is not None:
                    landed.take(r, i, written < 0)
                else:
                    r.landed = len(r.tokens)
                if written < 0:
                    written = len(r.tokens) - 1  # the last token has no KV yet
                if written >= (len(r.chain.nodes) + 1) * page_size:
                    cache.publish(r, written)
            if r.status is not Status.RUNNING:
                cache.settle(r)
        if self.planner is None:
            return
        before, self._landed = self._landed, self.clock()
        if out.step in self._unseen:
            self._unseen.remove(out.step)
            return
        self.planner.observe(
            DraftsLanded(
                out=out,
                generations=[r.generation for r in planned] if self._drafted else (),
                decodes=decodes,
                now=self._landed,
                before=before,
            )
        )

    # Room for decodes.

    def _grow(self, build: PlanBuilder, r: RequestState, want: int) -> bool:
        """Pages for ``want`` positions, from others if need be; False: it waits this step."""
        held, cache = len(r.pages), self.cache
        want = min(want, r.request.limit)
        need = cache.pages_for(want) - held
        while not cache.reserve(r, want):
            if cache.coming() + cache.pool.free >= need:
                return False  # enough is coming back: nobody has to give way for it
            victim = checked_victim(self.policy, self.running)
            if victim is r:
                return False
            build.withdraw(victim)
            self.preempt(victim)
        build.write_pages(r, held)
        return True

    # Admission.

    def _loaded(self, build: PlanBuilder) -> None:
        """Requests whose pages have come from a store."""
        for r in [r for r in self.loading if r.status is not Status.LOADING]:
            if build.may_prefill:
                self.loading.remove(r)
                self._enter(build, r)

    def _admissions(self, build: PlanBuilder) -> None:
        """In the policy's order; who does not fit holds up those behind, so nobody starves."""
        if not self.waiting or not self.cache.slots:
            return
        if not self._sorted:
            self.waiting = checked_order(self.policy, self.waiting)
            self._sorted = True
        seen, passed = 0, list[RequestState]()
        for r in self.waiting:
            if not self.cache.slots or not build.may_prefill:
                break
            if len(passed) >= self.config.max_num_seqs:
                break  # enough are about to enter; a long queue is not walked in every step
            if r.status is not Status.WAITING:
                break  # preempted, and something of it is still on its way
            admission = self.cache.admit(r)
            if admission is Admission.NO_ROOM:
                break
            seen += 1
            if admission is Admission.ASK_AGAIN:
                passed.append(r)
            elif admission is Admission.LOADS:
                self.loading.append(r)
            else:
                self._enter(build, r)
        if len(passed) < seen:
            self.waiting = passed + self.waiting[seen:]

    def _enter(self, build: PlanBuilder, r: RequestState) -> None:
        """It has a slot and pages for its whole text: run what the budget allows."""
        start = self.cache.start(r)
        r.status = Status.RUNNING
        r.prefilled, r.prefill_to = start, len(r.tokens)
        r.drafts, r.landed, r.generation = [], len(r.tokens), next(self._generations)
        self.running.append(r)
        self.cached_tokens += start
        metrics = r.output.metrics
        if metrics.first_scheduled is None:
            metrics.first_scheduled = self.clock()
            metrics.cached_tokens = start
        build.enter(r)
        self._chunk(build, r)


class _Decoding(Sequence[RequestState]):
    """Running requests that will run a decode row, looked for when somebody looks."""

    def __init__(self, running: Sequence[RequestState]) -> None:
        self._running = running
        self._found: list[RequestState] | None = None

    def _list(self) -> list[RequestState]:
        if self._found is None:
            self._found = [r for r in self._running if r.decodes and r.most_drafts >= 0]
        return self._found

    def __len__(self) -> int:
        return len(self._list())

    @overload
    def __getitem__(self, at: int) -> RequestState: ...
    @overload
    def __getitem__(self, at: slice) -> list[RequestState]: ...
    def __getitem__(self, at: int | slice) -> RequestState | list[RequestState]:
        return self._list()[at]

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._list())
