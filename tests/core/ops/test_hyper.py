"""Hyper-connections against recorded mixes, float64 and the properties of a mix."""

import torch
from deepinfer.ops.reference.hyper import HyperParams, split_mix
from deepinfer.ops.table import OpSet

OPS = OpSet({}, "reference")
N, D = 4, 24


def randn(*shape, seed=0, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def params(iters=20, norm_eps=1e-20):
    rows = N * (N + 2)
    fn = randn(rows, N * D, seed=1, scale=0.1)
    return HyperParams(fn, randn(3, seed=2), randn(rows, seed=3), iters, 1e-6, randn(D), norm_eps)


def test_mixes_are_the_recorded_ones(golden_ops):
    want = golden_ops("mhc/")
    got = split_mix(want["mixes"].float(), want["scale"], want["base"], 20, 1e-6, N)
    for part, name in zip(got, ("pre", "post", "comb"), strict=True):
        assert part.dtype == torch.float32
        torch.testing.assert_close(part, want[name], rtol=0, atol=2e-7)


def mix_by_hand(x, p):
    """Specification 2.2 in float64."""
    z = x.double().flatten(1)
    m = z @ p.fn.double().T * (z.square().mean(1, keepdim=True) + p.norm_eps).rsqrt()
    a, b = p.scale.double(), p.base.double()
    pre = torch.sigmoid(m[:, :N] * a[0] + b[:N]) + p.eps
    post = 2 * torch.sigmoid(m[:, N : 2 * N] * a[1] + b[N : 2 * N])
    c = (m[:, 2 * N :] * a[2] + b[2 * N :]).view(-1, N, N).softmax(-1) + p.eps
    c = c / (c.sum(1, keepdim=True) + p.eps)
    for _ in range(p.iters - 1):
        c = c / (c.sum(2, keepdim=True) + p.eps)
        c = c / (c.sum(1, keepdim=True) + p.eps)
    return pre, post, c


def mix(x, p):
    return OPS.hyper_mix(x, p.fn, p.scale, p.base, p.iters, p.eps, p.norm_eps)


def test_mix_against_float64():
    for p in (params(), params(iters=1), params(norm_eps=1e-3)):
        x = randn(17, N, D, seed=4)
        for got, want in zip(mix(x, p), mix_by_hand(x, p), strict=True):
            torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-7)


def test_a_mix_moves_all_of_every_stream():
    """comb is doubly stochastic but for the eps, and does not depend on the streams' scale."""
    x = randn(9, N, D, seed=4)
    comb = mix(x, params())[2]
    torch.testing.assert_close(comb.sum(1), torch.ones(9, N), rtol=0, atol=1e-5)
    torch.testing.assert_close(comb.sum(2), torch.ones(9, N), rtol=0, atol=1e-3)
    torch.testing.assert_close(mix(x * 1e-6, params())[2], comb, rtol=1e-5, atol=1e-6)


def test_collapse_and_merge_against_float64():
    x, y, pre = randn(9, N, D), randn(9, D, seed=1), randn(9, N, seed=2)
    post, comb = randn(9, N, seed=3), randn(9, N, N, seed=4)
    collapsed = torch.einsum("ti,tid->td", pre.double(), x.double())
    torch.testing.assert_close(OPS.hyper_collapse(x, pre).double(), collapsed, rtol=1e-6, atol=1e-5)
    moved = torch.einsum("tij,tid->tjd", comb.double(), x.double())
    merged = moved + post.double()[:, :, None] * y.double()[:, None]
    got = OPS.hyper_merge(x, y, post, comb).double()
    torch.testing.assert_close(got, merged, rtol=1e-6, atol=1e-5)


def test_each_rounds_once(same_bits):
    x, y, pre = randn(9, N, D).bfloat16(), randn(9, D, seed=1).bfloat16(), randn(9, N, seed=2)
    post, comb = randn(9, N, seed=3), randn(9, N, N, seed=4)
    same_bits(OPS.hyper_collapse(x, pre), OPS.hyper_collapse(x.float(), pre).bfloat16())
    merged = OPS.hyper_merge(x.float(), y.float(), post, comb).bfloat16()
    same_bits(OPS.hyper_merge(x, y, post, comb), merged)


def test_the_opening_uses_the_carried_mix_and_hands_on_its_own(same_bits):
    p, x, carried = params(), randn(7, N, D), randn(7, N, seed=5)
    rows, made = OPS.hyper_open(x, carried, p)
    same_bits(rows, OPS.rms_norm(OPS.hyper_collapse(x, carried), p.norm, p.norm_eps))
    for got, want in zip(made, mix(x, p), strict=True):
        same_bits(got, want)
    first = torch.eye(N)[:1].expand(7, -1)
    same_bits(OPS.hyper_collapse(x, first), x[:, 0].contiguous())
