"""Shapes at the edges that models and drafters pass: vectors, three dimensions, nothing."""

import pytest
import torch
from deepinfer.api.backend import OpContext
from deepinfer.ops.backend import ReferenceBackend, build_ops


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("shape", [(24,), (0, 24), (2, 0, 24), (2, 3, 24)])
def test_leading_dimensions_are_kept(invariant, shape):
    ctx = OpContext(dtype=torch.float32, device=torch.device("cpu"), invariant=invariant)
    ops = build_ops(ReferenceBackend(), ctx)
    x, w = torch.randn(shape), torch.randn(7, 24)
    torch.testing.assert_close(ops.linear(x, w), x @ w.T, rtol=1e-5, atol=1e-5)
    assert ops.silu_mul(x).shape == (*shape[:-1], 12)
    assert ops.rms_norm(x, None, 1e-5).shape == shape
