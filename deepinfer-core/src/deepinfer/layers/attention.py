"""Attention with a fused projection, paged KV and rotary positions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer.api.model import DeviceBatch
from deepinfer.api.parallel import ParallelContext
from deepinfer.layers.basic import Linear, RMSNorm
from deepinfer.ops.reference.blocks import AttentionParams
from deepinfer.ops.table import OpSet


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """``window``: how many keys a token sees, itself included; ``norm_eps``: of the norms that
    Qwen3 puts on each query and key head, None without them.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    norm_eps: float | None = None


class Attention:
    """Rows [T, H] and their residual to rows [T, H] and the next residual, behind a norm."""

    def __init__(self, shape: AttentionShape, ops: OpSet, parallel: ParallelContext) -> None:
        self.ops = ops
        self.tp = parallel.tp
        self.shape = shape
        self.qkv = Linear(ops)
        self.o = Linear(ops)
        eps = shape.norm_eps
        self.q_norm = None if eps is None else RMSNorm(ops, eps)
        self.k_norm = None if eps is None else RMSNorm(ops, eps)
        self._params: AttentionParams | None = None

    def behind(
        self,
        norm: RMSNorm,
        x: Tensor,
        residual: Tensor | None,
        batch: DeviceBatch,
        kv: tuple[Tensor, Tensor],
        cos_sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Returns (the rows of the norm of x + residual, x + residual)."""
        if self._params is None:
            self._params = self.params(norm)
        y, residual = self.ops.attention_block(x, residual, self._params, batch, kv, cos_sin)
        return self.tp.all_reduce(y), residual

    def tail_behind(
        self,
        norm: RMSNorm,
        x: Tensor,
        residual: Tensor | None,
        batch: DeviceBatch,
        kv: tuple[Tensor, Tensor],
        cos_sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`behind`, with both results [m, H] for ``batch.logit_rows`` alone; keys and
        values of all rows are written. The bits are the same.
        """
        ops, shape, lines = self.ops, self.shape, batch.logit_rows
        h, residual = (norm(x), x) if residual is None else norm.add(x, residual)
        heads, kv_heads = shape.heads, shape.kv_heads
        rows = self.qkv(h).view(len(h), heads + 2 * kv_heads, shape.head_dim)
        q, k, v = rows[lines, :heads], *rows[:, heads:].chunk(2, 1)
        if self.q_norm is not None and self.k_norm is not None:
            k = self.k_norm(k)
        ops.kv_write(ops.rope(k, batch.positions, cos_sin), v, *kv, batch.kv_slots)
        residual = residual[lines]
        if not len(lines):
            return residual, residual
        if self.q_norm is not None:
            q = self.q_norm(q)
        q = ops.rope(q, batch.positions[lines], cos_sin)
        out, _ = ops.attention(q, *kv, batch.tail, shape.head_dim**-0.5, shape.window)
        return self.tp.all_reduce(self.o(out.flatten(1))), residual

    def params(self, norm: RMSNorm) -> AttentionParams:
        """The parameters as the op takes them; they are loaded before the first step."""
        shape = self.shape
        return AttentionParams(
            norm=norm.weight,
            eps=norm.eps,
            qkv=self.qkv.weight,
            o=self.o.weight,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            window=shape.window,
            qkv_bias=self.qkv.bias,
            o_bias=self.o.bias,
            q_norm=None if self.q_norm is None else self.q_norm.weight,
            k_norm=None if self.k_norm is None else self.k_norm.weight,
            head_eps=shape.norm_eps or 0.0,
        )
