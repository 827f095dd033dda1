"""Noise without a generator: Philox4x32-10 as a pure function of (seed, position, id).

Where you are: the bottom of the draw. ``token = argmax_v(z_v/T + G(seed, position, v))``, so what a
request draws depends on nothing that runs beside it, on no order of calls and on no state.

Key (seed low, seed high), counter (v >> 2, position low, position high, domain), lane v & 3. All
arithmetic is int64 that holds 32-bit words; a product of two words wraps in int64, and its low and
high halves are still right bit for bit.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

EMISSION: Final = 0
"""Domain of emitted tokens, and of drafts that share their noise."""
ACCEPTANCE: Final = 1
RESIDUAL: Final = 2
DRAFT: Final = 3
"""Domain of drafts whose noise must be independent of the emission's."""

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Philox4x32-10 of broadcastable int64 words in 0 … 2³²−1; returns four such words.

    Words that are constant along a dimension stay small until a round mixes them.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1
        # c1 and c3 carry bits above 32 (low halves, not yet cut); the mask below cuts them.
        c0, c2 = ((p1 >> 32) ^ (c1 ^ k0)) & _MASK, ((p0 >> 32) ^ (c3 ^ k1)) & _MASK
        c1, c3 = p1, p0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def random_words(seed: Tensor, position: Tensor, count: int, domain: int = EMISSION) -> Words:
    """The lanes of ids 0 … count−1 for each row: four int64[m, ⌈count/4⌉].

    seed int64[m] is read as 64 unsigned bits, position int64[m] >= 0. Lane l of column c is the
    word of id 4·c + l.
    """
    block = torch.arange(-(-count // 4), device=seed.device)[None]
    high, low = (position >> 32) & _MASK, position & _MASK
    counter = (block, low[:, None], high[:, None], torch.full_like(low, domain)[:, None])
    return philox(counter, ((seed & _MASK)[:, None], ((seed >> 32) & _MASK)[:, None]))


def uniform(seed: Tensor, position: Tensor, count: int, domain: int) -> Tensor:
    """float64[m, count] in (0, 1): (word + ½)·2⁻³², each value exact."""
    lanes = torch.stack(random_words(seed, position, count, domain), -1).flatten(1)
    return (lanes[:, :count].double() + 0.5) * 2.0**-32


def gumbel(seed: Tensor, position: Tensor, count: int, domain: int = EMISSION) -> Tensor:
    """float32[m, count]: G = −ln(−ln1p(−u)), in float64, rounded once.

    It lies in −3.14 … 22.88: u → 0 is the upper tail, where u has its finest steps.
    """
    words = random_words(seed, position, count, domain)
    out = seed.new_empty((len(seed), words[0].shape[1], 4), dtype=torch.float32)
    for lane, word in enumerate(words):
        u = word.double().add_(0.5).mul_(2.0**-32)
        out[..., lane] = u.neg_().log1p_().neg_().log_().neg_()
    return out.flatten(1)[:, :count]
