"""Temperatures of confidences, from a file beside the draft's weights. Spec 4.1.

``calibration.json``: ``{"exact": {"greedy": [T_1, …], "sampled": [T_1, …]}, "ratio": {…}}``, one
temperature for each position of the block. Acceptance differs between rules and between greedy
and sampled requests, so each has its own. What is missing is 1. ``deepinfer speculative calibrate``
and training write it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from deepinfer.errors import ModelLoadError
from torch import Tensor

from deepinfer_speculative.options import take

if TYPE_CHECKING:
    from deepinfer.api.speculative import DrafterContext

FILE: Final = "calibration.json"
WAYS: Final = ("greedy", "sampled")


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
        """σ(z / T): z float32[R, γ]; ``temperature`` float32[R] of the requests."""
        return torch.sigmoid(z / self.table[(temperature > 0).long()])


def read_table(path: Path, rule: str, gamma: int) -> Tensor:
    """float32[2, γ] of a rule; what the file does not have is 1.

    Raises:
        ModelLoadError: the file is missing or no such table.
    """
    table = torch.ones((len(WAYS), gamma))
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        for row, way in enumerate(WAYS):
            values = said.get(rule, {}).get(way) or []
            mine = torch.tensor(list(values), dtype=torch.float32)[:gamma]
            table[row, : len(mine)] = mine
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError) as why:
        raise ModelLoadError(f"{path} is no calibration: {why}.", setting="calibration") from why
    if not bool(((table > 0) & (table < torch.inf)).all()):
        raise ModelLoadError(f"{path}: temperatures must be above 0.", setting="calibration")
    return table
