"""A rank's model with its weights, its ops and its drafter: :func:`load`.

Where you are: the second half of ``host``'s start; the device is open, and memory for KV is not
taken yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from deepinfer import settings
from deepinfer.api.backend import OpContext
from deepinfer.api.speculative import DrafterTarget
from deepinfer.errors import ConfigError, UnsupportedError
from deepinfer.models.dummy import make_weights
from deepinfer.models.registry import image_reader, model_config
from deepinfer.models.weights import LoadPlan, load_weights
from deepinfer.ops.backend import build_ops
from deepinfer.parallel import single
from deepinfer.worker.drafting import (
    drafter_context,
    drafter_needs,
    first_draft_layer,
    open_drafter,
    with_drafts,
)
from deepinfer.worker.sizes import kv_options

if TYPE_CHECKING:
    from deepinfer.api.backend import Backend, Device
    from deepinfer.api.kv import KVSpec
    from deepinfer.api.model import Model, ModelAdapter
    from deepinfer.api.speculative import Drafter, Verifier
    from deepinfer.config import EngineConfig
    from deepinfer.models.checkpoint import Checkpoint
    from deepinfer.ops.table import OpSet
    from deepinfer.resolution import Resolution


@dataclass(slots=True)
class Loaded:
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


def load(
    config: EngineConfig,
    resolution: Resolution,
    checkpoint: Checkpoint,
    backend: Backend,
    device: Device,
) -> Loaded:
    """Build the model that the plugins chose, and read its weights.

    Raises:
        DeepInferError: what of the model or the settings does not fit, by name.
    """
    adapter: ModelAdapter = resolution.load("model")()
    dtype = choose_dtype(config.dtype, checkpoint.config, device.torch_device)
    mine = model_config(adapter, checkpoint)
    mine = replace(mine, max_model_len=_length(config, mine.max_position_embeddings))
    drafting = drafter_context(config, resolution, (mine, checkpoint), dtype)
    needs = drafter_needs(resolution, drafting)
    spec = adapter.kv_spec(mine, kv_options(config, dtype.itemsize, needs.draft_len))
    ops = _ops(config, backend, device, dtype, spec)
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
        model=model,
        ops=ops,
        sampler=sampler,
        device=device.torch_device,
        dtype=dtype,
        record=getattr(device, "record", None),
    )
    drafter, verifier = open_drafter(resolution, drafting, target)
    return Loaded(
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


def _length(config: EngineConfig, limit: int) -> int:
    """The longest text: what is asked, within what the model can."""
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is longer than the model's own {limit}.",
            setting="max_model_len",
            next_step=f"Give at most {limit}, or leave it out.",
        )
    return config.max_model_len or limit


def _ops(
    config: EngineConfig, backend: Backend, device: Device, dtype: torch.dtype, spec: KVSpec
) -> OpSet:
    """The backend's ops under these settings, completed by the reference."""
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
    return ops


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
