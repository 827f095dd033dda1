"""The ratio rule gives the target's distribution; two variants that do not are found out.

Many requests at once, a million where they are marked slow: one block of two drafts each, over a
vocabulary of 50, so that first and second token, and the two together, can be compared with p by
chi-squared.
"""

import math

import numpy as np
import pytest
import torch
from deepinfer.api.backend import OpContext
from deepinfer.api.sampler import SampleRows
from deepinfer.api.speculative import VerifierContext
from deepinfer.ops.backend import ReferenceBackend, build_ops
from deepinfer.sampling.philox import DRAFT, EMISSION, RESIDUAL, gumbel
from deepinfer.sampling.sampler import GumbelSampler
from deepinfer.sampling.verify import line_grid
from deepinfer_speculative.ratio import RatioVerifier, accepted, rest, round_seed
from scipy_free import chi_squared_tail

V, QUICK, MANY, TILE = 50, 40_000, 1_000_000, 20_000


@pytest.fixture(scope="module")
def ops():
    context = OpContext(dtype=torch.float32, device=torch.device("cpu"))
    return build_ops(ReferenceBackend(), context)


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


def run(ops, target, q, draft, verify=None, lengths=2, mask=None, draws=QUICK, top_k=0):
    """Counts int64[V, V+1] of (first, second token or V where there is none) over all draws.

    ``draft(seed, position)`` gives ids of a position for many requests; ``verify`` is the rule.
    The model is position by position, not conditional on the text: enough for the joint law, since
    the second token's distribution is the same whatever the first is.
    """
    if mask is not None:
        target = target.masked_fill(~mask, -math.inf)
    drafter = Proposing(None if q is None else torch.softmax(q, 1)[None])
    rule = RatioVerifier(VerifierContext(ops=ops, sampler=GumbelSampler(ops), drafter=drafter))
    joint = torch.zeros(V * (V + 1), dtype=torch.int64)
    for tile in range(draws // TILE):
        seed = torch.arange(TILE) * 7919 + tile * 1_000_003
        drafts = torch.stack([draft(seed, k) for k in range(2)], 1)
        ran = torch.full((TILE,), lengths)
        rows = rows_of(seed, 5, ran, top_k=top_k)
        logits = target[rows.position - 5]
        call = rule.verify if verify is None else verify
        tokens, counts = call(logits, rows, drafts, ran)
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


def check(joint, p, floor=1e-4):
    """First token, second where there is one, and the two of them independent."""
    assert tail(joint.sum(1), p[0]) > floor
    second = joint[:, :V]
    if not second.any():
        return  # a first draft that is never legal
    assert tail(second.sum(0), p[1]) > floor
    given = second.sum(1)
    for first in np.argsort(-given)[:3]:  # whatever came first, the second is p's
        if given[first] > 5000:
            assert tail(second[first], p[1]) > floor / 10


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


@pytest.mark.parametrize("how", ["independent", "coupled", "greedy"])
@pytest.mark.parametrize("masked", [False, True], ids=["free", "masked"])
@pytest.mark.parametrize("draws", [QUICK, pytest.param(MANY, marks=pytest.mark.slow)])
def test_what_is_emitted_is_the_targets(ops, how, masked, draws):
    target, q = distributions(3)
    mask = None
    if masked:
        mask = torch.rand((3, V), generator=torch.Generator().manual_seed(1)) < 0.5
        mask[torch.arange(2), q.argmax(1)] = torch.tensor([False, True])  # one greedy draft illegal
    draft = {"independent": independent, "coupled": coupled, "greedy": greedy}[how](q)
    q_or_none = None if how == "greedy" else q
    joint = run(ops, target, q_or_none, draft, mask=mask, draws=draws)
    check(joint, p_of(target, mask))
    stood = joint[:, :V].sum() / draws
    if how != "greedy":
        p, said = p_of(target, mask)[0], torch.softmax(q[0].double(), 0).numpy()
        assert stood == pytest.approx(np.minimum(p, said).sum(), abs=0.01)  # 1 − TV


def test_filters_belong_to_the_target(ops):
    target, q = distributions(4)
    joint = run(ops, target, q, independent(q), top_k=7)
    check(joint, p_of(target, top_k=7))


def test_fewer_verified_drafts_change_nothing(ops):
    target, q = distributions(5)
    joint = run(ops, target, q, independent(q), lengths=1)
    check(joint, p_of(target))


def biased(shared, absent):
    """The two variants known to be wrong: the rest drawn with the drafts' own noise; and a draft
    that a mask forbids taken as if there were none.
    """

    def make(ops, q):
        sampler = GumbelSampler(ops)
        said = torch.softmax(q, 1)[None]
        luck = torch.Generator().manual_seed(11)

        def verify(logits, rows, drafts, lengths):
            width = drafts.shape[1] + 1
            lines = line_grid(lengths, width).clamp(min=0)
            p = sampler.probs(logits, rows)[lines]
            qs = said.expand(len(drafts), -1, -1)
            seed, position = rows.seed[lines], rows.position[lines]
            u = torch.rand(drafts.shape, dtype=torch.float64, generator=luck)
            stands = accepted(p[:, :-1], qs, drafts, u)
            kept = stands.long().cumprod(1).sum(1)
            at = kept[:, None]
            target = p.gather(1, at[..., None].expand(-1, -1, V))[:, 0]
            inner = at.clamp(max=1)
            x = drafts.gather(1, inner)[:, 0]
            left = rest(target, qs.gather(1, inner[..., None].expand(-1, -1, V))[:, 0], x)
            if absent:
                gone = target.gather(1, x[:, None])[:, 0] == 0
                left = torch.where(gone[:, None], target, left)
            mine, where = seed.gather(1, at)[:, 0], position.gather(1, at)[:, 0]
            domain = EMISSION if shared else RESIDUAL
            last = (left.log() + gumbel(mine, where, V, domain)).argmax(1)
            final = (target.log() + gumbel(mine, where, V, 7)).argmax(1)
            last = torch.where(kept < lengths, last, final)
            tokens = torch.cat((drafts, drafts[:, :1]), 1)
            return tokens.scatter_(1, kept[:, None], last[:, None]), 1 + kept

        return verify

    return make


def test_the_test_finds_shared_noise(ops):
    target, q = distributions(3)
    wrong = biased(shared=True, absent=False)(ops, q)
    joint = run(ops, target, q, coupled(q), verify=wrong)
    assert tail(joint.sum(1), p_of(target)[0]) < 1e-6
    right = biased(shared=False, absent=False)(ops, q)  # the harness itself is sound
    check(run(ops, target, q, coupled(q), verify=right), p_of(target))


def test_the_test_finds_forbidden_drafts_taken_as_absent(ops):
    target, q = distributions(3)
    mask = torch.rand((3, V), generator=torch.Generator().manual_seed(1)) < 0.5
    wrong = biased(shared=False, absent=True)(ops, q)
    joint = run(ops, target, q, independent(q), verify=wrong, mask=mask)
    assert tail(joint.sum(1), p_of(target, mask)[0]) < 1e-6


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
