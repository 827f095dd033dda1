"""The reference backend, and what build_ops refuses."""

import dataclasses

import pytest
import torch
from deepinfer.api.backend import Impl, OpContext
from deepinfer.errors import UnsupportedError
from deepinfer.ops.backend import ReferenceBackend, build_ops, free_memory, total_memory

CTX = OpContext(dtype=torch.float32, device=torch.device("cpu"))


class Partial(ReferenceBackend):
    """Claims the invariance of some ops only."""

    name = "partial"
    claims = frozenset({"linear", "rms_norm"})

    def facts(self):
        return dataclasses.replace(super().facts(), invariant=self.claims)


def test_everything_runs_the_reference():
    ops = build_ops(ReferenceBackend(), CTX)
    assert set(ops.origin.values()) == {"reference"}
    assert ops.context is CTX


def test_invariance_that_nobody_keeps_is_refused_by_name():
    ctx = dataclasses.replace(CTX, invariant=True)
    build_ops(ReferenceBackend(), ctx)
    with pytest.raises(UnsupportedError, match=r"no batch-invariant attention, .*silu_mul") as why:
        build_ops(Partial(), ctx)
    assert "linear," not in str(why.value).replace("grouped_linear,", "")
    assert why.value.setting == "batch_invariant"
    build_ops(Partial(), CTX)


def test_types_and_quantisations_are_refused_by_name():
    with pytest.raises(UnsupportedError, match="float16"):
        build_ops(ReferenceBackend(), dataclasses.replace(CTX, dtype=torch.float16))
    with pytest.raises(UnsupportedError, match="int4"):
        build_ops(ReferenceBackend(), dataclasses.replace(CTX, quantization="int4"))


def test_prepare_asks_the_first_use_that_has_one():
    class Packs(ReferenceBackend):
        name = "packs"

        def provide(self, ctx):
            return {"linear": Impl(lambda x, w, bias=None, out=None: x, lambda w, uses: uses)}

    ops = build_ops(Packs(), CTX)
    assert ops.prepare("w", ("gated_mlp", "linear")) == {"gated_mlp", "linear"}
    assert ops.prepare("w", ("embedding",)) == "w"
    assert ops.prepare("w", ()) == "w"


def test_the_device_copies_and_counts():
    device = ReferenceBackend().open(0)
    x = torch.arange(3)
    future = device.future(x, x + 1)
    x[0] = 9
    assert future.done() and [t.tolist() for t in future.result()] == [[0, 1, 2], [1, 2, 3]]
    fn = device.capture(max, 8)
    assert fn is max
    device.synchronize()
    device.close()
    device.close()


def test_memory_is_plausible():
    assert 0 < free_memory() <= total_memory()
    assert ReferenceBackend().facts().memory_bytes == total_memory()
