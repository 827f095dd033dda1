"""A scripted device without torch: :class:`FakeExecutor`.

It stands where a model would: the brain's tests, the scenarios and the host-overhead benchmark run
on it. Its KV is a numpy array of pages; an entry depends on every entry before it, *read through
the page table*, and so do its logits: a page that was freed, shared or written wrongly changes
tokens. It works in order on its own thread with random delays (or in place, without a thread).
Its mathematics is ``toy.py``.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.api.executor import ModelFacts
from deepinfer.api.kv import KVGroup, KVSpec
from deepinfer.api.plan import (
    DECODE,
    Admit,
    BatchPlan,
    Fault,
    LogprobRows,
    Request,
    Row,
    RowInputs,
    RowParams,
    StepOutput,
)
from deepinfer.testing.toy import (
    PlainText,
    Text,
    attend,
    candidates,
    draw,
    entry,
    process,
    toy_logits,
)

Floats = NDArray[np.float64]


@dataclass
class FakeScript:
    """What the device is and what goes wrong on it.

    ``jitter``: longest delay of a half step in seconds; None works in place, without a thread.
    ``poison``: a text that ends with this id gives NaN logits. ``fail_at``: the step whose result
    raises. ``draft_len``: drafts per row, right about 70 % of the time; how many of them a step
    verifies is random.
    """

    vocab_size: int = 17
    num_pages: int = 32
    page_size: int = 4
    max_model_len: int = 64
    max_num_seqs: int = 8
    draft_len: int = 0
    replay: int = 0
    jitter: float | None = None
    poison: int | None = None
    fail_at: int | None = None
    seed: int = 7

    def facts(self) -> ModelFacts:
        """What the brain is told of it."""
        group = KVGroup(
            name="toy",
            kind="full",
            layers=(0,),
            kv_heads=1,
            head_dim=1,
            bytes_per_token=8,
            replay=self.replay,
        )
        return ModelFacts(
            architecture="Toy",
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            page_size=self.page_size,
            num_pages=self.num_pages,
            kv=KVSpec(groups=(group,), layout="toy"),
            fingerprint="toy-weights",
            dtype="uint64",
            backend="fake",
            draft_len=self.draft_len,
        )

    def text(self, request: Request) -> Text:
        """The model on one text, for the naive loop."""
        return PlainText()


@dataclass
class _Slot:
    """What the device knows of a request."""

    limit: int
    seed: int
    params: RowParams
    tokens: list[int]
    length: int = 0  # tokens with KV; the text is one longer once it decodes
    drafts: list[int] = field(default_factory=list)
    floor: int = 0
    origin: list[int] = field(default_factory=list)  # the tokens it came with; whose slot it is


@dataclass
class Work:
    """A row between the halves of a step. ``logits``: of positions base … base+ℓ."""

    slot: int
    base: int = -1
    verified: int = 0
    logits: list[Floats] = field(default_factory=list)
    prompt: list[tuple[int, Floats]] = field(default_factory=list)


class FakeExecutor:
    """An :class:`~deepinfer.api.executor.Executor` on a :class:`FakeScript`."""

    def __init__(self, script: FakeScript) -> None:
        self.script = script
        self.kv = np.zeros((script.num_pages, script.page_size), np.uint64)
        self.tables: list[dict[int, int]] = [{} for _ in range(script.max_num_seqs)]
        self.slots: list[_Slot | None] = [None] * script.max_num_seqs
        self.open: dict[int, tuple[BatchPlan, list[Work]]] = {}
        self.steps = 0
        self._rng = random.Random(script.seed)
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._broken: Exception | None = None

    # The executor's interface.

    def start(self, config: Any = None, resolution: Any = None) -> ModelFacts:
        if self.script.jitter is not None and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fake-device", daemon=True)
            self._thread.start()
        return self.script.facts()

    def agree(self, plan: BatchPlan | None) -> BatchPlan | None:
        return plan

    def forward(self, plan: BatchPlan) -> None:
        self._check()
        self._submit(lambda: self.open.__setitem__(plan.step, (plan, self._forward(plan))))

    def sample(self, step: int, inputs: RowInputs | None) -> Future[StepOutput]:
        self._check()
        answer: Future[StepOutput] = Future()

        def work() -> None:
            try:
                if step == self.script.fail_at:
                    raise RuntimeError(f"planted failure of step {step}")
                answer.set_result(self._sample(*self.open.pop(step), inputs))
            except Exception as why:
                self._broken = self._broken or why
                answer.set_exception(why)

        self._submit(work)
        return answer

    def call(self, method: str, *args: Any) -> list[Any]:
        return [None]

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _submit(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            work()
        else:
            self._queue.put(work)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            if self.script.jitter:
                time.sleep(self._rng.random() * self.script.jitter)
            try:
                work()
            except Exception as why:
                self._broken = self._broken or why

    # The first half.

    def _forward(self, plan: BatchPlan) -> list[Work]:
        self.steps += 1
        for admit in plan.admits:
            self._admit(admit)
        for slot, index, page in plan.pages.tolist():
            self.tables[slot][index] = page
        return [self._row(row) for row in plan.rows]

    def _admit(self, admit: Admit) -> None:
        tokens = admit.tokens.tolist()
        self.slots[admit.slot] = _Slot(
            admit.limit, admit.seed, admit.params, tokens, floor=admit.floor, origin=tokens
        )
        self.tables[admit.slot] = {}

    def _row(self, row: Row) -> Work:
        slot = self.slots[row.slot]
        assert slot is not None, f"slot {row.slot} was never admitted"
        if row.start != DECODE:
            return self._prefill(slot, row)
        work = Work(row.slot, base=slot.length)
        if work.base + 1 >= slot.limit:
            return Work(row.slot)  # a dead row: its text is complete
        most = min(row.count - 1, len(slot.drafts), slot.limit - work.base - 2)
        work.verified = self._rng.randint(0, max(0, most))
        summary = self._read(row.slot, work.base)
        ids = [slot.tokens[work.base], *slot.drafts[: work.verified]]
        for k, token in enumerate(ids):
            summary = self._write(row.slot, summary, token, work.base + k)
            work.logits.append(self._logits(summary, token))
        return work

    def _prefill(self, slot: _Slot, row: Row) -> Work:
        work = Work(row.slot)
        summary = self._read(row.slot, row.start)
        end = row.start + row.count
        for p in range(row.start, end):
            token = slot.tokens[p]
            if p < row.start + row.replay:  # its KV is there already
                summary = attend(summary, self._at(row.slot, p), p)
            else:
                summary = self._write(row.slot, summary, token, p)
            if slot.params.prompt_logprobs >= 0 and p + 1 < slot.params.prompt_len:
                work.prompt.append((p + 1, toy_logits(summary, self.script.vocab_size)))
        slot.length = end
        if row.emits:
            slot.length = work.base = end - 1
            work.logits.append(self._logits(summary, slot.tokens[end - 1]))
        return work

    def _logits(self, summary: int, last: int) -> Floats:
        if last == self.script.poison:
            return np.full(self.script.vocab_size, np.nan)
        return toy_logits(summary, self.script.vocab_size)

    def _at(self, slot: int, position: int) -> int:
        page, offset = divmod(position, self.script.page_size)
        return int(self.kv[self.tables[slot][page], offset])

    def _read(self, slot: int, count: int) -> int:
        """The summary of the first ``count`` entries, through the page table."""
        if not count:
            return 0
        table = self.tables[slot]
        pages = [table[i] for i in range(-(-count // self.script.page_size))]
        entries = self.kv[pages].reshape(-1)[:count]
        weights = np.arange(1, 2 * count, 2, dtype=np.uint64)
        return int((entries * weights).sum(dtype=np.uint64))

    def _write(self, slot: int, summary: int, token: int, position: int) -> int:
        page, offset = divmod(position, self.script.page_size)
        value = entry(summary, token, position)
        self.kv[self.tables[slot][page], offset] = value
        return attend(summary, value, position)

    # The second half.

    def _sample(self, plan: BatchPlan, works: list[Work], inputs: RowInputs | None) -> StepOutput:
        width = 1 + self.script.draft_len
        masks = self._masks(inputs)
        tokens = np.zeros((len(works), width), np.int32)
        counts = np.zeros(len(works), np.int32)
        faults = np.zeros(len(works), np.uint8)
        found: list[tuple[int, list[int], list[float], int]] = []
        prompts = []
        for i, work in enumerate(works):
            slot = self.slots[work.slot]
            assert slot is not None
            if work.prompt:
                prompts.append((i, self._prompt_rows(slot, work)))
            if not work.logits:
                continue
            allowed = [masks.get(i * width + k) for k in range(width)]
            ids, faults[i] = self._emit(slot, work, allowed)
            tokens[i, : len(ids)], counts[i] = ids, len(ids)
            if slot.params.logprobs >= 0:
                for k, token in enumerate(ids):
                    best = candidates(work.logits[k], token, slot.params.logprobs)
                    found.append((i * width + k, *best))
        drafts = [self._drafts(work) for work in works]
        return StepOutput(
            step=plan.step,
            tokens=tokens,
            counts=counts,
            drafts=np.array(drafts, np.int32).reshape(len(works), -1) if width > 1 else None,
            logprobs=self._logprob_rows(found) if found else None,
            prompt_logprobs=tuple(prompts),
            faults=faults if faults.any() else None,
        )

    def _masks(self, inputs: RowInputs | None) -> dict[int, NDArray[np.bool_]]:
        if inputs is None or inputs.bitmask is None:
            return {}
        bits = np.unpackbits(inputs.bitmask.view(np.uint8), axis=1, bitorder="little")
        rows = bits[:, : self.script.vocab_size].astype(bool)
        return dict(zip(inputs.index.tolist(), rows, strict=True))

    def _emit(
        self, slot: _Slot, work: Work, masks: list[NDArray[np.bool_] | None]
    ) -> tuple[list[int], int]:
        """Draw row by row, while the draft before was right (the equality rule).

        A fault behind emitted tokens is left to the next step, which begins with it.
        """
        text, ids, fault = slot.tokens[: work.base + 1], list[int](), Fault.NONE
        for k in range(work.verified + 1):
            if np.isnan(work.logits[k]).any():
                fault = Fault.NAN
                break
            z = process(work.logits[k], text, slot.params, masks[k])
            token = draw(z, slot.seed, work.base + k + 1, slot.params.temperature)
            if token < 0:
                fault = Fault.NOTHING_ALLOWED
                break
            ids.append(token)
            text.append(token)
            if k < work.verified and token != slot.drafts[k]:
                break
        slot.tokens, slot.length = text, work.base + len(ids)
        return ids, Fault.NONE if ids else fault

    def _drafts(self, work: Work) -> list[int]:
        """Drafts for the next step, wrong on purpose now and then."""
        slot, vocab = self.slots[work.slot], self.script.vocab_size
        assert slot is not None
        wanted = self.script.draft_len
        if not work.logits or slot.length + 1 >= slot.limit or not wanted:
            return slot.drafts + [0] * (wanted - len(slot.drafts))
        summary, position = self._read(work.slot, slot.length), slot.length
        token, drafts = slot.tokens[-1], []
        for k in range(wanted):
            summary = attend(summary, entry(summary, token, position + k), position + k)
            z = toy_logits(summary, vocab)
            token = draw(z, slot.seed, position + k + 1, slot.params.temperature)
            if entry(slot.seed, position + k, 99) % 10 >= 7:
                token = (token + 1) % vocab
            drafts.append(token)
        slot.drafts = drafts
        return drafts

    def _prompt_rows(self, slot: _Slot, work: Work) -> LogprobRows:
        count = slot.params.prompt_logprobs
        return self._logprob_rows(
            [(p, *candidates(z, slot.tokens[p], count)) for p, z in work.prompt]
        )

    def _logprob_rows(self, found: list[tuple[int, list[int], list[float], int]]) -> LogprobRows:
        wide = max(len(ids) for _, ids, _, _ in found)
        ids = np.full((len(found), wide), -1, np.int32)
        values = np.zeros((len(found), wide), np.float32)
        for m, (_, row_ids, row_values, _) in enumerate(found):
            ids[m, : len(row_ids)], values[m, : len(row_ids)] = row_ids, row_values
        index = np.array([f[0] for f in found], np.int32)
        return LogprobRows(index, ids, values, np.array([f[3] for f in found], np.int32))
