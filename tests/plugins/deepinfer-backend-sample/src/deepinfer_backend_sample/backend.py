"""The backend: what it claims, the device it opens, the ops it provides.

Written against :mod:`deepinfer.api.backend` alone; it inherits nothing from core. An op that is
not returned by ``provide`` runs core's reference.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepinfer.api import BackendFacts, Impl, OpContext

from deepinfer_backend_sample import ops

INVARIANT = frozenset({"rms_norm", "gumbel_argmax"})


class SampleBackend:
    """A CPU, by way of torch and numpy."""

    name = "sample"
    device_type = "cpu"
    comm = "gloo"

    def facts(self) -> BackendFacts:
        """Two dtypes, and the ops whose rows do not depend on the batch."""
        return BackendFacts(
            dtypes=frozenset({"float32", "bfloat16"}),
            memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            page_sizes=(16, 32),
            invariant=INVARIANT,
        )

    def open(self, local_rank: int) -> SampleDevice:
        """There is one device; the rank changes nothing."""
        return SampleDevice()

    def provide(self, ctx: OpContext) -> Mapping[str, Impl]:
        """Three ops; an invariant engine gets those of them that keep it."""
        provided = {
            "linear": Impl(ops.linear, ops.prepare_linear),
            "rms_norm": Impl(ops.rms_norm),
            "gumbel_argmax": Impl(ops.gumbel_argmax),
        }
        if ctx.invariant:
            return {name: impl for name, impl in provided.items() if name in INVARIANT}
        return provided


class SampleDevice:
    """Nothing runs behind the host's back here, so futures are ready and capture is free."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def future(self, *tensors: torch.Tensor) -> SampleFuture:
        """Copies, so that the caller may overwrite its tensors at once."""
        return SampleFuture(tuple(tensor.detach().clone() for tensor in tensors))

    def capture(self, fn: Callable[..., Any], shape: int) -> Callable[..., Any]:
        """There are no graphs on a CPU."""
        return fn

    def free_bytes(self) -> int:
        """What the system calls free."""
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def synchronize(self) -> None:
        """Ops have ended when they return."""

    def close(self) -> None:
        """Nothing was taken."""


class SampleFuture:
    """A result that is there already."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._tensors = tensors

    def result(self) -> tuple[torch.Tensor, ...]:
        """The copies."""
        return self._tensors

    def done(self) -> bool:
        """Always."""
        return True
