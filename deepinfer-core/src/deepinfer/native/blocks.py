"""All decoder layers, or halves of one, in one native call, for steps of few rows.

There the cost of a call and of waking threads counts: a step of one token makes ten small calls
per layer. Many rows, and whatever else the calls do not take, go op by op: the bits are the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import pack
from typing import Any

import torch
from torch import Tensor

from deepinfer.api.model import DeviceBatch, KVPools, Taps
from deepinfer.native import _kernels
from deepinfer.native.weights import PackedWeight
from deepinfer.ops.reference import blocks
from deepinfer.ops.reference.blocks import AttentionParams, LayerParams, MLPParams

FEW_ROWS = 32
_CODE = {torch.float32: 0, torch.bfloat16: 1}
_Numbers = tuple[int | float | None, ...]
_Step = tuple[DeviceBatch | None, Tensor | None, _Numbers | None]


class Blocks:
    """``attention_block``, ``mlp_block`` and ``decoder_layers`` of one engine.

    Args:
        ops: the backend's ops without these.
        threads: how many a call may use.
    """

    def __init__(self, ops: Any, threads: int) -> None:
        self._ops = ops
        self._threads = threads
        self._layers: dict[int, tuple[AttentionParams, _Numbers | None]] = {}
        self._step: _Step = (None, None, None)
        self._stack: tuple[Any, Any, Tensor | None] = (None, None, None)

    def attention_block(
        self,
        x: Tensor,
        residual: Tensor | None,
        params: AttentionParams,
        batch: DeviceBatch,
        kv: tuple[Tensor, Tensor],
        cos_sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """As the reference; a step's and a layer's addresses are looked up once."""
        held = self._layers.get(id(params))
        if held is None:
            held = self._layers[id(params)] = params, _layer(params)
        layer, step, rows = held[1], self._of_step(batch, cos_sin, params), _rows(x, residual)
        cache = _cache(kv, params)
        if layer is None or step is None or rows is None or cache is None or step[0] != rows[1]:
            return blocks.attention_block(self._ops, x, residual, params, batch, kv, cos_sin)
        y = torch.empty_like(x)
        total = x if residual is None else torch.empty_like(x)
        _kernels.attention_block(
            x.data_ptr(), 0 if residual is None else residual.data_ptr(), y.data_ptr(),
            total.data_ptr(), *rows, *layer, *cache, *step[1:], self._threads,
        )  # fmt: skip
        return y, total

    def mlp_block(
        self,
        x: Tensor,
        residual: Tensor,
        norm: Tensor | None,
        eps: float,
        gate_up: PackedWeight,
        down: PackedWeight,
    ) -> tuple[Tensor, Tensor]:
        """As the reference."""
        rows, mlp = _rows(x, residual), _mlp(MLPParams(norm, eps, gate_up, down))
        if rows is None or mlp is None or x.shape[1] != gate_up.k:
            return blocks.mlp_block(self._ops, x, residual, norm, eps, gate_up, down)
        y, total = torch.empty_like(x), torch.empty_like(x)
        _kernels.mlp_block(
            x.data_ptr(), residual.data_ptr(), y.data_ptr(), total.data_ptr(), *rows, *mlp,
            self._threads,
        )  # fmt: skip
        return y, total

    def decoder_layers(
        self,
        x: Tensor,
        layers: Sequence[LayerParams],
        batch: DeviceBatch,
        kv: KVPools,
        cos_sin: Tensor,
        taps: Taps | None = None,
    ) -> Tensor:
        """As the reference; the layers' addresses are looked up once. What is tapped behind a
        layer is a sum that the layer after it makes anyway: it only gets a place of its own.
        """
        rows = _rows(x, None)
        if rows is None:
            return blocks.decoder_layers(self._ops, x, layers, batch, kv, cos_sin, taps)
        if layers is not self._stack[0] or kv is not self._stack[1]:
            self._stack = layers, kv, _stack(layers, kv)
        stack, step = self._stack[2], self._of_step(batch, cos_sin, layers[0].attention)
        if stack is None or step is None or step[0] != rows[1]:
            return blocks.decoder_layers(self._ops, x, layers, batch, kv, cos_sin, taps)
        inner = () if taps is None else [i for i in taps.layers if 0 <= i < len(layers) - 1]
        tapped = {layer: torch.empty_like(x) for layer in inner}
        places = _places(tapped, len(layers)) if tapped else None
        y, total = torch.empty_like(x), torch.empty_like(x)
        _kernels.decoder_layers(
            x.data_ptr(), 0, y.data_ptr(), total.data_ptr(), *rows, stack.data_ptr(), len(layers),
            places and places.buffer_info()[0], *step[1:], self._threads,
        )  # fmt: skip
        out = y + total
        if taps is not None:
            for layer, hidden in tapped.items():
                taps.put(layer, hidden)
            if len(layers) - 1 in taps.layers:
                taps.put(len(layers) - 1, out)
        return out

    def _of_step(
        self, batch: DeviceBatch, cos_sin: Tensor, params: AttentionParams
    ) -> _Numbers | None:
        if batch is not self._step[0] or cos_sin is not self._step[1]:
            self._step = batch, cos_sin, _step(batch, cos_sin, params.head_dim)
        return self._step[2]


def _rows(x: Tensor, residual: Tensor | None) -> _Numbers | None:
    """dt, t, h, strides; None for what is left to the ops."""
    code = _CODE.get(x.dtype)
    if code is None or x.dim() != 2 or not 0 < len(x) <= FEW_ROWS or not x.is_contiguous():
        return None
    t, h = x.shape
    if residual is None:
        return code, t, h, h, 0
    if residual.dtype != x.dtype or residual.shape != x.shape or not residual.is_contiguous():
        return None
    return code, t, h, h, h


def _scales(norm: Tensor | None, size: int) -> _Numbers | None:
    """Address and dtype of a norm's weight [size]."""
    if norm is None:
        return 0, 0
    code = _CODE.get(norm.dtype)
    if code is None or norm.shape != (size,) or not norm.is_contiguous():
        return None
    return norm.data_ptr(), code


