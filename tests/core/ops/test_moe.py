"""Expert references against float64 loops."""

import numpy as np
import pytest
import torch
from deepinfer.ops.table import OpSet

OPS = OpSet({}, "reference")

SCORES = {
    "softmax": lambda z: np.exp(z - z.max()) / np.exp(z - z.max()).sum(),
    "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
    "sqrtsoftplus": lambda z: np.sqrt(np.log1p(np.exp(z))),
}


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("renorm", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_route_against_a_loop(score, renorm, biased):
    logits, bias = randn(6, 8), randn(8, seed=1) if biased else None
    ids, weights = OPS.route(logits, bias, 3, score, renorm, 2.5)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    for t, z in enumerate(logits.double().numpy()):
        p = SCORES[score](z)
        ranked = p + (bias.double().numpy() if biased else 0)
        want = sorted(range(8), key=lambda e: (-ranked[e], e))[:3]
        assert ids[t].tolist() == want
        chosen = p[want] / (p[want].sum() if renorm else 1) * 2.5
        np.testing.assert_allclose(weights[t].numpy(), chosen, rtol=1e-5)


def test_route_takes_the_lower_id_of_equals():
    ids, weights = OPS.route(torch.zeros(2, 6), None, 4, "softmax", True, 1.0)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert weights.tolist() == [[0.25] * 4] * 2
    assert OPS.route(torch.zeros(0, 6), None, 2, "sigmoid", True, 1.0)[0].shape == (0, 2)


def test_permute_sorts_by_expert_then_token():
    order, offsets = OPS.permute(torch.tensor([[2, 0], [0, 2], [5, 0]], dtype=torch.int32), 4)
    assert order.tolist() == [1, 2, 5, 0, 3, 4]  # slot 4 names expert 5, who is not here
    assert offsets.tolist() == [0, 3, 3, 5, 5]
    empty, bounds = OPS.permute(torch.zeros(0, 2, dtype=torch.int32), 3)
    assert empty.tolist() == [] and bounds.tolist() == [0, 0, 0, 0]


def test_grouped_linear_leaves_rows_of_nobody_zero():
    x, w = randn(5, 8), randn(3, 4, 8, seed=1)
    y = OPS.grouped_linear(x, w, torch.tensor([0, 2, 2, 4]))
    want = torch.cat((x[:2] @ w[0].T, x[2:4] @ w[2].T, torch.zeros(1, 4)))
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_moe_against_a_loop(dtype, tokens):
    x = randn(tokens, 8).to(dtype)
    gate_up, down = randn(4, 12, 8, seed=1).to(dtype), randn(4, 8, 6, seed=2).to(dtype)
    ids, weights = OPS.route(randn(tokens, 4, seed=3), None, 2, "softmax", True, 1.0)
    got = OPS.moe(x, ids, weights, gate_up, down, 4)
    want = torch.zeros(tokens, 8)
    for t in range(tokens):
        for slot in range(2):
            expert = int(ids[t, slot])
            hidden = OPS.silu_mul(OPS.linear(x[t : t + 1], gate_up[expert]))
            want[t] += weights[t, slot] * OPS.linear(hidden, down[expert], None, torch.float32)[0]
    assert got.dtype == dtype
    tolerance = {"rtol": 2.0**-8, "atol": 0.02} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(got.float(), want, **tolerance)
