"""A small brain for the runner's tests, and the loop that it is compared with.

``Desk`` hands out slots and pages, writes plans and keeps what was emitted; ``expected`` draws one
token at a time from a full recompute, with the stages written again in Python.
"""

import dataclasses
import math

import numpy as np
import torch
from deepinfer.api.backend import OpContext
from deepinfer.api.kv import KVOptions
from deepinfer.api.model import DeviceBatch
from deepinfer.api.plan import DECODE, Admit, BatchPlan, RowBlock, RowInputs, RowParams
from deepinfer.models.checkpoint import open_checkpoint
from deepinfer.models.llama import LlamaAdapter
from deepinfer.models.registry import model_config
from deepinfer.models.source import resolve
from deepinfer.models.weights import load_weights
from deepinfer.ops.backend import ReferenceBackend, build_ops
from deepinfer.parallel import single
from deepinfer.sampling.philox import gumbel
from deepinfer.sampling.sampler import GumbelSampler
from deepinfer.sampling.verify import EqualityVerifier
from deepinfer.testing.tiny import VOCAB, write_tiny_checkpoint
from deepinfer.worker.drafting import NullDrafter
from deepinfer.worker.kvpool import KVPool
from deepinfer.worker.runner import ModelRunner, Rig
from deepinfer.worker.slots import SlotShape, SlotTable

PAGE = 4
CPU = torch.device("cpu")
NO_PAGES = np.zeros((0, 3), np.int32)


