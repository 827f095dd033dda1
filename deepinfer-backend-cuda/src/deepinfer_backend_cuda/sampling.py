"""``apply_bitmask``, ``filter_top``, ``gumbel_argmax`` and ``logprobs``: few launches, and none of
them waits for the host. Other sampling ops run references.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from deepinfer_backend_cuda.kernels import filter as filter_kernels
from deepinfer_backend_cuda.kernels import sample as kernels
from deepinfer_backend_cuda.launch import exact, options

BLOCK = 2048
SCORED_ROWS = 64
"""Rows that are scored at once: their keys take 8 bytes an id."""


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


def filter_top(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """logits float32[m, V], temperature, top_p, min_p float32[m], top_k int64[m] -> float32[m, V].

    NaN becomes −inf, as which it counts. Nothing is awaited.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocab = logits.shape
    out = logits.new_empty((rows, vocab))
    if out.numel():
        filter_kernels.filter_kernel[(rows,)](
            logits,
            out,
            temperature,
            top_k,
            top_p,
            min_p,
            logits.stride(0),
            vocab,
            BLOCK=min(4096, max(32, triton.next_power_of_2(vocab))),
            num_warps=16 if vocab > 4096 else 4,
            **exact(rows),
        )
    return out


def logprobs(logits: Tensor, k: int, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits float32[m, V], 0 <= k <= V, chosen int64[m] -> (top_ids int32[m, k], top_values
    float32[m, k], chosen_value float32[m], chosen_rank int32[m]).
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows = len(logits)
    value = logits.new_empty(rows)
    rank = torch.empty(rows, dtype=torch.int32, device=logits.device)
    top = torch.empty((rows, k), dtype=torch.int64, device=logits.device)
    for at in range(0, rows, SCORED_ROWS):
        part = slice(at, at + SCORED_ROWS)
        keys = _score(logits[part], k > 0, chosen[part], value[part], rank[part])
        if k:
            top[part] = keys.topk(k, dim=1).values
    bits = (top >> 32).int()
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = 0xFFFFFFFF - (top & 0xFFFFFFFF)
    return ids.int(), bits.view(torch.float32), value, rank


def _score(logits: Tensor, ranked: bool, chosen: Tensor, value: Tensor, rank: Tensor) -> Tensor:
    """Fill value and rank; a key for each id if ``ranked``, see ``kernels.sample.score_kernel``."""
    rows, vocab = logits.shape
    shape = (rows, vocab) if ranked else (0, 0)
    keys = torch.empty(shape, dtype=torch.int64, device=logits.device)
    kernels.score_kernel[(rows,)](
        logits,
        keys if ranked else chosen,
        chosen,
        value,
        rank,
        logits.stride(0),
        vocab,
        KEYS=ranked,
        BLOCK=min(4096, max(32, triton.next_power_of_2(vocab))),
        num_warps=16 if vocab > 4096 else 4,
        **exact(rows),
    )
    return keys


def apply_bitmask(logits: Tensor, bitmask: Tensor, index: Tensor) -> Tensor:
    """logits float32[m, V] in place, bitmask int32[k, W], index int64[k], −1 nobody's."""
    if bitmask.stride(1) != 1:
        bitmask = bitmask.contiguous()
    masks, vocab = len(index), logits.shape[1]
    if masks and logits.numel():
        filter_kernels.bitmask_kernel[(masks, triton.cdiv(vocab, BLOCK))](
            logits,
            bitmask,
            index,
            logits.stride(0),
            logits.stride(1),
            bitmask.stride(0),
            vocab,
            bitmask.shape[1],
            BLOCK=BLOCK,
            **exact(len(logits)),
        )
    return logits
