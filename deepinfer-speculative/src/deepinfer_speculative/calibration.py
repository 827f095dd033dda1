"""Confidence that means what it says: sequential temperature scaling. Spec 4.1.

Confidence heads are over-confident. One temperature for each position, fitted one after the other
on rounds in which all drafts were verified, makes survivals frequencies. Fit for each checkpoint,
draft length, acceptance rule and way of sampling anew: acceptance differs between them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from deepinfer.errors import ConfigError
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
BINS: Final = 15
GRID: Final[tuple[float, ...]] = tuple(float(10.0 ** (k / 20 - 1)) for k in range(41))
"""41 temperatures from 0.1 to 10, evenly spaced by logarithm; the middle one is 1."""


def ece(probability: ArrayLike, happened: ArrayLike, bins: int = BINS) -> float:
    """Expected calibration error over bins of equal width: Σ n_b/n · |mean p − frequency|."""
    p, y = np.asarray(probability, np.float64), np.asarray(happened, np.float64)
    if not len(p):
        return 0.0
    which = np.minimum((p * bins).astype(np.int64), bins - 1)
    gap = np.bincount(which, p - y, bins)
    return float(np.abs(gap).sum() / len(p))


def sigmoid(x: ArrayLike) -> Floats:
    """1 / (1 + e^−x), float64, without overflow."""
    z = np.asarray(x, np.float64)
    small = np.exp(-np.abs(z))
    return np.asarray(np.where(z >= 0, 1.0, small) / (1.0 + small)).astype(np.float64)


def survival(logits: ArrayLike, temperatures: ArrayLike) -> Floats:
    """float64[n, γ]: Π σ(z_i / T_i) up to each position. logits [n, γ], temperatures [γ]."""
    z = np.asarray(logits, np.float64) / np.asarray(temperatures, np.float64)
    return np.cumprod(sigmoid(z), axis=1).astype(np.float64)


def fit_temperatures(
    logits: ArrayLike, accepted: ArrayLike, verified: ArrayLike, grid: tuple[float, ...] = GRID
) -> Floats:
    """One temperature a position: ``T_k = argmin ECE(S·σ(z_k/T), accepted >= k)`` in turn.

    logits [n, γ]: raw confidence logits of n rounds; accepted int[n]: drafts that stood; verified
    int[n]: drafts that ran. Returns float64[γ]; ties go to the temperature nearest to 1.

    Raises:
        ConfigError: a round was trimmed, so what lies behind its end is unknown; or there is none.
    """
    z, count = np.asarray(logits, np.float64), np.asarray(accepted, np.int64)
    if z.ndim != 2 or not len(z) or len(count) != len(z):
        raise ConfigError(
            "Calibration needs rounds: logits [n, γ] and as many accepted counts, n at least 1; "
            f"there are {z.shape} and {count.shape}.",
            setting="speculative",
        )
    trimmed = int((np.asarray(verified, np.int64) < z.shape[1]).sum())
    if trimmed:
        raise ConfigError(
            f"{trimmed} of {len(z)} rounds verified fewer than {z.shape[1]} drafts; what lies "
            "behind their end is unknown, so they cannot be fitted to.",
            setting="speculative",
            next_step="Collect rounds in mode 'static', and leave out those that a limit cut.",
        )
    nearest = sorted(grid, key=lambda t: abs(np.log(t)))
    before, found = np.ones(len(z)), []
    for k in range(z.shape[1]):
        stood = count > k
        errors = [ece(before * sigmoid(z[:, k] / t), stood) for t in nearest]
        found.append(nearest[int(np.argmin(errors))])
        before = before * sigmoid(z[:, k] / found[-1])
    return np.array(found)


class Fit(NamedTuple):
    """``temperatures`` [γ], and the calibration error of survivals at each position ``before`` and
    ``after`` them, on rounds that were not fitted to.
    """

    temperatures: tuple[float, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]


def fit_halves(logits: ArrayLike, accepted: ArrayLike) -> Fit:
    """Temperatures from every other round, errors on the rest; all drafts of all rounds ran.

    logits [n, γ], accepted int[n], as for :func:`fit_temperatures`, which raises.
    """
    z, stood = np.asarray(logits, np.float64), np.asarray(accepted, np.int64)
    found = fit_temperatures(z[::2], stood[::2], np.full(len(stood[::2]), z.shape[1]))
    errors = []
    for temperatures in (np.ones_like(found), found):
        alive = survival(z[1::2], temperatures)
        errors.append(tuple(ece(alive[:, k], stood[1::2] > k) for k in range(z.shape[1])))
    return Fit(tuple(float(t) for t in found), *errors)
