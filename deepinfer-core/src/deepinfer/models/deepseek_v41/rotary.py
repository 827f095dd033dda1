"""Rotary tables: plain for layers with a window alone, YaRN for all others. Specification 3.2.

Frequencies and angles are float32, as the model was trained and is served: at long range its own
rounding is what the weights know, and a table from float64 would differ by 2.5e-2 at a million.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """Long waves stretched by ``factor`` beyond ``original`` positions."""

    factor: float
    beta_fast: float
    beta_slow: float
    original: int


def frequencies(width: int, theta: float, yarn: Yarn | None = None) -> Tensor:
    """float32[width / 2], of channel pairs."""
    exponent = torch.arange(0, width, 2, dtype=torch.float32) / width
    plain = 1.0 / (theta**exponent)
    if yarn is None:
        return plain

    def pair(turns: float) -> float:
        return width * math.log(yarn.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair(yarn.beta_fast)), 0)
    high = min(math.ceil(pair(yarn.beta_slow)), width - 1)
    index = torch.arange(width // 2, dtype=torch.float32)
    stretch = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
    smooth = 1 - stretch
    return plain / yarn.factor * (1 - smooth) + plain * smooth


def table(frequency: Tensor, length: int, device: torch.device | None = None) -> Tensor:
    """float32[length, width]: cosines of every position's angles, then sines."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequency)
    turned = torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1).to(device)
