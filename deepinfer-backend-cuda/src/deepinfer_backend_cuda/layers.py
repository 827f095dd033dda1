"""``attention_block`` and ``decoder_layers``: the same kernels, fewer launches.

Steps of few rows a request (decode, drafts to verify, short prompts) run as CUDA graphs, one for
each tier of tokens and of block-table width, made at a tier's second step, if they are not part of
a whole step's. A graph takes every row
for a request's only one where it chooses its kernels, and how many a request has is an input, so
one graph serves all mixes. No kernel's bits depend on the number of rows, so neither padding nor
replay shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from deepinfer.api.model import DeviceBatch, KVPools, Taps
from deepinfer.ops.reference.blocks import AttentionParams, LayerParams
from torch import Tensor

from deepinfer_backend_cuda import rows
from deepinfer_backend_cuda.attention import Plan, attention
from deepinfer_backend_cuda.graphs import Graphs
from deepinfer_backend_cuda.linear import gated, linear

MOST_TOKENS = 256
"""Steps of more rows are not worth a graph: launches hide behind the work."""
ROWS_A_REQUEST = 8
SHORT = 32
"""A graph's attention has tiles of one decoded row's height: for more rows a request than these,
beyond so many in all, it would read keys too often."""
Blocks = tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., tuple[Tensor, Tensor]]]


def attention_block(
    x: Tensor,
    residual: Tensor | None,
    params: AttentionParams,
    batch: DeviceBatch,
    kv: tuple[Tensor, Tensor],
    cos_sin: Tensor,
    product: Callable[..., Tensor] = linear,
) -> tuple[Tensor, Tensor]:
    """Norm, projection, rotation with the cache write, attention, projection."""
    x, residual = _join(x, residual, params.norm, params.eps)
    heads = (params.heads, params.kv_heads, params.head_dim)
    qkv = product(x, params.qkv, params.qkv_bias)
    if params.q_norm is None:
        q = rows.rope_write(qkv, heads, batch.positions, cos_sin, kv, batch.kv_slots)
    else:
        q = _normed(qkv, heads, params, batch, kv, cos_sin)
    out, _ = attention(q, *kv, batch.attn, params.head_dim**-0.5, params.window)
    return product(out.flatten(1), params.o, params.o_bias), residual


def _normed(
    qkv: Tensor,
    heads: tuple[int, int, int],
    params: AttentionParams,
    batch: DeviceBatch,
    kv: tuple[Tensor, Tensor],
    cos_sin: Tensor,
) -> Tensor:
    """Queries of a model that normalises heads; its keys and values go to the cache."""
    hq, hkv, dim = heads
    lines = qkv.view(len(qkv), hq + 2 * hkv, dim)
    q = rows.rms_norm(lines[:, :hq], params.q_norm, params.head_eps)
    k = rows.rms_norm(lines[:, hq : hq + hkv], params.k_norm, params.head_eps)
    k = rows.rope(k, batch.positions, cos_sin)
    rows.kv_write(k, lines[:, hq + hkv :], *kv, batch.kv_slots)
    return rows.rope(q, batch.positions, cos_sin)


def mlp_block(
    x: Tensor, residual: Tensor, norm: Tensor | None, eps: float, gate_up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor]:
    """Norm, gate and up, gate · up, down."""
    x, residual = _join(x, residual, norm, eps)
    return linear(gated(x, gate_up), down), residual


def _join(
    x: Tensor, residual: Tensor | None, norm: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    if residual is None:
        return rows.rms_norm(x, norm, eps), x
    return rows.add_rms_norm(x, residual, norm, eps)


def all_layers(
    x: Tensor,
    layers: Sequence[LayerParams],
    batch: DeviceBatch,
    kv: KVPools,
    cos_sin: Tensor,
    taps: Taps | None = None,
    blocks: Blocks | None = None,
) -> Tensor:
    """Rows [T, H] through all layers, launch by launch; ``blocks`` read weights of other kinds."""
    attend, feed = blocks or (attention_block, mlp_block)
    wanted = () if taps is None else taps.layers
    residual: Tensor | None = None
    for index, (attn, mlp) in enumerate(layers):
        x, residual = attend(x, residual, attn, batch, kv.layer(index), cos_sin)
        if index and index - 1 in wanted:  # the norm has added what the layer before left
            assert taps is not None
            taps.put(index - 1, residual)
        x, residual = feed(x, residual, *mlp)
    assert residual is not None, "there is at least one layer"
    out = x + residual
    if len(layers) - 1 in wanted:
        assert taps is not None
        taps.put(len(layers) - 1, out)
    return out


@dataclass(slots=True)
class _Stage:
    """The standing inputs of a graph, its replay once it is recorded, and what it returns."""

    x: Tensor
    batch: DeviceBatch
    plan: Plan
    replay: Callable[[], tuple[Tensor, _Tapped]] | None = None


class _Tapped:
    """Tapped rows of a stage: written by its graph, read before its next replay."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self.hidden: dict[int, Tensor] = {}

    def put(self, layer: int, hidden: Tensor) -> None:
        self.hidden[layer] = hidden

    def tell(self, taps: Taps | None, tokens: int) -> None:
        """The rows that are the step's."""
        for layer, hidden in self.hidden.items():
            assert taps is not None
            taps.put(layer, hidden[:tokens])


