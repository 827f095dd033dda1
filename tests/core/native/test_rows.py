"""Norms, rotary positions, gated SiLU, KV write: against float64; a row is on its own."""

from __future__ import annotations

import pytest
import torch

native_ops = pytest.importorskip("deepinfer.native.ops", exc_type=ImportError)

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = [F32, BF16]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32 if x.dtype == F32 else torch.int16)


def assert_close(got: torch.Tensor, want: torch.Tensor, ulps: float = 4.0) -> None:
    """Within ``ulps`` of float32 (before the rounding) plus half a unit of a bfloat16 result."""
    relative = ulps * 2.0**-23 + (2.0**-8 if got.dtype == BF16 else 0)
    assert got.shape == want.shape
    assert bool(((got.double() - want).abs() <= want.abs() * relative + 1e-7).all())


def same_alone(fn, x: torch.Tensor, *, rows: int = 1) -> None:
    """fn of every row alone, of all rows, with one and two threads: the same bits."""
    whole = fn(x, 2)
    assert torch.equal(bits(fn(x, 1)), bits(whole))
    for i in range(0, len(x), rows):
        assert torch.equal(bits(fn(x[i : i + rows], 2)), bits(whole[i : i + rows])), i


def norm64(x: torch.Tensor, w: torch.Tensor | None, eps: float) -> torch.Tensor:
    x = x.double()
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if w is None else y * w.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("h", [1, 8, 15, 64, 65, 200, 576, 1111])
def test_rms_norm(isa: str, dtype: torch.dtype, h: int) -> None:
    w = torch.randn(h).to(dtype)
    for t in (0, 1, 3, 61):
        x = torch.randn(t, h).to(dtype)
        assert_close(native_ops.rms_norm(x, w, 1e-5), norm64(x, w, 1e-5), 16)
    same_alone(lambda x, n: native_ops.rms_norm(x, w, 1e-5, num_threads=n), torch.randn(40, h))
    assert_close(native_ops.rms_norm(x, None, 1e-6), norm64(x, None, 1e-6), 16)
    heads = torch.randn(5, 4, h).to(dtype)
    assert_close(native_ops.rms_norm(heads, w, 1e-6), norm64(heads, w, 1e-6), 16)
    fused = torch.randn(5, 9 * h).to(dtype)
    part = fused[:, h : 4 * h].view(5, 3, h)
    want = native_ops.rms_norm(part.contiguous(), w, 1e-6)
    assert torch.equal(native_ops.rms_norm(part, w, 1e-6), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(isa: str, dtype: torch.dtype) -> None:
    for t, h in ((0, 7), (1, 576), (9, 33), (64, 576)):
        x, r, w = (torch.randn(*s).to(dtype) for s in ((t, h), (t, h), (h,)))
        before = x.clone(), r.clone()
        y, total = native_ops.add_rms_norm(x, r, w, 1e-5)
        assert torch.equal(bits(total), bits(x + r))
        assert torch.equal(bits(y), bits(native_ops.rms_norm(total, w, 1e-5)))
        assert torch.equal(x, before[0])
        assert torch.equal(r, before[1])


def rope64(x: torch.Tensor, at: torch.Tensor, table: torch.Tensor, pairs: bool) -> torch.Tensor:
    c, s = table[at].double()[:, None].chunk(2, -1)
    r = table.shape[1]
    head, rest = x[..., :r].double(), x[..., r:].double()
    a, b = (head[..., 0::2], head[..., 1::2]) if pairs else head.chunk(2, -1)
    y = (a * c - b * s, b * c + a * s)
    y = torch.stack(y, -1).flatten(-2) if pairs else torch.cat(y, -1)
    return torch.cat((y, rest), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(isa: str, dtype: torch.dtype, interleaved: bool) -> None:
    for d, r in ((64, 64), (80, 40), (6, 6), (128, 50), (32, 0)):
        angles = torch.randn(50, r // 2)
        table = torch.cat((angles.cos(), angles.sin()), -1)
        for t in (0, 1, 40):
            fused = torch.randn(t, 7 * d).to(dtype)
            x = fused[:, d : 4 * d].view(t, 3, d)
            at = torch.randint(0, 50, (t,))
            got = native_ops.rope(x, at, table, interleaved)
            want = rope64(x, at, table, interleaved)
            tight = 2.0**-22 + (2.0**-8 if dtype == BF16 else 0)
            scale = x.double().abs().amax() if t else 1.0
            assert bool(((got.double() - want).abs() <= tight * 2 * scale).all())
            for i in range(t):
                one = native_ops.rope(x[i : i + 1], at[i : i + 1], table, interleaved)
                assert torch.equal(bits(one), bits(got[i : i + 1]))
    with pytest.raises(ValueError, match="position"):
        native_ops.rope(torch.zeros(1, 1, 32), torch.tensor([50]), table)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(isa: str, dtype: torch.dtype) -> None:
    for t, i in ((0, 4), (1, 1), (3, 37), (5, 1536), (33, 1100)):
        x = (torch.randn(t, 2 * i) * 6).to(dtype)
        g, u = x.double().chunk(2, -1)
        assert_close(native_ops.silu_mul(x), g / (1 + (-g).exp()) * u, 6)
        g, u = g.clamp(max=0.5), u.clamp(-0.5, 0.5)
        assert_close(native_ops.silu_mul(x, 0.5), g / (1 + (-g).exp()) * u, 6)
    same_alone(lambda x, n: native_ops.silu_mul(x, num_threads=n), torch.randn(20, 2 * 1111))


def test_silu_does_not_depend_on_the_column(isa: str) -> None:
    for i in (1, 7, 16, 45, 1030):
        x = torch.full((2, 2 * i), 0.7)
        assert len(native_ops.silu_mul(x).unique()) == 1
    x = torch.tensor([[torch.nan, -torch.inf, 200.0, -200.0, 1.0, 1.0, 1.0, 1.0]])
    y = native_ops.silu_mul(x)[0]
    assert y[0].isnan()
    assert y[2] == 200.0
    assert abs(float(y[3])) < 1e-30
    assert native_ops.silu_mul(x, 7.0)[0, 0].isnan()


def test_exp(isa: str) -> None:
    """Worst error over the range, in units in the last place; special values."""
    from deepinfer.native import _kernels

    def exp(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        _kernels.exp(x.data_ptr(), y.data_ptr(), x.numel())
        return y

    x = torch.cat((torch.linspace(-87.3, 88.7, 400_003), torch.randn(100_000)))
    want = x.double().exp()
    unit = 2.0 ** (want.log2().floor() - 23)
    assert float(((exp(x).double() - want).abs() / unit).max()) < 1.5
    special = exp(torch.tensor([0.0, -torch.inf, torch.inf, torch.nan, 89.5, -110.0, -100.0]))
    assert special[:3].tolist() == [1.0, 0.0, torch.inf]
    assert special[3].isnan()
    assert special[4:6].tolist() == [torch.inf, 0.0]
    assert 0 < float(special[6]) < 1e-42  # gradual underflow


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_kv_write(isa: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    for t, heads, d in ((0, 2, 8), (1, 3, 64), (19, 3, 20)):
        fused = torch.randn(t, 3 * heads * d).to(dtype)
        k = fused[:, : heads * d].view(t, heads, d)
        v = fused[:, heads * d : 2 * heads * d].view(t, heads, d)
        caches = [torch.full((6, 4, heads, d), 9.0, dtype=cache_dtype) for _ in range(2)]
        want = [c.clone().view(24, heads, d) for c in caches]
        slots = torch.randperm(24)[:t]
        slots[::3] = -1
        for i, slot in enumerate(slots.tolist()):
            if slot >= 0:
                want[0][slot], want[1][slot] = k[i].to(cache_dtype), v[i].to(cache_dtype)
        native_ops.kv_write(k, v, *caches, slots)
        assert all(
            torch.equal(bits(c.view(24, heads, d)), bits(w))
            for c, w in zip(caches, want, strict=True)
        )
    with pytest.raises(ValueError, match="slot"):
        native_ops.kv_write(k[:1], v[:1], *caches, torch.tensor([24]))


def test_isas_agree() -> None:
    from deepinfer.native import loader

    x, w = torch.randn(3, 1000), torch.randn(1000)
    results = []
    try:
        for name in ("avx2", "avx512"):
            loader.set_isa(name)
            results.append([native_ops.rms_norm(x, w, 1e-5), native_ops.silu_mul(x)])
    finally:
        loader.set_isa("avx512")
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*results, strict=True))
