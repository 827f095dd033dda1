"""int8 weights in plain torch: values, readers, and equality with the native definition."""

import pytest
import torch
from deepinfer.api.backend import OpContext
from deepinfer.ops.backend import ReferenceBackend, build_ops
from deepinfer.ops.quant import GROUP, Int8Weight, round_rows

CPU = torch.device("cpu")


def weight(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("columns", [GROUP, 70])
def test_values_are_within_half_a_step(columns):
    w = weight(6, columns)
    w[1], w[2, :GROUP] = 0.0, 1e-9
    packed = Int8Weight.quantize(w)
    assert packed.shape == w.shape and packed.nbytes < w.nbytes / 2
    step = packed.scale.float().repeat_interleave(GROUP, dim=1)[:, :columns]
    assert ((packed.float() - w).abs() <= step * 0.51 + 1e-12).all()
    assert (packed.float()[1] == 0).all()


def test_equals_the_native_definition():
    native = pytest.importorskip("deepinfer.native.weights")
    w = weight(5, 70) * torch.logspace(-9, 4, 5)[:, None]
    packed = Int8Weight.quantize(w)
    q, scale = native.quantize_int8_reference(w)
    assert torch.equal(packed.values.flatten(1)[:, :70], q)
    assert torch.equal(packed.scale, scale)
    assert torch.equal(packed.float(), native.unpack(native.prepare_linear(w, "int8")))


@pytest.mark.parametrize("columns", [GROUP, 70])
def test_rounded_rows_are_within_half_a_step(columns):
    x = weight(6, columns) * torch.logspace(-12, 8, 6)[:, None]
    x[1], x[2, 3], x[3, 5] = 0.0, torch.nan, torch.inf
    near = round_rows(x)
    step = torch.nn.functional.pad(x.abs(), (0, -columns % GROUP)).view(6, -1, GROUP).amax(-1) / 127
    step = step.repeat_interleave(GROUP, dim=1)[:, :columns]
    good = [0, 1, 4, 5]
    assert ((near - x).abs() <= step * 0.501)[good].all() and (near[1] == 0).all()
    assert near[2:4, :GROUP].isnan().all() and near[2:4, GROUP:].isfinite().all()


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_reader_takes_it(invariant, dtype):
    ctx = OpContext(dtype=dtype, device=CPU, invariant=invariant, quantization="int8")
    ops = build_ops(ReferenceBackend(), ctx)
    x, w, experts = weight(3, 64).to(dtype), weight(40, 64).to(dtype), weight(2, 8, 64).to(dtype)
    packed = ops.prepare(w, ("linear", "embedding"))
    plain = packed.float()
    near = round_rows(x)
    assert torch.equal(ops.linear(x, packed), ops.linear(near, plain, None, dtype))
    assert torch.equal(ops.embedding(torch.tensor([7, 0]), packed), plain[[7, 0]].to(dtype))
    grouped = ops.prepare(experts, ("grouped_linear",))
    offsets = torch.tensor([0, 1, 3])
    wide = torch.stack([grouped[0].float(), grouped[1].float()])
    want = ops.grouped_linear(near, wide, offsets, dtype)
    assert torch.equal(ops.grouped_linear(x, grouped, offsets), want)


def test_routers_and_plain_tables_stay():
    ops = build_ops(
        ReferenceBackend(), OpContext(dtype=torch.float32, device=CPU, quantization="int8")
    )
    w = weight(4, 32)
    assert ops.prepare(w, ("linear", "route")) is w
    assert ops.prepare(w, ("embedding",)) is w
    assert ops.prepare(w[0], ()) is not None
