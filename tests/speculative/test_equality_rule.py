"""The equality rule by itself: the marginal is p, and drafts stand as often as theory says."""

import math

import numpy as np
import pytest
import torch
from deepinfer.api.backend import OpContext
from deepinfer.ops.backend import ReferenceBackend, build_ops
from deepinfer.sampling.philox import EMISSION, gumbel
from deepinfer.sampling.sampler import GumbelSampler
from deepinfer.sampling.verify import EqualityVerifier
from scipy_free import chi_squared_tail
from test_ratio import rows_of


def agreement(p, q):
    """P(x = y) of two Gumbel-max draws with one noise: Σ_j 1 / Σ_i max(p_i/p_j, q_i/q_j)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.maximum(p[None, :] / p[:, None], q[None, :] / q[:, None])
    total = ratio.sum(1)
    both = (p > 0) & (q > 0)
    return float((1.0 / total[both]).sum())


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def test_d_of_the_worked_example():
    p, q = np.array([0.1, 0.6, 0.3]), np.array([0.3, 0.3, 0.4])
    assert np.minimum(p, q).sum() == pytest.approx(0.700)
    assert agreement(p, q) == pytest.approx(2 / 3)
    draws = 60_000
    seed = torch.arange(draws) * 104_729
    zeros = torch.zeros(draws, dtype=torch.int64)
    noise = gumbel(seed, zeros + 5, 3, EMISSION)
    drafts = (torch.tensor(q).log().float() + noise).argmax(1)
    ops = build_ops(ReferenceBackend(), OpContext(dtype=torch.float32, device=torch.device("cpu")))
    lengths = zeros + 1
    logits = torch.tensor(p).log().float().expand(2 * draws, 3).clone()
    rows = rows_of(seed, 5, lengths)
    tokens, counts = EqualityVerifier(ops, GumbelSampler(ops)).verify(
        logits, rows, drafts[:, None], lengths
    )
    stood = (counts == 2).double().mean().item()
    assert stood == pytest.approx(2 / 3, abs=4 * math.sqrt(2 / 9 / draws))
    seen = torch.bincount(tokens[:, 0], minlength=3).numpy()
    assert chi_squared_tail(((seen - p * draws) ** 2 / (p * draws)).sum(), 2) > 1e-4


@pytest.mark.parametrize(
    "sigma, ratio, equality, greedy",
    [(0.5, 0.848, 0.818, 0.466), (1.0, 0.708, 0.664, 0.408), (1.5, 0.583, 0.534, 0.352)],
)
def test_the_table_of_3_2(sigma, ratio, equality, greedy):
    """V = 400, target logits N(0, 4²), draft = target + N(0, σ²)."""
    rng = np.random.default_rng(0)
    found = np.zeros(3)
    pairs = 400
    for _ in range(pairs):
        z = rng.normal(0, 4, 400)
        p, q = softmax(z), softmax(z + rng.normal(0, sigma, 400))
        found += (np.minimum(p, q).sum(), agreement(p, q), p[q.argmax()])
        bound = np.minimum(p, q).sum()
        assert agreement(p, q) >= bound / (2 - bound) - 1e-9, "(1 − TV)/(1 + TV)"
    assert (found / pairs).tolist() == pytest.approx([ratio, equality, greedy], abs=0.025)


def kept(z, top_k=20, top_p=0.8):
    p = softmax(z)
    order = np.argsort(-p)[:top_k]
    mass = np.cumsum(p[order]) / p[order].sum()
    order = order[: int(np.searchsorted(mass, top_p)) + 1]
    out = np.zeros_like(p)
    out[order] = p[order] / p[order].sum()
    return out


def test_filtering_the_draft_too_helps():
    """σ = 0.5, top-k 20, top-p 0.8: equality 0.698 → 0.802, ratio 0.745 → 0.831."""
    rng = np.random.default_rng(1)
    found = np.zeros(4)
    pairs = 400
    for _ in range(pairs):
        z = rng.normal(0, 4, 400)
        draft = z + rng.normal(0, 0.5, 400)
        p, whole, cut = kept(z), softmax(draft), kept(draft)
        found += (
            agreement(p, whole),
            agreement(p, cut),
            np.minimum(p, whole).sum(),
            np.minimum(p, cut).sum(),
        )
    assert (found / pairs).tolist() == pytest.approx([0.698, 0.802, 0.745, 0.831], abs=0.03)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_any_number_of_verified_drafts_gives_the_same_stream(temperature):
    """Tokens emitted round by round equal those drawn one at a time, whatever ran."""
    ops = build_ops(ReferenceBackend(), OpContext(dtype=torch.float32, device=torch.device("cpu")))
    sampler = GumbelSampler(ops)
    rule = EqualityVerifier(ops, sampler)
    rng = np.random.default_rng(2)
    model = torch.from_numpy(rng.normal(0, 2, (64, 30))).float()  # logits by position
    seed = torch.tensor([11])
    right = [
        int(sampler(model[p : p + 1], rows_of(seed, p, torch.tensor([0]), temperature)))
        for p in range(5, 45)
    ]
    for attempt in range(20):
        text = []
        while len(text) < 40:
            length = min(int(rng.integers(0, 6)), 39 - len(text))
            drafts = [
                right[len(text) + k] if rng.random() < 0.7 else int(rng.integers(30))
                for k in range(5)
                if len(text) + k < 40
            ]
            drafts += [0] * (5 - len(drafts))
            rows = rows_of(seed, 5 + len(text), torch.tensor([length]), temperature)
            tokens, counts = rule.verify(
                model[rows.position], rows, torch.tensor([drafts]), torch.tensor([length])
            )
            text += tokens[0, : int(counts)].tolist()
        assert text[:40] == right, attempt
