"""Engines over the real runner with drafters that tests script: :class:`Bench`.

A tiny checkpoint is loaded through the ordinary host, with a speculator of this module in the
resolution, as if a plugin had sold it. Drafters know the request of a slot by its seed. Random
loads for it are drawn in ``load_rig``.
"""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from deepinfer.api.kv import KVGroup, KVSpec
from deepinfer.api.speculative import DraftChoice, DraftNeeds, Drafts
from deepinfer.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.executors.local import LocalExecutor
from deepinfer.plugins import Chosen, PluginManager, Resolution, Wanted
from deepinfer.testing.scenarios import TOKENIZER
from deepinfer.testing.toy import ToyGrammarBackend
from deepinfer_speculative.allocation import allocate

TRUTH: dict[int, list[int]] = {}
"""Seed of a request -> its whole text without speculation: what a perfect drafter drafts."""


def know(requests, found):
    """Drafters learn from now on what these requests came to, and nothing else."""
    TRUTH.clear()
    for r in requests:
        signed = (r.seed ^ (1 << 63)) - (1 << 63) if r.seed >> 63 else r.seed
        TRUTH[signed] = [*r.token_ids, *found[r.id].ids]


class Scripted:
    """Drafts the truth as often as ``right`` says, at random what is close to it otherwise.

    Splits rows at random, gives random confidences, and sometimes drafts less than γ.
    """

    right, taps = 1.0, ()

    @classmethod
    def needs(cls, context):
        return DraftNeeds(draft_len=context.draft_length(None), taps=cls.taps)

    def __init__(self, context, target):
        self.draft_len = context.draft_length(None)
        self.vocab = context.config.vocab_size
        self.rng = random.Random(context.options.get("seed", 0))
        self.slots = None

    def bind(self, kv, slots):
        self.slots = slots

    def allot(self, slots, eligible, k):
        noise = torch.tensor([[self.rng.random() for _ in range(self.draft_len)] for _ in slots])
        return allocate(noise.view(len(slots), -1).cumprod(1), eligible, k)

    def commit(self, taps, kept):
        assert kept.dtype == torch.bool

    def propose(self, anchors, slots):
        ids = torch.zeros((len(slots), self.draft_len), dtype=torch.int64)
        for r, slot in enumerate(slots.tolist()):
            length = int(self.slots.length[slot])
            text = TRUTH.get(int(self.slots.seed[slot]), [])
            assert int(anchors[r]) == int(self.slots.tokens[slot, length - 1])
            for j in range(self.draft_len):
                right = length + j < len(text) and self.rng.random() < self.right
                ids[r, j] = text[length + j] if right else self.wrong(text, length + j)
        drafted = torch.tensor([self.rng.randint(self.least(), self.draft_len) for _ in slots])
        sure = torch.tensor([[self.rng.random() for _ in range(self.draft_len)] for _ in slots])
        return Drafts(ids, sure.view(ids.shape), drafted.long())

    def least(self):
        return 0 if self.rng.random() < 0.2 else self.draft_len

    def wrong(self, text, place):
        return self.rng.randrange(self.vocab)


class Perfect(Scripted):
    """Always right."""


class Garbage(Scripted):
    """Never right but by luck."""

    right = 0.0


class Biased(Scripted):
    """Right two times of three; else the end id, or what stands one place further."""

    right = 0.67

    def wrong(self, text, place):
        return 0 if self.rng.random() < 0.5 else text[-1] if text else 3


