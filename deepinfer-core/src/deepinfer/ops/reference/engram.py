"""Engram: rows of a large table, chosen by hashes of the last tokens, gated into the streams.

DeepSeek-V4.1 specification, sections 5.3 and 5.4. ``models.deepseek_v41.engram_hash`` makes the
constants; the table itself is no op's business: whoever holds it turns row ids into rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepinfer.ops.rows import row_sum, sigmoid
from deepinfer.ops.table import op


class EngramHash(NamedTuple):
    """Constants of L Engram layers, N-grams of 2 … N tokens and h heads each.

    ``token_map`` int64[V]: compressed ids; ``multipliers`` int64[L, N]; ``primes`` int64[L, N−1,
    h]: rows of each bucket; ``offsets`` int64[L, (N−1)·h]: its first row in the layer's table.
    ``pad`` is the compressed id of what is out of reach, ``image`` the token id of image spans (−1:
    none).
    """

    token_map: Tensor
    multipliers: Tensor
    primes: Tensor
    offsets: Tensor
    pad: int
    image: int


@op
def engram_rows(tokens: Tensor, history: Tensor, constants: EngramHash) -> Tensor:
    """Table rows of each token: int64[T, L, (N−1)·h], columns by N-gram size, then head.

    tokens int64[T] in [0, V), history int64[T, ≥ N−1]: the ids right before each, nearest first, −1
    before the text. What lies beyond the text's begin or an image token, that one included, counts
    as ``pad``; so an image token has pads alone. With c the compressed ids, nearest first:
    ``R_0 = c_0·M_0``, ``R_i = R_{i−1} xor c_i·M_i`` in wrapping int64 (never negative), row =
    ``R_i mod prime + offset``.
    """
    size = constants.multipliers.shape[1]
    ids = torch.cat((tokens[:, None], history[:, : size - 1]), 1)
    blocked = ((ids < 0) | (ids == constants.image)).cummax(1).values
    compressed = torch.where(blocked, constants.pad, constants.token_map[ids.clamp(min=0)])
    scrambled = compressed[:, None, :] * constants.multipliers  # [T, L, N]
    mixed, found = scrambled[..., 0], []
    for i in range(1, size):
        mixed = mixed ^ scrambled[..., i]
        found.append(mixed[..., None] % constants.primes[:, i - 1])
    rows = torch.stack(found, 2).flatten(2)
    return rows + constants.offsets


@op
def engram_gate(
    x: Tensor,
    keys: Tensor,
    value: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    active: Tensor | None = None,
) -> Tensor:
    """``x'[i] = x[i] + γ[i] · value``: each stream asks, each stream's key answers.

    x, keys [T, n, D], value [T, D], q_weight and k_weight [n, D], active bool[T] (None: all) ->
    [T, n, D] of x's dtype. In float32, over D: ``δ = Σ x·q_w·k_w·key · rsqrt(mean x² + eps) ·
    rsqrt(mean key² + eps) · D^−½``, ``γ = sigmoid(copysign(sqrt(max(|δ|, 1e−6)), δ))``; 0 where not
    active. Rounded once.
    """
    wide, key = x.float(), keys.float()
    weight = q_weight.float() * k_weight.float()
    width = x.shape[-1]
    product = row_sum(wide * weight * key)
    for side in (wide, key):
        product = product / torch.sqrt(row_sum(side.square()) / width + eps)
    delta = product * width**-0.5
    gate = sigmoid(torch.copysign(torch.sqrt(delta.abs().clamp(min=1e-6)), delta))
    if active is not None:
        gate = torch.where(active[:, None], gate, 0.0)
    return (wide + gate[..., None] * value.float()[:, None, :]).to(x.dtype)


class EngramParams(NamedTuple):
    """An Engram layer: ``kv`` [(n + 1)·D, columns·width] prepared for ``scaled_linear``, its rows
    the keys of each stream, then the value; ``q_weight`` and ``k_weight`` [n, D].
    """

    kv: Any
    q_weight: Tensor
    k_weight: Tensor
    eps: float


@op
def engram_block(
    ops: Any, x: Tensor, rows: Tensor, active: Tensor | None, params: EngramParams
) -> Tensor:
    """What a layer's table adds to the streams: projection and gate.

    x [T, n, D], rows [T, columns·width] of x's dtype: the dequantised table rows side by side,
    active bool[T] (None: all): not in an image -> [T, n, D] of x's dtype.
    """
    streams, width = x.shape[1:]
    kv = ops.scaled_linear(rows, params.kv)
    keys = kv[:, : streams * width].view(len(kv), streams, width)
    value = kv[:, streams * width :]
    y: Tensor = ops.engram_gate(
        x, keys, value, params.q_weight, params.k_weight, params.eps, active
    )
    return y
