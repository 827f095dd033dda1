"""Arithmetic that keeps rows apart: what the row-exact references and variants are made of.

What makes plain torch vary, measured on a CPU: a matrix product picks its kernel by the number of
rows, a sum its order by the shape, and elementwise sigmoid, softplus and silu compute the last few
elements of a block in scalar code that rounds differently. So here a product has one fixed shape, a
sum is a fixed tree, and the only functions are those that treat all elements alike (exp, log,
log1p, tanh, square root, division).
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS: Final = 32


def tiled(x: Tensor, w: Tensor) -> Tensor:
    """float32 x [T, K] · wᵀ in tiles of 32 rows; the last tile is padded with zero rows."""
    padded = F.pad(x, (0, 0, 0, -len(x) % ROWS))
    out = x.new_empty((len(padded), len(w)))
    for begin in range(0, len(padded), ROWS):
        torch.mm(padded[begin : begin + ROWS], w.T, out=out[begin : begin + ROWS])
    return out[: len(x)]


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension by halving: the order depends on its width alone."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        pairs = x[..., :half] + x[..., half : 2 * half]
        odd = x[..., 2 * half :]
        x = torch.cat((pairs, odd), -1) if odd.shape[-1] else pairs
    return x[..., 0]


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + e^−x)``."""
    return 1 / (1 + torch.exp(-x))


def softmax(x: Tensor) -> Tensor:
    """Over the last dimension."""
    weight = torch.exp(x - x.amax(-1, keepdim=True))
    return weight / row_sum(weight)[..., None]