class ContextKeeper(Scripted):
    """Keeps tapped rows in pages of its own and says what it reads back there.

    ``seen``: prefix of a text -> the rows that pages hold for its last token, on every read.
    """

    right, taps = 0.6, (-1, 0, 1)
    seen: dict[tuple[int, ...], torch.Tensor] = {}  # noqa: RUF012
    reads = 0

    @classmethod
    def needs(cls, context):
        hidden, size = context.config.hidden_size, context.dtype.itemsize
        group = KVGroup(
            name="context",
            kind="full",
            layers=(0, 1),
            kv_heads=1,
            head_dim=hidden,
            bytes_per_token=2 * 2 * hidden * size,
        )
        spec = KVSpec((group,), "test-context")
        return DraftNeeds(draft_len=context.draft_length(None), taps=cls.taps, kv=spec)

    def __init__(self, context, target):
        super().__init__(context, target)
        self.page_size = context.page_size

    def bind(self, kv, slots):
        super().bind(kv, slots)
        self.kv = [*kv.layer(0), *kv.layer(1)]

    def commit(self, taps, kept):
        where = torch.where(kept, taps.batch.kv_slots, -1)
        rows = (where >= 0).nonzero()[:, 0]
        page, offset = where[rows] // self.page_size, where[rows] % self.page_size
        values = [taps.hidden[layer] for layer in (-1, 0, 1)]
        for cache, hidden in zip(self.kv, (*values, values[0]), strict=True):
            cache[page, offset, 0] = hidden[rows].to(cache.dtype)

    def propose(self, anchors, slots):
        for slot in slots.tolist():
            length = int(self.slots.length[slot])
            text = self.slots.tokens[slot, :length].tolist()
            place = torch.arange(length - 1)
            page = self.slots.pages[slot][place // self.page_size].long()
            held = torch.stack([c[page, place % self.page_size, 0].float() for c in self.kv], 1)
            for p in range(length - 1):
                key = tuple(text[: p + 1])
                known = ContextKeeper.seen.setdefault(key, held[p].clone())
                ContextKeeper.reads += 1
                assert torch.equal(known, held[p]), f"the context of {key} is another"
        return super().propose(anchors, slots)


class RandomPlanner:
    """Any K, any cap, and steps that draft nothing; sees that facts and answers make sense."""

    def __init__(self, draft_len, mode, seed):
        self.draft_len = draft_len
        self.rng = random.Random(seed)
        self.modes = {"static": self.all, "cap": self.cap, "adaptive": self.any}
        self.mode = mode
        self.last = 0

    def choose(self, facts):
        assert facts.step >= self.last
        self.last = facts.step
        assert all(r.most_drafts >= 0 and r.rows_ahead >= 0 for r in facts.decoding)
        return self.modes[self.mode](facts)

    def all(self, facts):
        return DraftChoice(facts.room)

    def cap(self, facts):
        return DraftChoice(facts.room, keep=self.rng.randint(0, facts.room))

    def any(self, facts):
        propose = self.rng.random() < 0.8
        return DraftChoice(self.rng.randint(0, facts.room), propose=propose)

    def observe(self, landed):
        assert len(set(landed.generations)) == len(landed.generations)
        out = landed.out
        assert out.drafted is None or (out.drafted <= self.draft_len).all()


def resolution_for(config, architecture, drafter):
    manager = PluginManager()
    chosen = manager.resolve(Wanted.by(config, [architecture]), config).chosen
    if drafter is not None:
        parts = {
            "planner": f"{__name__}:RandomPlanner",
            "drafter": f"{__name__}:{drafter}",
            "verifier": "deepinfer_speculative.ratio:RatioVerifier",
        }
        chosen += (
            Chosen(
                kind="speculator",
                name="scripted",
                plugin="test",
                distribution="deepinfer-core",
                version="0.1.0",
                load=parts["planner"],
                parts=parts,
            ),
        )
    return Resolution(chosen)


class Found(NamedTuple):
    """What a request came to; all but ``metrics`` must not depend on speculation.

    ``scores`` and ``prompt_scores``: ids, logprobs and ranks, bit for bit.
    """

    ids: tuple[int, ...]
    scores: tuple[bytes, ...]
    prompt_scores: tuple[bytes | None, ...]
    text: str
    finish: str
    stop_reason: int | str | None
    metrics: Any

    @property
    def answer(self):
        return self[:-1]


def bits(table):
    """A table of logprobs as bytes."""
    return table and b"".join(
        struct.pack("<ifi", t, c.logprob, c.rank) for t, c in sorted(table.items())
    )


class Collected:
    """The deltas of one request."""

    def __init__(self):
        self.ids, self.scores, self.text, self.prompt, self.end = [], [], "", (), None

    def take(self, delta):
        assert self.end is None, f"{delta.request_id}: a delta behind its end"
        self.ids.extend(delta.token_ids)
        self.scores.extend(map(bits, delta.logprobs or ()))
        self.text += delta.text
        if delta.prompt_logprobs is not None:
            self.prompt = tuple(map(bits, delta.prompt_logprobs))
        if delta.finish is not None:
            self.end = delta

    def found(self):
        end = self.end
        texts = (tuple(self.ids), tuple(self.scores), self.prompt, self.text)
        return Found(*texts, str(end.finish), end.stop_reason, end.metrics)


class Bench:
    """One engine on a tiny checkpoint; ``drafter`` None: without speculation.

    ``planner``: makes one of (draft length, mode, seed); usually :class:`RandomPlanner`. ``clock``:
    the engine's, told of each step; None: the machine's.
    """

    def __init__(
        self,
        path,
        drafter=None,
        mode="adaptive",
        pages=None,
        gamma=3,
        seed=0,
        planner=None,
        policy=None,
        clock=None,
        **config,
    ):
        speculative = None
        if drafter is not None:
            speculative = {"mode": mode, "num_speculative_tokens": gamma, "seed": seed}
        self.config = EngineConfig(
            model=str(path),
            backend="reference" if config.pop("reference", False) else None,
            num_threads=1,
            speculative=speculative,
            kv_cache_memory=64 << 20,
            max_model_len=96,
            **{"batch_invariant": True, "page_size": 16, **config},
        )
        resolution = resolution_for(self.config, "LlamaForCausalLM", drafter)
        self.executor = LocalExecutor()
        facts = self.executor.start(self.config, resolution)
        if pages is not None:
            facts = replace(facts, num_pages=pages)
        if drafter is not None:
            planner = (planner or RandomPlanner)(facts.draft_len, mode, seed)
        self.facts, self.clock = facts, clock
        self.engine = Engine(
            self.config,
            self.executor,
            facts,
            tokenizer=TOKENIZER,
            policy=policy,
            planner=planner,
            grammar_backend=ToyGrammarBackend(facts.vocab_size),
            **({"clock": clock} if clock else {}),
        )

    def run(self, requests, arrivals=None, aborts=0.0):
        """request id -> :class:`Found`. ``arrivals``: a seed; None: all at once. ``aborts``: how
        likely somebody is sent away before a step.
        """
        rng = random.Random(arrivals)
        todo, open_, steps = list(requests), {}, 0
        texts = {r.id: Collected() for r in requests}
        while todo or self.engine.has_work():
            while todo and (arrivals is None or rng.random() < 0.4):
                open_[todo[0].id] = True
                self.engine.add(todo.pop(0))
            if open_ and rng.random() < aborts:
                self.engine.abort(rng.choice(list(open_)))
            for delta in self.engine.step():
                texts[delta.request_id].take(delta)
                if delta.finish is not None:
                    del open_[delta.request_id]
            self.engine.check_integrity()
            if self.clock is not None:
                self.clock.step()
            steps += 1
            assert steps < 5000, "stuck"
        return {name: text.found() for name, text in texts.items()}

    def close(self):
        self.engine.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
