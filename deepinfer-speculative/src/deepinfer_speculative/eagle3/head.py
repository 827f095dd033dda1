"""The head's forward pass, in ops: one decoder layer over pairs of a hidden state and a token.

The pair at position p is the token that stands there and the target's state one place before it.
What the layer makes of it predicts the token behind p, and is the state of the next pair while the
target has not run. Keys and values of pairs lie at p in the target's pages, so that they follow
from the text up to p and a prefix hit finds the right ones. At position 0 there is no pair: its key
and value are zeros, and :func:`join` takes what they add to a softmax away again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from deepinfer.layers import RMSNorm
from torch import Tensor

from deepinfer_speculative.dspark.backbone import DraftLayer, DraftModel, DraftRows

if TYPE_CHECKING:
    from deepinfer_speculative.eagle3.config import Eagle3Config

Pages = tuple[Tensor, Tensor]
LOST: Final = 5e-7
"""Four times float32's rounding: a smaller share of a sum is known to less than a quarter."""


class PairLayer(DraftLayer):
    """A decoder layer that reads pairs."""

    def __init__(self, config: Eagle3Config, ops: Any) -> None:
        super().__init__(config.shape, ops)
        self.config = config
        self.hidden_norm = RMSNorm(ops, config.shape.eps)

    def pairs(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs as the projections read them [T, 2H], and the residual [T, H]."""
        normed = self.hidden_norm(states)
        residual = normed if self.config.norm_before_residual else states
        return torch.cat((self.input_norm(embedded), normed), -1), residual

    def joined(self, far: tuple[Tensor, Tensor], near: tuple[Tensor, Tensor]) -> Tensor:
        """:func:`join`: there is no pair at position 0."""
        return join(*far, *near)


class Eagle3Head(DraftModel):
    """Embedding, projection of the target's states, layer, final norm and vocabulary head."""

    def __init__(self, config: Eagle3Config, ops: Any, length: int) -> None:
        """``length``: positions that drafts can have."""
        super().__init__(config.shape, ops, length)
        self.config = config
        self.joined_norm = RMSNorm(ops, config.shape.eps)
        self.state_norms = [RMSNorm(ops, config.shape.eps) for _ in config.taps if config.fc_norm]
        self.layer = PairLayer(config, ops)

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
        x, _ = self.layer.pairs(self.embedded(ids), states)
        k, v = self.layer.keys(x, positions, self.cos_sin)
        first = (positions == 0)[:, None, None]
        self.ops.kv_write(k.masked_fill(first, 0), v.masked_fill(first, 0), *pages, slots)

    def step(
        self, ids: Tensor, states: Tensor, rows: DraftRows, pages: Pages
    ) -> tuple[Tensor, Tensor]:
        """One draft of R chains: (rows [R, H] behind the final norm, states [R, H] of the next)."""
        x, residual = self.layer.pairs(self.embedded(ids), states)
        normed, state = self.norm.add(
            *self.layer.behind_norms(x, residual, rows, pages, self.cos_sin)
        )
        return normed, normed if self.config.norm_output else state


def join(far: Tensor, far_lse: Tensor, near: Tensor, near_lse: Tensor) -> Tensor:
    """Attention over two sets of keys from that over each, less a key of zeros in the first.

    far, near [R, HQ, D] with lse float32[R, HQ]; float32[R, HQ, D]. The first set begins with a key
    and a value of zeros, unless it is empty (lse −inf): it has weight 1 and adds nothing, so where
    every score of the set is below −10 or so little is left of float32's digits. Where nothing is
    left, the set is left out, or its rows would be divided by rounding. The second is never empty.
    """
    top = torch.maximum(far_lse, near_lse).clamp(min=0)
    a, b = torch.exp(far_lse - top)[..., None], torch.exp(near_lse - top)[..., None]
    nothing = torch.where(far_lse == -torch.inf, 0.0, torch.exp(-top))[..., None]
    known = (a - nothing) > LOST * a
    mass = torch.where(known, a - nothing, 0.0) + b
    return (torch.where(known, far.float() * a, 0.0) + near.float() * b) / mass
