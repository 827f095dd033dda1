"""Manifold-constrained hyper-connections: n residual streams, mixed anew around every sublayer.

DeepSeek-V4.1 specification, sections 2.2 and 2.3. The streams X are [T, n, D]; a mix is what a
token's streams give: ``pre`` float32[T, n] weighs them into a sublayer's input, ``post``
float32[T, n] spreads its output over them, ``comb`` float32[T, n, n] moves stream i to stream j.
The form is delayed: a sublayer collapses the streams with a ``pre`` computed before it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepinfer.ops.rows import row_sum, sigmoid, softmax
from deepinfer.ops.table import op

Mix = tuple[Tensor, Tensor, Tensor]
"""(pre, post, comb)."""


@op
def hyper_mix(
    ops: Any,
    x: Tensor,
    fn: Any,
    scale: Tensor,
    base: Tensor,
    iters: int,
    eps: float,
    norm_eps: float,
) -> Mix:
    """A mix of the streams. x [T, n, D], fn [(2 + n)·n, n·D] prepared for ``linear`` (uses
    ``("hyper_mix", "linear")``: never quantised), scale float32[3], base float32[(2 + n)·n].

    With z the streams of a token side by side, ``m = (fn · z) · rsqrt(mean(z²) + norm_eps)``, in
    float32. Of ``m·scale + base`` the first n columns are pre (sigmoid, + eps), the next n post
    (2 · sigmoid), the rest comb, row-major: softmax over j, + eps, columns divided by their sums
    + eps, then ``iters − 1`` times rows and columns. n is at least 2.
    """
    streams = x.shape[1]
    wide = x.flatten(1)
    mean = row_sum(wide.float().square()) / wide.shape[1]
    mixed = ops.linear(wide, fn, None, torch.float32) * (1 / torch.sqrt(mean + norm_eps))[:, None]
    return split_mix(mixed, scale, base, iters, eps, streams)


def split_mix(
    mixed: Tensor, scale: Tensor, base: Tensor, iters: int, eps: float, streams: int
) -> Mix:
    """:func:`hyper_mix` from the normalised projections float32[T, (2 + n)·n] on."""
    n = streams
    parts = torch.tensor((n, n, n * n), device=scale.device)
    shaped = mixed * scale.float().repeat_interleave(parts) + base.float()
    pre, post, rest = shaped[:, :n], shaped[:, n : 2 * n], shaped[:, 2 * n :]
    comb = _balance(softmax(rest.reshape(-1, n, n)) + eps, iters, eps)
    return sigmoid(pre) + eps, 2 * sigmoid(post), comb


def _balance(comb: Tensor, iters: int, eps: float) -> Tensor:
    """Divide columns by their sums, then rows and columns ``iters − 1`` times.

    Tokens lie innermost and everything happens in place: a small step is all calls, no numbers.
    """
    c = comb.permute(1, 2, 0).contiguous()
    streams, _, tokens = c.shape
    total = c.new_empty((streams, tokens))
    columns = c.unbind(0), total.view(1, streams, tokens)
    rows = c.unbind(1), total.view(streams, 1, tokens)
    for parts, divisor in (columns, *(rows, columns) * (iters - 1)):
        torch.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            total += part
        total += eps
        c /= divisor
    return c.permute(2, 0, 1).contiguous()


@op
def hyper_collapse(x: Tensor, pre: Tensor) -> Tensor:
    """``Σ_i pre[i] · x[i]``. x [T, n, D], pre float32[T, n] -> [T, D] of x's dtype.

    In float32, streams in ascending order, rounded once.
    """
    weighed = x.float() * pre[:, :, None]
    total = weighed[:, 0]
    for stream in range(1, x.shape[1]):
        total = total + weighed[:, stream]
    return total.to(x.dtype)


@op
def hyper_merge(x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """A sublayer's output into the streams: ``x'[j] = post[j]·y + Σ_i comb[i, j]·x[i]``.

    x [T, n, D], y [T, D], post float32[T, n], comb float32[T, n, n] -> [T, n, D] of x's dtype. In
    float32, terms in the order written and streams ascending, rounded once.
    """
    total = post[:, :, None] * y.float()[:, None, :]
    wide, term = x.float(), torch.empty_like(total)
    for stream in range(x.shape[1]):
        total += torch.mul(comb[:, stream, :, None], wide[:, stream, None, :], out=term)
    return total.to(x.dtype)


class HyperParams(NamedTuple):
    """What one sublayer's opening reads: :func:`hyper_mix`'s arguments, then the norm [D]."""

    fn: Any
    scale: Tensor
    base: Tensor
    iters: int
    eps: float
    norm: Tensor
    norm_eps: float


@op
def hyper_open(ops: Any, x: Tensor, pre: Tensor, params: HyperParams) -> tuple[Tensor, Mix]:
    """Everything before a sublayer: its mix, and its input.

    x [T, n, D], pre float32[T, n]: the mix carried from the sublayer before. Returns (rows [T, D] =
    ``rms_norm(hyper_collapse(x, pre))``, (pre', post, comb) of x). post and comb belong to this
    sublayer's ``hyper_merge``, pre' to the next one's opening. The mean of squares in the mix has
    the norm's eps.
    """
    mix = ops.hyper_mix(
        x, params.fn, params.scale, params.base, params.iters, params.eps, params.norm_eps
    )
    return ops.rms_norm(ops.hyper_collapse(x, pre), params.norm, params.norm_eps), mix
