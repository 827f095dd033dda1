"""How many drafts pay: expected tokens a second over the number of draft rows K. Spec 4.2, 4.4.

Pure functions of numpy arrays. Survival a[r, j] is the probability that draft j+1 of request r
stands together with all before it; verifying the K slots of highest survival gives
``τ(K) = emitting + Σ a`` tokens in ``t(K)`` seconds, and ``Θ(K) = τ(K) / t(K)``.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
NEGLIGIBLE: Final = 1e-6
"""Slots of less survival are no candidates."""


def ranked(survival: Floats, eligible: NDArray[np.int64]) -> Floats:
    """Survivals of all eligible slots, highest first: float64[Σ eligible] at most.

    survival float64[R, γ], not increasing along a row; eligible int64[R] in 0 … γ.
    """
    good = survival >= NEGLIGIBLE
    if len(eligible) and eligible.min() < survival.shape[1]:
        good &= np.arange(survival.shape[1]) < eligible[:, None]
    found = survival[good]
    found.sort()
    return found[::-1]


def throughput(gains: Floats, emitting: float, seconds: Floats) -> Floats:
    """Θ(0) … Θ(len(gains)) in tokens a second; ``seconds[K]``: what a step with K drafts takes."""
    tokens = np.empty(len(gains) + 1)
    tokens[0] = 0.0
    gains.cumsum(out=tokens[1:])
    tokens += emitting
    tokens /= seconds[: len(tokens)]
    return tokens


def best_rows(rate: Floats, min_gain: float = 0.0) -> int:
    """K of the highest Θ, the first of equals; all, if it is not ``min_gain`` better than all."""
    best = int(np.argmax(rate))
    return best if rate[best] >= (1.0 + min_gain) * rate[-1] else len(rate) - 1


def causal_rows(rate: Floats) -> int:
    """K where walking up stops at the first step that does not gain: the paper's Algorithm 1.

    Safe under the ratio rule even with the confidences of the drafts at hand, but it never passes
    the edge of a tier.
    """
    falls = np.flatnonzero(rate[1:] <= rate[:-1])
    return int(falls[0]) if len(falls) else len(rate) - 1


def allocate(survival: Floats, eligible: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """int64[R]: prefix lengths of the ``rows`` best slots, ranked by (−a, position, row).

    The host's twin of ``allocation.allocate``.
    """
    gamma = survival.shape[1]
    mine = np.arange(gamma) < eligible[:, None]
    request, position = np.nonzero(mine)
    order = np.lexsort((request, position, -survival[request, position]))[:rows]
    return np.bincount(request[order], minlength=len(eligible)).astype(np.int64)