class Naive:
    """A loaded tiny llama with invariant ops: equal text must mean equal bits."""

    def __init__(self, path):
        checkpoint = open_checkpoint(resolve(str(path)))
        adapter = LlamaAdapter()
        config = model_config(adapter, checkpoint)
        self.config = dataclasses.replace(config, max_model_len=64)
        ctx = OpContext(
            dtype=torch.float32,
            device=CPU,
            invariant=True,
            page_size=PAGE,
            head_dim=config.head_dim,
        )
        self.ops = build_ops(ReferenceBackend(), ctx)
        self.model = adapter.build(self.config, self.ops, single())
        rules = adapter.weights(self.config)
        load_weights(self.model, rules, checkpoint, self.ops, torch.float32)
        self.spec = adapter.kv_spec(self.config, KVOptions(dtype_bytes=4, page_size=PAGE))

    def logits(self, ids):
        """float32[len(ids), V] of a whole text, in one go and with a cache of its own."""
        n, pages = len(ids), -(-len(ids) // PAGE)
        place = torch.arange(n)
        batch = DeviceBatch(
            ids=torch.tensor(ids),
            positions=place,
            row_of_token=torch.zeros_like(place),
            kv_slots=place,
            attn=self.ops.plan_attention(
                torch.arange(pages, dtype=torch.int32)[None],
                torch.tensor([n]),
                torch.tensor([0, n], dtype=torch.int32),
                PAGE,
            ),
            logit_rows=place,
        )
        kv = KVPool(self.spec, pages, PAGE, torch.float32, CPU)
        with torch.inference_mode():
            return self.model.logits(self.model.forward(batch, kv))


def load(path):
    return Naive(write_tiny_checkpoint(path))


def make_runner(naive, *, slots=4, drafter=None, max_len=64, pages=100, few_rows=0):
    """``few_rows``: 0, so that the last layer leaves out what it may, however short the prompts."""
    drafter = drafter or NullDrafter()
    shape = SlotShape(
        slots=slots, max_len=max_len, page_size=PAGE, vocab_size=VOCAB, draft_len=drafter.draft_len
    )
    runner = ModelRunner(
        Rig(
            model=naive.model,
            ops=naive.ops,
            spec=naive.spec,
            kv=KVPool(naive.spec, pages, PAGE, torch.float32, CPU),
            device=ReferenceBackend().open(0),
            slots=SlotTable(shape, CPU),
            drafter=drafter,
            verifier=EqualityVerifier(naive.ops, GumbelSampler(naive.ops)),
        )
    )
    runner._batches.few_rows = few_rows
    return runner


@dataclasses.dataclass
class Req:
    prompt: list
    limit: int
    seed: int = 0
    params: dict = dataclasses.field(default_factory=dict)
    allowed: object = None  # text -> ids: a toy grammar
    slot: int = -1
    done: int = 0
    out: list = dataclasses.field(default_factory=list)
    pages: list = dataclasses.field(default_factory=list)
    drafts: list = dataclasses.field(default_factory=list)
    logprobs: list = dataclasses.field(default_factory=list)
    prompt_logprobs: list = dataclasses.field(default_factory=list)
    faults: list = dataclasses.field(default_factory=list)

    @property
    def row_params(self):
        return RowParams(len(self.prompt), **self.params)

    @property
    def text(self):
        return [*self.prompt, *self.out]

    @property
    def finished(self):
        return len(self.text) >= self.limit or bool(self.faults)


class Desk:
    """Runs requests; ``pick(request)`` may be given to choose chunk sizes."""

    def __init__(self, runner, *, gamma=0, seed=0):
        self.runner, self.gamma = runner, gamma
        self.rng = np.random.default_rng(seed)
        self.free = self.rng.permutation(100).tolist()
        self.step = 0
        self.new, self.writes = [], []

    def enter(self, request, slot):
        request.slot, request.done = slot, 0
        admit = Admit(
            slot,
            np.array(request.text, np.int32),
            request.limit,
            request.seed,
            request.row_params,
        )
        self.new.append(admit)
        return request

    def reserve(self, request, tokens):
        while len(request.pages) * PAGE < tokens:
            self.writes.append((request.slot, len(request.pages), self.free.pop()))
            request.pages.append(self.writes[-1][2])

    def leave(self, request):
        self.free += request.pages
        request.pages.clear()

    def chunk(self, request, count):
        end = request.done + count
        self.reserve(request, end)
        row = (request.slot, request.done, count, int(end == len(request.text)), 0)
        request.done = end
        return row

    def decode(self, request, count=None):
        self.reserve(request, min(len(request.text) + self.gamma, 64))
        return (request.slot, DECODE, 1 + self.gamma if count is None else count, 1, 0)

    def run(self, pairs, draft_rows=0):
        """One step of (request, row) pairs; returns its output."""
        block = RowBlock(np.array([row for _, row in pairs], np.int32).reshape(-1, 5))
        pages = np.array(self.writes, np.int32) if self.writes else NO_PAGES
        constrained = any(request.allowed for request, _ in pairs)
        plan = BatchPlan(
            self.step, tuple(self.new), block, pages, draft_rows, 0, constrained=constrained
        )
        self.new, self.writes = [], []
        with torch.inference_mode():
            self.runner.forward(plan)
            future = self.runner.sample(self.step, self.inputs(pairs) if constrained else None)
        self.step += 1
        out = future.result()
        self.collect(pairs, out)
        return out

    def inputs(self, pairs):
        masks, index = [], []
        for r, (request, row) in enumerate(pairs):
            if request.allowed is None or not row[3]:
                continue
            text, drafts = request.text, request.drafts if row[1] == DECODE else []
            for j in range(1 + min(len(drafts), self.gamma)):
                ids = request.allowed(text)
                words = np.zeros(-(-VOCAB // 32), np.uint32)
                for v in ids:
                    words[v // 32] |= np.uint32(1 << (v % 32))
                masks.append(words.view(np.int32))
                index.append(r * (1 + self.gamma) + j)
                if j == len(drafts) or drafts[j] not in ids:
                    break
                text = [*text, drafts[j]]
        bitmask = np.stack(masks) if masks else None
        return RowInputs(bitmask, np.array(index, np.int32))

    def collect(self, pairs, out):
        for r, (request, row) in enumerate(pairs):
            count = int(out.counts[r])
            request.out += out.tokens[r, :count].tolist()
            if out.faults[r]:
                request.faults.append(int(out.faults[r]))
            if out.drafts is not None and row[3]:
                request.drafts = out.drafts[r].tolist()
            assert count <= (row[2] if row[1] == DECODE else row[3])
        if out.logprobs is not None:
            rows = out.logprobs.index // (1 + self.gamma)
            for i, r in enumerate(rows):
                entry = (
                    out.logprobs.token_ids[i].tolist(),
                    out.logprobs.values[i].tolist(),
                    int(out.logprobs.ranks[i]),
                )
                pairs[r][0].logprobs.append(entry)
        for r, lp in out.prompt_logprobs:
            pairs[r][0].prompt_logprobs += list(
                zip(
                    lp.index.tolist(),
                    lp.token_ids.tolist(),
                    lp.values.tolist(),
                    lp.ranks.tolist(),
                    strict=True,
                )
            )

    def finish(self, requests, *, chunk=None, draft_rows=None):
        """Steps of random make-up until all are done."""
        for _ in range(400):
            live = [r for r in requests if not r.finished]
            if not live:
                return
            pairs, decodes = [], 0
            for request in live:
                left = len(request.text) - request.done
                if request.out or left == 0:
                    pairs.append((request, self.decode(request)))
                    decodes += 1
                else:
                    count = min(left, chunk or int(self.rng.integers(1, left + 1)))
                    pairs.append((request, self.chunk(request, count)))
            self.rng.shuffle(pairs)
            most = self.gamma * decodes
            k = int(self.rng.integers(0, most + 1)) if draft_rows is None else min(draft_rows, most)
            self.run([(request, tuple(row)) for request, row in pairs], k)
        raise AssertionError("the requests do not end")


def expected(naive, request):
    """(ids, raw log-softmax of each) of one request, one token at a time."""
    p, text, raw = request.row_params, list(request.prompt), []
    while len(text) < request.limit:
        z = naive.logits(text)[-1]
        raw.append(torch.log_softmax(z.double(), 0))
        z = stages(z.numpy().copy(), text, p, request.allowed)
        z = filters(torch.from_numpy(z), p)
        if p.temperature > 0:
            seed = torch.tensor([request.seed])
            z = z / p.temperature + gumbel(seed, torch.tensor([len(text)]), len(z))[0]
        text.append(int(z.argmax()))
    return text[len(request.prompt) :], raw


def stages(z, text, p, allowed):
    """bias, allowed ids, penalties, bad words, min tokens, grammar; float32 as the ops."""
    one = np.float32
    for v, b in p.logit_bias:
        z[v] += one(b)
    keep = set(range(len(z))) if p.allowed_token_ids is None else set(p.allowed_token_ids)
    out = text[p.prompt_len :]
    for v in set(text):
        r = one(p.repetition_penalty)
        z[v] = z[v] / r if z[v] > 0 else z[v] * r
    for v in set(out):
        z[v] -= one(p.frequency_penalty) * one(out.count(v))
        z[v] -= one(p.presence_penalty)
    for word in p.bad_words:
        *prefix, last = word
        if len(out) >= len(prefix) and out[len(out) - len(prefix) :] == prefix:
            keep.discard(last)
    if len(text) < p.min_len:
        keep -= set(p.stop_ids)
    if allowed is not None:
        keep &= set(allowed(text))
    mask = np.ones(len(z), bool)
    mask[list(keep)] = False
    z[mask] = -np.inf
    return z


def filters(z, p):
    if p.temperature == 0:
        return z
    ids = sorted(range(len(z)), key=lambda v: (-z[v].item(), v))
    scaled = [float(np.float32(z[v].item()) / np.float32(p.temperature)) for v in ids]
    weight = [math.exp(s - scaled[0]) for s in scaled]
    n = p.top_k if p.top_k > 0 else len(ids)
    if p.top_p < 1:
        total, below, n_p = sum(weight[:n]), 0.0, 0
        while n_p < n and below < float(np.float32(p.top_p)) * total:
            below += weight[n_p]
            n_p += 1
        n = n_p
    kept = [v for v, w in zip(ids[:n], weight, strict=False) if w >= np.float32(p.min_p)]
    out = torch.full_like(z, -math.inf)
    out[kept] = z[kept]
    return out