class Layers:
    """``decoder_layers`` of one engine, with its graphs.

    Args:
        device: where they run.
        graphs: False: every step is launched kernel by kernel.
        blocks: ``attention_block`` and ``mlp_block``, if not those of this file.
    """

    def __init__(
        self, device: torch.device, graphs: bool = True, blocks: Blocks | None = None
    ) -> None:
        self._blocks = blocks
        self._graphs = Graphs(device) if graphs and device.type == "cuda" else None
        self._stages: dict[tuple[int, int, tuple[int, ...]], _Stage] = {}
        self._of: tuple[Any, Any] = (None, None)

    def release(self) -> None:
        """Give back all graphs, and record none from here on: memory is short."""
        self._stages.clear()
        self._graphs = None

    def __call__(
        self,
        x: Tensor,
        layers: Sequence[LayerParams],
        batch: DeviceBatch,
        kv: KVPools,
        cos_sin: Tensor,
        taps: Taps | None = None,
    ) -> Tensor:
        """The op. A step of few rows is staged and replayed."""
        tokens = len(x)
        plan = batch.attn
        few = max(SHORT, ROWS_A_REQUEST * len(plan.kv_lengths))
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            if len(plan.kv_lengths) < tokens <= min(few, MOST_TOKENS):
                inside = _stage(tokens, plan.block_table.shape[1], x, plan)
                _fill(inside, x, batch, plan)
                x, batch = inside.x, inside.batch
            return all_layers(x, layers, batch, kv, cos_sin, taps, self._blocks)
        if self._graphs is None or tokens > min(few, MOST_TOKENS) or tokens < len(plan.kv_lengths):
            return all_layers(x, layers, batch, kv, cos_sin, taps, self._blocks)
        if self._of[0] is not layers or self._of[1] is not kv:
            self._stages.clear()
            self._of = (layers, kv)
        tapped = () if taps is None else taps.layers
        key = tier(tokens), triton.next_power_of_2(plan.block_table.shape[1]), tapped
        new = key not in self._stages
        if new:
            self._stages[key] = _stage(*key[:2], x, plan)
        stage = self._stages[key]
        _fill(stage, x, batch, plan)

        def run() -> tuple[Tensor, _Tapped]:
            # Tiles are cut inside: they belong to the step, not to the stage.
            inside = replace(stage.batch, attn=replace(stage.plan, cuts={}))
            found = _Tapped(tapped)
            args = (stage.x, layers, inside, kv, cos_sin, found, self._blocks)
            return all_layers(*args), found

        if not new and stage.replay is None:
            stage.replay = self._graphs.record(run)
        hidden, found = run() if stage.replay is None else stage.replay()
        found.tell(taps, tokens)
        return hidden[:tokens]


def tier(tokens: int) -> int:
    """The number of rows that a graph for ``tokens`` rows has."""
    if tokens <= 8:
        return int(triton.next_power_of_2(tokens))
    step = 8 if tokens <= 64 else 16 if tokens <= 128 else 32
    return -(-tokens // step) * step


def _stage(tokens: int, width: int, x: Tensor, plan: Plan) -> _Stage:
    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=x.device)

    where = zeros(tokens, dtype=torch.int64)
    mine = Plan(
        zeros(tokens, width, dtype=torch.int32),
        zeros(tokens, dtype=torch.int64),
        zeros(tokens + 1, dtype=torch.int32),
        plan.page_size,
    )
    batch = DeviceBatch(
        ids=where,
        positions=zeros(tokens, dtype=torch.int64),
        row_of_token=where,
        kv_slots=zeros(tokens, dtype=torch.int64),
        attn=mine,
        logit_rows=where,
    )
    return _Stage(x.new_zeros((tokens, x.shape[1])), batch, mine)


def _fill(stage: _Stage, x: Tensor, batch: DeviceBatch, plan: Plan) -> None:
    """The step's inputs; rows behind them belong to nobody and write nowhere."""
    mine, own = stage.batch, stage.plan
    rows.stage(
        (x, plan.block_table, batch.positions, batch.kv_slots, plan.kv_lengths, plan.cu_q),
        (stage.x, own.block_table, mine.positions, mine.kv_slots, own.kv_lengths, own.cu_q),
    )
