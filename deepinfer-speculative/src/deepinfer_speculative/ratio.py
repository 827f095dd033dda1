"""The ratio rule: drafts stand with probability min(1, p/q). Spec 3.3.

Where you are: in place of core's equality rule, for ``acceptance="ratio"``. The rule is that of
Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1, and Chen et al. 2023 (arXiv 2302.01318).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import torch
from deepinfer.sampling.philox import ACCEPTANCE, EMISSION, RESIDUAL, gumbel, uniform
from deepinfer.sampling.verify import line_grid
from torch import Tensor

if TYPE_CHECKING:
    from deepinfer.api.sampler import SampleRows
    from deepinfer.api.speculative import SamplingDrafter, VerifierContext

NOTHING_LEFT: Final = 1e-8
"""A residual of less mass is rounding: p itself is drawn from."""


class RatioVerifier:
    """Draft x of proposal q stands with probability ``min(1, p(x)/q(x))``; where one falls, the
    token is drawn from the rest, ``max(p − q, 0)`` normalised; behind the last, from p.

    p is what the ordinary sampler would draw from on that row: all penalties, masks, temperature
    and filters. A draft of a drafter without proposals is its q's only id, so it stands with
    probability p(x), and the rest is p without x. A draft that a mask forbids has p(x) = 0 and
    falls, which draws from the rest as well; it is not as if it had never been proposed.

    What it keeps: each emitted token has the target's distribution given the text before it, up to
    float32 rounding of p and q. At T = 0 the text is the one without speculation. What it does not
    keep, and the equality rule does:

    - *Which* token a seed gives: that depends on the drafts, on how many of them were verified and
      so, in the modes ``adaptive`` and ``cap`` and whenever the token budget binds, on what runs
      beside it. The same seed under another load is another text. ``batch_invariant`` refuses it.
    - Anything at all where the number of verified drafts of a request depends on that request's
      own drafts: the planner therefore looks at confidences of an older block than the one that is
      verified, and a drafter's confidence in draft k may depend on drafts before k alone.
    - Noise: acceptance and rest have domains of their own, and a drafter that draws must key its
      noise with :func:`round_seed`. With shared noise the result is biased (the tests show it).

    It costs ``probs`` of every verified row, [R, 1+γ, V] float32, and reads the drafter's
    [R, γ, V].

    Args:
        context: ops, the sampler, and the drafter, which may have ``proposal``.
    """

    def __init__(self, context: VerifierContext) -> None:
        self._sampler = context.sampler
        self._drafter = context.drafter

    def verify(
        self, logits: Tensor, rows: SampleRows, drafts: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As core's ``EqualityVerifier``: tokens int64[R, 1+γ], of which counts int64[R] stand."""
        width = drafts.shape[1] + 1
        if width == 1:
            sampled = self._sampler(logits, rows)
            return sampled[: len(lengths), None], torch.ones_like(lengths)
        lines = line_grid(lengths, width).clamp(min=0)
        seed, position = rows.seed[lines], rows.position[lines]
        p = self._sampler.probs(logits, rows)[lines]
        q = self._proposal(rows.slot[lines[:, 0]])
        u = uniform(seed[:, :-1].flatten(), position[:, :-1].flatten(), 1, ACCEPTANCE)
        stands = accepted(p[:, :-1], q, drafts, u.view(drafts.shape))
        stands &= torch.arange(width - 1, device=drafts.device) < lengths[:, None]
        kept = stands.long().cumprod(1).sum(1)
        last = self._last(p, q, drafts, kept, lengths, (seed, position))
        tokens = torch.cat((drafts, drafts[:, :1]), 1)
        return tokens.scatter_(1, kept[:, None], last[:, None]), 1 + kept

    def _proposal(self, slots: Tensor) -> Tensor | None:
        if not hasattr(self._drafter, "proposal"):
            return None
        return cast("SamplingDrafter", self._drafter).proposal(slots)

    def _last(
        self,
        p: Tensor,
        q: Tensor | None,
        drafts: Tensor,
        kept: Tensor,
        lengths: Tensor,
        noise: tuple[Tensor, Tensor],
    ) -> Tensor:
        """int64[R]: the token behind the drafts that stand."""
        vocab = p.shape[2]
        at = kept[:, None]
        inner = at.clamp(max=drafts.shape[1] - 1)
        target = p.gather(1, at[..., None].expand(-1, -1, vocab))[:, 0]
        fell = kept < lengths
        mine = None if q is None else q.gather(1, inner[..., None].expand(-1, -1, vocab))[:, 0]
        left = rest(target, mine, drafts.gather(1, inner)[:, 0])
        seed, position = (x.gather(1, at)[:, 0] for x in noise)
        score = torch.where(
            fell[:, None],
            left.log() + gumbel(seed, position, vocab, RESIDUAL),
            target.log() + gumbel(seed, position, vocab, EMISSION),
        )
        return score.argmax(1)


def accepted(p: Tensor, q: Tensor | None, drafts: Tensor, u: Tensor) -> Tensor:
    """bool[R, γ]: which drafts would stand, each taken alone: ``u · q(x) < p(x)``.

    p, q float32[R, γ, V] (q None: point masses), drafts int64[R, γ], u float64[R, γ] in (0, 1).
    """
    mine = p.gather(2, drafts[..., None])[..., 0].double()
    theirs = 1.0 if q is None else q.gather(2, drafts[..., None])[..., 0].double()
    return u * theirs < mine


def rest(p: Tensor, q: Tensor | None, draft: Tensor) -> Tensor:
    """float32[R, V], not normalised: what is drawn from where a draft fell.

    p, q float32[R, V] (q None: all on ``draft`` int64[R]).
    """
    if q is None:
        left = p.scatter(1, draft[:, None], 0.0)
    else:
        left = (p - q).clamp(min=0.0)
    empty = left.sum(1, keepdim=True) <= NOTHING_LEFT
    return torch.where(empty, p, left)


def round_seed(seed: Tensor, anchor: Tensor) -> Tensor:
    """int64[R]: the seed of one round's draft noise, from the request's and the anchor's position.

    A later round drafts for some of the same positions again, and how many of its drafts are
    verified follows from confidences of this one: with the same noise the two would be dependent.
    The SplitMix64 finaliser of ``seed + anchor · φ``, in arithmetic modulo 2⁶⁴.
    """
    x = seed + (anchor + 1) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """A logical shift to the right of 64 bits."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
