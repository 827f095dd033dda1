"""What the tests hold in their hands: the backend under examination and ways to run ops on it.

:class:`Kit` is one per session. :class:`Run` is one op set on one device; the same case runs once
on the references and once on the backend, from equal inputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from deepinfer.api.backend import Backend, Device, OpContext
from deepinfer.discovery import Availability
from deepinfer.ops.backend import build_ops
from deepinfer.ops.table import OpSet
from deepinfer.plugins import Offer, PluginManager
from deepinfer.testing.conformance.draw import Draw

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PAGE_SIZE = 16


class Kit:
    """The backend under examination, its device, and its op sets.

    Args:
        name: the backend's name, as a configuration would give it.
        rank: which of its devices to open.
        dtypes: activation types to examine; empty for all that the backend names.
    """

    def __init__(self, name: str, rank: int = 0, dtypes: Iterable[str] = ()) -> None:
        self.name = name
        self.manager = PluginManager()
        self.offer = _offer(self.manager, name)
        self._rank = rank
        self._dtypes = tuple(dtypes)
        self.op_set = cache(self._op_set)

    @cached_property
    def availability(self) -> Availability:
        """What its probe said."""
        return self.manager.available(self.offer)

    @cached_property
    def backend(self) -> Backend:
        """The backend, made as an engine makes it."""
        from deepinfer.discovery import import_path

        backend: Backend = import_path(self.offer.spec.load)()
        return backend

    @cached_property
    def device(self) -> Device:
        """Its device, open for the whole session."""
        return self.backend.open(self._rank)

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """Names of the activation types to examine."""
        if self.availability.state != "usable":
            return ("float32",)
        return self._dtypes or tuple(sorted(self.backend.facts().dtypes & set(DTYPES)))

    def context(
        self,
        dtype: str,
        invariant: bool = False,
        head_dim: int | None = None,
        quantization: str | None = None,
    ) -> OpContext:
        """What an engine would tell the backend before it chooses implementations."""
        return OpContext(
            dtype=DTYPES[dtype],
            device=self.device.torch_device,
            invariant=invariant,
            quantization=quantization,
            num_threads=torch.get_num_threads(),
            page_size=PAGE_SIZE,
            head_dim=head_dim,
        )

    def claims(self) -> frozenset[str]:
        """Ops that it says are batch-invariant; nothing where it cannot run."""
        usable = self.availability.state == "usable"
        return self.backend.facts().invariant if usable else frozenset()

    def invariant_ops(self) -> set[str]:
        """What it provides for an invariant engine; nothing where it cannot run."""
        if self.availability.state != "usable":
            return set()
        return {op for d in self.dtypes for op in self.backend.provide(self.context(d, True))}

    def _op_set(self, dtype: str, invariant: bool = False, head_dim: int | None = None) -> OpSet:
        ctx = self.context(dtype, invariant, head_dim)
        if invariant:  # a backend may claim some ops only; an engine would refuse it as a whole
            return OpSet(self.backend.provide(ctx), self.name, ctx)
        return build_ops(self.backend, ctx)

    def quantized_run(self, dtype: str, quantization: str) -> Run:
        """The backend's ops for an engine with such weights."""
        ops = build_ops(self.backend, self.context(dtype, quantization=quantization))
        return Run(ops, self.device.torch_device, dtype)

    def run(self, dtype: str, invariant: bool = False, head_dim: int | None = None) -> Run:
        """The backend's ops on its device."""
        return Run(self.op_set(dtype, invariant, head_dim), self.device.torch_device, dtype)


class Run:
    """One op set on one device. Cases make their tensors with ``draw`` and move them with ``put``.

    What was put is remembered, so that a test can ask whether an op changed its inputs.
    """

    def __init__(self, ops: OpSet, device: torch.device, dtype: str) -> None:
        self.ops = ops
        self.device = device
        self.dtype = DTYPES[dtype]
        self.draw = Draw(DTYPES[dtype])
        self._put: list[tuple[Tensor, Tensor]] = []

    def put(self, value: Tensor) -> Tensor:
        """A tensor on the device, as an input that the op may not change."""
        there = value.to(self.device, copy=True)
        self._put.append((there, value.to("cpu", copy=True)))
        return there

    def place(self, value: Tensor) -> Tensor:
        """A tensor on the device that the op is meant to change."""
        return value.to(self.device, copy=True)

    def weight(self, value: Tensor, *uses: str) -> Any:
        """A weight as the model would hand it over: prepared for the ops that read it."""
        return self.ops.prepare(value.to(self.device, copy=True), uses)

    def changed(self) -> list[tuple[int, ...]]:
        """Shapes of inputs that are not what they were."""
        return [tuple(was.shape) for now, was in self._put if not same_bits(now.cpu(), was)]


def reference_run(dtype: str) -> Run:
    """The definitions: plain torch on the CPU."""
    return Run(OpSet({}, "reference"), torch.device("cpu"), dtype)


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Equal bit for bit: NaN equals itself, −0 is not 0."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return torch.equal(bits(one), bits(two))


def bits(value: Tensor) -> Tensor:
    """A float tensor's bits as integers of the same width; integers as they are."""
    if not value.is_floating_point():
        return value
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    return value.contiguous().view(width)


def tensors(result: Any) -> list[Tensor]:
    """A case's outputs as CPU tensors, in order."""
    if isinstance(result, Tensor):
        return [result.detach().cpu()]
    return [] if result is None else [t for part in result for t in tensors(part)]


def _offer(manager: PluginManager, name: str) -> Offer:
    offers = manager.offers("backend")
    for offer in offers:
        if offer.spec.name == name:
            return offer
    known = ", ".join(offer.spec.name for offer in offers)
    broken = "".join(
        f"\nplugin {p.name!r} is {p.state}: {p.reason}\n{p.trace}"
        for p in manager.plugins
        if p.state != "ready"
    )
    raise LookupError(f"no plugin here has a backend called {name!r}; known: {known}{broken}")
