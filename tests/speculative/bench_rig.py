"""Engines over the real runner with drafters that tests script: :class:`Bench`.

A tiny checkpoint is loaded through the ordinary host, with a speculator of this module in the
resolution, as if a plugin had sold it. Drafters know the request of a slot by its seed.
"""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import torch
from deepinfer.api.kv import KVGroup, KVSpec
from deepinfer.api.plan import Request
from deepinfer.api.speculative import DraftChoice, DraftNeeds, Drafts
from deepinfer.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.logits import to_row_params
from deepinfer.engine.request import mix
from deepinfer.executors.local import LocalExecutor
from deepinfer.plugins import Chosen, PluginManager, Resolution, Wanted
from deepinfer.sampling_params import SamplingParams
from deepinfer.testing.tiny import VOCAB
from deepinfer.testing.toy import ToyGrammarBackend
from deepinfer_speculative.allocation import allocate

EOS = frozenset({2})
TRUTH: dict[int, list[int]] = {}
"""Seed of a request -> its whole text without speculation: what a perfect drafter drafts."""


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
        return self.rng.randrange(VOCAB)


class Perfect(Scripted):
    """Always right."""


class Garbage(Scripted):
    """Never right but by luck."""

    right = 0.0


class Biased(Scripted):
    """Right two times of three; else the end id, or what stands one place further."""

    right = 0.67

    def wrong(self, text, place):
        return 2 if self.rng.random() < 0.5 else text[-1] if text else 3


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

    def __init__(self, context):
        self.draft_len = context.draft_len
        self.rng = random.Random(context.options.get("seed", 0))
        self.modes = {"static": self.all, "cap": self.cap, "adaptive": self.any}
        self.mode = context.mode
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


MODES = ("static", "cap", "adaptive")


class Bench:
    """One engine on a tiny checkpoint; ``drafter`` None: without speculation."""

    def __init__(self, path, drafter=None, mode="adaptive", pages=None, gamma=3, seed=0, **config):
        speculative = None
        if drafter is not None:
            speculative = {"mode": mode, "num_speculative_tokens": gamma, "seed": seed}
        self.config = EngineConfig(
            model=str(path),
            backend="reference" if config.pop("reference", False) else None,
            batch_invariant=config.pop("batch_invariant", True),
            num_threads=1,
            page_size=16,
            speculative=speculative,
            kv_cache_memory=64 << 20,
            max_model_len=96,
            **config,
        )
        resolution = resolution_for(self.config, "LlamaForCausalLM", drafter)
        self.executor = LocalExecutor()
        facts = self.executor.start(self.config, resolution)
        if pages is not None:
            facts = replace(facts, num_pages=pages)
        planner = None
        if drafter is not None:
            asked = self.config.speculation()
            planner = RandomPlanner(_Facts(facts.draft_len, asked.mode, asked.options))
        self.facts = facts
        self.engine = Engine(
            self.config,
            self.executor,
            facts,
            planner=planner,
            grammar_backend=ToyGrammarBackend(VOCAB),
        )

    def run(self, requests, arrivals=None, abort=()):
        """request id -> (ids, logprobs as bits, finish, metrics)."""
        rng = random.Random(arrivals)
        todo, found, steps = list(requests), {r.id: ([], []) for r in requests}, 0
        ends = {}
        while todo or self.engine.has_work():
            while todo and (arrivals is None or rng.random() < 0.4):
                self.engine.add(todo.pop(0))
            for name in abort:
                if steps == 4:
                    self.engine.abort(name)
            for delta in self.engine.step():
                ids, scores = found[delta.request_id]
                ids.extend(delta.token_ids)
                for table in delta.logprobs or ():
                    scores.append(
                        b"".join(
                            struct.pack("<ifi", t, c.logprob, c.rank)
                            for t, c in sorted(table.items())
                        )
                    )
                if delta.finish is not None:
                    ends[delta.request_id] = delta
            self.engine.check_integrity()
            steps += 1
            assert steps < 5000, "stuck"
        return {
            name: (tuple(ids), tuple(scores), ends[name].finish, ends[name].metrics)
            for name, (ids, scores) in found.items()
        }

    def close(self):
        self.engine.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class _Facts:
    """What :class:`RandomPlanner` reads of a planner's context."""

    def __init__(self, draft_len, mode, options):
        self.draft_len, self.mode, self.options = draft_len, mode, options


