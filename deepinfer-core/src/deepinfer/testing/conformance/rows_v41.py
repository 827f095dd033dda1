"""DeepSeek-V4.1's ops as functions of rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from deepinfer.ops.reference.scaled import Kind
from deepinfer.testing.conformance.draw import Draw
from deepinfer.testing.conformance.inputs_v41 import (
    GROUPED,
    KINDS,
    LINEAR,
    STORAGES,
    STREAMS,
    Storage,
    engram_hash,
    engram_params,
    hyper_params,
    moe_params,
    scaled_experts,
    scaled_weight,
)
from deepinfer.testing.conformance.kit import Run
from deepinfer.testing.conformance.rows import ByRow, Rows


def _quantize(run: Run, rows: Rows, kind: Kind) -> Any:
    return run.ops.quantize(rows[0], kind)


def _pack_rows(run: Run, rows: Rows, kind: Kind) -> Any:
    return run.ops.pack_rows(rows[0], kind)


def _unpack_rows(run: Run, rows: Rows, kind: Kind) -> Any:
    return run.ops.unpack_rows(rows[0], kind, run.dtype)


def _scaled_linear(run: Run, rows: Rows, storage: Storage) -> Any:
    return run.ops.scaled_linear(rows[0], scaled_weight(run, storage, (70, 96), *LINEAR))


def _grouped_scaled_linear(run: Run, rows: Rows, storage: Storage) -> Any:
    """Rows of any order: sorted by expert here, and back."""
    x, expert = rows
    order = expert.argsort(stable=True)
    offsets = torch.bincount(expert, minlength=5).cumsum(0)
    weight = scaled_weight(run, storage, (5, 64, 96), *GROUPED)
    bounds = torch.cat((offsets.new_zeros(1), offsets))
    return run.ops.grouped_scaled_linear(x[order], weight, bounds)[order.argsort()]


def _scaled_moe(run: Run, rows: Rows, storage: Storage) -> Any:
    return run.ops.scaled_moe(*rows, *scaled_experts(run, storage), 5, None)


def _scaled_moe_block(run: Run, rows: Rows, storage: Storage) -> Any:
    x, image = rows
    params = moe_params(run, storage)._replace(limit=None)  # some backends have none
    return run.ops.scaled_moe_block(x, image == 1, params)


def _route(run: Run, rows: Rows) -> Any:
    return run.ops.route(*rows, 3, "sqrtsoftplus", True, 1.5)


def _hyper_mix(run: Run, rows: Rows) -> Any:
    p = hyper_params(run)
    return run.ops.hyper_mix(rows[0], p.fn, p.scale, p.base, p.iters, p.eps, p.norm_eps)


def _hyper_collapse(run: Run, rows: Rows) -> Any:
    return run.ops.hyper_collapse(*rows)


def _hyper_merge(run: Run, rows: Rows) -> Any:
    return run.ops.hyper_merge(*rows)


def _hyper_open(run: Run, rows: Rows) -> Any:
    return run.ops.hyper_open(*rows, hyper_params(run))


def _engram_rows(run: Run, rows: Rows) -> Any:
    return run.ops.engram_rows(*rows, engram_hash(run))


def _engram_gate(run: Run, rows: Rows) -> Any:
    x, keys, value, active = rows
    weights = (run.put(run.draw.normal(STREAMS, 48)) for _ in range(2))
    return run.ops.engram_gate(x, keys, value, *weights, 1e-20, active == 1)


def _engram_block(run: Run, rows: Rows, storage: Storage) -> Any:
    x, read, active = rows
    return run.ops.engram_block(x, read, active == 1, engram_params(run, storage))


def _streams(d: Draw, n: int, width: int = 48) -> Any:
    return d.normal(n, STREAMS, width)


def _each(op: str, make: Any, call: Any, values: tuple[str, ...], name: str) -> list[ByRow]:
    return [ByRow(op, make, partial(call, **{name: v}), label=v) for v in values]


BY_ROW_V41 = [
    *_each("quantize", lambda d, n: (d.normal(n, 96),), _quantize, KINDS, "kind"),
    *_each("pack_rows", lambda d, n: (d.normal(n, 96),), _pack_rows, KINDS, "kind"),
    *_each(
        "unpack_rows",
        lambda d, n: (d.ids(120, n, 72).to(torch.uint8),),
        _unpack_rows,
        ("nvfp4",),
        "kind",
    ),
    *_each(
        "unpack_rows",
        lambda d, n: (d.ids(120, n, 66).to(torch.uint8),),
        _unpack_rows,
        ("fp8",),
        "kind",
    ),
    *_each("scaled_linear", lambda d, n: (d.normal(n, 96),), _scaled_linear, STORAGES, "storage"),
    *_each(
        "grouped_scaled_linear",
        lambda d, n: (d.normal(n, 96), d.ids(5, n)),
        _grouped_scaled_linear,
        STORAGES,
        "storage",
    ),
    *_each(
        "scaled_moe",
        lambda d, n: (d.normal(n, 64), d.ids(5, n, 2).int(), d.wide(n, 2).abs()),
        _scaled_moe,
        STORAGES,
        "storage",
    ),
    *_each(
        "scaled_moe_block",
        lambda d, n: (d.normal(n, 64), d.ids(2, n)),
        _scaled_moe_block,
        STORAGES,
        "storage",
    ),
    ByRow("route", lambda d, n: (d.grid(n, 8), d.wide(n, 8)), _route, logits=True, label="biases"),
    ByRow("hyper_mix", lambda d, n: (_streams(d, n),), _hyper_mix),
    ByRow("hyper_collapse", lambda d, n: (_streams(d, n), d.wide(n, STREAMS)), _hyper_collapse),
    ByRow(
        "hyper_merge",
        lambda d, n: (
            _streams(d, n),
            d.normal(n, 48),
            d.wide(n, STREAMS),
            d.wide(n, STREAMS, STREAMS),
        ),
        _hyper_merge,
    ),
    ByRow("hyper_open", lambda d, n: (_streams(d, n), d.wide(n, STREAMS)), _hyper_open),
    ByRow(
        "engram_rows", lambda d, n: (d.ids(50, n), d.ids(51, n, 3) - 1), _engram_rows, logits=True
    ),
    ByRow(
        "engram_gate",
        lambda d, n: (_streams(d, n), _streams(d, n), d.normal(n, 48), d.ids(2, n)),
        _engram_gate,
    ),
    *_each(
        "engram_block",
        lambda d, n: (_streams(d, n, 32), d.normal(n, 96), d.ids(2, n)),
        _engram_block,
        STORAGES[:2],
        "storage",
    ),
]
