"""Random loads for engines that speculate: :func:`draw`, and what came of them: :class:`Tally`.

Requests are those of ``deepinfer.testing.scenarios``, with what only a real model knows on top
(filters, penalties by count). Drafter, planner, mode, draft length and the size of the device are
each drawn by themselves from a load's number, so that anything may meet anything.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from bench_rig import Bench, RandomPlanner, know
from deepinfer.api.speculative import PlannerContext
from deepinfer.engine.logits import to_row_params
from deepinfer.engine.policy import FCFSPolicy, PriorityPolicy
from deepinfer.testing.naive import toy_grammar
from deepinfer.testing.scenarios import EOS, TOKENIZER, Grammars, make
from deepinfer.testing.tiny import write_tiny_checkpoint
from deepinfer.testing.toy import ToyGrammarBackend
from deepinfer_speculative.planner import Planner
from safetensors.torch import load_file, save_file

VOCAB = 34
"""Two ids for each piece of the toy tokenizer, so that its stop texts strike."""
GRAMMARS = Grammars((4, 5), ToyGrammarBackend, toy_grammar, 1 / 3)
DRAFTERS = ("Perfect", "Garbage", "Biased")
MODES = ("static", "cap", "adaptive")
COSTS = {"cheap": (0.0, 0.0), "even": (0.001, 0.004), "dear": (0.01, 0.02)}
"""Seconds of a row and of drafting, beside the ``BASE`` of any step: drafting always pays, pays for
good drafts on a good day, never pays.
"""
BASE = 0.01


def tiny_model(folder, calm=False):
    """A tiny Llama of ``VOCAB`` ids whose end is that of the scenarios' requests.

    ``calm``: its layers add little and its head is sure, so that a token mostly follows from the
    one before it. Drafts that borrow embedding and head begin with much of that, and learn the rest
    from a few texts; what random layers say of one text teaches nothing of another.
    """
    more = {"vocab_size": VOCAB, "eos_token_id": min(EOS), "bos_token_id": 1, "pad_token_id": 1}
    path = write_tiny_checkpoint(folder, overrides=more)
    if calm:
        weights = load_file(path / "model.safetensors")
        for name, tensor in weights.items():
            tensor *= 3.0 if name == "lm_head.weight" else 1.0
            tensor *= 0.01 if "o_proj" in name or "down_proj" in name else 1.0
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@dataclass
class Load:
    """One random load, fixed by its number. ``costs``: of the engine's own planner, by name; None:
    a :class:`RandomPlanner` decides.
    """

    number: int
    requests: list
    drafter: str
    mode: str
    costs: str | None
    gamma: int
    overlap: bool
    looks: bool
    pages: int
    config: dict

    @property
    def own(self):
        """The planner is the engine's own, and may pause."""
        return self.costs is not None and self.mode == "adaptive"


