"""The two halves of a decoder layer as composites, each with the norm before it, and the layers.

The residual travels beside the rows: a half adds what came before to it, normalises and computes;
what it computes is added by the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from deepinfer.api.model import DeviceBatch, KVPools, Taps
from deepinfer.ops.table import op


class AttentionParams(NamedTuple):
    """A layer's attention: prepared weights, shape, and what only some families have.

    ``norm`` [H] with ``eps``; ``qkv`` [(HQ + 2·HKV)·D, H]: query, key and value rows; ``o``
    [H, HQ·D]. ``window``: how many keys a token sees, itself included. ``q_norm``, ``k_norm`` [D]
    with ``head_eps``: norms of each query and key head before the rotation, both or neither.
    """

    norm: Tensor | None
    eps: float
    qkv: Any
    o: Any
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    head_eps: float = 0.0


class MLPParams(NamedTuple):
    """A layer's feed-forward block: as ``mlp_block`` takes it."""

    norm: Tensor | None
    eps: float
    gate_up: Any
    down: Any


class LayerParams(NamedTuple):
    """A decoder layer that is nothing but its two halves."""

    attention: AttentionParams
    mlp: MLPParams


@op
def attention_block(
    ops: Any,
    x: Tensor,
    residual: Tensor | None,
    params: AttentionParams,
    batch: DeviceBatch,
    kv: tuple[Tensor, Tensor],
    cos_sin: Tensor,
) -> tuple[Tensor, Tensor]:
    """Norm, projection, rotation, KV write, attention and projection. Returns (y, residual').

    x, residual [T, H]: ``residual' = x + residual`` (None: x), y [T, H] is what attention makes of
    its norm. Of ``batch`` it reads ``positions``, ``kv_slots`` and ``attn``. Rounds after each op.
    """
    x, residual = _join(ops, x, residual, params.norm, params.eps)
    heads, kv_heads = params.heads, params.kv_heads
    qkv = ops.linear(x, params.qkv, params.qkv_bias)
    rows = qkv.view(len(qkv), heads + 2 * kv_heads, params.head_dim)
    v = rows[:, heads + kv_heads :]
    if params.q_norm is None:
        # Queries and keys lie side by side and turn alike: one call.
        turned = ops.rope(rows[:, : heads + kv_heads], batch.positions, cos_sin)
        q, k = turned[:, :heads], turned[:, heads:]
    else:
        q = ops.rms_norm(rows[:, :heads], params.q_norm, params.head_eps)
        k = ops.rms_norm(rows[:, heads : heads + kv_heads], params.k_norm, params.head_eps)
        q = ops.rope(q, batch.positions, cos_sin)
        k = ops.rope(k, batch.positions, cos_sin)
    ops.kv_write(k, v, *kv, batch.kv_slots)
    scale: float = params.head_dim**-0.5
    out, _ = ops.attention(q, *kv, batch.attn, scale, params.window)
    return ops.linear(out.flatten(1), params.o, params.o_bias), residual


@op
def mlp_block(
    ops: Any,
    x: Tensor,
    residual: Tensor,
    norm: Tensor | None,
    eps: float,
    gate_up: Any,
    down: Any,
) -> tuple[Tensor, Tensor]:
    """``residual' = x + residual``; ``y = gated_mlp(rms_norm(residual'))``. Returns (y, residual').

    x, residual [T, H], norm [H], weights as ``gated_mlp``'s. Rounds after each op.
    """
    x, residual = _join(ops, x, residual, norm, eps)
    return ops.gated_mlp(x, gate_up, down), residual


@op
def decoder_layers(
    ops: Any,
    x: Tensor,
    layers: Sequence[LayerParams],
    batch: DeviceBatch,
    kv: KVPools,
    cos_sin: Tensor,
    taps: Taps | None = None,
) -> Tensor:
    """Rows [T, H] through all layers, one half after the other, the residual added at the end.

    At least one layer; ``kv.layer(i)`` is layer i's. An implementation may keep what it derives of
    ``layers`` and ``kv``: they stay as they are. A model may have two ``layers``, all of them and,
    in steps of many rows, all but the last. ``taps`` gets ``x + residual`` behind each of its
    layers that is one of these, and changes no bit of the result.
    """
    residual: Tensor | None = None
    for index, (attention, mlp) in enumerate(layers):
        x, residual = ops.attention_block(x, residual, attention, batch, kv.layer(index), cos_sin)
        x, residual = ops.mlp_block(x, residual, *mlp)
        if taps is not None and index in taps.layers:
            taps.put(index, x + residual)
    assert residual is not None, "there is at least one layer"
    return x + residual


def _join(
    ops: Any, x: Tensor, residual: Tensor | None, norm: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    if residual is None:
        return ops.rms_norm(x, norm, eps), x
    y, total = ops.add_rms_norm(x, residual, norm, eps)
    return y, total
