"""Three ops, each with the parameters and the meaning of its reference in core."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Transposed(NamedTuple):
    """A weight [N, K] as ``addmm`` likes it: float32 [K, N]."""

    columns: Tensor


def prepare_linear(weight: Tensor, uses: frozenset[str]) -> Tensor | Transposed:
    """Once after loading. A table that ``embedding`` reads too must stay a table."""
    return Transposed(weight.float().T.contiguous()) if uses == {"linear"} else weight


def linear(
    x: Tensor,
    w: Tensor | Transposed,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``x · wᵀ + bias`` in float32, rounded once."""
    columns = w.columns if isinstance(w, Transposed) else w.float().T
    start = columns.new_zeros(columns.shape[1]) if bias is None else bias.float()
    flat = torch.addmm(start, x.float().reshape(-1, x.shape[-1]), columns)
    return flat.view(*x.shape[:-1], columns.shape[1]).to(out_dtype or x.dtype)


def rms_norm(x: Tensor, w: Tensor | None, eps: float) -> Tensor:
    """``x · rsqrt(mean(x²) + eps) · w``. A row's additions depend on its width alone."""
    wide = x.float()
    root = torch.sqrt(_row_sum(wide * wide) / x.shape[-1] + eps)
    y = wide / root[..., None]
    return (y if w is None else y * w.float()).to(x.dtype)


def _row_sum(x: Tensor) -> Tensor:
    """Fold the upper half onto the lower until one column is left."""
    while (width := x.shape[-1]) > 1:
        half = (width + 1) // 2
        folded = x[..., :half].clone()
        folded[..., : width - half] += x[..., half:]
        x = folded
    return x[..., 0]


def gumbel_argmax(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """The id with the highest z/T + G; the lowest of equals; NaN never."""
    z = np.nan_to_num(logits.numpy(), nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    t = temperature.numpy()[:, None]
    noise = _gumbel(seed.numpy(), position.numpy(), z.shape[1])
    score = np.where(t == 0, z, z / np.where(t == 0, np.float32(1), t) + noise)
    best = score.argmax(1) if score.size else np.zeros(len(score), np.int64)
    return torch.from_numpy(best.astype(np.int64))


def _gumbel(seed: np.ndarray, position: np.ndarray, count: int) -> np.ndarray:
    """G = −ln(−ln1p(−u)) of Philox4x32-10: key = seed, counter = (id >> 2, position, domain 0)."""
    key, place = seed.astype(np.uint64)[:, None], position.astype(np.uint64)[:, None]
    block = np.arange(-(-count // 4), dtype=np.uint64)[None]
    words = _philox((block, _low(place), _high(place), np.zeros_like(place)), _low(key), _high(key))
    lanes = np.stack(words, -1).reshape(len(seed), words[0].shape[1] * 4)[:, :count]
    u = (lanes.astype(np.float64) + 0.5) * 2.0**-32
    return (-np.log(-np.log1p(-u))).astype(np.float32)


def _philox(c: tuple[np.ndarray, ...], k0: np.ndarray, k1: np.ndarray) -> tuple[np.ndarray, ...]:
    c0, c1, c2, c3 = np.broadcast_arrays(*c)
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = _high(p1) ^ c1 ^ k0, _low(p1), _high(p0) ^ c3 ^ k1, _low(p0)
        k0, k1 = _low(k0 + np.uint64(0x9E3779B9)), _low(k1 + np.uint64(0xBB67AE85))
    return c0, c1, c2, c3


def _low(x: np.ndarray) -> np.ndarray:
    return x & np.uint64(0xFFFFFFFF)


def _high(x: np.ndarray) -> np.ndarray:
    return x >> np.uint64(32)
