"""Temperatures of confidences, from a file beside the draft's weights. Spec 4.1.

``calibration.json``: ``{"exact": {"greedy": [T_1, …], "sampled": [T_1, …]}, "ratio": {…}}``, one
temperature for each position of the block. Acceptance differs between rules and between greedy
and sampled requests, so each has its own. What is missing is 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import torch
from deepinfer.errors import ModelLoadError
from torch import Tensor

FILE: Final = "calibration.json"
WAYS: Final = ("greedy", "sampled")


class Temperatures:
    """float32[2, γ]: of greedy requests, of those that sample."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    @classmethod
    def beside(cls, folder: str, rule: str, gamma: int, device: torch.device) -> Temperatures:
        """Of a draft in ``folder``; all 1 where there is no file.

        Raises:
            ModelLoadError: the file is no such table.
        """
        table = torch.ones((len(WAYS), gamma))
        path = Path(folder) / FILE
        if path.is_file():
            try:
                said = json.loads(path.read_text(encoding="utf-8"))
                for row, way in enumerate(WAYS):
                    values = said.get(rule, {}).get(way)
                    if values is not None:
                        table[row] = torch.tensor(values, dtype=torch.float32)[:gamma]
            except (OSError, ValueError, TypeError, AttributeError, RuntimeError) as why:
                raise ModelLoadError(f"{path} is no calibration: {why}.", setting="model") from why
            if not bool((table > 0).all()):
                raise ModelLoadError(f"{path}: temperatures must be above 0.", setting="model")
        return cls(table.to(device))

    def confidence(self, z: Tensor, temperature: Tensor) -> Tensor:
        """σ(z / T): z float32[R, γ]; ``temperature`` float32[R] of the requests."""
        return torch.sigmoid(z / self.table[(temperature > 0).long()])
