"""Ops that add up in the order of the program that recorded the golden data.

The product's ops keep rows apart: tiles of one shape, trees of additions. The recorder ran a whole
prompt at once, on one thread, in plain torch: products of 32 columns added block by block, ``sum``
and ``mean`` as torch orders them, attention over 64 entries at a time. Both are the specification's
arithmetic; they differ in last bits, and a last bit may become another FP8 code.

For a whole prompt of one request, float32, weights dequantised, one thread.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from deepinfer.api.backend import Impl
from deepinfer.api.model import DeviceBatch
from deepinfer.ops.reference.dense import silu_mul
from deepinfer.ops.reference.latent import COMPRESSED, Window
from deepinfer.ops.reference.scaled import quantize
from deepinfer.ops.reference.sparse import entry_slots, read_entries
from deepinfer.ops.table import OpSet
from torch import Tensor

BLOCK = 32
ENTRIES = 64
PLAIN = OpSet({}, "reference")


def recorded_ops() -> dict[str, Impl]:
    """Overrides where the references' order is another one; those serve all other ops."""
    ops = (scaled_linear, scaled_moe, hyper_mix, hyper_merge, engram_gate, latent_attention)
    return {fn.__name__: Impl(fn) for fn in ops}


def scaled_linear(x: Tensor, w: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """Blocks of 32 columns, added in ascending order."""
    x, total = quantize(x, "fp8"), x.new_zeros((len(x), len(w)))
    for begin in range(0, x.shape[1], BLOCK):
        total += x[:, begin : begin + BLOCK] @ w[:, begin : begin + BLOCK].T
    return total


def scaled_moe(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, num_experts: int,
    limit: float | None,
) -> Tensor:  # fmt: skip
    """Expert by expert, each added to the rows that chose it."""
    total = torch.zeros_like(x)
    for expert in range(num_experts):
        row, slot = torch.where(ids == expert)
        if len(row):
            gated = silu_mul(scaled_linear(x[row], gate_up[expert]), limit)
            total[row] += scaled_linear(weights[row, slot, None] * gated, down[expert])
    return total


def hyper_mix(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iters: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    n, wide = x.shape[1], x.flatten(1)
    mixed = F.linear(wide, fn) * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm_eps)
    pre = torch.sigmoid(mixed[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(mixed[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (mixed[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    comb = torch.exp(comb - comb.amax(-1, keepdim=True))
    comb = comb / comb.sum(-1, keepdim=True) + eps
    for dim in (-2, *(-1, -2) * (iters - 1)):
        comb = comb / (comb.sum(dim, keepdim=True) + eps)
    return pre, post, comb


def hyper_merge(x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The streams are added up before the sublayer's output joins them."""
    return post[..., None] * y[:, None] + (comb[..., None] * x[:, :, None]).sum(1)


def engram_gate(
    x: Tensor, keys: Tensor, value: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float,
    active: Tensor | None = None,
) -> Tensor:  # fmt: skip
    scale = torch.rsqrt(x.square().mean(-1) + eps) * torch.rsqrt(keys.square().mean(-1) + eps)
    dot = (x * (q_weight * k_weight) * keys).sum(-1) * scale * x.shape[-1] ** -0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))
    if active is not None:
        gate = gate.masked_fill(~active[:, None], 0)
    return x + gate[..., None] * value[:, None]


def latent_attention(
    q: Tensor, window: Window, batch: DeviceBatch, sink: Tensor, scale: float,
    cache: Tensor | None = None, entries: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """An online softmax over 64 entries at a time: those of the window, then the chosen ones."""
    rows, kv = len(q), window.own
    assert batch.requests is not None and int(batch.requests.starts.sum()) == 0
    end = torch.arange(rows)[:, None]
    index = (end - window.size + 1).clamp(0) + torch.arange(min(rows, window.size))
    index = torch.where(index > end, -1, index)
    if cache is not None and entries is not None:
        count = int(entries.max()) + 1
        slots = entry_slots(batch, cache.shape[1], torch.zeros(1).long(), torch.arange(count)[None])
        kv = torch.cat((kv, read_entries(PLAIN, cache, slots[0], COMPRESSED, torch.float32)))
        chosen = entries[:, : min(entries.shape[1], count)].long()
        index = torch.cat((index, torch.where(chosen < 0, -1, chosen + rows)), 1)
    o, total = torch.zeros_like(q), q.new_zeros(q.shape[:2])
    top = torch.full_like(total, -1e30)
    for begin in range(0, index.shape[1], ENTRIES):
        at = index[:, begin : begin + ENTRIES]
        some = kv[at.clamp(min=0)] * (at >= 0)[..., None]
        logits = torch.einsum("mhd,mkd->mhk", q, some)
        logits = torch.where((at >= 0)[:, None], logits, -torch.inf) * scale
        before, top = top, torch.maximum(top, logits.amax(-1))
        keep, weight = torch.exp(before - top), torch.exp(logits - top[..., None])
        total = total * keep + weight.sum(-1)
        o = o * keep[..., None] + torch.einsum("mhk,mkd->mhd", weight, some)
    return o / (total + torch.exp(sink - top))[..., None]
