"""The block's forward pass, in ops: a few decoder layers that attend to the target's states.

One block of a text whose anchor stands at position p is the anchor and masks. Every row of it sees
the context, positions below p, and all rows of the block, before and behind it (spec 1.1). Keys and
values of the context are made from the target's hidden rows when these become text, and lie in the
target's pages; those of the block lie in pages of its own and are written anew each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from deepinfer.layers import Linear, RMSNorm, assign, rotary_table
from torch import Tensor

if TYPE_CHECKING:
    from deepinfer.api.model import KVPools
    from deepinfer.models.llama import LlamaConfig

    from deepinfer_speculative.dspark.config import DSparkConfig


class DraftRows(NamedTuple):
    """What layers of a draft read of a step's T rows, of whole blocks or of one place of chains.

    ``positions`` int64[T]; ``context`` and ``own``: attention plans in which every row is a request
    of its own, over the target's pages and over ``scratch``, where the drafts' own keys lie;
    ``slots`` int64[T]: where these rows' go there.
    """

    positions: Tensor
    context: Any
    own: Any
    slots: Tensor
    scratch: tuple[Tensor, Tensor]


class DraftLayer:
    """A decoder layer with two sources of keys: the context, and drafts."""

    def __init__(self, shape: LlamaConfig, ops: Any) -> None:
        self.ops, self.shape = ops, shape
        self.input_norm, self.post = RMSNorm(ops, shape.eps), RMSNorm(ops, shape.eps)
        self.q, self.kv, self.o = Linear(ops), Linear(ops), Linear(ops)
        self.gate_up, self.down = Linear(ops), Linear(ops)
        self.q_norm = RMSNorm(ops, shape.eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(ops, shape.eps) if shape.qk_norm else None

    def keys(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rows as the projections read them to turned keys and raw values, each [T, HKV, D]."""
        heads = self.shape.kv_heads
        rows = self.kv(x).view(len(x), 2 * heads, self.shape.head_dim)
        k = rows[:, :heads]
        k = k if self.k_norm is None else self.k_norm(k)
        return self.ops.rope(k, positions, cos_sin), rows[:, heads:]

    def joined(self, far: tuple[Tensor, Tensor], near: tuple[Tensor, Tensor]) -> Tensor:
        """Attention over both sources, float32[T, HQ, D], from (o, lse) of each."""
        return merge(*far, *near)

    def behind_norms(
        self,
        x: Tensor,
        residual: Tensor,
        rows: DraftRows,
        kv: tuple[Tensor, Tensor],
        cos_sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Rows as the projections read them and the residual [T, H]; returns rows [T, H] and the
        next residual.
        """
        ops, shape = self.ops, self.shape
        q = self.q(x).view(len(x), shape.heads, shape.head_dim)
        q = q if self.q_norm is None else self.q_norm(q)
        q = ops.rope(q, rows.positions, cos_sin)
        ops.kv_write(*self.keys(x, rows.positions, cos_sin), *rows.scratch, rows.slots)
        scale = shape.head_dim**-0.5
        far = ops.attention(q, *kv, rows.context, scale)
        near = ops.attention(q, *rows.scratch, rows.own, scale)
        x = self.o(self.joined(far, near).to(x.dtype).flatten(1))
        y, total = ops.mlp_block(
            x, residual, self.post.weight, self.post.eps, self.gate_up.weight, self.down.weight
        )
        return y, total


class DSparkLayer(DraftLayer):
    """One layer of a block."""

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        rows: DraftRows,
        kv: tuple[Tensor, Tensor],
        cos_sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Rows [T, H] and their residual; returns the next pair."""
        if residual is None:
            x, residual = self.input_norm(x), x
        else:
            x, residual = self.input_norm.add(x, residual)
        return self.behind_norms(x, residual, rows, kv, cos_sin)


class DraftModel:
    """What drafts from hidden states have around their layers.

    ``embed`` and ``head`` have no weight until :meth:`share` where the checkpoint has none.
    """

    def __init__(self, shape: LlamaConfig, ops: Any, length: int) -> None:
        """``length``: positions that drafts can have."""
        self.ops = ops
        self.embed, self.head, self.fc = Linear(ops), Linear(ops), Linear(ops)
        self.norm = RMSNorm(ops, shape.eps)
        device = None if ops.context is None else ops.context.device
        self.cos_sin = rotary_table(shape.rope, length, device)
        self.dtype = None if ops.context is None else ops.context.activation_dtype

    def load(self, parameter: str, value: Any) -> None:
        """Take one prepared parameter, by the name in its rule."""
        assign(self, parameter, value)

    def share(self, target: Any) -> None:
        """Take embedding and head of the target where the checkpoint has none."""
        if self.embed.weight is None:
            self.embed = target.embed
        if self.head.weight is None:
            self.head = target.head

    def embedded(self, ids: Tensor) -> Tensor:
        """ids int64[T] to rows [T, H] in the activations' type."""
        x: Tensor = self.ops.embedding(ids, self.embed.weight)
        return x if self.dtype is None else x.to(self.dtype)


class Backbone(DraftModel):
    """Embedding, context projection, layers, final norm and heads."""

    def __init__(self, config: DSparkConfig, ops: Any, length: int) -> None:
        """``length``: positions that blocks can have."""
        super().__init__(config.shape, ops, length)
        self.config = config
        self.hidden_norm = RMSNorm(ops, config.shape.eps)
        self.layers = [DSparkLayer(config.shape, ops) for _ in range(config.shape.layers)]
        self.w1, self.w2, self.sure = Linear(ops), Linear(ops), Linear(ops)

    def write(self, joined: Tensor, positions: Tensor, slots: Tensor, kv: KVPools) -> None:
        """Context keys and values of target rows into their pages: [T, taps × H], the tapped layers
        side by side, positions and slots int64[T]; a row with slot −1 is not written.
        """
        x = self.hidden_norm(self.fc(joined))
        for index, layer in enumerate(self.layers):
            k, v = layer.keys(x, positions, self.cos_sin)
            self.ops.kv_write(k, v, *kv.layer(index), slots)

    def empty(self, slots: Tensor, kv: KVPools) -> None:
        """Keys and values of zero at these slots, int64[n]."""
        shape = self.config.shape
        for index in range(len(self.layers)):
            pools = kv.layer(index)
            zero = pools[0].new_zeros((len(slots), shape.kv_heads, shape.head_dim))
            self.ops.kv_write(zero, zero, *pools, slots)

    def block(self, ids: Tensor, rows: DraftRows, kv: KVPools) -> Tensor:
        """ids int64[T] to rows [T, H] behind the final norm."""
        x = self.embedded(ids)
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, rows, kv.layer(index), self.cos_sin)
        assert residual is not None, "a draft has at least one layer"
        return self.norm.add(x, residual)[0]


def merge(o: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Attention over two sets of keys from that over each: float32[T, HQ, D].

    o [T, HQ, D] with lse float32[T, HQ] (−inf and 0 where the set is empty; not both).
    """
    top = torch.maximum(lse, other_lse)
    mine, theirs = torch.exp(lse - top)[..., None], torch.exp(other_lse - top)[..., None]
    return (o.float() * mine + other.float() * theirs) / (mine + theirs)
