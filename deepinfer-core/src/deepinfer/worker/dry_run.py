"""How much memory a step takes beside weights and KV, found out by running one.

Where you are: in ``host``, between weights and KV, on a device that measures. The largest step that
the scheduler plans runs on a text of nobody, a single page of KV, and writes nowhere; the KV pool
then leaves that much free.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepinfer.api.model import DeviceBatch
from deepinfer.worker.kvpool import KVPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from deepinfer.api.backend import Device
    from deepinfer.api.kv import KVSpec
    from deepinfer.api.model import Model
    from deepinfer.ops.table import OpSet

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """A step's most: token ``rows``, and ``lines`` of logits, of ``vocab`` ids each."""

    rows: int
    lines: int
    vocab: int
    page_size: int
    dtype: torch.dtype


def scratch_bytes(model: Model, ops: OpSet, spec: KVSpec, device: Device, largest: Largest) -> int:
    """Bytes that the largest step takes for a while.

    Where it does not fit, that of half its rows, since steps are then cut (``worker.shortage``). 0
    on a device that does not measure, and for models that keep more than pairs of keys and values,
    whose batches only the runner can build.
    """
    measure: Callable[[Callable[[], object]], int] | None = getattr(device, "measure", None)
    if measure is None or any(group.entry is not None for group in spec.groups):
        return 0
    pool = KVPool(spec, 1, largest.page_size, largest.dtype, device.torch_device)
    rows = largest.rows
    while True:
        batch = _batch(ops, device.torch_device, rows, largest)
        try:
            return measure(lambda batch=batch: _step(model, ops, batch, pool, largest))  # type: ignore[misc]
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
        log.warning("A step of %d rows does not fit beside the weights; steps will be cut.", rows)
        rows //= 2


def _batch(ops: OpSet, device: torch.device, rows: int, largest: Largest) -> DeviceBatch:
    """Requests of a page of tokens each, all of the one page; slot −1 writes nowhere."""
    size = largest.page_size
    place = torch.arange(rows, device=device)
    requests = -(-rows // size)
    cu_q = (torch.arange(requests + 1, device=device) * size).clamp(max=rows)
    attn = ops.plan_attention(
        torch.zeros((requests, 1), dtype=torch.int32, device=device),
        cu_q[1:] - cu_q[:-1],
        cu_q.int(),
        size,
    )
    return DeviceBatch(
        ids=torch.zeros_like(place),
        positions=place % size,
        row_of_token=place // size,
        kv_slots=torch.full_like(place, -1),
        attn=attn,
        logit_rows=place[: largest.lines],
    )


def _step(model: Model, ops: OpSet, batch: DeviceBatch, pool: KVPool, largest: Largest) -> None:
    """All layers, logits, and the hungriest of the draw's stages."""
    hidden = model.forward(batch, pool)
    logits = model.logits(hidden[batch.logit_rows])
    one = torch.ones(len(logits), device=logits.device)
    ops.filter_top(logits, one, one.long() * largest.vocab, one * 0.9, one * 0.0)
