"""What the backend says of itself, the device that it opens, and what it provides."""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest
import torch

from deepinfer.api.backend import Impl
from deepinfer.api.ops import OP_NAMES
from deepinfer.errors import UnsupportedError
from deepinfer.ops.backend import build_ops
from deepinfer.ops.table import table
from deepinfer.testing.conformance.kit import DTYPES, Kit


def test_it_is_who_its_window_says(kit: Kit) -> None:
    """Name and device type agree with the spec, and it can be made without arguments."""
    assert kit.backend.name == kit.offer.spec.name
    assert kit.backend.device_type == kit.offer.spec.device_type  # type: ignore[attr-defined]
    assert isinstance(kit.backend.comm, str)


def test_facts_are_plausible(kit: Kit) -> None:
    """Known dtypes, memory, page sizes; asked twice, told the same."""
    facts = kit.backend.facts()
    assert facts.dtypes and facts.dtypes <= set(DTYPES)
    assert facts.memory_bytes > 0
    assert facts.page_sizes and all(size >= 1 for size in facts.page_sizes)
    assert facts.quantizations <= {"int8", "fp8"}
    assert facts == kit.backend.facts()


def test_claims_are_about_ops(kit: Kit) -> None:
    """``facts().invariant`` names ops of the table."""
    assert kit.backend.facts().invariant <= set(OP_NAMES)


def test_offers_are_kept(kit: Kit, dtype: str) -> None:
    """A window that offers "invariant", "int8" or "fp8" has a backend that can be built so."""
    offers, facts = kit.offer.spec.offers, kit.backend.facts()
    assert offers & {"int8", "fp8"} == facts.quantizations
    if "invariant" in offers:
        assert build_ops(kit.backend, kit.context(dtype, invariant=True)).context is not None


def test_what_is_not_offered_is_refused(kit: Kit, dtype: str) -> None:
    """An engine that asks for invariance gets it or a reason, never something else."""
    try:
        build_ops(kit.backend, kit.context(dtype, invariant=True))
    except UnsupportedError as why:
        assert "invariant" not in kit.offer.spec.offers, str(why)


@pytest.mark.parametrize("invariant", [False, True])
def test_it_provides_ops_of_the_table(kit: Kit, dtype: str, invariant: bool) -> None:
    """Names of the table, callables that take the reference's parameters; the same set twice."""
    provided = kit.backend.provide(kit.context(dtype, invariant))
    specs = table()
    assert set(provided) <= set(specs)
    for name, impl in provided.items():
        assert isinstance(impl, Impl), f"{name}: {impl!r} is no Impl"
        wanted = list(inspect.signature(specs[name].reference).parameters)
        wanted = wanted[1:] if specs[name].composite else wanted
        _takes(name, impl.fn, wanted)
    assert set(kit.backend.provide(kit.context(dtype, invariant))) == set(provided)


def _takes(name: str, fn: Any, wanted: list[str]) -> None:
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return  # a C function does not say
    if any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        return
    assert list(parameters)[: len(wanted)] == wanted, f"{name} takes {list(parameters)}"


def test_an_invariant_engine_gets_invariant_ops_only(kit: Kit, dtype: str) -> None:
    """With ``ctx.invariant``, what is provided is what ``facts().invariant`` claims."""
    provided = set(kit.backend.provide(kit.context(dtype, invariant=True)))
    assert provided <= kit.backend.facts().invariant


def test_opening_changes_nothing_of_the_host(kit: Kit) -> None:
    """No environment variable, default dtype or device, gradient mode, precision flag."""
    kit.backend.facts()  # so that imports are behind us
    before = _host()
    device = kit.backend.open(0)
    kit.backend.provide(kit.context(kit.dtypes[0]))
    assert _host() == before
    device.close()
    assert _host() == before


def _host() -> dict[str, Any]:
    return {
        "environment": dict(os.environ),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "random state": torch.get_rng_state().sum().item(),
        "working directory": os.getcwd(),
    }


def test_the_device_closes_twice(kit: Kit) -> None:
    """``close`` may be called again, and the device can be opened again."""
    for _ in range(2):
        device = kit.backend.open(0)
        assert device.torch_device.type == kit.backend.device_type
        device.close()
        device.close()


def test_the_device_has_memory(kit: Kit) -> None:
    """``free_bytes`` is positive and at most what the facts say."""
    assert 0 < kit.device.free_bytes() <= kit.backend.facts().memory_bytes


def test_a_future_keeps_what_it_was_given(kit: Kit) -> None:
    """Later work on the device may not change what arrives; results are CPU tensors, in order."""
    one = torch.arange(1000, device=kit.device.torch_device)
    two = torch.full((3,), 0.5, device=kit.device.torch_device)
    future = kit.device.future(one, two)
    one.fill_(-1)
    two += 1
    got = future.result()
    assert [t.device.type for t in got] == ["cpu", "cpu"]
    assert torch.equal(got[0], torch.arange(1000)) and got[1].tolist() == [0.5] * 3
    assert future.done() and torch.equal(future.result()[0], got[0])


def test_a_future_of_nothing(kit: Kit) -> None:
    """Empty tensors travel too."""
    empty = torch.empty(0, 4, dtype=torch.int64, device=kit.device.torch_device)
    (got,) = kit.device.future(empty).result()
    assert got.shape == (0, 4) and got.dtype is torch.int64


def test_capture_computes_the_same(kit: Kit, dtype: str) -> None:
    """A captured function gives what the function gives, also on changed inputs."""
    run = kit.run(dtype)
    x = run.place(run.draw.normal(8, 32))
    weight = run.weight(run.draw.normal(32), "rms_norm")

    def fn() -> Any:
        return run.ops.rms_norm(x, weight, 1e-5)

    captured = kit.device.capture(fn, 8)
    for scale in (1.0, 3.0):
        x.mul_(scale)
        got, want = captured().clone(), fn()
        kit.device.synchronize()
        assert torch.equal(got, want)


def test_record_runs_nothing_and_its_replay_everything(kit: Kit, dtype: str) -> None:
    """What a function changes changes once for each replay, and never while it is recorded."""
    record = getattr(kit.device, "record", None)
    if record is None:
        pytest.skip("the device does not record")
    run = kit.run(dtype)
    x = run.place(run.draw.normal(8, 32))
    weight = run.weight(run.draw.normal(32), "rms_norm")
    times = torch.zeros(8, dtype=torch.int64, device=kit.device.torch_device)

    def fn() -> Any:
        times.add_(1)
        return run.ops.rms_norm(x, weight, 1e-5), times * 2

    fn()
    replay = record(fn)
    kit.device.synchronize()
    assert times.tolist() == [1] * 8
    for turn in (2, 3, 4):
        x.mul_(2.0)
        got, doubled = (part.clone() for part in replay())
        want = run.ops.rms_norm(x, weight, 1e-5)
        kit.device.synchronize()
        assert torch.equal(got, want)
        assert times.tolist() == [turn] * 8 and doubled.tolist() == [2 * turn] * 8
