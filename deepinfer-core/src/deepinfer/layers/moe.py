"""A router and its gated experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.api.parallel import ParallelContext
from deepinfer.layers.basic import Linear, RMSNorm
from deepinfer.ops.table import OpSet


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEShape:
    """``experts`` in all, ``chosen`` per token; ``renorm``: chosen weights sum to 1."""

    experts: int
    chosen: int
    renorm: bool
    score: str = "softmax"
    scale: float = 1.0


class MoE:
    """Rows [T, H] to rows [T, H], before the residual. The router's logits are float32."""

    def __init__(self, shape: MoEShape, ops: OpSet, parallel: ParallelContext) -> None:
        self.shape = shape
        self.ops = ops
        self.tp = parallel.tp
        self.router = Linear(ops)
        self.bias: Tensor | None = None
        self.gate_up: Any = None
        self.down: Any = None

    def behind(self, norm: RMSNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (the rows of the norm of x + residual, x + residual)."""
        x, residual = norm.add(x, residual)
        return self(x), residual

    def __call__(self, x: Tensor) -> Tensor:
        shape = self.shape
        ids, weights = self.ops.route(
            self.router(x, torch.float32),
            self.bias,
            shape.chosen,
            shape.score,
            shape.renorm,
            shape.scale,
        )
        y = self.ops.moe(x, ids, weights, self.gate_up, self.down, shape.experts)
        return self.tp.all_reduce(y)
