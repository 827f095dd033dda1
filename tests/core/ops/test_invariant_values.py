"""The invariant variants compute what the references define."""

import pytest
import torch
from deepinfer.api.backend import OpContext
from deepinfer.ops import invariant
from deepinfer.ops.backend import ReferenceBackend, build_ops
from deepinfer.ops.table import OpSet

CPU = torch.device("cpu")
PLAIN = OpSet({}, "reference")
DTYPES = [torch.float32, torch.bfloat16]


def draw(*shape, dtype=torch.float32, seed=0):
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def ops_of(dtype):
    return build_ops(ReferenceBackend(), OpContext(dtype=dtype, device=CPU, invariant=True))


def close(got, want):
    loose = {"rtol": 2.0**-7, "atol": 1e-3} if want.dtype == torch.bfloat16 else {}
    torch.testing.assert_close(got, want, **(loose or {"rtol": 1e-5, "atol": 1e-5}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 24), (5, 24), (2, 3, 24)])
def test_dense(dtype, shape):
    ops, x = ops_of(dtype), draw(*shape, dtype=dtype)
    w, bias, scale = draw(7, 24, dtype=dtype, seed=1), draw(7, seed=2), draw(24, seed=3)
    close(ops.linear(x, w, bias), PLAIN.linear(x, w, bias))
    assert ops.linear(x, w, None, torch.float32).dtype == torch.float32
    close(ops.rms_norm(x, scale, 1e-6), PLAIN.rms_norm(x, scale, 1e-6))
    close(ops.silu_mul(x), PLAIN.silu_mul(x))
    close(ops.silu_mul(x, 0.5), PLAIN.silu_mul(x, 0.5))


def test_silu_has_no_gap_at_the_ends():
    x = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4, torch.nan, *([1.0] * 6)]])
    close(torch.nan_to_num(invariant.silu_mul(x)), torch.nan_to_num(PLAIN.silu_mul(x)))
    assert invariant.silu_mul(x)[0, 5].isnan()


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_route(score):
    ops, logits, bias = ops_of(torch.float32), draw(9, 12), draw(12, seed=1)
    got = ops.route(logits, bias, 4, score, True, 2.0)
    want = PLAIN.route(logits, bias, 4, score, True, 2.0)
    assert torch.equal(got[0], want[0])
    close(got[1], want[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 3, 5, 64, 1003])
def test_row_sum(dtype, width):
    x = draw(4, width)
    close(invariant.row_sum(x), x.sum(-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "how", [{}, {"window": 5}, {"softcap": 2.0}, {"sink": draw(4)}], ids=lambda how: str(list(how))
)
def test_attention(dtype, how):
    ops, pages, page = ops_of(dtype), 60, 4
    k, v = draw(pages, page, 2, 8, dtype=dtype, seed=1), draw(pages, page, 2, 8, dtype=dtype)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).int()
    table = torch.stack((order[:50], order[10:]))
    cu_q, lengths = torch.tensor([0, 20, 21], dtype=torch.int32), torch.tensor([197, 131])
    q = draw(23, 4, 8, dtype=dtype, seed=2)
    plan = ops.plan_attention(table, lengths, cu_q, page)
    got = ops.attention(q, k, v, plan, 0.3, **how)
    want = PLAIN.attention(q, k, v, plan, 0.3, **how)
    for a, b in zip(got, want, strict=True):
        close(a, b)
    assert (got[0][21:] == 0).all() and got[1][21:].isneginf().all()


def test_a_broken_cache_shows_only_where_it_is_seen():
    ops = ops_of(torch.float32)
    k, v = draw(3, 4, 1, 8), draw(3, 4, 1, 8, seed=1)
    v[1, 2] = torch.nan  # position 6
    table = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    plan = ops.plan_attention(table, torch.tensor([10]), torch.tensor([0, 6]).int(), 4)
    for some in (ops, PLAIN):
        o, _ = some.attention(draw(6, 1, 8), k, v, plan, 1.0)
        assert o[:2].isfinite().all() and o[2:].isnan().all()