def draw(number, drafters=DRAFTERS):
    """The load of this number."""
    scenario, rng = make(number, grammars=GRAMMARS), random.Random(f"load {number}")
    page_size = scenario.script.page_size
    longest = max(-(-r.limit // page_size) for r in scenario.requests)
    return Load(
        number=number,
        requests=_requests(rng, scenario.requests),
        drafter=rng.choice(drafters),
        mode=rng.choice(MODES),
        costs=rng.choice([None, *COSTS]),
        gamma=rng.randint(1, 5),
        overlap=rng.random() < 0.7,
        looks=rng.random() < 0.5,
        pages=longest + rng.randint(0, 6),
        config={**scenario.config, "page_size": page_size},
    )


def _requests(rng, requests):
    asked, found = {}, []
    for r in requests:
        group = r.id.split("#")[0]  # samples of one prompt
        params = asked.setdefault(group, _real(rng, r.sampling))
        row = to_row_params(params, len(r.token_ids), EOS, VOCAB, TOKENIZER.encode)
        found.append(replace(r, sampling=params, row_params=row))
    return found


def _real(rng, params):
    """With T = 1 for 0.8, and what the scenarios' toy model does not know."""

    def maybe(chance, value, otherwise):
        return value if rng.random() < chance else otherwise

    return params.model_copy(
        update={
            "temperature": 1.0 if params.temperature else 0.0,
            "top_k": maybe(0.2, 12, 0),
            "top_p": maybe(0.2, 0.8, 1.0),
            "min_p": maybe(0.1, 0.05, 0.0),
            "frequency_penalty": maybe(0.1, 0.4, 0.0),
            "repetition_penalty": maybe(0.1, 1.3, 1.0),
            "logprobs": maybe(0.5, rng.randint(0, 3), params.logprobs),
        }
    )


class Clock:
    """Time as a device of such costs takes it, but now drafts cost more than they should and now
    less, so that a planner that measures changes its mind; the same in every run.
    """

    def __init__(self, costs, seed):
        self.row, self.draft = COSTS[costs]
        self.rng = random.Random(seed)
        self.now, self.weather, self.choice = 0.0, 1.0, None

    def __call__(self):
        return self.now

    def step(self):
        """A step has gone by."""
        if self.rng.random() < 0.1:
            self.weather = self.rng.choice([0.2, 1.0, 1.0, 5.0])
        rows, propose = (self.choice.rows, self.choice.propose) if self.choice else (0, False)
        drafting = self.weather * (self.row * rows + self.draft * propose)
        self.now += self.rng.uniform(0.9, 1.1) * (BASE + drafting)

    def measure(self, shapes):
        """What a cost table is made from."""
        return [BASE + self.row * (s.requests + s.drafts) + self.draft * s.propose for s in shapes]


class Watched:
    """A planner that asks another and keeps count in a :class:`Tally`."""

    def __init__(self, planner, load, tally, clock):
        self.draft_len = planner.draft_len
        self._planner, self._clock, self._tally = planner, clock, tally
        self._drafter, self._own = load.drafter, load.own
        self._proposed = True

    def choose(self, facts):
        choice = self._planner.choose(facts)
        if self._clock is not None:
            self._clock.choice = choice
        if self._own:
            self._tally["own steps with drafts"] += choice.rows > 0
            self._tally["own steps in a pause"] += not (choice.propose or self._proposed)
            self._tally["own comebacks"] += choice.propose and not self._proposed
        self._proposed = choice.propose
        return choice

    def observe(self, landed):
        self._planner.observe(landed)
        ran = landed.out.verified[: landed.decodes] if landed.out.verified is not None else ()
        self._tally[f"{self._drafter} together"] += int(sum(n > 0 for n in ran) > 1)


class Tally(Counter):
    """What happened in some loads, by name: a test sees that they exercise what they should."""

    def add(self, load, right, got):
        """One load's answers without and with speculation."""
        self["loads"] += 1
        self[load.drafter] += 1
        for name in ("preempted", "accepted"):
            field = {"preempted": "preemptions"}.get(name, name)
            self[f"loads that {name}"] += any(getattr(f.metrics, field) for f in got.values())
        for r in load.requests:
            found, metrics = got[r.id], got[r.id].metrics
            self["requests"] += 1
            self["grammar"] += r.structured is not None
            self["greedy"] += r.sampling.temperature == 0
            self["aborted"] += found.finish == "abort"
            stopped = isinstance(found.stop_reason, str)
            self["stop texts"] += stopped
            self["stop texts behind drafts"] += stopped and metrics.accepted > 0
            self["preemptions"] += metrics.preemptions
            for name in ("verified", "accepted"):
                self[name] += getattr(metrics, name)
                self[f"{name} {load.drafter}"] += getattr(metrics, name)
                self[f"{name} grammar"] += getattr(metrics, name) * (r.structured is not None)

    def share(self, name, of):
        return self[name] / self[of]


def speculating(model, load, dtype, tally):
    """A bench for a load, watched."""
    clock = Clock(load.costs, load.number) if load.costs else None

    def planner(draft_len, mode, seed):
        if load.costs is None:
            inner = RandomPlanner(draft_len, mode, seed)
        else:
            inner = Planner(
                PlannerContext(
                    method="scripted",
                    mode=mode,
                    acceptance="exact",
                    draft_len=draft_len,
                    options={},
                    max_num_seqs=load.config["max_num_seqs"],
                    max_tokens=load.config["max_num_batched_tokens"],
                    identity=load.costs,
                    cache_dir=Path(model),
                    measure=clock.measure,
                )
            )
        return Watched(inner, load, tally, clock)

    config = {name: value for name, value in load.config.items() if name != "model"}
    priority = config["scheduling_policy"] == "priority"
    bench = Bench(
        model,
        drafter=load.drafter,
        mode=load.mode,
        gamma=load.gamma,
        seed=load.number,
        pages=load.pages,
        planner=planner,
        policy=PriorityPolicy() if priority else FCFSPolicy(),
        clock=clock,
        dtype=dtype,
        overlap=load.overlap,
        **config,
    )
    # As for a device whose values the host does not know.
    bench.executor._host.runner._batches.looks = load.looks
    return bench


def same_texts(model, dtype, loads):
    """Every load without and with speculation: ids, logprobs, text and end of each request are the
    same, bit for bit; of those that were sent away, what had come so far. Returns a
    :class:`Tally`.
    """
    tally = Tally()
    with Bench(model, dtype=dtype, enable_prefix_caching=False) as plain:
        for load in loads:
            right = plain.run(load.requests)
            know(load.requests, right)
            with speculating(model, load, dtype, tally) as bench:
                got = bench.run(load.requests, arrivals=load.number, aborts=0.01)
            for r in load.requests:
                where = f"load {load.number}, {r.id}"
                mine, theirs = got[r.id], right[r.id]
                if mine.finish == "abort":
                    for part in ("ids", "scores", "text"):
                        so_far = getattr(mine, part)
                        assert getattr(theirs, part)[: len(so_far)] == so_far, where
                else:
                    assert mine.answer == theirs.answer, where
                drafted, verified = mine.metrics.drafted, mine.metrics.verified
                assert drafted >= verified >= mine.metrics.accepted, where
                assert mine.metrics.accepted < max(1, mine.metrics.output_tokens), where
            tally.add(load, right, got)
    return tally
