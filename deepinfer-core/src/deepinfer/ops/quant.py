"""int8 weights in plain torch: the native kernels' quantised values, dequantised at each use.

Every 32 values along K share one scale, ``max |w| / 127`` as fp16 (rounded up where that is
subnormal); a value is w / scale, rounded half to even, within ±127. The rows that meet such a
weight are rounded alike (:func:`round_rows`), so that kernels may multiply integers. Arithmetic is
float32 on ``q · scale`` of both; the native kernels sum a group's products exactly and differ by
float32 rounding only. A router's weight, which decides who computes, stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.api.backend import Impl
from deepinfer.ops.reference import dense, moe
from deepinfer.ops.table import EXACT_WEIGHTS

GROUP = 32


class Int8Weight:
    """A weight [..., K] as int8 and one fp16 scale for each 32 values.

    It answers ``float()`` and indexing as the tensor would, which is all that the readers ask of a
    weight; so they take both.
    """

    def __init__(self, values: Tensor, scale: Tensor, columns: int, dtype: torch.dtype) -> None:
        self.values = values  # int8[..., groups, 32]
        self.scale = scale  # float16[..., groups]
        self.shape = torch.Size((*scale.shape[:-1], columns))
        self.dtype = dtype
        self.nbytes = values.nbytes + scale.nbytes

    @classmethod
    def quantize(cls, weight: Tensor) -> Int8Weight:
        """Padding of the last group counts as zeros."""
        columns = weight.shape[-1]
        padded = F.pad(weight.float(), (0, -columns % GROUP))
        groups = padded.view(*weight.shape[:-1], padded.shape[-1] // GROUP, GROUP)
        ideal = (groups.abs().amax(-1) / 127).clamp(max=65504)
        rounded_up = (ideal * 2.0**24).ceil() * 2.0**-24
        scale = torch.where(ideal < 2.0**-14, rounded_up, ideal).half()
        step = scale.float()[..., None]
        ratio = torch.where(step > 0, groups / step, 0.0).clamp(-127, 127)
        return cls(ratio.round().to(torch.int8), scale, columns, weight.dtype)

    def float(self) -> Tensor:
        wide = self.values.float() * self.scale.float()[..., None]
        return wide.flatten(-2)[..., : self.shape[-1]]

    def __getitem__(self, index: int | Tensor) -> Any:
        """One expert as a weight, or the rows of a table in the type that it had."""
        part = Int8Weight(self.values[index], self.scale[index], self.shape[-1], self.dtype)
        return part if isinstance(index, int) else part.float().to(self.dtype)


def quantized_ops(base: Mapping[str, Impl]) -> dict[str, Impl]:
    """``base`` with weights of projections prepared as int8.

    A table that ``embedding`` alone reads stays as it is.
    """
    linear = base["linear"].fn if "linear" in base else dense.linear
    grouped = base["grouped_linear"].fn if "grouped_linear" in base else moe.grouped_linear
    readers: dict[str, Callable[..., Any]] = {
        "linear": partial(_linear, linear),
        "grouped_linear": partial(_grouped_linear, grouped),
    }
    return {**base, **{name: Impl(fn, _prepare) for name, fn in readers.items()}}


def round_rows(x: Tensor) -> Tensor:
    """x [..., K] in int8 steps, float32: every 32 values share the step ``max |x| / 127``.

    A value is x / step, rounded half to even, within ±127. 32 values with a NaN or an infinity
    among them become NaN.
    """
    columns = x.shape[-1]
    padded = F.pad(x.float(), (0, -columns % GROUP))
    groups = padded.view(*x.shape[:-1], padded.shape[-1] // GROUP, GROUP)
    step = groups.abs().amax(-1, keepdim=True) / 127
    good = (step > 0) & step.isfinite()
    values = torch.where(good, groups / torch.where(good, step, 1.0), 0.0)
    return (values.clamp(-127, 127).round() * step).flatten(-2)[..., :columns]


def _linear(
    fn: Callable[..., Any],
    x: Tensor,
    w: Any,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    if isinstance(w, Int8Weight):
        return fn(round_rows(x), w, bias, out_dtype or x.dtype)
    return fn(x, w, bias, out_dtype)


def _grouped_linear(
    fn: Callable[..., Any],
    x: Tensor,
    w: Any,
    offsets: Tensor,
    out_dtype: torch.dtype | None = None,
) -> Any:
    if isinstance(w, Int8Weight):
        return fn(round_rows(x), w, offsets, out_dtype or x.dtype)
    return fn(x, w, offsets, out_dtype)


def _prepare(weight: Tensor, uses: frozenset[str]) -> Any:
    return weight if uses & EXACT_WEIGHTS else Int8Weight.quantize(weight)
