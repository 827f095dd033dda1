"""The head's forward pass, in ops: one decoder layer over pairs of a hidden state and a token.

The pair at position p is the token that stands there and the target's state one place before it.
What the layer makes of it predicts the token behind p, and is the state of the next pair while the
target has not run. Keys and values of pairs lie at p in the target's pages, so that they follow
from the text up to p and a prefix hit finds the right ones. At position 0 there is no pair: its key
and value are zeros, and :func:`join` takes what they add to a softmax away again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from deepinfer.layers import Linear, RMSNorm, assign, rotary_table
from torch import Tensor

if TYPE_CHECKING:
    from deepinfer_speculative.eagle3.config import Eagle3Config

Pages = tuple[Tensor, Tensor]


class DraftRows(NamedTuple):
    """What the layer reads of R drafts at one place of their chains.

    ``positions`` int64[R]; ``context``: attention plan over the pages, all before the anchor;
    ``chain``: the same over ``scratch``, where the chain's own keys lie; ``slots`` int64[R]: where
    this one's goes there.
    """

    positions: Tensor
    context: Any
    chain: Any
    slots: Tensor
    scratch: Pages


class PairLayer:
    """A decoder layer that reads pairs."""

    def __init__(self, config: Eagle3Config, ops: Any) -> None:
        shape = config.shape
        self.ops, self.config = ops, config
        self.input_norm, self.hidden_norm = RMSNorm(ops, shape.eps), RMSNorm(ops, shape.eps)
        self.q, self.kv, self.o = Linear(ops), Linear(ops), Linear(ops)
        self.q_norm = RMSNorm(ops, shape.eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(ops, shape.eps) if shape.qk_norm else None
        self.post = RMSNorm(ops, shape.eps)
        self.gate_up, self.down = Linear(ops), Linear(ops)

    def joined(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs as the projections read them [T, 2H], and the residual [T, H]."""
        normed = self.hidden_norm(states)
        residual = normed if self.config.norm_before_residual else states
        return torch.cat((self.input_norm(embedded), normed), -1), residual

    def keys(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Turned keys and raw values of pairs [T, 2H], each [T, HKV, D]."""
        heads = self.config.shape.kv_heads
        rows = self.kv(x).view(len(x), 2 * heads, self.config.shape.head_dim)
        k = rows[:, :heads]
        k = k if self.k_norm is None else self.k_norm(k)
        return self.ops.rope(k, positions, cos_sin), rows[:, heads:]

    def __call__(
        self, x: Tensor, residual: Tensor, rows: DraftRows, pages: Pages, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Pairs [R, 2H] and their residual to rows [R, H] and the next residual."""
        ops, shape = self.ops, self.config.shape
        q = self.q(x).view(len(x), shape.heads, shape.head_dim)
        q = q if self.q_norm is None else self.q_norm(q)
        q = ops.rope(q, rows.positions, cos_sin)
        ops.kv_write(*self.keys(x, rows.positions, cos_sin), *rows.scratch, rows.slots)
        scale = shape.head_dim**-0.5
        far = ops.attention(q, *pages, rows.context, scale)
        near = ops.attention(q, *rows.scratch, rows.chain, scale)
        y = self.o(join(*far, *near).to(x.dtype).flatten(1))
        norm, down = self.post, self.down.weight
        y, total = ops.mlp_block(y, residual, norm.weight, norm.eps, self.gate_up.weight, down)
        return y, total


class Eagle3Head:
    """Embedding, projection of the target's states, layer, final norm and vocabulary head.

    ``embed`` and ``head`` have no weight until :meth:`share` where the checkpoint has none.
    """

    def __init__(self, config: Eagle3Config, ops: Any, length: int) -> None:
        """``length``: positions that drafts can have."""
        shape = config.shape
        self.ops, self.config = ops, config
        self.embed, self.head, self.fc = Linear(ops), Linear(ops), Linear(ops)
        self.joined_norm, self.norm = RMSNorm(ops, shape.eps), RMSNorm(ops, shape.eps)
        self.state_norms = [RMSNorm(ops, shape.eps) for _ in config.taps if config.fc_norm]
        self.layer = PairLayer(config, ops)
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

    def states(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """Rows [T, Ht] of each tapped layer to states [T, H]."""
        rows = [hidden[layer] for layer in self.config.taps]
        if self.config.fc_norm:
            rows = [norm(x) for norm, x in zip(self.state_norms, rows, strict=True)]
        joined = torch.cat(rows, -1)
        return self.fc(self.joined_norm(joined) if self.config.norm_before_fc else joined)

    def write(
        self, ids: Tensor, states: Tensor, positions: Tensor, pages: Pages, slots: Tensor
    ) -> None:
        """Keys and values of pairs into their pages; a row with slot −1 is not written.

        ids, positions, slots int64[T]; states [T, H] of one place before.
        """
        x, _ = self.layer.joined(self._embedded(ids), states)
        k, v = self.layer.keys(x, positions, self.cos_sin)
        first = (positions == 0)[:, None, None]
        self.ops.kv_write(k.masked_fill(first, 0), v.masked_fill(first, 0), *pages, slots)

    def step(
        self, ids: Tensor, states: Tensor, rows: DraftRows, pages: Pages
    ) -> tuple[Tensor, Tensor]:
        """One draft of R chains: (rows [R, H] behind the final norm, states [R, H] of the next)."""
        x, residual = self.layer.joined(self._embedded(ids), states)
        normed, state = self.norm.add(*self.layer(x, residual, rows, pages, self.cos_sin))
        return normed, normed if self.config.norm_output else state

    def _embedded(self, ids: Tensor) -> Tensor:
        x: Tensor = self.ops.embedding(ids, self.embed.weight)
        return x if self.dtype is None else x.to(self.dtype)


def join(far: Tensor, far_lse: Tensor, near: Tensor, near_lse: Tensor) -> Tensor:
    """Attention over two sets of keys from that over each, less a key of zeros in the first.

    far, near [R, HQ, D] with lse float32[R, HQ]; float32[R, HQ, D]. The first set begins with a key
    and a value of zeros, unless it is empty (lse −inf): it has weight 1 and adds nothing, so where
    every score is below −10 or so little is left of float32's digits. The second is never empty.
    """
    top = torch.maximum(far_lse, near_lse).clamp(min=0)
    a, b = torch.exp(far_lse - top)[..., None], torch.exp(near_lse - top)[..., None]
    nothing = torch.where(far_lse == -torch.inf, 0.0, torch.exp(-top))[..., None]
    mass = (a - nothing).clamp(min=0) + b
    return (far.float() * a + near.float() * b) / mass
