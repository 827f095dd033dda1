"""Dense references against float64 numpy."""

import numpy as np
import pytest
import torch
from deepinfer.ops.table import OpSet

OPS = OpSet({}, "reference")
DTYPES = [torch.float32, torch.bfloat16]


def wide(x):
    return x.detach().double().numpy()


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded(got, want, dtype, tolerance=2e-6):
    """``got`` is the float64 result in ``dtype``: float32 arithmetic and one rounding apart."""
    assert got.dtype == dtype
    step = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}[dtype]
    scale = np.abs(want).max(initial=1.0)
    error = np.abs(wide(got) - want)
    assert (error <= np.abs(want) * step + tolerance * scale).all(), error.max()


def test_embedding_copies_rows():
    table = randn(7, 5, dtype=torch.bfloat16)
    assert torch.equal(OPS.embedding(torch.tensor([6, 0, 6]), table), table[[6, 0, 6]])
    assert OPS.embedding(torch.tensor([], dtype=torch.int64), table).shape == (0, 5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_linear_rounds_once_after_the_bias(dtype, rows, out_dtype):
    x, w, bias = randn(rows, 48, dtype=dtype), randn(9, 48, dtype=dtype), randn(9, dtype=dtype)
    got = OPS.linear(x, w, bias, out_dtype)
    assert got.shape == (rows, 9)
    assert_rounded(got, wide(x) @ wide(w).T + wide(bias), out_dtype or dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (3, 64), (2, 3, 16)])
def test_rms_norm(dtype, shape):
    x, w = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
    scaled = wide(x) / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + 1e-5)
    assert_rounded(OPS.rms_norm(x, w, 1e-5), scaled * wide(w), dtype)
    assert_rounded(OPS.rms_norm(x, None, 1e-5), scaled, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_norms_the_rounded_sum(dtype):
    x, residual, w = (randn(4, 32, dtype=dtype, seed=s) for s in range(3))
    before = x.clone(), residual.clone()
    y, total = OPS.add_rms_norm(x, residual, w[0], 1e-5)
    assert torch.equal(total, (x.float() + residual.float()).to(dtype))
    assert torch.equal(y, OPS.rms_norm(total, w[0], 1e-5))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [None, 0.5])
def test_silu_mul(dtype, limit):
    x = 4 * randn(5, 20, dtype=dtype)
    gate, up = wide(x)[:, :10], wide(x)[:, 10:]
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    assert_rounded(OPS.silu_mul(x, limit), gate / (1 + np.exp(-gate)) * up, dtype)


def test_gated_mlp_is_its_three_ops():
    x, gate_up, down = randn(3, 16), randn(24, 16, seed=1), randn(16, 12, seed=2)
    hidden = OPS.silu_mul(OPS.linear(x, gate_up))
    assert torch.equal(OPS.gated_mlp(x, gate_up, down), OPS.linear(hidden, down))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [8, 4])
def test_rope_turns_pairs(dtype, interleaved, rotated):
    x = randn(5, 3, 8, dtype=dtype)
    positions = torch.tensor([0, 3, 3, 1, 9])
    angle = np.outer(np.arange(10), 10.0 ** -np.arange(rotated // 2))
    cos_sin = torch.tensor(np.concatenate((np.cos(angle), np.sin(angle)), -1)).float()
    want = wide(x).copy()
    for t, p in enumerate(positions.tolist()):
        for i in range(rotated // 2):
            at = (2 * i, 2 * i + 1) if interleaved else (i, i + rotated // 2)
            turned = (want[t, :, at[0]] + 1j * want[t, :, at[1]]) * np.exp(1j * angle[p, i])
            want[t, :, at[0]], want[t, :, at[1]] = turned.real, turned.imag
    got = OPS.rope(x, positions, cos_sin, interleaved)
    assert_rounded(got, want, dtype)
    assert torch.equal(got[..., rotated:], x[..., rotated:])
    assert torch.equal(got[0], x[0])  # position 0 does not turn


@pytest.mark.parametrize(
    ("start", "count", "total", "rows", "positions"),
    [
        ([5, 0, 9], [2, 0, 3], 5, [0, 0, 2, 2, 2], [5, 6, 9, 10, 11]),
        ([5, 7], [1, 1], 4, [0, 1, -1, -1], [5, 7, 0, 0]),
        ([3], [4], 2, [0, 0], [3, 4]),
        ([], [], 2, [-1, -1], [0, 0]),
        ([1], [0], 0, [], []),
    ],
)
def test_expand_rows(start, count, total, rows, positions):
    given = torch.tensor(start, dtype=torch.int64), torch.tensor(count, dtype=torch.int64)
    row, position = OPS.expand_rows(*given, total)
    assert row.tolist() == rows and position.tolist() == positions
    assert row.dtype == position.dtype == torch.int64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 3, 5, 6, 8, 9, 1000])
@pytest.mark.parametrize("tokens", [0, 1, 3, 8, 9])
def test_append_rows(tokens, count, dtype):
    """Row by row in plain Python: places 0 to 7."""
    parts, numbers = [randn(tokens, 4, dtype=dtype) for _ in range(3)], (torch.arange(tokens),) * 2
    rows, ints = randn(8, 12, dtype=dtype), torch.full((2, 8), -1)
    want = [row.clone() for row in rows], ints.T.tolist()
    for t in range(tokens):
        if count + t < 8:
            want[0][count + t] = torch.cat([part[t] for part in parts])
            want[1][count + t] = [t, t]
    at = torch.tensor([count])
    assert OPS.append_rows(parts, numbers, rows, ints, at) is None
    assert torch.equal(rows, torch.stack(want[0])) and ints.T.tolist() == want[1]
    assert at.tolist() == [count + tokens]
