"""From block rows to drafts: the Markov head step by step, then confidences. Spec 1.2 and 1.3."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from deepinfer.layers import Linear


class HeadShape(Protocol):
    """``rank`` of the Markov head, 0 without one; ``confident``: there is a confidence head, which
    reads the Markov embedding too if ``confident_markov``.
    """

    @property
    def rank(self) -> int: ...
    @property
    def confident(self) -> bool: ...
    @property
    def confident_markov(self) -> bool: ...


class Headed(Protocol):
    """A draft model as the heads read it: ``head`` to the vocabulary, ``w1``, ``w2`` and ``sure``
    (the confidence projection); ``dtype`` of activations, None: the weights' own.
    """

    ops: Any
    head: Linear
    w1: Linear
    w2: Linear
    sure: Linear
    dtype: torch.dtype | None

    @property
    def config(self) -> HeadShape: ...


Pick = Callable[[int, Tensor], Tensor]
"""(k, logits float32[R, V]) to the ids int64[R] of draft k + 1; ties to the lowest id."""


def draft_steps(
    model: Headed, base: Tensor, anchors: Tensor, pick: Pick, candidates: int = 0
) -> tuple[Tensor, Tensor | None]:
    """γ drafts, each corrected by the one before it: ``logits_k = U_k + W1[x_{k−1}]·W2ᵀ``.

    base float32[R, γ, V]: the head's logits U; anchors int64[R]. ``candidates``: correct only so
    many best ids of U and forbid the others; 0 corrects all. Returns ids int64[R, γ] and, with a
    Markov head, its embeddings [R, γ, r] of the token before each draft.
    """
    gamma, ops = base.shape[1], model.ops
    chosen = _Candidates(model, base, candidates) if 0 < candidates < base.shape[2] else None
    before, ids, embeddings = anchors, [], []
    for k in range(gamma):
        logits = base[:, k]
        if model.config.rank:
            e = ops.embedding(before, model.w1.weight)
            embeddings.append(e)
            logits = _corrected(model, logits, e) if chosen is None else chosen.corrected(k, e)
        before = pick(k, logits.contiguous())
        ids.append(before)
    return torch.stack(ids, 1), torch.stack(embeddings, 1) if embeddings else None


def _corrected(model: Headed, logits: Tensor, e: Tensor) -> Tensor:
    """``logits`` float32[R, V] + W1[x]·W2ᵀ in few passes over V; e [R, r]."""
    rows, ops, w2 = _wide(model, e), model.ops, model.w2.weight
    if len(rows) == 1 and ops.origin["linear"] == "cpu":  # adds as it writes
        corrected: Tensor = ops.linear(rows, w2, logits[0], torch.float32)
        return corrected
    corrected = ops.linear(rows, w2, None, torch.float32)
    return corrected.add_(logits)


class _Candidates:
    """The best ids of each row of U, and the rows of W2 that correct them."""

    def __init__(self, model: Headed, base: Tensor, count: int) -> None:
        rows, gamma, self._vocab = base.shape
        self._base, self._ids = base.topk(count, dim=2)
        table = model.ops.embedding(self._ids.flatten(), model.w2.weight)
        self._w2 = table.float().view(rows, gamma, count, -1)

    def corrected(self, k: int, e: Tensor) -> Tensor:
        """float32[R, V], −inf outside the candidates of position k; e [R, r]."""
        values = self._base[:, k] + (self._w2[:, k] * e.float()[:, None]).sum(-1)
        full = values.new_full((len(values), self._vocab), -torch.inf)
        return torch.scatter(full, 1, self._ids[:, k], values)


def confidence_logits(model: Headed, hidden: Tensor, embeddings: Tensor | None) -> Tensor | None:
    """float32[R, γ]: ``w·[h_k ; W1[x_{k−1}]] + b``, in float32; None without the head.

    hidden [R, γ, H] behind the final norm; embeddings [R, γ, r].
    """
    if not model.config.confident:
        return None
    x = hidden.float()
    if model.config.confident_markov:
        assert embeddings is not None, "a Markov head has embeddings"
        x = torch.cat((x, embeddings.float()), -1)
    z: Tensor = model.ops.linear(x.flatten(0, 1), model.sure.weight, None, torch.float32)
    z = z.view(hidden.shape[:2])
    return z if model.sure.bias is None else z + model.sure.bias.float()


def _wide(model: Headed, rows: Tensor) -> Tensor:
    """In the type that activations have."""
    return rows if model.dtype is None else rows.to(model.dtype)
