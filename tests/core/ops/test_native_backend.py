"""The native backend behind the op table: what it provides, prepares and falls back to."""

import dataclasses

import pytest
import torch
from deepinfer.api.backend import OpContext
from deepinfer.ops.backend import ReferenceBackend, build_ops

native = pytest.importorskip("deepinfer.native.backend")

CTX = OpContext(dtype=torch.float32, device=torch.device("cpu"), num_threads=1, head_dim=16)
NATIVE = {
    *("linear", "grouped_linear", "embedding", "rms_norm", "add_rms_norm", "silu_mul", "rope"),
    *("kv_write", "plan_attention", "attention", "gumbel_argmax", "logprobs"),
    *("apply_bitmask", "filter_top", "attention_block", "mlp_block", "decoder_layers"),
}


def ops_of(**more):
    return build_ops(native.NativeCPUBackend(), dataclasses.replace(CTX, **more))


def served(ops):
    return {name for name, origin in ops.origin.items() if origin == "cpu"}


def test_what_it_serves():
    assert served(ops_of()) == NATIVE
    assert served(ops_of(invariant=True)) == NATIVE | {"route"}
    assert "kernels" in native.NativeCPUBackend().facts().notes


@pytest.mark.parametrize("invariant", [False, True])
def test_heads_too_wide_for_the_kernel_fall_back(invariant):
    wide = served(ops_of(head_dim=512, invariant=invariant))
    assert not wide & {"plan_attention", "attention_block", "decoder_layers"}
    assert ("attention" in wide) == invariant


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_table_is_packed_once(quantization, dtype):
    ops = ops_of(quantization=quantization, dtype=dtype)
    table = torch.randn(50, 64).to(dtype)
    packed = ops.prepare(table, ("linear", "embedding"))
    rows = ops.embedding(torch.tensor([49, 0]), packed)
    assert rows.dtype == dtype
    if quantization is None:
        assert torch.equal(rows, table[[49, 0]])
    assert ops.linear(rows, packed, None, torch.float32).shape == (2, 50)
    assert packed.nbytes < 1.4 * table.nbytes / (3 if quantization and dtype.itemsize == 4 else 1)


def test_a_table_of_its_own_and_a_router_stay_exact():
    ops = ops_of(quantization="int8")
    table = torch.randn(50, 64)
    assert ops.prepare(table, ("embedding",)) is table
    assert torch.equal(ops.embedding(torch.tensor([3]), table), table[[3]])
    router = ops.prepare(table, ("linear", "route"))
    torch.testing.assert_close(ops.linear(table[:2], router), table[:2] @ table.T)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_experts_are_packed_one_by_one(quantization):
    ops = ops_of(quantization=quantization)
    plain = build_ops(ReferenceBackend(), dataclasses.replace(CTX, quantization=quantization))
    experts, x = torch.randn(4, 24, 64), torch.randn(7, 64)
    offsets = torch.tensor([0, 3, 3, 5, 6])
    packed = ops.prepare(experts, ("moe", "grouped_linear"))
    got = ops.grouped_linear(x, packed, offsets)
    want = plain.grouped_linear(x, plain.prepare(experts, ("moe", "grouped_linear")), offsets)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert (got[6:] == 0).all()
    assert packed.nbytes >= experts.nbytes // 4


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_float32_rows_meet_a_bfloat16_cache(backend):
    """What runs where dtype is bfloat16: rows stay float32 and are rounded as they are stored."""
    from deepinfer.ops.backend import ReferenceBackend

    chosen = native.NativeCPUBackend() if backend == "cpu" else ReferenceBackend()
    assert chosen.facts().activations == "float32"
    ops = build_ops(chosen, dataclasses.replace(CTX, dtype=torch.bfloat16))
    torch.manual_seed(3)
    q, k, v = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 16)
    k_cache, v_cache = torch.zeros(2, 2, 4, 2, 16, dtype=torch.bfloat16).unbind(0)
    ops.kv_write(k, v, k_cache, v_cache, torch.arange(5))
    torch.testing.assert_close(k_cache.flatten(0, 1)[:5], k.bfloat16(), rtol=0, atol=0)
    plan = ops.plan_attention(
        torch.tensor([[0, 1]], dtype=torch.int32),
        torch.tensor([5]),
        torch.tensor([0, 5], dtype=torch.int32),
        4,
    )
    o, _ = ops.attention(q, k_cache, v_cache, plan, 0.25)
    keys, values = (x.bfloat16().float().repeat_interleave(2, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * 0.25
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    assert o.dtype == torch.float32
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-6)
