"""linear, embedding, packing and int8: against float64, and bit for bit over batch and threads."""

from __future__ import annotations

import pytest
import torch
from deepinfer.ops.quant import round_rows

native_ops = pytest.importorskip("deepinfer.native.ops", exc_type=ImportError)

F32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(1, 1), (16, 32), (17, 33), (40, 50), (64, 576), (96, 1536), (250, 300), (40, 9000)]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32 if x.dtype == F32 else torch.int16)


def packed(n: int, k: int, kind: str) -> tuple[native_ops.PackedWeight, torch.Tensor]:
    w = torch.randn(n, k).to(BF16 if kind == "bf16" else F32)
    p = native_ops.prepare_linear(w, "int8" if kind == "int8" else None)
    return p, native_ops.unpack(p)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("x_dtype", [F32, BF16])
def test_close_to_float64(isa: str, kind: str, x_dtype: torch.dtype) -> None:
    for n, k in SHAPES:
        p, w = packed(n, k, kind)
        for rows in (0, 1, 2, 7, 13, 98):
            x = torch.randn(rows, k).to(x_dtype)
            bias = torch.randn(n).to(x_dtype)
            near = round_rows(x) if kind == "int8" else x
            want = near.double() @ w.double().T + bias.double()
            y = native_ops.linear(x, p, bias, F32)
            assert y.shape == (rows, n)
            bound = (x.double().abs() @ w.double().abs().T + 1) * (k + 2) * 2.0**-24
            assert bool(((y.double() - want).abs() <= bound).all())
            same_dtype = native_ops.linear(x, p, bias)
            assert same_dtype.dtype == x_dtype
            assert torch.equal(bits(same_dtype), bits(y.to(x_dtype)))  # rounded once


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("shape", [(64, 576), (50, 1000), (200, 37)])
def test_a_row_does_not_see_the_batch(isa: str, kind: str, shape: tuple[int, int]) -> None:
    p, _ = packed(*shape, kind)
    x = torch.randn(200, shape[1])
    alone = torch.cat([native_ops.linear(x[i : i + 1], p, num_threads=1) for i in range(200)])
    for rows in (*range(2, 26), 47, 70, 193):
        start = (200 - rows) // 3
        y = native_ops.linear(x[start : start + rows], p, num_threads=1 + rows % 2)
        assert torch.equal(bits(y), bits(alone[start : start + rows])), rows
    order = torch.randperm(200)
    assert torch.equal(bits(native_ops.linear(x[order], p)), bits(alone[order]))


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_avx2_and_avx512_agree(kind: str) -> None:
    from deepinfer.native import loader

    results = []
    try:
        for name in ("avx2", "avx512"):
            loader.set_isa(name)
            torch.manual_seed(7)
            p, _ = packed(83, 333, kind)
            results.append([native_ops.linear(torch.randn(m, 333), p) for m in (1, 5, 30)])
    finally:
        loader.set_isa("avx512")
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*results, strict=True))


def test_the_chain_is_the_documented_one() -> None:
    """acc = fma(x[k], w[k], acc), ascending: replayed in float64 and rounded at every step."""
    from deepinfer.native import loader

    p, w = packed(16, 40, "fp32")
    x = torch.randn(1, 40)
    acc = torch.zeros(16)
    for k in range(40):
        product = x[0, k].double() * w[:, k].double()  # exact: 48 bits
        acc = (product + acc.double()).float()
    got = native_ops.linear(x, p)[0]
    if "baseline" not in loader.describe():  # no fused multiply-add there
        assert torch.equal(bits(got), bits(acc))


def test_the_int8_chain_is_the_documented_one() -> None:
    """acc = fma(sum of a group's integers, xs * ws, acc), ascending: replayed in float64."""
    from deepinfer.native import loader

    w, x = torch.randn(16, 100), torch.randn(1, 100)
    q, scale = native_ops.quantize_int8_reference(w)
    wide = torch.zeros(1, 128)
    wide[:, :100] = x
    groups = wide.view(4, 32)
    step = groups.abs().amax(-1) / 127
    values = (groups / step[:, None]).clamp(-127, 127).round()
    acc = torch.zeros(16)
    for g in range(4):
        part = q[:, 32 * g : 32 * g + 32].double()
        total = part @ values[g, : part.shape[1]].double()
        acc = (total * (step[g] * scale[:, g].float()).double() + acc.double()).float()
    got = native_ops.linear(x, native_ops.prepare_linear(w, "int8"))[0]
    if "baseline" not in loader.describe():
        assert torch.equal(bits(got), bits(acc))


def test_int8_extremes(isa: str) -> None:
    """Sums at the edge of sixteen bits, and groups that are no numbers."""
    x = torch.full((3, 64), 5.0)
    x[1, ::2] = -5.0
    p = native_ops.prepare_linear(torch.stack([torch.ones(64), -torch.ones(64), x[1]]), "int8")
    want = x.double() @ native_ops.unpack(p).double().T
    torch.testing.assert_close(native_ops.linear(x, p).double(), want, rtol=1e-6, atol=1e-6)
    x[1, 3], x[2, 40] = torch.nan, torch.inf
    y = native_ops.linear(x, p)
    assert y[1:].isnan().all() and y[0].isfinite().all()


