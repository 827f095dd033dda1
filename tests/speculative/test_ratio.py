"""The ratio rule gives the target's distribution; two variants that do not are found out.

Many requests at once, a million where they are marked slow: one block of two drafts each, over a
vocabulary of 50, so that first and second token, and the two together, can be compared with p by
chi-squared. Masks are those of real grammars, which depend on the drafts before a row. The variants
are the real verifier with one place changed.
"""

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from deepinfer.api.backend import OpContext
from deepinfer.api.grammar import GrammarContext, MaskJob
from deepinfer.api.sampler import SampleRows
from deepinfer.api.speculative import VerifierContext
from deepinfer.ops.backend import ReferenceBackend, build_ops
from deepinfer.sampling.philox import DRAFT, EMISSION, gumbel
from deepinfer.sampling.sampler import GumbelSampler
from deepinfer.sampling_params import StructuredSpec
from deepinfer.testing.toy import ToyGrammarBackend, ToyTokenizer
from deepinfer_speculative import ratio
from deepinfer_speculative.ratio import RatioVerifier, round_seed
from scipy_free import chi_squared_tail

V, QUICK, MANY, TILE = 50, 40_000, 1_000_000, 20_000


@pytest.fixture(scope="module")
def ops():
    context = OpContext(dtype=torch.float32, device=torch.device("cpu"))
    return build_ops(ReferenceBackend(), context)


class Pieces(ToyTokenizer):
    """The toy's tokens, repeated up to the vocabulary's size."""

    name, vocab_size = "toy", V

    def token_to_id(self, token):
        return 0 if token == "<end>" else None


def toy_matcher():
    backend = ToyGrammarBackend(V)
    return backend, backend.compile(5, frozenset({0}))


def xgrammar_matcher():
    module = pytest.importorskip("deepinfer_structured.backend")
    context = GrammarContext(
        tokenizer=Pieces(),
        vocab_size=V,
        eos_ids=frozenset({0}),
        options={},
        cache_dir=Path("/nowhere"),
    )
    backend = module.XGrammarBackend(context)
    spec = StructuredSpec(schema_type="regex", schema="a[abc]{2,5}x?( c|[abcx]{3,12}|é)*")
    return backend, backend.compile(spec, frozenset({0}))


MATCHERS = {"toy": toy_matcher, "xgrammar": xgrammar_matcher}


