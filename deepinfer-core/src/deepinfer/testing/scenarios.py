"""Random engine runs against a naive loop: :func:`run_scenario`.

A scenario is a random load (prompts with common beginnings, limits, stops, priorities, parallel
samples, aborts …) on a random small device. Whatever the engine does to be quick, every request
must end with the ids, text, logprobs and reason that ``naive`` finds, which looks at one request at
a time and knows no pages, steps or drafts. ``python -m deepinfer.testing.scenarios 600`` runs more.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepinfer.api.grammar import GrammarBackend
from deepinfer.api.plan import Delta, Request
from deepinfer.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.logits import to_row_params
from deepinfer.engine.policy import FCFSPolicy, PriorityPolicy
from deepinfer.engine.request import mix
from deepinfer.sampling_params import SamplingParams
from deepinfer.testing.fake import FakeExecutor, FakeScript
from deepinfer.testing.naive import Answer, Oracle, naive, toy_grammar
from deepinfer.testing.stateful import StateExecutor, StateScript
from deepinfer.testing.toy import MemoryStore, ToyGrammar, ToyGrammarBackend, ToyTokenizer

EOS = frozenset({0})
STOPS = ("ab", "bca", "c a", "é", "aba", "€", "b\n", "xa", "bb", "caba", "a")
TOKENIZER = ToyTokenizer()


@dataclass(frozen=True)
class Grammars:
    """What constrained requests are given, and how the naive loop reads it.

    ``specs``: one is drawn for each; ``chance``: that a request is constrained; ``backend`` is made
    for a vocabulary's size; ``reasoning``: the chance that the rule begins behind a mark.
    """

    specs: Sequence[Any]
    backend: Callable[[int], GrammarBackend]
    oracle: Callable[[Request, int], Oracle]
    chance: float
    reasoning: float = 0.0


TOY = Grammars((4, 5), ToyGrammarBackend, toy_grammar, 0.2)


@dataclass
class Scenario:
    """One random load, fixed by its number."""

    number: int
    script: FakeScript
    config: dict[str, Any]
    requests: list[Request]
    tiers: bool
    grammars: Grammars = TOY
    answers: list[Answer] = field(default_factory=list)


@dataclass
class Tally:
    """What happened, so that a test can see that its scenarios exercise what they should."""

    steps: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    aborts: int = 0
    loads: int = 0
    errors: int = 0

    def add(self, other: Tally) -> None:
        """Sum up."""
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))


# Making a scenario.


def make(number: int, stateful: bool = False, grammars: Grammars = TOY) -> Scenario:
    """The scenario of this number, with the naive loop's answers.

    ``stateful``: the model keeps state, prompts are longer, and some go on where another ended.
    """
    rng = random.Random(number)
    vocab = rng.choice([17, 17, 34])
    page_size = rng.choice([2, 4])
    script = FakeScript(
        vocab_size=vocab,
        page_size=page_size,
        num_pages=-(-36 // page_size) + rng.randint(0, 6),
        max_model_len=40,
        max_num_seqs=rng.randint(1, 6),
        draft_len=rng.choice([0, 0, 1, 2, 4]),
        replay=rng.choice([0, 0, 0, 3]),
        jitter=rng.choice([None, None, None, 0.0, 0.0002]),
        poison=16 if rng.random() < 0.05 else None,
        seed=number,
    )
    if stateful:
        script = _stateful(rng, script)
    config = {
        "model": "toy",
        "max_num_seqs": script.max_num_seqs,
        "max_num_batched_tokens": rng.randint(2, 16),
        "enable_prefix_caching": rng.random() < 0.9,
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
    }
    scenario = Scenario(number, script, config, [], rng.random() < 0.3, grammars)
    longest = 24 if stateful else 14
    common = [rng.choice(TOKENIZER.whole) for _ in range(longest - 2)]
    for k in range(rng.randint(1, 10)):
        past = _past(rng, scenario, longest) if stateful else None
        made = _requests(rng, f"r{k}", past or common, scenario, longest, past is not None)
        scenario.requests.extend(made)
        scenario.answers.extend([naive(r, script, grammars.oracle) for r in made])
    return scenario


def _stateful(rng: random.Random, plain: FakeScript) -> StateScript:
    """The same device with a model that keeps state."""
    script = StateScript(**vars(plain) | {"replay": 0, "max_model_len": 48})
    script.num_pages = -(-46 // script.page_size) + rng.randint(0, 8)
    script.window, script.late = rng.randint(2, 4), rng.randint(1, 4)
    script.snapshots = rng.choice([0, 1, 2, 4, 8])
    if rng.random() < 0.7:
        script.keep = script.window + script.draft_len + rng.randint(0, 3)
    return script


def _past(rng: random.Random, scenario: Scenario, longest: int) -> list[int] | None:
    """A text that some request ended with, to be gone on with, as a chat does."""
    if not scenario.requests or rng.random() < 0.6:
        return None
    k = rng.randrange(len(scenario.requests))
    text = [*scenario.requests[k].token_ids, *scenario.answers[k].ids]
    return text if len(text) < longest else None


def _requests(
    rng: random.Random,
    name: str,
    common: list[int],
    scenario: Scenario,
    longest: int = 14,
    whole: bool = False,
) -> list[Request]:
    """One request, or the samples of one prompt. ``whole``: all of ``common`` begins it."""
    script, grammars = scenario.script, scenario.grammars
    length = rng.randint(1 + whole * len(common), longest)
    prompt = common if whole else common[: rng.randint(0, min(length, longest - 2))]
    prompt = prompt + [rng.choice(TOKENIZER.whole) for _ in range(length - len(prompt))]
    params = _params(rng, script.vocab_size)
    row = to_row_params(params, length, EOS, script.vocab_size, TOKENIZER.encode)
    structured = rng.choice(grammars.specs) if rng.random() < grammars.chance else None
    mark: tuple[int, ...] = ()
    if structured is not None and grammars.reasoning and rng.random() < grammars.reasoning:
        mark = tuple(rng.choices(TOKENIZER.whole[:4], k=rng.randint(1, 2)))
    priority, salt = rng.randint(0, 3), rng.choice(["", "", "", "other"])
    return [
        Request(
            id=f"{name}#{i}",
            token_ids=tuple(prompt),
            sampling=params,
            row_params=row,
            seed=mix(params.effective_seed or 0, i),
            limit=length + (params.max_tokens or 1),
            eos_ids=EOS,
            priority=priority,
            arrival=float(name[1:]),
            cache_salt=salt,
            structured=structured,
            reasoning_end=mark,
        )
        for i in range(params.n)
    ]


def _params(rng: random.Random, vocab: int) -> SamplingParams:
    """Sampling parameters with one feature or another switched on."""

    def maybe(chance: float, value: Any, otherwise: Any) -> Any:
        return value if rng.random() < chance else otherwise

    most = rng.randint(1, 20)
    return SamplingParams(
        n=maybe(0.15, rng.randint(2, 3), 1),
        temperature=maybe(0.5, 0.8, 0.0),
        seed=rng.randrange(1 << 64),
        max_tokens=most,
        min_tokens=maybe(0.2, rng.randint(0, most), 0),
        stop=tuple(rng.sample(STOPS, maybe(0.4, rng.randint(1, 3), 0))),
        stop_token_ids=tuple(rng.sample(range(1, vocab), maybe(0.2, 2, 0))),
        include_stop_str_in_output=rng.random() < 0.3,
        ignore_eos=rng.random() < 0.2,
        skip_special_tokens=rng.random() < 0.7,
        logit_bias=maybe(0.15, {rng.randrange(vocab): 3.0, 0: -1.0}, None),
        allowed_token_ids=maybe(0.1, tuple(rng.sample(range(vocab), 6)), None),
        presence_penalty=maybe(0.15, 1.5, 0.0),
        logprobs=maybe(0.15, rng.randint(0, 3), None),
        prompt_logprobs=maybe(0.1, rng.randint(0, 2), None),
    )


# Running it.


class _Caller:
    """Collects deltas as a front door would, and checks what holds of every stream."""

    def __init__(self) -> None:
        self.ids: dict[str, list[int]] = {}
        self.texts: dict[str, str] = {}
        self.logprobs: dict[str, list[Any]] = {}
        self.prompts: dict[str, tuple[Any, ...]] = {}
        self.ends: dict[str, Delta] = {}

    def take(self, delta: Delta) -> None:
        name = delta.request_id
        assert name not in self.ends, f"{name}: a delta behind its end"
        self.ids.setdefault(name, []).extend(delta.token_ids)
        self.texts[name] = self.texts.get(name, "") + delta.text
        self.logprobs.setdefault(name, []).extend(map(_plain, delta.logprobs or ()))
        if delta.prompt_logprobs is not None:
            assert name not in self.prompts, f"{name}: prompt logprobs twice"
            self.prompts[name] = tuple(map(_plain, delta.prompt_logprobs))
        if delta.finish is not None:
            self.ends[name] = delta

    def answer(self, name: str) -> Answer:
        """What it came to."""
        end = self.ends[name]
        return Answer(
            tuple(self.ids[name]),
            self.texts[name],
            str(end.finish),
            end.stop_reason,
            tuple(self.logprobs[name]),
            self.prompts.get(name),
        )


def _plain(table: Any) -> Any:
    if table is None:
        return None
    for token, candidate in table.items():
        assert candidate.decoded_token == TOKENIZER.decode([token], False)
    return {token: (candidate.logprob, candidate.rank) for token, candidate in table.items()}


def build(
    scenario: Scenario,
    overlap: bool,
    executor_type: type[FakeExecutor] = FakeExecutor,
    grammar_type: type[ToyGrammar] = ToyGrammar,
) -> tuple[Engine, MemoryStore]:
    """An engine on a scripted device, with a tier if the scenario has one."""
    stateful = isinstance(scenario.script, StateScript)
    if stateful and executor_type is FakeExecutor:
        executor_type = StateExecutor
    executor = executor_type(scenario.script)
    facts = executor.start()
    store = MemoryStore(executor.kv, scenario.number)
    backend = scenario.grammars.backend(scenario.script.vocab_size)
    if isinstance(backend, ToyGrammarBackend):
        backend.grammar = grammar_type
    priority = scenario.config["scheduling_policy"] == "priority"
    engine = Engine(
        EngineConfig(**scenario.config, overlap=overlap),
        executor,
        facts,
        tokenizer=TOKENIZER,
        policy=PriorityPolicy() if priority else FCFSPolicy(),
        grammar_backend=backend,
        stores=[store] if scenario.tiers else [],
    )
    return engine, store


def run_scenario(scenario: Scenario, overlap: bool, **types: Any) -> Tally:
    """Run it with random arrivals and aborts, compare every request, and look for leaks."""
    rng = random.Random(scenario.number + 1)
    engine, store = build(scenario, overlap, **types)
    caller = _Caller()
    todo, aborted, steps = list(scenario.requests), set[str](), 0
    try:
        while todo or engine.has_work():
            while todo and rng.random() < 0.5:
                engine.add(todo.pop(0))
            if rng.random() < 0.03 and (names := _open(scenario, todo, caller)):
                name = rng.choice(names)
                if engine.abort(name):
                    aborted.add(name)
            if scenario.tiers and rng.random() < 0.1:
                engine.reset_prefix_cache()
            for delta in engine.step():
                caller.take(delta)
            engine.check_integrity()
            steps += 1
            assert steps < 20_000, "stuck"
        _compare(scenario, caller, aborted)
        pool = engine.cache.pool
        assert not engine.cache.leaving, "a request never settled"
        assert pool.free == pool.num_pages, "pages leaked"
        assert len(engine.cache.slots) == scenario.script.max_num_seqs, "slots leaked"
        assert not store.spoiled, "a page was given away while it was being read"
    finally:
        engine.close()
    counters = engine.counters
    errors = counters.finished.get("error", 0)
    return Tally(
        steps, counters.preemptions, counters.cached_tokens, len(aborted), store.loaded, errors
    )


def _open(scenario: Scenario, todo: list[Request], caller: _Caller) -> list[str]:
    waiting = {request.id for request in todo}
    ids = [request.id for request in scenario.requests]
    return [name for name in ids if name not in waiting and name not in caller.ends]


def _compare(scenario: Scenario, caller: _Caller, aborted: set[str]) -> None:
    for request, right in zip(scenario.requests, scenario.answers, strict=True):
        got = caller.answer(request.id)
        where = f"scenario {scenario.number}, {request.id}"
        if request.id in aborted:
            assert got.finish == "abort", where
            assert right.ids[: len(got.ids)] == got.ids, f"{where}: {got} is no part of {right}"
            assert right.text.startswith(got.text), f"{where}: {got.text!r}, {right.text!r}"
        else:
            if right.finish == "error":  # its text stays where the error found it
                assert right.text.startswith(got.text), where
                got = got._replace(text=right.text)
            assert got == right, f"{where}:\ngot   {got}\nright {right}"


def run_many(numbers: range, stateful: bool = False) -> Tally:
    """Each scenario with and without overlap."""
    total = Tally()
    for number in numbers:
        scenario = make(number, stateful)
        for overlap in (True, False):
            total.add(run_scenario(scenario, overlap))
    return total


if __name__ == "__main__":
    begin = time.perf_counter()
    for stateful in (False, True):
        tally = run_many(range(int(sys.argv[1])), stateful)
        print("with state" if stateful else "plain", tally, f"{time.perf_counter() - begin:.1f} s")
