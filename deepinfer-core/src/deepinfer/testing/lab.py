"""One loaded model under many conditions: the bench of ``testing.determinism``.

A :class:`Lab` loads the model once and puts a fresh brain before it for each :class:`Condition`:
other neighbours, another order, chunks, caches, pages, overlap. What comes out is compared bit by
bit with every request run alone; where it differs, both runs are repeated under ``testing.trace``.
"""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from deepinfer.entrypoints.assemble import Assembly, assemble
from deepinfer.entrypoints.llm import LLM
from deepinfer.sampling_params import SamplingParams
from deepinfer.testing.trace import Difference, Tracer, first_difference, watch

if TYPE_CHECKING:
    from deepinfer.api.executor import Executor, ModelFacts
    from deepinfer.api.plan import BatchPlan, RowInputs
    from deepinfer.config import EngineConfig
    from deepinfer.entrypoints.outputs import RequestOutput
    from deepinfer.ops.table import OpSet

_LOGPROBS: Final = 5
Answer = tuple[tuple[int, ...], bytes]


@dataclass(frozen=True, slots=True)
class Case:
    """One request of the workload. ``seed`` also names it in traces."""

    name: str
    ids: tuple[int, ...]
    params: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """How to run the workload.

    Attributes:
        name: for the report.
        config: engine arguments that differ.
        alone: one request at a time.
        shuffle: submit in another order.
        crowd: further requests beside it.
        warm: run it once before, in the same engine.
        squeeze: so few pages that requests must give way; it counts only if some did.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False
    shuffle: bool = False
    crowd: int = 0
    warm: bool = False
    squeeze: bool = False


_CACHED: Final = {"enable_prefix_caching": True}
CASES: Final = 7
"""Requests of a workload."""
BASELINE: Final = Condition(name="alone", alone=True)
CONDITIONS: Final = (
    Condition(name="together"),
    Condition(name="crowded", crowd=12),
    Condition(name="permuted", shuffle=True),
    Condition(name="small chunks", config={"max_num_batched_tokens": 24}),
    Condition(name="cold prefix cache", config=_CACHED),
    Condition(name="warm prefix cache", config=_CACHED, warm=True),
    Condition(name="preempted", squeeze=True),
    Condition(name="no overlap", config={"overlap": False}),
    Condition(
        name="all at once",
        config={**_CACHED, "max_num_batched_tokens": 40},
        crowd=6,
        shuffle=True,
        squeeze=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one condition showed. ``cases``: those that came out otherwise, with the token."""

    condition: str
    cases: tuple[str, ...] = ()
    first: Difference | None = None
    note: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.cases and not self.note

    def __str__(self) -> str:
        if self.ok:
            return "equal"
        parts = [self.note] if self.note else []
        if self.cases:
            where = self.first or "no op of the trace, where every row runs every layer"
            parts.append(f"DIFFERS in {', '.join(self.cases)}; first op: {where}")
        return "; ".join(parts)


def among(requests: int) -> Condition:
    """The workload in the company that makes it ``requests`` at once."""
    return Condition(name=f"{requests} requests", crowd=requests - CASES)


def workload(vocab: int, length: int = 20) -> list[Case]:
    """Short and long prompts, three that share a prefix, greedy and sampled, with penalties."""
    draw = random.Random(7)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocab // 8, vocab * 7 // 8) for _ in range(count))

    shared = ids(48)
    prompts = {
        "short": ids(3),
        "page": ids(16),
        "odd": ids(37),
        "shared-1": shared + ids(5),
        "shared-2": shared + ids(11),
        "shared-3": shared + ids(30),
        "long": ids(90),
    }
    styles: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
        {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.5, "min_p": 0.02},
        {"temperature": 0.0, "frequency_penalty": 0.7},
    ]
    return [
        _case(n, p, styles[i % len(styles)], i, length) for i, (n, p) in enumerate(prompts.items())
    ]