def requests_of(number, longest=14):
    """A random load with every feature, fixed by its number; a third of it under a grammar."""
    rng = random.Random(number)

    def maybe(chance, value, otherwise):
        return value if rng.random() < chance else otherwise

    shared = [rng.randrange(3, VOCAB) for _ in range(20)]
    found = []
    for k in range(rng.randint(2, 6)):
        head = shared[: rng.choice([0, 0, 16, 20])]
        prompt = head + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))]
        most = rng.randint(1, 24)
        params = SamplingParams(
            n=maybe(0.15, 2, 1),
            temperature=maybe(0.5, 1.0, 0.0),
            top_k=maybe(0.2, 12, 0),
            top_p=maybe(0.2, 0.8, 1.0),
            min_p=maybe(0.1, 0.05, 0.0),
            seed=number * 100 + k,
            max_tokens=most,
            min_tokens=maybe(0.2, rng.randint(0, most), 0),
            stop_token_ids=tuple(rng.sample(range(3, VOCAB), maybe(0.3, 25, 0))),
            ignore_eos=rng.random() < 0.3,
            logit_bias=maybe(0.15, {rng.randrange(VOCAB): 4.0, 2: 2.0}, None),
            allowed_token_ids=maybe(0.1, tuple(rng.sample(range(VOCAB), 30)), None),
            presence_penalty=maybe(0.15, 0.8, 0.0),
            frequency_penalty=maybe(0.1, 0.4, 0.0),
            repetition_penalty=maybe(0.1, 1.3, 1.0),
            logprobs=maybe(0.5, rng.randint(0, 3), None),
            prompt_logprobs=maybe(0.1, 1, None),
            detokenize=False,
        )
        structured = rng.choice([4, 5]) if rng.random() < 1 / 3 else None
        row = to_row_params(params, len(prompt), EOS, VOCAB, None)
        for i in range(params.n):
            found.append(
                Request(
                    id=f"r{k}#{i}",
                    token_ids=tuple(prompt),
                    sampling=params,
                    row_params=row,
                    seed=mix(params.effective_seed or 0, i),
                    limit=len(prompt) + most,
                    eos_ids=EOS,
                    arrival=float(k),
                    structured=structured,
                )
            )
    return found


def crowded(model, number, requests, **settings):
    """A bench whose mode, lengths, pages and batch follow from a load's number: little room.

    Every other one builds batches as for a device whose values the host does not know.
    """
    longest = max(-(-r.limit // 16) for r in requests)
    bench = Bench(
        model,
        mode=MODES[number // 3 % 3],
        gamma=1 + number % 5,
        seed=number,
        pages=longest + number % 3,
        max_num_seqs=1 + number % 6,
        max_num_batched_tokens=8 + 5 * (number % 4),
        overlap=number % 4 != 0,
        **settings,
    )
    bench.executor._host.runner._batches.looks = number % 2 == 0
    return bench


def same_texts(model, drafter, dtype, numbers):
    """Random loads without and with a drafter; every text, score and end is the same, some drafts
    stand and somebody is preempted.
    """
    accepted = preempted = 0
    with Bench(model, dtype=dtype, enable_prefix_caching=False) as plain:
        for number in numbers:
            requests = requests_of(number)
            right = plain.run(requests)
            with crowded(model, number, requests, drafter=drafter, dtype=dtype) as speculating:
                got = speculating.run(requests, arrivals=number)
            for request in requests:
                name = request.id
                if right[name][2] == "error":
                    assert got[name][2] == "error", (number, name)
                assert got[name][:3] == right[name][:3], (number, name)
                accepted += got[name][3].accepted
                preempted += got[name][3].preemptions
    assert accepted > len(numbers) // 8 and preempted > 0
