"""Block-scaled ops: bit for bit against recorded data, brute force, and float64 loops."""

import math

import numpy as np
import pytest
import torch
from deepinfer.api.backend import OpContext
from deepinfer.ops.backend import ReferenceBackend, build_ops
from deepinfer.ops.lowbit import BlockScaled, e4m3, e8m0, unpack_fp4
from deepinfer.ops.quant import Int8Weight
from deepinfer.ops.reference.scaled import ScaledMoEParams
from deepinfer.ops.table import OpSet

OPS = OpSet({}, "reference")
KINDS = {"fp8": "fp8_g32", "mxfp4": "fp4_e8m0_g32", "nvfp4": "fp4_e4m3_g16"}
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def randn(*shape, seed=0, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored(kind, *shape, seed=0):
    """A random BlockScaled weight of values about 1/8."""
    *lead, n, k = shape
    generator = torch.Generator().manual_seed(seed)
    if kind == "fp8":
        codes = randn(*shape, seed=seed, scale=16).to(torch.float8_e4m3fn).view(torch.uint8)
        tiles, around = (*lead, -(-n // 32), k // 32), 120
    else:
        codes = torch.randint(0, 256, (*lead, n, k // 2), generator=generator).to(torch.uint8)
        tiles, around = (*lead, n, k // 32), 122
    scales = torch.randint(around, around + 3, tiles, generator=generator).to(torch.uint8)
    return BlockScaled(codes, scales, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_quantisers_are_the_recorded_ones(golden_ops, same_bits, kind):
    want = golden_ops(f"quant/{KINDS[kind]}/")
    x = want["x"]
    same_bits(OPS.quantize(x, kind), want["dequant"])
    same_bits(OPS.quantize(x.float(), kind), want["dequant"].float())
    packed = OPS.pack_rows(x, kind)
    same_bits(packed, torch.cat((want["codes"], want["scale"]), -1))
    same_bits(OPS.unpack_rows(packed, kind, torch.bfloat16), want["dequant"])


def test_codes_are_the_recorded_values(golden_ops, same_bits):
    formats, codes = golden_ops("formats/"), torch.arange(256).to(torch.uint8)
    same_bits(e4m3(codes), formats["e4m3_all"])
    same_bits(e8m0(codes), formats["e8m0_all"])
    same_bits(unpack_fp4(codes[:16])[0::2], formats["e2m1_all"])
    same_bits(unpack_fp4(codes[:16] << 4)[1::2], formats["e2m1_all"])


@pytest.mark.parametrize("name", ["fp8_small", "fp8_tail", "fp4_small", "fp4_tail"])
def test_stored_linears_are_the_recorded_ones(golden_ops, same_bits, name):
    want = golden_ops(f"linear/{name}/")
    codes, scales = (want[k].view(torch.uint8) for k in ("weight", "scale"))
    weight = BlockScaled(codes, scales, name[:3])
    same_bits(OPS.scaled_linear(want["x"], weight), want["y"])
    dense = OPS.scaled_linear(want["x"], weight.dequantize(torch.bfloat16))
    torch.testing.assert_close(dense, want["y"], rtol=2**-8, atol=1e-6)


def nearest(values, x):
    """The nearest value of an ascending table, the one of even number between equals."""
    best = min(range(len(values)), key=lambda i: (abs(values[i] - abs(x)), i % 2))
    return math.copysign(values[best], x)


def by_hand(group, kind):
    """One group in float64 and Python's integers."""
    most = float(np.abs(group).max())
    if kind == "nvfp4":
        tables = FP4, e4m3(torch.arange(127).to(torch.uint8)).tolist()
        ratio = float(np.float32(max(most, 6 * 2.0**-9)) / np.float32(6))
        scale = nearest(tables[1], min(ratio, 448.0))
        shares = [float(np.float32(v) / np.float32(scale)) for v in group]
    else:
        top, least = (448.0, 1e-4) if kind == "fp8" else (6.0, 6 * 2.0**-126)
        product = np.float32(max(np.float32(most), np.float32(least))) * np.float32(1 / top)
        mantissa, exponent = math.frexp(float(product))
        scale = 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)
        shares = [float(v) / scale for v in group]
    table = e4m3(torch.arange(127).to(torch.uint8)).tolist() if kind == "fp8" else FP4
    return [nearest(table, v) * scale for v in shares]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 1e-6, 3e3])
def test_quantisers_against_brute_force(same_bits, kind, scale):
    x = randn(6, 64, scale=scale)
    x[0] = torch.arange(-32, 32) / 16 * scale
    size = 16 if kind == "nvfp4" else 32
    want = [by_hand(group.numpy(), kind) for group in x.view(-1, size)]
    same_bits(OPS.quantize(x, kind), torch.tensor(want, dtype=torch.float32).view(x.shape))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_packed_reads_back_as_quantised(same_bits, kind, dtype):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(1))
    for x in (every.view(-1, 64), every[order].view(-1, 64), every.abs().sort()[0].view(-1, 64)):
        x = x.to(dtype)
        back = OPS.unpack_rows(OPS.pack_rows(x, kind), kind, dtype)
        want = OPS.quantize(x, kind)
        assert torch.equal(back.isnan(), want.isnan())
        same_bits(back.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_quantising_twice_changes_nothing(same_bits, kind):
    once = OPS.quantize(randn(200, 64, scale=5.0), kind)
    same_bits(OPS.quantize(once, kind), once)


def test_fp8_rounds_as_the_type_does(same_bits):
    """With scale 1, which a maximum in (224, 448] has, values are the type's own."""
    x = torch.linspace(-448, 448, 100_003)[:100_000].view(-1, 20)
    x = torch.cat((torch.full((len(x), 12), 300.0), x), 1)
    same_bits(OPS.quantize(x, "fp8"), x.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("kind", KINDS)
def test_not_a_number_stays_in_its_group(kind):
    x = randn(2, 96)
    x[0, 40] = torch.nan
    got = OPS.quantize(x, kind)
    size = 16 if kind == "nvfp4" else 32
    assert got[0].view(-1, size).isnan().all(1).tolist() == [
        g == 40 // size for g in range(96 // size)
    ]
    assert not got[1].isnan().any()


def test_rows_of_part_of_a_group_are_refused():
    with pytest.raises(ValueError, match="whole groups of 32"):
        OPS.quantize(randn(2, 48), "fp8")


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_stored_and_dense_agree(kind):
    weight, x = stored(kind, 70, 256), randn(40, 256)
    got = OPS.scaled_linear(x, weight)
    exact = OPS.quantize(x, "fp8").double() @ weight.dequantize().double().T
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(
        OPS.scaled_linear(x, weight.dequantize()).double(), exact, rtol=1e-6, atol=1e-5
    )


def test_blocks_of_k_are_added_in_ascending_order(same_bits):
    """Numbers whose float32 sum depends on the order: 1e8, then −1e8, then 1 …"""
    codes = torch.full((32, 160), 0x38).to(torch.uint8)  # ones
    scales = torch.tensor([[127 + 27, 127, 127 + 27, 127, 127]]).to(torch.uint8)
    x = torch.zeros(1, 160)
    x[0, 0], x[0, 32], x[0, 64], x[0, 96], x[0, 128] = 1, 1, -1, 1, 1
    total = torch.zeros(1)
    for value in (2.0**27, 1.0, -(2.0**27), 1.0, 1.0):
        total = total + value
    got = OPS.scaled_linear(x, BlockScaled(codes, scales, "fp8"))
    same_bits(got, total.expand(1, 32).contiguous())


def test_a_stored_weight_is_not_shown_to_dense_ops():
    ops = build_ops(
        ReferenceBackend(),
        OpContext(dtype=torch.float32, device=torch.device("cpu"), quantization="int8"),
    )
    weight = stored("fp8", 32, 64)
    assert ops.prepare(weight, ("scaled_linear", "linear")) is weight
    assert isinstance(ops.prepare(weight.dequantize(), ("scaled_linear", "linear")), Int8Weight)
    mix = randn(24, 64)
    assert ops.prepare(mix, ("hyper_mix", "linear")) is mix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_native_backend_multiplies_dense_weights(dtype):
    native = pytest.importorskip("deepinfer.native.backend")
    ctx = OpContext(dtype=dtype, device=torch.device("cpu"))
    ops = build_ops(native.NativeCPUBackend(), ctx)
    weight, x = stored("fp8", 70, 96), randn(5, 96).to(dtype)
    packed = ops.prepare(weight.dequantize(dtype), ("scaled_linear", "linear"))
    assert type(packed).__name__ == "PackedWeight"
    got = ops.scaled_linear(x, packed, torch.float32)
    want = OPS.scaled_linear(x, weight, torch.float32)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert ops.prepare(weight, ("scaled_linear", "linear")) is weight


def moe_params(kind, experts=5, width=32, hidden=64, dtype=torch.float32):
    def weight(*shape, seed):
        made = stored("fp4" if len(shape) == 3 else "fp8", *shape, seed=seed)
        return made if kind == "stored" else made.dequantize(dtype)

    return ScaledMoEParams(
        router=randn(experts, hidden, seed=1, scale=0.3).to(dtype),
        bias=randn(experts, seed=2),
        image_bias=randn(experts, seed=3),
        gate_up=weight(experts, 2 * width, hidden, seed=4),
        down=weight(experts, hidden, width, seed=5),
        shared_gate_up=weight(2 * width, hidden, seed=6),
        shared_down=weight(hidden, width, seed=7),
        experts=experts,
        chosen=2,
        scale=1.5,
        limit=1.0,
    )


def moe_by_hand(x, image, p):
    """Specification, section 4, a token at a time; x and weights in x's dtype."""

    def wide(w):
        return w if isinstance(w, torch.Tensor) else w.dequantize()

    def project(row, w):
        return (OPS.quantize(row[None], "fp8").float() @ wide(w).float().T)[0].to(x.dtype).float()

    def expert(row, gate_up, down, share):
        g, u = project(row, gate_up).chunk(2)
        g, u = g.clamp(max=p.limit), u.clamp(-p.limit, p.limit)
        a = g / (1 + torch.exp(-g)) * u
        a = a if share is None else share * a
        return project(a.to(x.dtype), down)

    out = []
    for row, is_image in zip(x, image, strict=True):
        score = torch.log1p(torch.exp(row.float() @ p.router.float().T)).sqrt()
        ranked = score + (p.image_bias if is_image else p.bias)
        chosen = sorted(range(p.experts), key=lambda e: (-float(ranked[e]), e))[: p.chosen]
        shares = {e: score[e] / (score[chosen].sum() + 1e-20) * p.scale for e in chosen}
        total = torch.zeros(x.shape[1])
        for e in sorted(chosen):
            total = total + expert(row, wide(p.gate_up[e]), wide(p.down[e]), shares[e])
        shared = expert(row, wide(p.shared_gate_up), wide(p.shared_down), None)
        out.append((total + shared).to(x.dtype))
    return torch.stack(out)


@pytest.mark.parametrize("kind", ["stored", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moe_against_a_loop(kind, dtype):
    """Codes may fall either way where a sum rounds otherwise; few rows see that."""
    p, x = moe_params(kind, dtype=dtype), randn(50, 64).to(dtype)
    image = torch.arange(50) % 3 == 0
    got, want = OPS.scaled_moe_block(x, image, p), moe_by_hand(x, image, p)
    assert got.dtype == dtype
    error = (got.double() - want.double()).abs().amax(1) / want.double().abs().max()
    assert (error < (1e-6 if dtype == torch.float32 else 2**-8)).float().mean() > 0.9
    assert error.max() < 0.02


def test_image_rows_choose_with_their_own_bias():
    p, x = moe_params("dense"), randn(20, 64)
    text = OPS.scaled_moe_block(x, None, p)
    image = torch.arange(20) % 2 == 1
    mixed = OPS.scaled_moe_block(x, image, p)
    only = OPS.scaled_moe_block(x, None, p._replace(bias=p.image_bias))
    torch.testing.assert_close(mixed, torch.where(image[:, None], only, text))
    assert not torch.allclose(only, text)
    neither = p._replace(image_bias=None)
    torch.testing.assert_close(OPS.scaled_moe_block(x, image, neither), text)


def test_experts_are_added_in_ascending_order(same_bits):
    """Whatever the order in which they were chosen."""
    p, x = moe_params("dense"), randn(9, 64)
    ids = torch.tensor([[3, 0, 4]]).expand(9, -1).int()
    shares = randn(9, 3, seed=8).abs()
    turned = torch.tensor([1, 2, 0])
    one = OPS.scaled_moe(x, ids, shares, p.gate_up, p.down, 5, None)
    two = OPS.scaled_moe(
        x, ids[:, turned].contiguous(), shares[:, turned].contiguous(), p.gate_up, p.down, 5, None
    )
    assert one.dtype == torch.float32
    same_bits(one, two)
