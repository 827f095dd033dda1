"""The gated feed-forward block, gate and up fused."""

from __future__ import annotations

from torch import Tensor

from deepinfer.api.parallel import ParallelContext
from deepinfer.layers.basic import Linear, RMSNorm
from deepinfer.ops.reference.blocks import MLPParams
from deepinfer.ops.table import OpSet


class MLP:
    """Rows [T, H] to rows [T, H], before the residual."""

    def __init__(self, ops: OpSet, parallel: ParallelContext) -> None:
        self.ops = ops
        self.tp = parallel.tp
        self.gate_up = Linear(ops)
        self.down = Linear(ops)

    def behind(self, norm: RMSNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (the rows of the norm of x + residual, x + residual)."""
        params = self.params(norm)
        if params is not None:
            y, residual = self.ops.mlp_block(x, residual, *params)
            return self.tp.all_reduce(y), residual
        x, residual = norm.add(x, residual)
        return self(x), residual

    def params(self, norm: RMSNorm) -> MLPParams | None:
        """The parameters as ``mlp_block`` takes them; None with biases, which it lacks."""
        if self.gate_up.bias is not None or self.down.bias is not None:
            return None
        return MLPParams(norm.weight, norm.eps, self.gate_up.weight, self.down.weight)

    def __call__(self, x: Tensor) -> Tensor:
        if self.gate_up.bias is None and self.down.bias is None:
            return self.tp.all_reduce(self.ops.gated_mlp(x, self.gate_up.weight, self.down.weight))
        return self.tp.all_reduce(self.down(self.ops.silu_mul(self.gate_up(x))))
