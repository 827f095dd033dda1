"""Confidences of drafts that mean what they say: between ``deepinfer speculative calibrate`` and a
method's plugin. Core runs a workload, the plugin fits and keeps what came of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRounds:
    """n rounds in which all γ drafts were verified. ``confidence`` float64[n, γ]: what the drafter
    said, raw; ``accepted`` int64[n]: drafts that stood.
    """

    confidence: NDArray[np.float64]
    accepted: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationContext:
    """What ``SpeculatorSpec.calibrate`` is called with.

    ``model``: what the user named as draft checkpoint; ``rounds``: of requests that are ``greedy``
    (T = 0) and ``sampled`` (T = 1); ``out``: the file to write; None: that beside the weights,
    which the drafter reads without being told. Then ``model`` is a folder.
    """

    method: str
    model: str | None
    acceptance: Literal["exact", "ratio"]
    rounds: Mapping[str, DraftRounds]
    out: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was written to ``path``: temperatures of each way, by position, and the calibration
    errors of survivals before and after, on rounds that were not fitted to.
    """

    path: Path
    temperatures: Mapping[str, tuple[float, ...]]
    before: Mapping[str, tuple[float, ...]]
    after: Mapping[str, tuple[float, ...]]


class Calibrate(Protocol):
    """Fits a drafter's confidences to what stood, and keeps the result."""

    def __call__(self, context: CalibrationContext) -> Calibration:
        """Raises ConfigError: there are too few rounds, or the file cannot be written."""
        ...
