"""Each op as a function of rows: what ``test_rows`` splits, shuffles and surrounds.

A :class:`ByRow` makes tensors whose first dimension are rows, and calls an op on any selection of
them. Weights and shared tables come from a ``Draw`` of their own, so they are the same each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepinfer.testing.conformance.draw import Draw
from deepinfer.testing.conformance.inputs import VOCAB, angles, expert_weights, sampling_rows
from deepinfer.testing.conformance.kit import Run

Rows = tuple[Tensor, ...]


@dataclass(frozen=True)
class ByRow:
    """``make(draw, n)`` gives n rows; ``call(run, rows)`` runs the op on them."""

    op: str
    make: Callable[[Draw, int], Rows]
    call: Callable[[Run, Rows], Any]
    logits: bool = False  # float32 only
    label: str = ""  # tells several of one op apart

    def __call__(self, run: Run, rows: Rows) -> Any:
        """The op's outputs for these rows, weights drawn afresh."""
        run.draw = Draw(run.dtype, seed=77)
        with torch.inference_mode():
            return self.call(run, tuple(run.place(column) for column in rows))


def _linear(run: Run, rows: Rows) -> Any:
    weight = run.weight(run.draw.normal(70, 96, scale=0.2), "linear")
    return run.ops.linear(rows[0], weight, run.put(run.draw.normal(70)))


def _rms_norm(run: Run, rows: Rows) -> Any:
    return run.ops.rms_norm(rows[0], run.weight(run.draw.normal(96), "rms_norm"), 1e-5)


def _add_rms_norm(run: Run, rows: Rows) -> Any:
    weight = run.weight(run.draw.normal(96), "add_rms_norm", "rms_norm")
    return run.ops.add_rms_norm(*rows, weight, 1e-5)


def _gated_mlp(run: Run, rows: Rows) -> Any:
    gate_up = run.weight(run.draw.normal(2 * 40, 96, scale=0.2), "gated_mlp", "linear")
    down = run.weight(run.draw.normal(96, 40, scale=0.2), "gated_mlp", "linear")
    return run.ops.gated_mlp(rows[0], gate_up, down)


def _mlp_block(run: Run, rows: Rows) -> Any:
    uses = ("mlp_block", "gated_mlp", "linear")
    gate_up = run.weight(run.draw.normal(2 * 40, 96, scale=0.2), *uses)
    down = run.weight(run.draw.normal(96, 40, scale=0.2), *uses)
    norm = run.weight(run.draw.normal(96), "rms_norm")
    return run.ops.mlp_block(*rows, norm, 1e-5, gate_up, down)


def _grouped_linear(run: Run, rows: Rows) -> Any:
    """Rows of any order: sorted by expert here, and back."""
    x, expert = rows
    order = expert.argsort(stable=True)
    offsets = torch.bincount(expert, minlength=5).cumsum(0)
    weight = run.weight(run.draw.normal(5, 33, 96, scale=0.2), "grouped_linear")
    bounds = torch.cat((offsets.new_zeros(1), offsets))
    return run.ops.grouped_linear(x[order], weight, bounds)[order.argsort()]


def _moe(run: Run, rows: Rows) -> Any:
    x, ids, shares = rows
    return run.ops.moe(x, ids, shares, *expert_weights(run), 5)


def _embedding(run: Run, rows: Rows) -> Any:
    return run.ops.embedding(rows[0], run.weight(run.draw.normal(VOCAB, 96), "embedding"))


def _rope(run: Run, rows: Rows) -> Any:
    return run.ops.rope(*rows, run.put(angles(40, 16)))


def _route(run: Run, rows: Rows, score: str) -> Any:
    return run.ops.route(rows[0], run.put(run.draw.wide(8)), 3, score, True, 1.0)


def _penalties(run: Run, rows: Rows) -> Any:
    return run.ops.penalties(*rows)


