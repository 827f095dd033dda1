"""``load_format="dummy"``: a model's shapes from its config.json, filled with random numbers.

For measuring speed and memory without a checkpoint. Values are drawn where the model will run, a
parameter at a time, by a generator of their own: the same numbers at every start on one kind of
device, and nobody's random state moves.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from deepinfer.errors import UnsupportedError
from deepinfer.models.fit import stored_shapes
from deepinfer.models.weights import ALONE, block_scaled, give_back, joined_shape, owned, size_of
from deepinfer.ops.lowbit import TILE, BlockScaled

if TYPE_CHECKING:
    from deepinfer.api.model import Model, WeightRule
    from deepinfer.models.weights import LoadPlan
    from deepinfer.ops.table import OpSet

SPREAD: Final = 0.02
"""Standard deviation of the values: what models are initialised with, so that rows stay finite."""
_FP8_SCALE, _FP4_SCALE = 127 - 6, 127 - 7  # E8M0: codes of unit spread, E2M1's of 2.9, to SPREAD


def make_weights(
    model: Model,
    rules: Iterable[WeightRule],
    ops: OpSet,
    dtype: torch.dtype,
    plan: LoadPlan = ALONE,
) -> int:
    """Fill every parameter; optional ones stay absent. Returns the bytes that they take.

    Norms' weights are 1, everything else is drawn from N(0, SPREAD²); weights that a checkpoint
    stores in few bits are so here.

    Raises:
        UnsupportedError: the model reads a table from its checkpoint's file in every step.
    """
    mine = [r for rule in rules if (r := owned(rule, plan.parallel)) is not None and not r.optional]
    for rule in mine:
        if rule.stored == "table":
            raise UnsupportedError(
                f"load_format='dummy': {rule.parameter!r} is a table that stays in the "
                "checkpoint's file, and here is none.",
                setting="load_format",
                next_step="Load real weights, or describe a model without such tables.",
            )
    device = torch.device("cpu") if ops.context is None else ops.context.device
    total = 0
    for rule in mine:
        prepared = ops.prepare(_filled(rule, dtype, device, plan.dequantize), rule.uses)
        total += size_of(prepared)
        model.load(rule.parameter, prepared)
        del prepared
    give_back()
    return total


def _filled(
    rule: WeightRule, dtype: torch.dtype, device: torch.device, dequantize: bool
) -> Tensor | BlockScaled:
    source = torch.Generator(device).manual_seed(zlib.crc32(rule.parameter.encode()))
    if not dequantize and block_scaled(rule):
        return _low_bit(rule, device, source)
    shape = joined_shape(rule.shapes, rule.stack) if rule.view is None else rule.view
    out = torch.empty(shape, dtype=torch.float32 if rule.exact else dtype, device=device)
    if "rms_norm" in rule.uses:
        return out.fill_(1.0)
    return out.normal_(0.0, SPREAD, generator=source)


def _low_bit(rule: WeightRule, device: torch.device, source: torch.Generator) -> BlockScaled:
    """Codes drawn at random, all scales alike."""
    assert rule.stored in ("fp8", "fp4"), rule.parameter
    parts = [stored_shapes(rule, shape) for shape in rule.shapes]
    size, tiles = (joined_shape(shapes, rule.stack) for shapes in zip(*parts, strict=True))
    if rule.view is not None:
        lead = rule.view[:-1]
        size = (*lead, size[-1])
        tiles = (*lead[:-1], lead[-1] // (TILE if rule.stored == "fp8" else 1), tiles[-1])
    codes = torch.empty(size, dtype=torch.uint8, device=device)
    if rule.stored == "fp8":
        for place in torch.split(codes.flatten(), 1 << 26):  # a whole stack's float32 is large
            drawn = torch.empty(place.shape, device=device).normal_(generator=source)
            place.copy_(drawn.to(torch.float8_e4m3fn).view(torch.uint8))
    else:
        codes.random_(0, 256, generator=source)
    scale = _FP8_SCALE if rule.stored == "fp8" else _FP4_SCALE
    return BlockScaled(
        codes, torch.full(tiles, scale, dtype=torch.uint8, device=device), rule.stored
    )
