"""One rank's start: from a configuration to a loaded model, its memory and its runner.

Where you are: behind ``executors.local``, on the thread that will run the steps. Order: find and
open the checkpoint, open the device, load the model (``loading``), give what is left to KV.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from deepinfer.api.executor import ModelFacts
from deepinfer.errors import ConfigError, shown
from deepinfer.models.checkpoint import open_checkpoint
from deepinfer.models.registry import architectures_of
from deepinfer.models.source import resolve
from deepinfer.worker.drafting import DraftPools
from deepinfer.worker.dry_run import Largest, scratch_bytes
from deepinfer.worker.kvpool import KVPool
from deepinfer.worker.loading import Loaded, load
from deepinfer.worker.measure import device_name, measure_steps
from deepinfer.worker.runner import ModelRunner, Rig
from deepinfer.worker.sizes import KVSizes, full_bytes, size_kv
from deepinfer.worker.slots import SlotShape, SlotTable

if TYPE_CHECKING:
    from deepinfer.api.backend import Backend, Device
    from deepinfer.api.kv import KVSpec
    from deepinfer.api.model import SeeingModel
    from deepinfer.config import EngineConfig
    from deepinfer.models.checkpoint import Checkpoint
    from deepinfer.resolution import Resolution

CPU_KV_BYTES = 1 << 30
"""KV on a CPU where nobody says otherwise; its pages cost memory when they are first used."""


@dataclass(slots=True)
class Host:
    """A loaded model on an opened device. ``close`` may be called twice."""

    facts: ModelFacts
    runner: ModelRunner
    device: Device
    kv: KVPool
    startup: dict[str, float] = field(default_factory=dict)

    @classmethod
    def open(cls, config: EngineConfig, resolution: Resolution) -> Host:
        """Everything that a rank needs.

        Raises:
            DeepInferError: what of the model, the device or the memory does not fit, by name.
        """
        times: dict[str, float] = {}
        with _phase(times, "open"):
            source = resolve(
                config.model,
                revision=config.revision,
                tokenizer=config.tokenizer,
                weights=config.load_format != "dummy",
            )
            checkpoint = open_checkpoint(source, config.load_format)
            backend: Backend = resolution.load("backend")()
            device = backend.open(0)
        try:
            with _phase(times, "weights"):
                loaded = load(config, resolution, checkpoint, backend, device)
            with _phase(times, "kv"):
                host = cls._equip(config, loaded, checkpoint, backend, device, times)
            times.update(getattr(device, "seconds", {}))
            return host
        except BaseException:
            device.close()
            raise

    @classmethod
    def _equip(
        cls,
        config: EngineConfig,
        loaded: Loaded,
        checkpoint: Checkpoint,
        backend: Backend,
        device: Device,
        times: dict[str, float],
    ) -> Host:
        """KV and slots for a loaded model, in what it leaves of the memory."""
        sizes, kv = _pages(config, loaded, backend, device)
        slots = _slots(config, loaded, sizes.max_len, device)
        loaded.drafter.bind(DraftPools(kv, loaded.first_draft_layer), slots)
        rig = Rig(
            model=loaded.model,
            ops=loaded.ops,
            spec=loaded.spec,
            kv=kv,
            device=device,
            slots=slots,
            drafter=loaded.drafter,
            verifier=loaded.verifier,
            seeing=cast("SeeingModel", loaded.model) if loaded.image_token >= 0 else None,
            image_token=loaded.image_token,
            weight_bytes=loaded.weight_bytes,
        )
        runner = ModelRunner(rig)
        facts = _facts(config, loaded, checkpoint, backend, sizes, times["weights"])
        facts = replace(facts, graph_rows=runner.graph_rows)
        return cls(facts, runner, device, kv, times)

    def call(self, method: str, *args: Any) -> Any:
        """Rare calls by name, those below."""
        calls: dict[str, Callable[..., Any]] = {
            "trace": self.runner.trace,
            "memory": self.memory,
            "profile": self.profile,
            "ops": self.runner.ops,
            "device": lambda: device_name(self.device.torch_device),
            "measure": lambda shapes: measure_steps(self.runner, self.facts, shapes),
        }
        if method not in calls:
            raise ConfigError(f"There is no call {method!r}; there are {', '.join(calls)}.")
        return calls[method](*args)

    def memory(self) -> dict[str, int]:
        """Bytes of weights and KV, and what is free beside them."""
        return {
            "weights": self.facts.weight_bytes,
            "kv": self.kv.nbytes,
            "free": self.device.free_bytes(),
        }

    def profile(self) -> dict[str, float]:
        """Seconds of each phase of the start, and of all steps since: forward, sample, steps.

        And what the device says of itself, such as the time spent on compiling kernels.
        """
        return dict(self.startup, **self.runner.seconds, **getattr(self.device, "seconds", {}))

    def close(self) -> None:
        """Give weights, KV and device back."""
        self.runner.close()
        self.kv.close()
        self.device.close()


def _pages(
    config: EngineConfig, loaded: Loaded, backend: Backend, device: Device
) -> tuple[KVSizes, KVPool]:
    """The KV: what is left beside the weights and the largest step, divided and allocated."""
    spec, max_len = loaded.spec, loaded.config.max_model_len
    largest = Largest(
        rows=config.max_num_batched_tokens or backend.facts().step_tokens,
        lines=config.max_num_seqs,
        vocab=loaded.config.vocab_size,
        page_size=config.page_size,
        dtype=loaded.dtype,
    )
    scratch = scratch_bytes(loaded.model, loaded.ops, spec, device, largest)
    sizes = size_kv(config, spec, max_len, kv_memory(config, spec, max_len, device, scratch))
    with _allocating("kv_cache_memory"):
        kv = KVPool(
            spec,
            sizes.pages,
            config.page_size,
            loaded.dtype,
            device.torch_device,
            sizes.state_blocks,
        )
    return sizes, kv


def _slots(config: EngineConfig, loaded: Loaded, max_len: int, device: Device) -> SlotTable:
    """What the device keeps of each running request."""
    shape = SlotShape(
        slots=config.max_num_seqs,
        max_len=max_len,
        page_size=config.page_size,
        vocab_size=loaded.config.vocab_size,
        draft_len=loaded.drafter.draft_len,
    )
    with _allocating("max_num_seqs"):
        return SlotTable(shape, device.torch_device)


def _facts(
    config: EngineConfig,
    loaded: Loaded,
    checkpoint: Checkpoint,
    backend: Backend,
    sizes: KVSizes,
    load_seconds: float,
) -> ModelFacts:
    """What the brain is told."""
    return ModelFacts(
        architecture=architectures_of(checkpoint.config)[0],
        vocab_size=loaded.config.vocab_size,
        max_model_len=sizes.max_len,
        page_size=config.page_size,
        num_pages=sizes.pages,
        kv=loaded.spec,
        state_blocks=sizes.state_blocks,
        fingerprint=checkpoint.fingerprint(),
        dtype=str(loaded.dtype).removeprefix("torch."),
        backend=backend.name,
        weight_bytes=loaded.weight_bytes,
        draft_len=loaded.drafter.draft_len,
        step_tokens=backend.facts().step_tokens,
        load_seconds=load_seconds,
        image_token=loaded.image_token,
    )


def kv_memory(
    config: EngineConfig, spec: KVSpec, max_len: int, device: Device, scratch: int = 0
) -> int:
    """Bytes for KV: what the user names, else a share of what is free, as far as it can be used.

    Args:
        scratch: what a step takes beside it, and is left.

    Raises:
        ConfigError: the user named more memory than there is.
    """
    budget, free = config.kv_cache_memory, device.free_bytes()
    if budget is not None:
        if budget > free:
            raise ConfigError(
                f"kv_cache_memory={shown(budget)} is more than the {free} bytes that are free.",
                setting="kv_cache_memory",
                next_step="Give less, or leave it out: it is then sized from what is free.",
            )
        return budget
    budget = max(min(int(config.gpu_memory_utilization * free), free - scratch), 0)
    if device.torch_device.type == "cpu":
        budget = min(budget, CPU_KV_BYTES)
    return min(budget, full_bytes(config, spec, max_len))


@contextmanager
def _allocating(setting: str) -> Iterator[None]:
    """What a setting asks for may not be there, however much is free."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as why:
        raise ConfigError(
            f"{setting} asks for memory that cannot be had: {why}.",
            setting=setting,
            next_step="Give less.",
        ) from why


@contextmanager
def _phase(times: dict[str, float], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    times[name] = time.perf_counter() - began
