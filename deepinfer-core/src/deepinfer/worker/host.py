"""One rank's start: from a configuration to a loaded model, its memory and its runner.

Where you are: behind ``executors.local``, on the thread that will run the steps. Order: find and
open the checkpoint, open the device, choose ops, build and load the model, give what is left to KV.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from deepinfer import settings
from deepinfer.api.backend import OpContext
from deepinfer.api.executor import ModelFacts
from deepinfer.api.speculative import DrafterTarget
from deepinfer.errors import ConfigError, UnsupportedError, shown
from deepinfer.models.checkpoint import open_checkpoint
from deepinfer.models.dummy import make_weights
from deepinfer.models.registry import architectures_of, image_reader, model_config
from deepinfer.models.source import resolve
from deepinfer.models.weights import LoadPlan, load_weights
from deepinfer.ops.backend import build_ops
from deepinfer.parallel import single
from deepinfer.worker.drafting import (
    DraftPools,
    drafter_context,
    drafter_needs,
    first_draft_layer,
    open_drafter,
    with_drafts,
)
from deepinfer.worker.dry_run import Largest, scratch_bytes
from deepinfer.worker.kvpool import KVPool
from deepinfer.worker.measure import device_name, measure_steps
from deepinfer.worker.runner import ModelRunner, Rig
from deepinfer.worker.sizes import full_bytes, kv_options, size_kv
from deepinfer.worker.slots import SlotShape, SlotTable

if TYPE_CHECKING:
    from deepinfer.api.backend import Backend, Device
    from deepinfer.api.kv import KVSpec
    from deepinfer.api.model import Model, ModelAdapter, SeeingModel
    from deepinfer.api.speculative import Drafter, Verifier
    from deepinfer.config import EngineConfig
    from deepinfer.models.checkpoint import Checkpoint
    from deepinfer.ops.table import OpSet
    from deepinfer.resolution import Resolution

log = logging.getLogger(__name__)

CPU_KV_BYTES = 1 << 30
"""KV on a CPU where nobody says otherwise; its pages cost memory when they are first used."""


@dataclass(slots=True)
class _Loaded:
    """A model and what it was loaded with; ``image_token`` −1 if it takes no images.

    ``spec``: KV of the target and, from layer ``first_draft_layer`` on, of the drafter.
    """

    model: Model
    ops: OpSet
    config: Any
    spec: KVSpec
    first_draft_layer: int
    drafter: Drafter
    verifier: Verifier
    dtype: torch.dtype
    weight_bytes: int
    image_token: int


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
                loaded = _load(config, resolution, checkpoint, backend, device)
            with _phase(times, "kv"):
                where = backend, device
                host = cls._equip(config, resolution, loaded, checkpoint, where, times)
            times.update(getattr(device, "seconds", {}))
            return host
        except BaseException:
            device.close()
            raise

    @classmethod
    def _equip(
        cls,
        config: EngineConfig,
        resolution: Resolution,
        loaded: _Loaded,
        checkpoint: Checkpoint,
        where: tuple[Backend, Device],
        times: dict[str, float],
    ) -> Host:
        backend, device = where
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
        drafter = loaded.drafter
        shape = SlotShape(
            slots=config.max_num_seqs,
            max_len=sizes.max_len,
            page_size=config.page_size,
            vocab_size=loaded.config.vocab_size,
            draft_len=drafter.draft_len,
        )
        with _allocating("max_num_seqs"):
            slots = SlotTable(shape, device.torch_device)
        drafter.bind(DraftPools(kv, loaded.first_draft_layer), slots)
        rig = Rig(
            model=loaded.model,
            ops=loaded.ops,
            spec=spec,
            kv=kv,
            device=device,
            slots=slots,
            drafter=drafter,
            verifier=loaded.verifier,
            seeing=cast("SeeingModel", loaded.model) if loaded.image_token >= 0 else None,
            image_token=loaded.image_token,
        )
        facts = ModelFacts(
            architecture=architectures_of(checkpoint.config)[0],
            vocab_size=loaded.config.vocab_size,
            max_model_len=sizes.max_len,
            page_size=config.page_size,
            num_pages=sizes.pages,
            kv=spec,
            state_blocks=sizes.state_blocks,
            fingerprint=checkpoint.fingerprint(),
            dtype=str(loaded.dtype).removeprefix("torch."),
            backend=backend.name,
            weight_bytes=loaded.weight_bytes,
            draft_len=drafter.draft_len,
            step_tokens=backend.facts().step_tokens,
            load_seconds=times["weights"],
            image_token=loaded.image_token,
        )
        return cls(facts, ModelRunner(rig), device, kv, times)

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


def _load(
    config: EngineConfig,
    resolution: Resolution,
    checkpoint: Checkpoint,
    backend: Backend,
    device: Device,
) -> _Loaded:
    adapter: ModelAdapter = resolution.load("model")()
    dtype = choose_dtype(config.dtype, checkpoint.config, device.torch_device)
    mine = model_config(adapter, checkpoint)
    limit = mine.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is longer than the model's own {limit}.",
            setting="max_model_len",
            next_step=f"Give at most {limit}, or leave it out.",
        )
    mine = replace(mine, max_model_len=config.max_model_len or limit)
    drafting = drafter_context(config, resolution, (mine, checkpoint), dtype)
    needs = drafter_needs(resolution, drafting)
    spec = adapter.kv_spec(mine, kv_options(config, dtype.itemsize, needs.draft_len))
    rows = backend.facts().activations
    context = OpContext(
        dtype=dtype,
        device=device.torch_device,
        invariant=config.batch_invariant,
        quantization=config.quantization,
        num_threads=config.num_threads or torch.get_num_threads(),
        page_size=config.page_size,
        head_dim=spec.groups[0].head_dim or None,
        activation_dtype=None if rows is None else getattr(torch, rows),
        cache_dir=settings.cache_dir() / backend.name,
    )
    _check_page_size(config.page_size, backend)
    by_reference = {"apply_bitmask"} if config.grammar_acceleration == "cpu" else set()
    ops = build_ops(backend, context, by_reference)
    _check_acceleration(config, ops, backend)
    parallel = single()
    model = adapter.build(mine, ops, parallel)
    dequantize = config.dequantize_weights
    if dequantize is None:
        dequantize = backend.facts().dequantize
    plan = LoadPlan(known=adapter.unread, parallel=parallel, dequantize=dequantize)
    rules = adapter.weights(mine)
    if config.load_format == "dummy":
        nbytes = make_weights(model, rules, ops, dtype, plan)
    else:
        nbytes = load_weights(model, rules, checkpoint, ops, dtype, plan=plan)
    reader = image_reader(adapter, checkpoint.config)
    sampler = resolution.load("sampler")(ops)
    target = DrafterTarget(
        model=model, ops=ops, sampler=sampler, device=device.torch_device, dtype=dtype
    )
    drafter, verifier = open_drafter(resolution, drafting, target)
    return _Loaded(
        model=model,
        ops=ops,
        config=mine,
        spec=with_drafts(spec, needs),
        first_draft_layer=first_draft_layer(spec),
        drafter=drafter,
        verifier=verifier,
        dtype=dtype,
        weight_bytes=nbytes + needs.weight_bytes,
        image_token=-1 if reader is None else reader.token,
    )


def _check_acceleration(config: EngineConfig, ops: OpSet, backend: Backend) -> None:
    """``grammar_acceleration="cuda"`` is a promise: a kernel, on that device."""
    if config.grammar_acceleration != "cuda":
        return
    if backend.device_type != "cuda":
        why = f"backend {backend.name!r} runs on {backend.device_type!r}"
    elif ops.origin["apply_bitmask"] == "reference":
        why = f"backend {backend.name!r} has no kernel for the op apply_bitmask"
    else:
        return
    raise UnsupportedError(
        f"grammar_acceleration='cuda' cannot be kept: {why}.",
        setting="grammar_acceleration",
        next_step="Leave it at 'auto', which takes the best there is.",
    )


def choose_dtype(asked: str, raw: dict[str, Any], device: torch.device) -> torch.dtype:
    """``auto``: float32 on a CPU, else the checkpoint's own (bfloat16 if it does not say)."""
    if asked == "auto":
        own = str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16")
        asked = "float32" if device.type == "cpu" or own == "float32" else "bfloat16"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[asked]


def _check_page_size(page_size: int, backend: Backend) -> None:
    known = backend.facts().page_sizes
    if page_size not in known:
        raise ConfigError(
            f"page_size={page_size}: backend {backend.name!r} has pages of "
            f"{', '.join(map(str, known))} tokens.",
            setting="page_size",
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
