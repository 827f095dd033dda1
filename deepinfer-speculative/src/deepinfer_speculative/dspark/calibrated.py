"""Temperatures of confidences, from a file beside the draft's weights. Spec 4.1.

``calibration.json``: ``{"exact": {"greedy": [T_1, …], "sampled": [T_1, …]}, "ratio": {…}}``, one
temperature for each position of the block. Acceptance differs between rules and between greedy
and sampled requests, so each has its own. What is missing is 1. ``deepinfer speculative calibrate``
and training write it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from deepinfer.errors import ModelLoadError, shown
from torch import Tensor

from deepinfer_speculative.options import take

if TYPE_CHECKING:
    from deepinfer.api.speculative import DrafterContext

FILE: Final = "calibration.json"
WAYS: Final = ("greedy", "sampled")
RULES: Final = ("exact", "ratio")
_LEAST, _MOST = 1e-6, 1e6  # what float32 still divides by


class Temperatures:
    """float32[2, γ]: of greedy requests, of those that sample."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    @classmethod
    def asked(
        cls, context: DrafterContext, folder: str | None, gamma: int, device: torch.device
    ) -> Temperatures:
        """By the option ``calibration``: a file, ``off`` (all 1), or, where it is not given, the
        file in ``folder`` if there is one.

        Raises:
            ModelLoadError: the file is missing or no such table.
        """
        given = take(context.options, "calibration", str, "")
        path = Path(given) if given else Path(folder or "", FILE)
        if given == "off" or not (given or (folder is not None and path.is_file())):
            return cls(torch.ones((len(WAYS), gamma), device=device))
        return cls(read_table(path, context.acceptance, gamma).to(device))

    def confidence(self, z: Tensor, temperature: Tensor) -> Tensor:
        """σ(z / T): z float32[R, k] of the first k places; ``temperature`` float32[R] of the
        requests.
        """
        return torch.sigmoid(z / self.table[(temperature > 0).long(), : z.shape[1]])


def read_table(path: Path, rule: str, gamma: int) -> Tensor:
    """float32[2, γ] of a rule; what the file does not have is 1.

    Raises:
        ModelLoadError: the file is missing or no such table.
    """
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        _check(said)
    except (OSError, ValueError) as why:
        raise ModelLoadError(
            f"{path} is no calibration: {why}.",
            setting="calibration",
            next_step="Write one with 'deepinfer speculative calibrate', or say calibration=off.",
        ) from why
    table = torch.ones((len(WAYS), gamma))
    for row, way in enumerate(WAYS):
        mine = said.get(rule, {}).get(way, [])[:gamma]
        table[row, : len(mine)] = torch.tensor(mine, dtype=torch.float32)
    return table


def _check(said: Any) -> None:
    """ValueError says what is wrong: a misspelt name would leave confidences as they are."""
    _names(said, RULES, "it")
    for rule, ways in said.items():
        _names(ways, WAYS, rule)
        for way, values in ways.items():
            fine = isinstance(values, list) and all(type(t) in (int, float) for t in values)
            if not fine or not all(_LEAST <= t <= _MOST for t in values):
                raise ValueError(
                    f"{rule}.{way} is {shown(values)}, expected a list of temperatures, each "
                    f"from {_LEAST:g} to {_MOST:g}"
                )


def _names(part: Any, known: tuple[str, ...], where: str) -> None:
    if not isinstance(part, dict) or set(part) - set(known):
        raise ValueError(f"{where} is {shown(part)}, expected an object of {' and '.join(known)}")
