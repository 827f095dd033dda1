"""Attention with a fused projection, paged KV and rotary positions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer.api.model import DeviceBatch
from deepinfer.api.parallel import ParallelContext
from deepinfer.layers.basic import Linear, RMSNorm
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
    """Rows [T, H] to rows [T, H], before the residual."""

    def __init__(self, shape: AttentionShape, ops: OpSet, parallel: ParallelContext) -> None:
        self.ops = ops
        self.tp = parallel.tp
        self.shape = shape
        self.scale = shape.head_dim**-0.5
        self.qkv = Linear(ops)
        self.o = Linear(ops)
        eps = shape.norm_eps
        self.q_norm = None if eps is None else RMSNorm(ops, eps)
        self.k_norm = None if eps is None else RMSNorm(ops, eps)

    def __call__(
        self, x: Tensor, batch: DeviceBatch, kv: tuple[Tensor, Tensor], cos_sin: Tensor
    ) -> Tensor:
        ops, k_cache, v_cache = self.ops, *kv
        q, k, v = self._heads(self.qkv(x), batch.positions, cos_sin)
        ops.kv_write(k, v, k_cache, v_cache, batch.kv_slots)
        out, _ = ops.attention(q, k_cache, v_cache, batch.attn, self.scale, self.shape.window)
        return self.tp.all_reduce(self.o(out.flatten(1)))

    def _heads(
        self, qkv: Tensor, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Fused rows [T, (HQ + 2·HKV)·D] to queries, keys and values [T, heads, D]."""
        ops, heads, kv_heads = self.ops, self.shape.heads, self.shape.kv_heads
        rows = qkv.view(len(qkv), -1, self.shape.head_dim)
        v = rows[:, heads + kv_heads :]
        if self.q_norm is None or self.k_norm is None:
            # Queries and keys lie side by side and turn alike: one call.
            turned = ops.rope(rows[:, : heads + kv_heads], positions, cos_sin)
            return turned[:, :heads], turned[:, heads:], v
        q = ops.rope(self.q_norm(rows[:, :heads]), positions, cos_sin)
        k = ops.rope(self.k_norm(rows[:, heads : heads + kv_heads]), positions, cos_sin)
        return q, k, v
