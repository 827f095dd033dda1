"""Attention of an image's patches: no cache, no order, every row sees every row."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.rows import softmax, tiled
from deepinfer.ops.table import op

_BLOCK = 512  # query rows at a time: bounds the score matrix


@op
def full_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """``softmax(scale · q·kᵀ) · v`` for each head. q, k, v [T, H, D] -> [T, H, D] of q's dtype.

    Arithmetic is float32 and the result is rounded once.
    """
    out = torch.empty_like(q)
    for head in range(q.shape[1]):
        keys, values = k[:, head].float(), v[:, head].float().T.contiguous()
        for begin in range(0, len(q), _BLOCK):
            rows = slice(begin, begin + _BLOCK)
            weights = softmax(tiled(q[rows, head].float(), keys) * scale)
            out[rows, head] = tiled(weights, values).to(q.dtype)
    return out