def _case(name: str, ids: tuple[int, ...], style: dict[str, Any], i: int, length: int) -> Case:
    seed = 1000 + i
    params = SamplingParams(
        **style, max_tokens=length, ignore_eos=True, seed=seed, logprobs=_LOGPROBS
    )
    return Case(f"{name} (T={params.temperature:g})", ids, params, seed)


class Lab:
    """One loaded model and any number of brains before it, one after the other.

    Args:
        config: of the engine; conditions change a copy.
        tell: gets a word on what is being done.
        seqs: how many requests may run at once.
    """

    def __init__(
        self,
        config: EngineConfig,
        tell: Callable[[str], None] = lambda _: None,
        seqs: int = 64,
    ) -> None:
        base = {"enable_prefix_caching": False, "max_num_seqs": seqs}
        self._config = config.model_copy(update=base)
        self._tell = tell
        # The model is loaded for the conditions that need most: with room for cached state.
        self._parts = assemble(self._config.model_copy(update=_CACHED))
        self.facts: ModelFacts = self._parts.facts

    def close(self) -> None:
        """Unload the model."""
        self._parts.engine.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def ops(self) -> OpSet:
        """The loaded model's ops, to be wrapped; their executor must run in this process."""
        ops: OpSet
        (ops,) = self._parts.executor.call("ops")
        return ops

    def check(self, cases: Sequence[Case], conditions: Sequence[Condition]) -> list[Finding]:
        """Run all conditions against the baseline."""
        self._tell(BASELINE.name)
        expected = self._run(BASELINE, cases)[0]
        return [self._finding(condition, cases, expected) for condition in conditions]

    def _finding(
        self, condition: Condition, cases: Sequence[Case], expected: Mapping[str, Answer]
    ) -> Finding:
        self._tell(condition.name)
        began = time.perf_counter()
        answers, note = self._run(condition, cases)
        parted = [c for c in cases if answers[c.name] != expected[c.name]]
        first = self._explain(condition, cases, parted) if parted else None
        names = tuple(_where(c.name, answers[c.name], expected[c.name]) for c in parted)
        return Finding(condition.name, names, first, note, time.perf_counter() - began)

    def _explain(
        self, condition: Condition, cases: Sequence[Case], parted: Sequence[Case]
    ) -> Difference | None:
        self._tell(f"{condition.name}: looking for the first op that differs")
        traces = []
        for how in (BASELINE, condition):
            tracer = Tracer(frozenset(case.seed for case in parted))
            self._run(how, cases if how is condition else parted, tracer)
            traces.append(tracer)
        return first_difference(*traces)

    def seen_ops(self, cases: Sequence[Case]) -> frozenset[str]:
        """Ops that give a row per token in this model."""
        tracer = Tracer()
        self._run(BASELINE, cases[:1], tracer)
        return frozenset(call.op for call in tracer.order)

    def _run(
        self, condition: Condition, cases: Sequence[Case], tracer: Tracer | None = None
    ) -> tuple[dict[str, Answer], str]:
        """Case name → what came out, and what is wrong with the experiment itself."""
        if not condition.squeeze:
            return self._in_engine(condition, cases, None, tracer)[:2]
        sizes = [
            -(-(len(c.ids) + (c.params.max_tokens or 0)) // self.facts.page_size) for c in cases
        ]
        for share in (0.6, 0.5, 0.4, 0.3):  # less and less room, until somebody has to give way
            pages = max(int(sum(sizes) * share), max(sizes) + 1)
            answers, note, preemptions = self._in_engine(condition, cases, pages, tracer)
            if preemptions:
                return answers, note
        return answers, note or "nobody was preempted"

    def _in_engine(
        self,
        condition: Condition,
        cases: Sequence[Case],
        pages: int | None,
        tracer: Tracer | None,
    ) -> tuple[dict[str, Answer], str, int]:
        with self.brain(condition, pages) as llm:
            crowd = self._crowd(condition.crowd)
            if condition.warm:
                self._submit(llm, condition, cases, crowd)
            with self._watched(tracer):
                answers, note = self._submit(llm, condition, cases, crowd)
            return answers, note, llm.get_metrics()["counters"].preemptions

    @contextmanager
    def brain(self, condition: Condition, pages: int | None = None) -> Iterator[LLM]:
        """A front door with a fresh brain before the loaded model; ``pages``: of fewer pages."""
        from deepinfer.engine.engine import Engine

        config = self._config.model_copy(update=dict(condition.config))
        facts = self.facts if pages is None else replace(self.facts, num_pages=pages)
        executor = _Lent(self._parts.executor)
        parts = self._parts
        engine = Engine(config, executor, facts, tokenizer=parts.tokenizer)
        assembly = Assembly(
            config=config,
            executor=executor,
            facts=facts,
            tokenizer=parts.tokenizer,
            engine=engine,
            preparer=parts.preparer,
        )
        with LLM.from_assembly(assembly) as llm:
            yield llm

    @contextmanager
    def _watched(self, tracer: Tracer | None) -> Iterator[None]:
        if tracer is None:
            yield
            return
        executor = self._parts.executor
        undo = watch(self.ops, tracer)
        executor.call("trace", tracer)
        try:
            yield
        finally:
            executor.call("trace", None)
            undo()

    def _submit(
        self, llm: LLM, condition: Condition, cases: Sequence[Case], crowd: Sequence[Case]
    ) -> tuple[dict[str, Answer], str]:
        if condition.alone:
            outputs = [llm.generate([c.ids], [c.params])[0] for c in cases]
            return self._answers(cases, outputs)
        everybody = [*cases, *crowd]
        if condition.shuffle:
            random.Random(3).shuffle(everybody)
        outputs = llm.generate([c.ids for c in everybody], [c.params for c in everybody])
        return self._answers(everybody, outputs)

    def _answers(
        self, cases: Sequence[Case], outputs: Sequence[RequestOutput]
    ) -> tuple[dict[str, Answer], str]:
        failed = [out.error for out in outputs if out.error is not None]
        note = f"a request failed: {failed[0]}" if failed else ""
        return {c.name: _bits(out) for c, out in zip(cases, outputs, strict=True)}, note

    def _crowd(self, count: int) -> list[Case]:
        draw, cases = random.Random(11), []
        texts = [i for i in range(self.facts.vocab_size) if i != self.facts.image_token]
        for i in range(count):
            ids = tuple(draw.choices(texts, k=5 + 9 * (i % 5)))
            style = {"temperature": 0.0 if i % 2 else 1.3}
            cases.append(_case(f"crowd {i}", ids, style, 500 + i, 6 + i % 9))
        return cases


class _Lent:
    """An executor that its borrower cannot close."""

    def __init__(self, owner: Executor) -> None:
        self._owner = owner

    def start(self, config: EngineConfig, resolution: Any) -> ModelFacts:
        raise AssertionError("a lent executor runs already")

    def agree(self, plan: BatchPlan | None) -> BatchPlan | None:
        return self._owner.agree(plan)

    def forward(self, plan: BatchPlan) -> None:
        self._owner.forward(plan)

    def sample(self, step: int, inputs: RowInputs | None) -> Any:
        return self._owner.sample(step, inputs)

    def call(self, method: str, *args: Any) -> list[Any]:
        return self._owner.call(method, *args)

    def close(self) -> None:
        """The owner does that."""


def _bits(output: RequestOutput) -> Answer:
    """Ids, and every logprob as the bits of its float32."""
    out = output.outputs[0]
    words = [
        struct.pack("<if", token, candidate.logprob)
        for candidates in out.logprobs or ()
        for token, candidate in sorted(candidates.items())
    ]
    return tuple(out.token_ids), b"".join(words)


def _where(name: str, got: Answer, expected: Answer) -> str:
    pairs = zip(got[0], expected[0], strict=False)
    for i, (one, two) in enumerate(pairs):
        if one != two:
            return f"{name} at token {i}"
    return f"{name} (ids equal, logprobs not)"
