"""Numbers for the kit's cases: seeded, on the CPU, the same for the references and the backend."""

from __future__ import annotations

import torch
from torch import Tensor


class Draw:
    """A source of inputs. Every method advances one generator, so equal calls give equal numbers.

    Args:
        dtype: of activations and weights.
    """

    def __init__(self, dtype: torch.dtype, seed: int = 20) -> None:
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Activations or weights of the run's dtype."""
        return self.wide(*shape, scale=scale).to(self.dtype)

    def wide(self, *shape: int, scale: float = 1.0) -> Tensor:
        """float32, whatever the run's dtype."""
        return torch.randn(shape, generator=self._generator) * scale

    def grid(self, *shape: int) -> Tensor:
        """float32 multiples of 1/64: differences survive rounding, and some values are equal."""
        return (torch.randn(shape, generator=self._generator) * 128).round() / 64

    def ids(self, high: int, *shape: int) -> Tensor:
        """int64 in [0, high)."""
        return torch.randint(0, high, shape, generator=self._generator)

    def order(self, count: int) -> Tensor:
        """A permutation of 0 … count−1."""
        return torch.randperm(count, generator=self._generator)

    def wide_ids(self, *shape: int) -> Tensor:
        """int64 over the whole range: seeds."""
        top, low = self.ids(1 << 32, *shape) - (1 << 31), self.ids(1 << 32, *shape)
        return (top << 32) | low