def test_int8_is_the_reference(isa: str) -> None:
    for n, k in ((33, 100), (16, 64), (5, 1)):
        w = torch.randn(n, k) * torch.logspace(-8, 4, n)[:, None]
        w[0] = 0
        q, scale = native_ops.quantize_int8_reference(w)
        p = native_ops.prepare_linear(w, "int8")
        exact = native_ops.dequantize(q, scale)
        assert torch.equal(native_ops.unpack(p), exact)
        x = torch.randn(9, k)
        full = round_rows(x).double() @ exact.double().T
        bound = 1e-6 * (round_rows(x).double().abs() @ exact.double().abs().T)
        assert bool(((native_ops.linear(x, p).double() - full).abs() <= bound).all())
        step = scale.float().repeat_interleave(32, 1)[:, :k]
        assert bool(((exact - w).abs() <= step * 0.53 + w.abs() * 0.0005).all())


def test_q8_0_values_survive(isa: str) -> None:
    """Groups that reach ±127 with an fp16 scale, subnormal ones too, as in a GGUF file."""
    q = torch.randint(-127, 128, (40, 96), dtype=torch.int8)
    q[:, ::32] = 127
    scale = torch.rand(40, 3).half() * torch.logspace(-7, 2, 40)[:, None].half()
    w = native_ops.dequantize(q, scale)
    assert torch.equal(native_ops.unpack(native_ops.prepare_linear(w, "int8")), w)


def test_blocks_are_stacked(isa: str) -> None:
    for sizes in ((32, 16, 10), (10, 7, 5)):
        parts = [torch.randn(n, 48) for n in sizes]
        for quantization in (None, "int8"):
            whole = native_ops.prepare_linear(torch.cat(parts), quantization)
            stacked = native_ops.prepare_linear(parts, quantization)
            assert stacked.shape == whole.shape
            assert stacked.nbytes == whole.nbytes
            assert torch.equal(native_ops.unpack(stacked), native_ops.unpack(whole))


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_embedding_reads_the_packed_table(isa: str, kind: str) -> None:
    p, w = packed(75, 70, kind)
    ids = torch.randint(0, 75, (50,))
    assert torch.equal(native_ops.embedding(ids, p, F32), w[ids])
    assert torch.equal(native_ops.embedding(ids, p, BF16), w[ids].to(BF16))
    assert native_ops.embedding(ids[:0], p).shape == (0, 70)
    for bad in (-1, 75):
        with pytest.raises(ValueError, match="outside the table"):
            native_ops.embedding(torch.tensor([0, bad]), p)


def test_strided_rows_and_leading_dimensions() -> None:
    p, _ = packed(48, 32, "fp32")
    wide = torch.randn(12, 100)
    part = wide[:, 20:52]
    assert torch.equal(native_ops.linear(part, p), native_ops.linear(part.contiguous(), p))
    cube = torch.randn(3, 4, 32)
    flat = native_ops.linear(cube.view(12, 32), p)
    assert torch.equal(native_ops.linear(cube, p).view(12, 48), flat)


def test_nan_and_inf_stay_in_their_row() -> None:
    p, _ = packed(20, 64, "fp32")
    x = torch.randn(14, 64)
    clean = native_ops.linear(x, p)
    x[3, 5], x[9, 0] = torch.nan, torch.inf
    y = native_ops.linear(x, p)
    rows = [i for i in range(14) if i not in (3, 9)]
    assert y[3].isnan().all()
    assert not y[9].isfinite().any()
    assert torch.equal(bits(y[rows]), bits(clean[rows]))
    small = native_ops.linear(x, p, out_dtype=BF16)
    assert small[3].isnan().all()


def test_wrong_arguments() -> None:
    p, _ = packed(16, 8, "fp32")
    with pytest.raises(TypeError):
        native_ops.linear(torch.zeros(2, 8, dtype=torch.float64), p)
    with pytest.raises(TypeError):
        native_ops.linear(torch.zeros(2, 8), p, out_dtype=torch.float16)
    with pytest.raises(ValueError, match="columns"):
        native_ops.linear(torch.zeros(2, 9), p)
    with pytest.raises(ValueError, match="contiguous"):
        native_ops.linear(torch.zeros(8, 2).T, p)
    with pytest.raises(ValueError, match="bias"):
        native_ops.linear(torch.zeros(2, 8), p, torch.zeros(15))
    with pytest.raises(ValueError, match="quantization"):
        native_ops.prepare_linear(torch.zeros(2, 8), "int4")
    with pytest.raises(TypeError):
        native_ops.prepare_linear(torch.zeros(2, 8, dtype=torch.float16))
