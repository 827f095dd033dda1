"""The smallest layers, and how a parameter finds its place in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.table import OpSet


class Linear:
    """A projection. ``weight`` is prepared and opaque, ``bias`` a tensor or None."""

    def __init__(self, ops: OpSet) -> None:
        self.ops = ops
        self.weight: Any = None
        self.bias: Tensor | None = None

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        y: Tensor = self.ops.linear(x, self.weight, self.bias, out_dtype)
        return y


class RMSNorm:
    """A norm over the last dimension, alone or joined with the addition to the residual."""

    def __init__(self, ops: OpSet, eps: float) -> None:
        self.ops = ops
        self.eps = eps
        self.weight: Any = None

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.ops.rms_norm(x, self.weight, self.eps)
        return y

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (norm of the new residual, the new residual)."""
        y, total = self.ops.add_rms_norm(x, residual, self.weight, self.eps)
        return y, total


def assign(root: Any, path: str, value: Any) -> None:
    """Put a parameter at a dotted path: attributes by name, list items by number.

    The attribute must exist, so a wrong name in a rule is an error and not a lost weight.
    """
    *parents, last = path.split(".")
    for part in parents:
        root = root[int(part)] if part.isdigit() else getattr(root, part)
    if not hasattr(root, last):
        raise AttributeError(f"{type(root).__name__} has no parameter {path!r}")
    setattr(root, last, value)