def _logit_bias(run: Run, rows: Rows) -> Any:
    logits, ids, values = rows
    where = torch.arange(len(ids), device=ids.device)
    return run.ops.logit_bias(logits, where, ids, values)


def _apply_bitmask(run: Run, rows: Rows) -> Any:
    logits, mask = rows
    return run.ops.apply_bitmask(logits, mask, torch.arange(len(mask), device=mask.device))


def _logprobs(run: Run, rows: Rows) -> Any:
    return run.ops.logprobs(rows[0], 5, rows[1])


def _by_name(name: str) -> Callable[[Run, Rows], Any]:
    return lambda run, rows: getattr(run.ops, name)(*rows)


def _draws(d: Draw, n: int) -> Rows:
    return d.wide(n, VOCAB), sampling_rows(n), d.wide_ids(n), d.ids(1000, n)


def _filters(d: Draw, n: int) -> Rows:
    top_p = torch.tensor([1.0, 0.4, 0.9])[torch.arange(n) % 3]
    min_p = torch.tensor([0.0, 0.05])[torch.arange(n) % 2]
    return d.wide(n, VOCAB), sampling_rows(n), d.ids(20, n), top_p, min_p


def _text(d: Draw, n: int) -> Rows:
    amounts = d.wide(n), d.wide(n), d.wide(n).abs() + 0.5
    return d.wide(n, VOCAB), d.ids(VOCAB + 1, n, 20) - 1, d.ids(12, n), *amounts


BY_ROW = [
    ByRow("embedding", lambda d, n: (d.ids(VOCAB, n),), _embedding),
    ByRow("linear", lambda d, n: (d.normal(n, 96),), _linear),
    ByRow("rms_norm", lambda d, n: (d.normal(n, 96),), _rms_norm),
    ByRow("add_rms_norm", lambda d, n: (d.normal(n, 96), d.normal(n, 96)), _add_rms_norm),
    ByRow("silu_mul", lambda d, n: (d.normal(n, 66),), _by_name("silu_mul")),
    ByRow("gated_mlp", lambda d, n: (d.normal(n, 96),), _gated_mlp),
    ByRow("mlp_block", lambda d, n: (d.normal(n, 96), d.normal(n, 96)), _mlp_block),
    ByRow("rope", lambda d, n: (d.normal(n, 3, 16), d.ids(40, n)), _rope),
    ByRow("grouped_linear", lambda d, n: (d.normal(n, 96), d.ids(5, n)), _grouped_linear),
    ByRow(
        "moe",
        lambda d, n: (d.normal(n, 32), d.ids(5, n, 2).int(), d.wide(n, 2).abs()),
        _moe,
    ),
    *(
        ByRow(
            "route",
            lambda d, n: (d.grid(n, 8),),
            partial(_route, score=score),
            logits=True,
            label=score,
        )
        for score in ("softmax", "sigmoid", "sqrtsoftplus")
    ),
    ByRow(
        "logit_bias",
        lambda d, n: (d.wide(n, VOCAB), d.ids(VOCAB, n), d.wide(n)),
        _logit_bias,
        logits=True,
    ),
    ByRow("penalties", _text, _penalties, logits=True),
    ByRow(
        "apply_bitmask",
        lambda d, n: (d.wide(n, VOCAB), d.ids(1 << 31, n, 3).int()),
        _apply_bitmask,
        logits=True,
    ),
    ByRow("filter_top", _filters, _by_name("filter_top"), logits=True),
    ByRow("gumbel_argmax", _draws, _by_name("gumbel_argmax"), logits=True),
    ByRow("logprobs", lambda d, n: (d.grid(n, VOCAB), d.ids(VOCAB, n)), _logprobs, logits=True),
    ByRow(
        "accept_prefix",
        lambda d, n: (d.ids(2, n, 4), d.ids(2, n, 3), d.ids(4, n)),
        _by_name("accept_prefix"),
        logits=True,
    ),
]
