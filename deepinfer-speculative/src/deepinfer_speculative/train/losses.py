"""What is minimised (spec 6.1): cross entropy, distance to the target's distribution, confidence.

``L = 0.1·CE(p, true token) + 0.9·‖p − p_target‖₁ + BCE(z, c*)``, ``c* = 1 − ½‖p − p_target‖₁``,
each a mean over all valid slots with weights ``exp(−(k−1)/4)``; both distributions at T = 1.

The gradient of the distance vanishes where ``p`` is flat, as it is in the beginning. So a share of
it may be the divergence ``KL(p_target ‖ p)``, whose gradient ``p − p_target`` does not.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_speculative.train.data import Batch
from deepinfer_speculative.train.network import Network

CE: Final = 0.1
L1: Final = 0.9
SURE: Final = 1.0
DECAY: Final = 4.0
_PIECE = 4096


class Losses(NamedTuple):
    """``total`` to be minimised; the rest without gradient. ``overlap`` float32[n]: c* of the valid
    slots, ``place`` int64[n]: which of the block's slots each is.
    """

    total: Tensor
    ce: Tensor
    l1: Tensor
    sure: Tensor
    overlap: Tensor
    place: Tensor


def losses(network: Network, batch: Batch, head: Tensor, divergence: float = 0.0) -> Losses:
    """Of one batch; head [V, H], the target's; ``divergence``: the share of it, 0 … 1."""
    block = network.config.block
    before, token, valid = batch.slots(block)
    rows = torch.arange(len(batch.ids), device=batch.ids.device)[:, None]
    hidden = network(batch.joined, batch.lengths, batch.anchors, batch.ids[rows, batch.anchors])[
        valid
    ]
    place = torch.arange(block, device=valid.device).expand_as(valid)[valid]
    weight = torch.exp(-place / DECAY)
    weight = weight / weight.sum()
    at = batch.anchors[..., None] + torch.arange(block, device=valid.device)
    truth = batch.final[rows[..., None], at.clamp(max=batch.ids.shape[1] - 1)][valid]
    e = network.markov(before[valid])
    w2 = network.get("markov_head.markov_w2.weight")
    given = (hidden, e, w2, head, truth, token[valid], weight, divergence)
    main, ce, l1, overlap = HeadLoss.apply(*given)  # type: ignore[no-untyped-call]
    z = network.confidence(hidden, e)
    sure = (F.binary_cross_entropy_with_logits(z, overlap, reduction="none") * weight).sum()
    return Losses(main + SURE * sure, ce, l1, sure.detach(), overlap, place)


class HeadLoss(torch.autograd.Function):
    """Vocabulary projection, Markov correction and both distances, some thousand slots at a time.

    Logits of a whole batch would take gigabytes several times over; here a piece's gradient is
    formed at once: ``∂CE/∂z = p − onehot``, ``∂‖p − t‖₁/∂z = p·(s − ⟨p, s⟩)``, s = sign(p − t),
    ``∂KL(t ‖ p)/∂z = p − t``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        e: Tensor,
        w2: Tensor,
        head: Tensor,
        truth: Tensor,
        token: Tensor,
        weight: Tensor,
        divergence: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """hidden, truth [n, H], e float32[n, r], w2 float32[V, r], head [V, H], token int64[n],
        weight float32[n] -> (loss, ce, l1, c* float32[n]).
        """
        dtype, wide = head.dtype, w2.to(head.dtype)
        d_hidden, d_e, d_w2 = torch.empty_like(hidden), torch.empty_like(e), torch.zeros_like(w2)
        ce, l1, kl = (weight.new_zeros(()) for _ in range(3))
        overlap = torch.empty_like(weight)
        for begin in range(0, len(hidden), _PIECE):
            part = slice(begin, begin + _PIECE)
            narrow, w = e[part].to(dtype), weight[part, None]
            logits = (hidden[part] @ head.T).float() + (narrow @ wide.T).float()
            lead = logits.logsumexp(1, keepdim=True)
            ids = token[part, None]
            ce += ((lead - logits.gather(1, ids)) * w).sum()
            p = torch.exp(logits - lead)
            t = torch.softmax((truth[part] @ head.T).float(), 1)
            gap = p - t
            g = p * CE
            if divergence:
                kl -= (
                    (
                        torch.special.entr(t).sum(1, keepdim=True)
                        + (t * (logits - lead)).sum(1, keepdim=True)
                    )
                    * w
                ).sum()
                g.add_(gap, alpha=L1 * divergence)
            distance = gap.abs().sum(1, keepdim=True)
            l1 += (distance * w).sum()
            overlap[part] = (1 - distance[:, 0] / 2).clamp(0, 1)
            s = gap.sign_()
            s = s - (p * s).sum(1, keepdim=True)
            g.addcmul_(p, s, value=L1 * (1 - divergence))
            g.scatter_add_(1, ids, torch.full_like(w, -CE))
            g = (g * w).to(dtype)
            d_hidden[part], d_e[part] = g @ head, (g @ wide).float()
            d_w2 += (g.T @ narrow).float()
        ctx.save_for_backward(d_hidden, d_e, d_w2)
        ctx.mark_non_differentiable(ce, l1, overlap)
        return CE * ce + L1 * ((1 - divergence) * l1 + divergence * kl), ce, l1, overlap

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Scaled by the gradient of the loss; the rest has none."""
        d_hidden, d_e, d_w2 = ctx.saved_tensors
        g = grads[0]
        return d_hidden * g.to(d_hidden.dtype), d_e * g, d_w2 * g, None, None, None, None, None
