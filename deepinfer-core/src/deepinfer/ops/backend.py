"""The reference backend, and how a backend becomes the ops of one engine.

``ReferenceBackend`` provides nothing, so every op runs its reference: the oracle, and what runs on
a machine without a C compiler. In invariant mode it provides the fixed-tile variants.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer.api.backend import Backend, BackendFacts, Impl, OpContext
from deepinfer.errors import UnsupportedError
from deepinfer.ops.invariant import ROW_EXACT, invariant_ops
from deepinfer.ops.quant import quantized_ops
from deepinfer.ops.table import OpSet, table

_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def build_ops(
    backend: Backend, ctx: OpContext, by_reference: Collection[str] = frozenset()
) -> OpSet:
    """The ops of one engine; ``by_reference`` names those that core serves in any case.

    Raises:
        UnsupportedError: ``ctx`` asks for a type, a quantisation or an invariance that the backend
            does not keep; the ops or settings at fault are named.
    """
    facts = backend.facts()
    dtype = str(ctx.dtype).removeprefix("torch.")
    if dtype not in facts.dtypes:
        raise UnsupportedError(
            f"Backend {backend.name!r} does not compute in {dtype}.",
            setting="dtype",
            next_step=f"It has {', '.join(sorted(facts.dtypes))}.",
        )
    if ctx.quantization is not None and ctx.quantization not in facts.quantizations:
        raise UnsupportedError(
            f"Backend {backend.name!r} has no {ctx.quantization} weights.", setting="quantization"
        )
    if ctx.invariant:
        _check_invariant(backend.name, facts)
    provided = backend.provide(ctx)
    kept = {name: impl for name, impl in provided.items() if name not in by_reference}
    return OpSet(kept, backend.name, ctx)


def _check_invariant(name: str, facts: BackendFacts) -> None:
    """Every op must be claimed, be row-exact as it is, or be written in such ops."""
    composites = {spec.name for spec in table().values() if spec.composite}
    missing = sorted(set(table()) - facts.invariant - ROW_EXACT - composites)
    if missing:
        raise UnsupportedError(
            f"Backend {name!r} has no batch-invariant {', '.join(missing)}.",
            setting="batch_invariant",
            next_step="Choose another backend, or leave batch_invariant off.",
        )


def cpu_facts() -> BackendFacts:
    """What both of core's CPU backends can do; every op has an invariant implementation."""
    return BackendFacts(
        dtypes=frozenset({"float32", "bfloat16"}),
        memory_bytes=total_memory(),
        page_sizes=(1, 2, 4, 8, 16, 32, 64, 128),
        quantizations=frozenset({"int8"}),
        step_tokens=512,
        activations="float32",
        invariant=frozenset(table()),
    )


class ReferenceBackend:
    """Plain torch on a CPU."""

    name = "reference"
    device_type = "cpu"
    comm = "gloo"

    def facts(self) -> BackendFacts:
        return cpu_facts()

    def open(self, local_rank: int) -> CPUDevice:
        return CPUDevice()

    def provide(self, ctx: OpContext) -> Mapping[str, Impl]:
        provided = invariant_ops() if ctx.invariant else {}
        return provided if ctx.quantization is None else quantized_ops(provided)


class CPUDevice:
    """The machine's processors and its memory."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def future(self, *tensors: Tensor) -> Ready:
        """Copies now: the caller may write over its tensors at once."""
        return Ready(tuple(t.detach().clone() for t in tensors))

    def capture(self, fn: Callable[..., Any], shape: int) -> Callable[..., Any]:
        return fn

    def free_bytes(self) -> int:
        return free_memory()

    def synchronize(self) -> None:
        """Nothing is in flight: ops return when they are done."""

    def close(self) -> None:
        """Nothing was taken."""


class Ready:
    """A future that holds its result."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._tensors = tensors

    def result(self) -> tuple[Tensor, ...]:
        return self._tensors

    def done(self) -> bool:
        return True


def total_memory() -> int:
    """Bytes that this process may use in all: the machine's, or less if it is limited."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_limits()]
    return min(limits)


def free_memory() -> int:
    """Bytes that can still be had: what the machine has free, within this process's limits."""
    return max(0, min(_available(), total_memory() - _used_by_group()))


def _available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _limits() -> list[int]:
    found = [limit for limit in map(_number, _CGROUPS) if limit is not None]
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    return found if soft == resource.RLIM_INFINITY else [*found, soft]


def _used_by_group() -> int:
    """What the control group has used, without the file cache that it would give back."""
    used = _number("/sys/fs/cgroup/memory.current")
    try:
        stat = Path("/sys/fs/cgroup/memory.stat").read_text()
    except OSError:
        return 0
    cached = [
        int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file")
    ]
    return 0 if used is None else max(0, used - sum(cached))


def _number(path: str) -> int | None:
    """The number in a file; None if there is none (``max``, or no such file)."""
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
