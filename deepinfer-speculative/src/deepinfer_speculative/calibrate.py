"""``deepinfer speculative calibrate``: from rounds to ``calibration.json``. No model runs here.

Confidences are σ of a number z that the drafter has; what arrives is σ(z) in float32, so z is known
as far as that resolves it, and counts as at most some 16.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from deepinfer.api.calibration import Calibration
from deepinfer.errors import ConfigError

from deepinfer_speculative.calibration import Fit, fit_halves
from deepinfer_speculative.dspark.calibrated import FILE, WAYS

if TYPE_CHECKING:
    from deepinfer.api.calibration import CalibrationContext
    from numpy.typing import NDArray

FEWEST: Final = 40
"""Rounds of a way: half of them are fitted to, and a temperature of ten points is noise."""
_LEAST: Final = 1e-7


def calibrate(context: CalibrationContext) -> Calibration:
    """A :class:`~deepinfer.api.calibration.Calibrate`: sequential temperature scaling."""
    path = place(context)
    fits = {way: _fit(context, way) for way in WAYS}
    said = _read(path)
    mine = {way: [round(t, 4) for t in fit.temperatures] for way, fit in fits.items()}
    said[context.acceptance] = mine
    try:
        path.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    except OSError as why:
        raise ConfigError(
            f"{path} cannot be written: {why.strerror or why}.", setting="out"
        ) from why
    return Calibration(
        path=path,
        temperatures={way: fit.temperatures for way, fit in fits.items()},
        before={way: fit.before for way, fit in fits.items()},
        after={way: fit.after for way, fit in fits.items()},
    )


def place(context: CalibrationContext) -> Path:
    """The file: the one asked for, else beside the draft's weights."""
    if context.out is not None:
        return context.out
    assert context.model is not None, "a draft without a folder has no place of its own"
    return Path(context.model, FILE)


def _fit(context: CalibrationContext, way: str) -> Fit:
    rounds = context.rounds[way]
    if len(rounds.accepted) < FEWEST:
        raise ConfigError(
            f"There are {len(rounds.accepted)} {way} rounds in which all drafts ran, too few to "
            f"fit to: {FEWEST} are the least, some thousand are good.",
            setting="prompts",
            next_step="Give more prompts, or longer answers (--tokens).",
        )
    return fit_halves(log_odds(rounds.confidence), rounds.accepted)


def log_odds(confidence: NDArray[np.float64]) -> NDArray[np.float64]:
    """log(p / (1 − p)), with p kept off 0 and 1."""
    p = np.clip(np.nan_to_num(confidence), _LEAST, 1 - _LEAST)
    z: NDArray[np.float64] = np.log(p) - np.log1p(-p)
    return z


def _read(path: Path) -> dict[str, Any]:
    """What the file says already: another rule's temperatures stay."""
    if not path.is_file():
        return {}
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as why:
        raise ConfigError(f"{path} is no calibration: {why}.", setting="out") from why
    if not isinstance(said, dict):
        raise ConfigError(f"{path} is no calibration: no JSON object.", setting="out")
    return said