def _layer(p: AttentionParams) -> _Numbers | None:
    """A layer's weights and shape as the kernel takes them."""
    hq, hkv, d = p.heads, p.kv_heads, p.head_dim
    norm = _scales(p.norm, p.qkv.k)
    qkv_bias, o_bias = _scales(p.qkv_bias, p.qkv.n), _scales(p.o_bias, p.o.n)
    q_norm, k_norm = _scales(p.q_norm, d), _scales(p.k_norm, d)
    if norm is None or qkv_bias is None or o_bias is None or q_norm is None or k_norm is None:
        return None
    if p.qkv.n != (hq + 2 * hkv) * d or p.o.k != hq * d or p.o.n != p.qkv.k or hq % hkv:
        return None
    if (p.q_norm is None) != (p.k_norm is None) or q_norm[1] != k_norm[1]:
        return None
    if p.window is not None and p.window < 1:
        return None
    return (
        *norm, p.eps, p.qkv.pointer, p.qkv.code, p.qkv.scale_pointer, *qkv_bias, q_norm[0], *k_norm,
        p.head_eps, hq, hkv, d, d**-0.5, p.window or 0, p.o.pointer, p.o.code, p.o.scale_pointer,
        *o_bias,
    )  # fmt: skip


def _mlp(p: MLPParams) -> _Numbers | None:
    """A feed-forward block's weights as the kernel takes them."""
    up, down = p.gate_up, p.down
    norm = _scales(p.norm, up.k)
    if norm is None or up.n != 2 * down.k or down.n != up.k:
        return None
    return (
        *norm, p.eps, up.pointer, up.code, up.scale_pointer, down.pointer, down.code,
        down.scale_pointer, down.k,
    )  # fmt: skip


def _stack(layers: Sequence[LayerParams], kv: KVPools) -> Tensor | None:
    """All layers as the kernel takes them: 64-bit numbers, a layer behind the other."""
    table = b""
    for index, layer in enumerate(layers):
        parts = _layer(layer.attention), _cache(kv.layer(index), layer.attention), _mlp(layer.mlp)
        if None in parts or layer.attention.qkv.k != layers[0].mlp.down.n:
            return None
        table += b"".join(
            pack("=d" if isinstance(n, float) else "=q", n) for part in parts for n in part or ()
        )
    return torch.frombuffer(bytearray(table), dtype=torch.int64)


def _places(tapped: dict[int, Tensor], layers: int) -> array[int]:
    """Where the rows of each layer go; 0: nowhere."""
    return array("q", (tapped[i].data_ptr() if i in tapped else 0 for i in range(layers)))


def _step(batch: DeviceBatch, cos_sin: Tensor, head_dim: int) -> _Numbers | None:
    """Number of rows, then a step's tensors as the kernel takes them."""
    table, lengths, cu_q = batch.attn
    t, requests = len(batch.positions), len(table)
    whole = (batch.positions, batch.kv_slots, cos_sin, table, lengths, cu_q)
    dtypes = [x.dtype for x in whole]
    wide = lengths.dtype == torch.int64
    integers = torch.int64 if wide else torch.int32
    good = [torch.int64, torch.int64, torch.float32, torch.int32, integers, torch.int32]
    if dtypes != good or not all(x.is_contiguous() for x in whole) or cos_sin.dim() != 2:
        return None
    rotated = cos_sin.shape[1]
    if rotated > head_dim or rotated % 2 or batch.kv_slots.shape != (t,):
        return None
    if lengths.shape != (requests,) or cu_q.shape != (requests + 1,):
        return None
    return (
        t, cos_sin.data_ptr(), rotated, len(cos_sin), batch.positions.data_ptr(),
        batch.kv_slots.data_ptr(), table.data_ptr(), table.shape[1], lengths.data_ptr(), int(wide),
        cu_q.data_ptr(), requests,
    )  # fmt: skip


def _cache(kv: tuple[Tensor, Tensor], p: AttentionParams) -> _Numbers | None:
    """A layer's pages as the kernel takes them."""
    k, v = kv
    code = _CODE.get(k.dtype)
    pages, page, heads, dim = k.shape
    if code is None or v.dtype != k.dtype or v.shape != k.shape:
        return None
    if heads != p.kv_heads or dim != p.head_dim or not (k.is_contiguous() and v.is_contiguous()):
        return None
    return k.data_ptr(), v.data_ptr(), code, pages, page
