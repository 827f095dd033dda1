"""Expert ops: choose, sort, multiply, combine.

Weights of all experts lie in one tensor, [E, N, K]. Token t's j-th choice is *slot* j of t.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.ops.table import op

_SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: torch.softmax(logits, -1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.sqrt(F.softplus(logits)),
}


@op
def route(
    logits: Tensor, bias: Tensor | None, k: int, score: str, renorm: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Choose k experts per token.

    logits float32[T, E]; score "softmax" | "sigmoid" | "sqrtsoftplus". Choice by score + bias
    (float32[E], or [T, E] where tokens differ), highest first, ties to the lower id; weights from
    the score alone, divided by their sum + 1e−20 if ``renorm``, then times ``scale``. Returns (ids
    int32[T, k], weights float32[T, k]).
    """
    scores = _SCORES[score](logits)
    return select(scores, bias, k, renorm, scale)


def select(
    scores: Tensor, bias: Tensor | None, k: int, renorm: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """:func:`route` after the score function. The k weights are summed in slot order."""
    ranked = scores if bias is None else scores + bias
    ids = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(-1, ids)
    if renorm:
        total = weights[:, 0]
        for slot in range(1, k):
            total = total + weights[:, slot]
        weights = weights / (total + 1e-20)[:, None]
    return ids.int(), weights * scale


@op
def permute(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort slots by expert, tokens in order within one.

    ids int32[T, k] -> (order int64[T·k], offsets int64[E+1]). ``order[r]`` is the flat slot t·k + j
    that row r holds; rows of expert e are ``offsets[e] … offsets[e+1]−1``. Slots whose id is not in
    [0, E), as those of experts elsewhere, come last and belong to nobody.
    """
    flat = ids.flatten().long()
    flat = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts]
    return order, F.pad(counts.cumsum(0), (1, 0))


@op
def grouped_linear(
    x: Tensor, w: Tensor, offsets: Tensor, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Each expert's rows times its weight: row r of expert e is ``x[r] · w[e]ᵀ``.

    x [R, K] sorted by expert, w [E, N, K], offsets int64[E+1] -> [R, N] of ``out_dtype`` (x's if
    None). Rows from ``offsets[E]`` on are 0. Arithmetic as in ``linear``.
    """
    y = x.new_zeros((len(x), w.shape[1]), dtype=out_dtype or x.dtype)
    bounds = offsets.tolist()
    for expert, (begin, end) in enumerate(pairwise(bounds)):
        if begin < end:
            y[begin:end] = F.linear(x[begin:end].float(), w[expert].float()).to(y.dtype)
    return y


@op
def moe(
    ops: Any,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Any,
    down: Any,
    num_experts: int,
) -> Tensor:
    """Gated experts. x [T, H], ids int32[T, k], weights float32[T, k], gate_up [E, 2·I, H],
    down [E, H, I] -> [T, H] of x's dtype.

    The down projections stay float32; they are weighted and added in ascending slot order, with
    one rounding at the end. Slots of experts elsewhere add nothing.
    """
    tokens, k = ids.shape
    order, offsets = ops.permute(ids, num_experts)
    hidden = ops.silu_mul(ops.grouped_linear(x[order // k], gate_up, offsets))
    rows = ops.grouped_linear(hidden, down, offsets, torch.float32)
    slots = torch.empty_like(rows)
    slots[order] = rows
    slots = slots.view(tokens, k, rows.shape[-1])
    total = slots[:, 0] * weights[:, :1]
    for slot in range(1, k):
        total = total + slots[:, slot] * weights[:, slot : slot + 1]
    return total.to(x.dtype)
