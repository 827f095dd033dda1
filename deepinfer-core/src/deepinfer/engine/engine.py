"""The loop: :class:`Engine`. Second stop of the reading tour, after ``api/plan.py``.

``step`` plans one step ahead of the device: it starts step N+1 before it has seen what step N
produced. What it asks lies next door: the scheduler who runs, the cache for pages, the logits
pipeline for masks, the output processor for text. No torch here; the executor is the only way out.

Threads: one thread drives ``step``, and ``add`` and ``abort`` belong to the same thread. A front
door that serves several threads puts a queue before them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from deepinfer.api.plan import Delta, Fault, FinishReason
from deepinfer.engine.cache import KVCache
from deepinfer.engine.grammars import Grammars
from deepinfer.engine.in_flight import Begun, InFlight, InterruptedWaitError
from deepinfer.engine.logits import LogitsPipeline
from deepinfer.engine.output import OutputProcessor, ended, row_fault
from deepinfer.engine.policy import FCFSPolicy
from deepinfer.engine.request import RequestState, Status, check_request, floor_of
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.stats import Counters, Recorder
from deepinfer.errors import (
    DeepInferError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
)

if TYPE_CHECKING:
    from deepinfer.api.executor import Executor, ModelFacts
    from deepinfer.api.grammar import GrammarBackend
    from deepinfer.api.kv import KVStore
    from deepinfer.api.observer import Observer
    from deepinfer.api.plan import BatchPlan, Request, RowInputs, StepOutput, StepStats
    from deepinfer.api.policy import Policy
    from deepinfer.api.speculative import DraftPlanner
    from deepinfer.config import EngineConfig
    from deepinfer.engine.detokenizer import TokenText


class Engine:
    """Requests in, deltas out. The executor that it was given is closed with it."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        facts: ModelFacts,
        *,
        tokenizer: TokenText | None = None,
        policy: Policy | None = None,
        planner: DraftPlanner | None = None,
        grammar_backend: GrammarBackend | None = None,
        stores: Sequence[KVStore] = (),
        observers: Sequence[Observer] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.executor = executor
        self.facts = facts
        self.clock = clock
        self.cache = KVCache(
            facts,
            num_slots=config.max_num_seqs,
            caching=config.enable_prefix_caching,
            stores=stores,
        )
        self.scheduler = Scheduler(
            config, self.cache, policy or FCFSPolicy(), planner, facts, clock
        )
        self.logits = LogitsPipeline(facts.vocab_size, facts.draft_len, grammar_backend)
        self.output = OutputProcessor(tokenizer)
        self._recorder = Recorder(observers)
        self.grammars = Grammars(grammar_backend, self._recorder.counters, clock)
        self._open: dict[str, RequestState] = {}
        self._in_flight = InFlight(executor, self._recorder, clock, deep=facts.graph_rows > 0)
        self._deltas: list[Delta] = []
        self._over: DeepInferError | None = None

    # Requests.

    def add(self, request: Request) -> None:
        """Queue a request; raises, and changes nothing, if it can never run."""
        self._check_open()
        if request.id in self._open:
            raise InvalidRequestError(f"Request {request.id}: this id is in use.", setting="id")
        check_request(request, self.facts)
        self.grammars.check(request)
        r = RequestState(request, self.output.state(request))
        r.floor = floor_of(request, self.facts.kv.truncation)
        self._open[request.id] = r
        self.counters.requests += 1
        if request.structured is None or self.grammars.start(r):
            self.scheduler.add(r)

    def abort(self, request_id: str) -> bool:
        """End a request now; its last delta comes with the next step. False: it is not open."""
        r = self._open.get(request_id)
        if r is None:
            return False
        delta = ended(r, FinishReason.ABORT, self.clock())
        self._deltas.append(delta)
        self._end(r, delta)
        return True

    def has_work(self) -> bool:
        """There is something for ``step`` to do or to deliver."""
        flying = self._in_flight or self._in_flight.begun
        work = self._open or flying or self._deltas or self.cache.leaving or self.grammars.judging
        return self._over is None and bool(work)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; what runs is not disturbed."""
        self.cache.reset_prefix_cache()

    # The step.

    def step(self) -> list[Delta]:
        """Run one step and return what has arrived; after a failure of the device, the failures.

        Every open request then ends with an error, and later calls raise
        :class:`~deepinfer.errors.EngineDeadError`.
        """
        self._check_open()
        try:
            self._step()
        except InterruptedWaitError as why:
            raise (why.__cause__ or why) from None
        except Exception as why:
            self._die(why)
        except BaseException as why:
            self._die(why)
            raise
        return self._take_deltas()

    def _step(self) -> None:
        self._recorder.begin()
        begun = self._in_flight.begun  # only if Ctrl-C struck between the halves of a step
        if begun is None:
            self.cache.poll()  # tier loads and stores that have finished
            self._take_grammars()
            if not self.scheduler.config.overlap:
                self._collect()
            plan = self.executor.agree(self._plan())  # identity unless replicas go in lockstep
            if plan is None:
                self._rest()
                return
            # Step N+1 starts; it needs no token of step N on the host, nor of those before it.
            begun = self._in_flight.forward(plan, self.scheduler.planned)
        if begun.plan.constrained:
            self._collect()  # only masks need step N's tokens; the wait hides under forward
        self._in_flight.sample(self._masks(begun) if begun.plan.constrained else None)
        self._collect(keep=self._in_flight.depth)  # step N, if it was not yet

    def _plan(self) -> BatchPlan | None:
        start = self.clock()
        plan = self.scheduler.plan()
        self.stats.plan_seconds += self.clock() - start
        if plan is not None:
            self._recorder.planned(plan, self.scheduler.decodes)
        return plan

    def _masks(self, begun: Begun) -> RowInputs | None:
        """While the device runs the step's first half."""
        start = self.clock()
        inputs = self.logits.prepare(*begun, self._fail)
        self.stats.mask_seconds += self.clock() - start
        return inputs

    def _rest(self) -> None:
        """Nothing can run: take what is in flight, or nap while grammars or pages come."""
        if self._in_flight:
            self._collect()
        elif self._open or self.cache.leaving or self.grammars.judging:
            self._in_flight.nap()

    def _collect(self, keep: int = 0) -> None:
        """Take in steps in flight, oldest first, until ``keep`` are left."""
        while len(self._in_flight) > keep:
            self._commit(*self._in_flight.take())

    def _commit(self, planned: list[RequestState], out: StepOutput) -> None:
        """Tokens into text, then the books: bounds, drafts, prefix index, pages."""
        start = self.clock()
        deltas, over = self.output.take(planned, out, start)
        middle = self.clock()
        self._deltas.extend(deltas)
        self.scheduler.land(planned, out)
        for r, delta in over:
            if r.grammar is not None and self.grammars.judge(r, delta):
                self._deltas.remove(delta)  # until it is known what the text is worth
                self._leave(r)
            else:
                self._end(r, delta)
        if out.faults is not None and out.faults.any():
            self._fail_rows(planned, out.faults.tolist())
        self.stats.device_seconds += out.device_seconds
        self.stats.output_seconds += middle - start
        self.stats.collect_seconds += self.clock() - middle

    # Ends.

    def _end(self, r: RequestState, delta: Delta) -> None:
        """The request is over for its caller; its pages follow when nothing holds them."""
        self._leave(r)
        self._recorder.finished(delta, r.output_tokens)

    def _leave(self, r: RequestState) -> None:
        del self._open[r.request.id]
        self.grammars.forget(r)
        self.scheduler.finish(r)

    def _fail(self, r: RequestState, error: Exception) -> None:
        delta = ended(r, FinishReason.ERROR, self.clock(), error)
        self._deltas.append(delta)
        self._end(r, delta)

    def _fail_rows(self, planned: list[RequestState], faults: list[int]) -> None:
        for r, fault in zip(planned, faults, strict=True):
            if fault != Fault.NONE and r.status is not Status.FINISHED:
                self._fail(r, row_fault(r, fault))

    def _take_grammars(self) -> None:
        if not self.grammars.busy:
            return
        for r, why in self.grammars.compiled():
            if why is None:
                self.scheduler.add(r)
            else:
                self._fail(r, why)
        for delta in self.grammars.judged():
            self._deltas.append(delta)
            assert delta.metrics is not None
            self._recorder.finished(delta, delta.metrics.output_tokens)

    def _die(self, why: BaseException) -> None:
        """The device or the brain has failed: every open request ends with an error."""
        said = why.message if isinstance(why, DeepInferError) else f"{type(why).__name__}: {why}"
        self._over = dead = EngineDeadError(
            f"The engine has stopped: {said}",
            next_step=getattr(why, "next_step", None) or "Create a new engine.",
        )
        dead.__cause__ = why
        for r in self._open.values():
            self._deltas.append(ended(r, FinishReason.ERROR, self.clock(), dead))
        self._deltas.extend(self.grammars.unjudged(dead))
        self._open.clear()
        self._in_flight.abandon()

    def close(self) -> None:
        """Abort what is open, wait for what is in flight, close the executor. Idempotent."""
        if isinstance(self._over, EngineClosedError):
            return
        alive = self._over is None
        try:
            if alive:
                self._drain()
        except Exception:
            alive = False  # the device failed after its last answer was wanted
        except InterruptedWaitError as why:
            raise (why.__cause__ or why) from None
        finally:
            self._over = EngineClosedError("This engine is closed.", next_step="Create a new one.")
            self._deltas.clear()
            self.grammars.close()
            self.executor.close()
        if alive:
            self.check_integrity()

    def _drain(self) -> None:
        for request_id in list(self._open):
            self.abort(request_id)
        if self._in_flight.begun is not None:
            self._in_flight.sample(None)  # its rows are dead by now
        self._collect()
        while self.cache.busy:
            self.cache.poll()
            self._in_flight.nap()

    def check_integrity(self) -> None:
        """Nothing is lost, shared wrongly or held by nobody. Asserts; cheap enough when idle."""
        self.cache.check_integrity(self._open.values())

    # Small things.

    @property
    def stats(self) -> StepStats:
        """Of the last step."""
        return self._recorder.stats

    @property
    def counters(self) -> Counters:
        """Totals since the start."""
        return self._recorder.counters

    def _check_open(self) -> None:
        if self._over is not None:
            raise self._over.with_traceback(None)

    def _take_deltas(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        self._recorder.end(self.scheduler)
        return deltas
