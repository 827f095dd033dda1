"""What a device offers: :class:`Backend`, :class:`Device`, :class:`Impl`. House section 7.1.

Protocols: a backend need not inherit. The conformance kit tests these docstrings
(``pytest --pyargs deepinfer.testing.conformance --backend NAME``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from deepinfer.api.plan import StepOutput


class Impl(NamedTuple):
    """One implementation of one op.

    ``fn`` takes the reference's parameters (a composite's without its leading ``ops``).
    ``prepare(weight, uses)`` turns a loaded weight into what ``fn`` takes, once: ``uses`` names
    every op that will read this weight (a tied embedding is read by ``embedding`` and ``linear``,
    so the result must serve both). None leaves the tensor as it is.
    ``of_parts``, of a composite: its bits are those of the ops that it is written in, and it takes
    weights as they do. A model may then run a part of it by these (``DeviceBatch.tail``).
    """

    fn: Callable[..., Any]
    prepare: Callable[[Any, frozenset[str]], Any] | None = None
    of_parts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpContext:
    """What a backend may know when it chooses implementations. Nothing of it changes later.

    ``dtype`` is the type of weights and KV, ``activation_dtype`` of the rows between ops (None:
    ``dtype``); ``quantization`` None, "int8" or "fp8" (linear weights; all else stays ``dtype``);
    ``invariant``: return only implementations whose row i depends neither on other rows nor on i.
    ``cache_dir``: a folder of the backend's own for what it compiles, which need not exist and may
    not be writable; None: nowhere.
    """

    dtype: torch.dtype
    device: torch.device
    invariant: bool = False
    quantization: str | None = None
    num_threads: int = 1
    page_size: int = 16
    head_dim: int | None = None
    activation_dtype: torch.dtype | None = None
    cache_dir: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFacts:
    """What a backend can do; core compares it with what the configuration needs.

    ``invariant``: op names whose implementation is batch-invariant (with ``OpContext.invariant``).
    ``memory_bytes``: what KV and weights may use together. ``step_tokens``: tokens of a step that
    fill the device, where the user names no ``max_num_batched_tokens``. ``activations``: the type
    of rows between ops where it is not ``dtype``: a device whose arithmetic is float32 anyway
    loses nothing by it and rounds less. ``dequantize``: where the user does not say, weights that a
    checkpoint stores in few bits become ``dtype`` at load; False: they are multiplied as stored.
    """

    dtypes: frozenset[str]
    memory_bytes: int
    page_sizes: tuple[int, ...] = (16, 32, 64)
    quantizations: frozenset[str] = frozenset()
    invariant: frozenset[str] = frozenset()
    graphs: bool = False
    step_tokens: int = 2048
    activations: str | None = None
    dequantize: bool = True
    notes: Mapping[str, str] = field(default_factory=dict)


class Future(Protocol):
    """Tensors on their way to the host. ``result()`` waits and returns them as CPU tensors."""

    def result(self) -> tuple[torch.Tensor, ...]: ...

    def done(self) -> bool: ...


class OutputFuture(Protocol):
    """A step's answer on its way to the brain."""

    def result(self) -> StepOutput: ...

    def done(self) -> bool: ...


class Device(Protocol):
    """One opened device. ``close`` gives back what ``open`` took and may be called twice.

    One with an attribute ``seconds``, a mapping of names to seconds so far (of compiling kernels,
    say), has it shown among the times of the engine. One with ``release()`` is asked, where memory
    runs out within a step, to give back what can be made again, such as graphs and caches. One with
    ``explain(error)`` may give a clearer error for one that its driver raised. One with
    ``measure(work)`` runs it and returns the bytes that it took for a while: KV is then sized so
    that a step fits beside it. One with ``record(fn)`` has graphs of all that a function launches:
    it calls ``fn`` without running what that launches, and returns what runs it, again and again,
    and returns what ``fn`` returned, overwritten each time; everything was launched once before.
    Whole steps are run so.
    """

    torch_device: torch.device

    def future(self, *tensors: torch.Tensor) -> Future:
        """Start copying to the host; later device work may not change what arrives."""
        ...

    def capture(self, fn: Callable[..., Any], shape: int) -> Callable[..., Any]:
        """A graph of ``fn`` for this token count, or ``fn`` itself."""
        ...

    def free_bytes(self) -> int:
        """Memory that can still be allocated for KV."""
        ...

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


class Backend(Protocol):
    """A family of devices and the implementations for them."""

    name: str
    device_type: str
    comm: str

    def facts(self) -> BackendFacts: ...

    def open(self, local_rank: int) -> Device: ...

    def provide(self, ctx: OpContext) -> Mapping[str, Impl]:
        """Overrides for this context; called once per engine and process.

        An entry may be a primitive or a composite of the op table. What is not returned runs the
        reference. An entry serves every shape of its reference; there is no dispatch by argument
        later. An unknown name is an error. With ``ctx.invariant`` every entry must be invariant.
        """
        ...
