"""``gumbel_argmax``: the draw without waiting for the host. Other sampling ops run references."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from deepinfer_backend_cuda.kernels import sample as kernels
from deepinfer_backend_cuda.launch import exact, options

BLOCK = 2048


def gumbel_argmax(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """logits float32[m, V], temperature float32[m], seed, position int64[m] -> int64[m]."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocab = logits.shape
    out = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    if not logits.numel():
        return out
    blocks = triton.cdiv(vocab, BLOCK)
    best = logits.new_empty((rows, blocks))
    ids = torch.empty((rows, blocks), dtype=torch.int32, device=logits.device)
    kernels.gumbel_kernel[(rows, blocks)](
        logits,
        temperature,
        seed,
        position,
        best,
        ids,
        logits.stride(0),
        vocab,
        blocks,
        BLOCK=BLOCK,
        num_warps=8,
        **exact(rows),
    )
    kernels.choose_kernel[(rows,)](
        best, ids, out, blocks, BLOCK=triton.next_power_of_2(blocks), num_warps=1, **options(rows)
    )
    return out
