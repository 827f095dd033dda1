"""Attention without order: against torch's own, and the same bits with any number of threads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from deepinfer.ops.table import OpSet

OPS = OpSet({}, "reference")


def rows(count, heads=3, dim=16):
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(count, heads, dim, generator=generator) for _ in range(3)]


def test_torch_says_the_same():
    for count in (1, 40, 530):
        q, k, v = rows(count)
        found = OPS.full_attention(q, k, v, 0.25)
        want = F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, v)), scale=0.25)
        assert torch.allclose(found, want.transpose(0, 1), atol=2e-6, rtol=0)


def test_bfloat16_rounds_once():
    parts = [t.bfloat16() for t in rows(40)]
    found = OPS.full_attention(*parts, 0.25)
    wide = OPS.full_attention(*(t.float() for t in parts), 0.25)
    assert torch.equal(found, wide.bfloat16())


def test_no_rows():
    assert OPS.full_attention(*rows(0), 0.25).shape == (0, 3, 16)


def test_threads_do_not_show():
    parts, before, found = rows(100), torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(OPS.full_attention(*parts, 0.25).view(torch.int32))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