class Masks:
    """What a grammar allows in a random state of its: at the first row, behind each first draft,
    and behind each two of them, as its backend fills the masks of a step.
    """

    def __init__(self, kind, steps=3):
        backend, matcher = MATCHERS[kind]()
        rng = random.Random(5)
        for _ in range(steps):
            legal = self._filled(backend, matcher, ())[0].nonzero()[:, 0].tolist()
            matcher.accept([rng.choice([i for i in legal if i])])
        filled = [[self._filled(backend, matcher, (a, b)) for b in range(V)] for a in range(V)]
        self._rows = torch.stack([torch.stack(row) for row in filled])
        self.first, self.second = self._rows[0, 0, 0], self._rows[:, 0, 1]
        backend.close()

    @staticmethod
    def _filled(backend, matcher, drafts):
        """bool[1 + drafts, V]; rows behind an illegal draft or a text's end are left as they are:
        all allowed.
        """
        rows = np.full((1 + len(drafts), -(-V // 32)), -1, np.int32)
        (legal,) = backend.fill([MaskJob(matcher, 0, drafts)], rows)
        assert isinstance(legal, int), legal
        bits = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(bits[:, :V].astype(bool))

    def of(self, drafts):
        """bool[R, 3, V] for drafts int64[R, 2]."""
        return self._rows[drafts[:, 0], drafts[:, 1]]


class Proposing:
    """A drafter whose drafts were drawn from these distributions, [1, γ, V]."""

    def __init__(self, q):
        self.q = q

    def proposal(self, slots):
        return None if self.q is None else self.q.expand(len(slots), -1, -1)


def distributions(seed, gamma=2, like=0.7):
    """Target logits and drafter's of each position, alike but not equal."""
    rng = np.random.default_rng(seed)
    z = rng.normal(0, 1.5, (gamma + 1, V))
    return torch.tensor(z).float(), torch.tensor(
        z[:gamma] + rng.normal(0, like, (gamma, V))
    ).float()


def rows_of(seed, start, lengths, temperature=1.0, top_k=0):
    """One line for each draw of each request, at positions start …."""
    count = lengths + 1
    owner = torch.repeat_interleave(torch.arange(len(lengths)), count)
    first = count.cumsum(0) - count
    position = start + torch.arange(int(count.sum())) - first[owner]
    ones = torch.ones(len(owner))
    return SampleRows(
        slot=owner,
        position=position,
        seed=seed[owner],
        temperature=ones * temperature,
        top_k=torch.full_like(owner, top_k),
        top_p=ones,
        min_p=ones * 0,
        filtered=top_k > 0,
        greedy=temperature == 0,
    )


def run(ops, target, q, draft, lengths=2, masks=None, draws=QUICK, top_k=0):
    """Counts int64[V, V+1] of (first, second token or V where there is none) over all draws.

    ``draft(seed, position)`` gives ids of a position for many requests; ``masks``: :class:`Masks`.
    Without them the model is position by position, not conditional on the text: enough for the
    joint law, since the second token's distribution is the same whatever the first is.
    """
    drafter = Proposing(None if q is None else torch.softmax(q, 1)[None])
    rule = RatioVerifier(VerifierContext(ops=ops, sampler=GumbelSampler(ops), drafter=drafter))
    joint = torch.zeros(V * (V + 1), dtype=torch.int64)
    for tile in range(draws // TILE):
        seed = torch.arange(TILE) * 7919 + tile * 1_000_003
        drafts = torch.stack([draft(seed, k) for k in range(2)], 1)
        ran = torch.full((TILE,), lengths)
        rows = rows_of(seed, 5, ran, top_k=top_k)
        logits = target[rows.position - 5]
        if masks is not None:
            allowed = masks.of(drafts)[:, : lengths + 1].flatten(0, 1)
            logits = logits.masked_fill(~allowed, -math.inf)
        tokens, counts = rule.verify(logits, rows, drafts, ran)
        second = torch.where(counts > 1, tokens[:, 1], V)
        joint += torch.bincount(tokens[:, 0] * (V + 1) + second, minlength=len(joint))
    return joint.view(V, V + 1).double().numpy()


def p_of(target, mask=None, top_k=0):
    z = target if mask is None else target.masked_fill(~mask, -math.inf)
    if top_k:
        edge = z.topk(top_k, 1).values[:, -1:]
        z = z.masked_fill(z < edge, -math.inf)
    return torch.softmax(z.double(), 1).numpy()


def tail(seen, p):
    """P(chi-squared at least this large), bins that expect fewer than 10 put together."""
    total = seen.sum()
    assert seen[p == 0].sum() == 0, "a token of probability 0 was emitted"
    keep = p * total >= 10
    pairs = [(seen[keep], p[keep] * total)]
    small = ~keep & (p > 0)
    if p[small].sum() * total >= 10:
        pairs.append((seen[small].sum(keepdims=True), p[small].sum(keepdims=True) * total))
    observed = np.concatenate([a for a, _ in pairs])
    expected = np.concatenate([b for _, b in pairs])
    expected *= observed.sum() / expected.sum()
    return chi_squared_tail(((observed - expected) ** 2 / expected).sum(), len(expected) - 1)


def check(joint, p, behind=None, floor=1e-4):
    """First token; second where there is one: all of them, and behind each of the likeliest first
    ones alone. ``behind`` float64[V, V]: the second's law given the first, usually always p[1].
    """
    assert tail(joint.sum(1), p[0]) > floor
    second = joint[:, :V]
    if not second.any():
        return  # a first draft that is never legal
    given = second.sum(1)
    law = np.tile(p[1], (V, 1)) if behind is None else behind
    assert tail(second.sum(0), given @ law / given.sum()) > floor
    for first in np.argsort(-given)[:3]:  # whatever came first, the second is its law's
        if given[first] > 5000:
            assert tail(second[first], law[first]) > floor / 10


def independent(q):
    def draft(seed, k):
        noise = gumbel(round_seed(seed, torch.full_like(seed, 4)), seed * 0 + 5 + k, V, DRAFT)
        return (torch.log_softmax(q[k], 0) + noise).argmax(1)

    return draft


def coupled(q):
    """The emission's own noise: legal too, since acceptance and rest have noise of their own."""
    return lambda seed, k: (q[k] + gumbel(seed, seed * 0 + 5 + k, V, EMISSION)).argmax(1)


def greedy(q):
    return lambda seed, k: torch.full_like(seed, int(q[k].argmax()))


LONG = pytest.mark.parametrize("draws", [QUICK, pytest.param(MANY, marks=pytest.mark.slow)])


@pytest.fixture(scope="module", params=["free", *MATCHERS])
def masks(request):
    return None if request.param == "free" else Masks(request.param)


@pytest.mark.parametrize("how", ["independent", "coupled", "greedy"])
@LONG
def test_what_is_emitted_is_the_targets(ops, how, masks, draws):
    target, q = distributions(3)
    draft = {"independent": independent, "coupled": coupled, "greedy": greedy}[how](q)
    joint = run(ops, target, None if how == "greedy" else q, draft, masks=masks, draws=draws)
    p, behind = p_of(target), None
    if masks is not None:
        p = p_of(target[:1], masks.first)
        behind = p_of(target[1].expand(V, -1), masks.second)
    check(joint, p, behind)
    stood = joint[:, :V].sum() / draws
    said = torch.softmax(q[0].double(), 0).numpy()
    right = p[0][q[0].argmax()] if how == "greedy" else np.minimum(p[0], said).sum()  # 1 − TV
    assert stood == pytest.approx(right, abs=0.01)


@pytest.mark.parametrize("kind", MATCHERS)
def test_masks_are_those_of_the_text(kind):
    """They forbid much and not all, and differ with the draft before them. The likeliest first
    draft, which a greedy drafter makes, is legal by one grammar and forbidden by the other.
    """
    masks = Masks(kind)
    assert masks.first[distributions(3)[1][0].argmax()] == (kind == "toy")
    assert 3 < masks.first.sum() < V - 10
    assert len(masks.second[masks.first].unique(dim=0)) > 2


def test_filters_belong_to_the_target(ops):
    target, q = distributions(4)
    joint = run(ops, target, q, independent(q), top_k=7)
    check(joint, p_of(target, top_k=7))


def test_fewer_verified_drafts_change_nothing(ops):
    target, q = distributions(5)
    joint = run(ops, target, q, independent(q), lengths=1)
    check(joint, p_of(target))


@LONG
def test_the_test_finds_shared_noise(ops, draws, monkeypatch):
    """The rest drawn with the drafts' own noise."""
    target, q = distributions(3)
    monkeypatch.setattr(ratio, "RESIDUAL", EMISSION)
    joint = run(ops, target, q, coupled(q), draws=draws)
    assert tail(joint.sum(1), p_of(target)[0]) < 1e-6
    with pytest.raises(AssertionError):
        check(joint, p_of(target))


@pytest.mark.parametrize("kind", MATCHERS)
@LONG
def test_the_test_finds_forbidden_drafts_taken_as_absent(ops, kind, draws, monkeypatch):
    """A draft that a mask forbids taken as if there were none: p is drawn from, not the rest."""
    right = ratio.rest

    def absent(p, q, draft):
        forbidden = p.gather(1, draft[:, None]) == 0
        return torch.where(forbidden, p, right(p, q, draft))

    monkeypatch.setattr(ratio, "rest", absent)
    target, q = distributions(3)
    masks = Masks(kind)
    joint = run(ops, target, q, independent(q), masks=masks, draws=draws)
    p = p_of(target[:1], masks.first)
    assert tail(joint.sum(1), p[0]) < 1e-6
    with pytest.raises(AssertionError):
        check(joint, p, p_of(target[1].expand(V, -1), masks.second))


def test_greedy_requests_get_what_they_get_without_drafts(ops):
    target, _ = distributions(6)
    best = target.argmax(1)
    for first in (int(best[0]), (int(best[0]) + 1) % V):
        drafts = torch.tensor([[first, int(best[1])]])
        lengths = torch.tensor([2])
        rule = RatioVerifier(
            VerifierContext(ops=ops, sampler=GumbelSampler(ops), drafter=Proposing(None))
        )
        rows = rows_of(torch.tensor([9]), 5, lengths, temperature=0.0)
        tokens, counts = rule.verify(target, rows, drafts, lengths)
        right = best.tolist() if first == int(best[0]) else best[:1].tolist()
        assert tokens[0, : int(counts)].tolist() == right


def test_numbers_of_the_specification():
    """3.3: what the two wrong variants give, by enumeration and by integration."""
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.4, 0.1, 0.5])
    keep = np.minimum(1, np.divide(p, q))
    out = q * keep + (q * (1 - keep)).sum() * p  # "absent": p is drawn from
    assert out.tolist() == pytest.approx([0.65, 0.35, 0.0])
    left = np.maximum(p - q, 0)
    out = q * keep + (q * (1 - keep)).sum() * left / left.sum()
    assert out.tolist() == pytest.approx(p.tolist())
    p, q = np.array([0.10, 0.55, 0.25, 0.10]), np.array([0.40, 0.10, 0.10, 0.40])
    noise = np.random.default_rng(0).gumbel(size=(1_000_000, 4))
    drafted = (np.log(q) + noise).argmax(1)
    stands = np.random.default_rng(1).random(len(noise)) * q[drafted] < p[drafted]
    with np.errstate(divide="ignore"):
        again = (np.log(np.maximum(p - q, 0)) + noise).argmax(1)  # the same noise
    out = np.bincount(np.where(stands, drafted, again), minlength=4) / len(noise)
    assert out.tolist() == pytest.approx([0.100, 0.575, 0.225, 0.100], abs=2e-3)


def test_round_seeds_differ_by_anchor_and_stay_64_bits():
    seed = torch.tensor([0, 1, -1, 2**62])
    one, two = (
        round_seed(seed, torch.full_like(seed, 3)),
        round_seed(seed, torch.full_like(seed, 4)),
    )
    assert len({*one.tolist(), *two.tolist()}) == 8

    def plain(x, anchor):
        mask = (1 << 64) - 1
        x = (x + (anchor + 1) * 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    assert [v % (1 << 64) for v in one.tolist()] == [plain(v, 3) for v in seed.tolist()]
