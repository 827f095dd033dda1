"""The native CPU backend: C kernels for the ops that cost time, references for the rest.

The kernels are batch-invariant by construction, so ``ctx.invariant`` changes only which fallbacks
stand beside them. ``deepinfer.native.ops`` holds the contracts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepinfer.api.backend import BackendFacts, Impl, OpContext
from deepinfer.native import loader
from deepinfer.native import ops as native
from deepinfer.native.blocks import Blocks
from deepinfer.native.weights import PackedWeight, WeightMemory, prepare_linear
from deepinfer.ops import invariant
from deepinfer.ops.backend import CPUDevice, cpu_facts
from deepinfer.ops.table import EXACT_WEIGHTS, OpSet

MAX_HEAD_DIM = 256


class NativePlan(NamedTuple):
    """What the attention kernel reads of a step."""

    block_table: Tensor
    kv_lengths: Tensor
    cu_q: Tensor


class NativeCPUBackend:
    """C kernels on a CPU."""

    name = "cpu"
    device_type = "cpu"
    comm = "gloo"

    def facts(self) -> BackendFacts:
        return replace(cpu_facts(), notes={"kernels": loader.describe()})

    def open(self, local_rank: int) -> CPUDevice:
        return CPUDevice()

    def provide(self, ctx: OpContext) -> Mapping[str, Impl]:
        threads = ctx.num_threads
        provided = {"route": Impl(invariant.route)} if ctx.invariant else {}
        provided |= {name: Impl(partial(fn, num_threads=threads)) for name, fn in _PLAIN.items()}
        provided |= _weights(ctx)
        if ctx.head_dim is None or ctx.head_dim <= MAX_HEAD_DIM:
            provided["plan_attention"] = Impl(_plan_attention)
            provided["attention"] = Impl(partial(_attention, num_threads=threads))
        elif ctx.invariant:
            provided["attention"] = Impl(invariant.attention)
        blocks = Blocks(OpSet(provided, self.name, ctx), threads)
        provided["mlp_block"] = Impl(blocks.mlp_block)
        if "plan_attention" in provided:
            provided["attention_block"] = Impl(blocks.attention_block, of_parts=True)
            provided["decoder_layers"] = Impl(blocks.decoder_layers, of_parts=True)
        return provided


_PLAIN: Mapping[str, Callable[..., Any]] = {
    "apply_bitmask": native.apply_bitmask,
    "rms_norm": native.rms_norm,
    "add_rms_norm": native.add_rms_norm,
    "silu_mul": native.silu_mul,
    "rope": native.rope,
    "kv_write": native.kv_write,
    "filter_top": native.filter_top,
    "gumbel_argmax": native.gumbel_argmax,
    "logprobs": native.logprobs,
}


def _weights(ctx: OpContext) -> dict[str, Impl]:
    """The ops that read packed weights."""
    pack = partial(_pack, ctx=ctx, memory=WeightMemory())
    return {
        "linear": Impl(partial(native.linear, num_threads=ctx.num_threads), pack),
        "grouped_linear": Impl(partial(_grouped_linear, num_threads=ctx.num_threads), pack),
        "embedding": Impl(partial(_embedding, dtype=ctx.dtype, num_threads=ctx.num_threads)),
    }


def _pack(weight: Tensor, uses: frozenset[str], *, ctx: OpContext, memory: WeightMemory) -> Any:
    """One packed weight, which ``linear`` and ``embedding`` may share, or one for each expert."""
    quantization = None if uses & EXACT_WEIGHTS else ctx.quantization
    if weight.dim() == 3:
        return Experts(tuple(prepare_linear(w, quantization, memory=memory) for w in weight))
    return prepare_linear(weight, quantization, memory=memory)


class Experts(NamedTuple):
    """Packed weights of all experts."""

    weights: tuple[PackedWeight, ...]

    @property
    def nbytes(self) -> int:
        return sum(w.nbytes for w in self.weights)


def _embedding(
    ids: Tensor, table: PackedWeight | Tensor, *, dtype: torch.dtype, num_threads: int
) -> Tensor:
    """A table that only ``embedding`` reads was never packed."""
    if isinstance(table, Tensor):
        return table[ids]
    return native.embedding(ids, table, dtype, num_threads=num_threads)


def _grouped_linear(
    x: Tensor,
    w: Experts,
    offsets: Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    num_threads: int,
) -> Tensor:
    y = x.new_zeros((len(x), w.weights[0].n), dtype=out_dtype or x.dtype)
    for weight, (begin, end) in zip(w.weights, pairwise(offsets.tolist()), strict=True):
        if begin < end:
            rows = x[begin:end]
            y[begin:end] = native.linear(rows, weight, None, y.dtype, num_threads=num_threads)
    return y


def _plan_attention(
    block_table: Tensor, kv_lengths: Tensor, cu_q: Tensor, page_size: int
) -> NativePlan:
    return NativePlan(block_table.int().contiguous(), kv_lengths, cu_q.int())


def _attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: NativePlan,
    scale: float,
    window: int | None = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
    *,
    num_threads: int,
) -> tuple[Tensor, Tensor]:
    return native.attention(
        q, k_cache, v_cache, *plan, scale, window, sink, softcap, num_threads=num_threads
    )
