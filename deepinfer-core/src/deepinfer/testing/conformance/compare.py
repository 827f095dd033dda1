"""How close is close enough: two tolerances for each op and dtype.

A reference computes in float32 and rounds once. A backend may add in another order, so an element
may land on the neighbouring number; it may not lose precision on the way. One bound cannot say
both, so there are two, over the error of an element relative to ``|want| + rms(want)``:

``worst``
    bounds every element. In bfloat16 it is a little over one rounding step (2⁻⁷ at most), because
    an element that the reference rounded up may be rounded down; ops that round in the middle, and
    attention, get two steps. In float32 it grows with the number of terms that are added.
``mean``
    bounds the average over all elements, far below a rounding step. Elements that sit on the edge
    between two numbers are rare; a backend that accumulates in bfloat16, forgets the bias' bits or
    rounds once too often moves all of them a little, passes ``worst`` and fails here.

Ops without arithmetic (copies, indices, masks, counts) have no tolerance: they are equal or wrong.
NaN must meet NaN and an infinity the same infinity everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tolerance(NamedTuple):
    """The two bounds; both 0: bit for bit up to the sign of zero."""

    worst: float
    mean: float


_STEP = 2.0**-7  # of bfloat16, relative: the widest gap between neighbours
EXACT = Tolerance(0.0, 0.0)
SINGLE = {"float32": Tolerance(4e-6, 4e-7), "bfloat16": Tolerance(1.1 * _STEP, 0.05 * _STEP)}
SUMMED = {"float32": Tolerance(2e-5, 2e-6), "bfloat16": Tolerance(1.1 * _STEP, 0.05 * _STEP)}
CHAINED = {"float32": Tolerance(4e-5, 4e-6), "bfloat16": Tolerance(2.2 * _STEP, 0.15 * _STEP)}
# Rows that are rounded to FP8 in the middle: an element on the edge of two codes may fall either
# way, and then moves what follows by a sixteenth of its share.
CODED = {"float32": Tolerance(2e-2, 1e-4), "bfloat16": Tolerance(8 * _STEP, 0.5 * _STEP)}
BLOCK = {"float32": Tolerance(8e-5, 8e-6), "bfloat16": Tolerance(4.4 * _STEP, 0.3 * _STEP)}
LAYERS = {"float32": Tolerance(3e-4, 3e-5), "bfloat16": Tolerance(16 * _STEP, 1.0 * _STEP)}

TOLERANCES: dict[str, dict[str, Tolerance]] = {
    "linear": SUMMED,
    "rms_norm": SUMMED,
    "add_rms_norm": SUMMED,
    "silu_mul": SINGLE,
    "gated_mlp": CHAINED,
    "rope": SINGLE,
    "plan_attention": CHAINED,  # seen through the attention that uses the plan
    "attention": CHAINED,
    "full_attention": SUMMED,
    "attention_block": BLOCK,
    "mlp_block": BLOCK,
    "decoder_layers": LAYERS,
    "route": SINGLE,
    "grouped_linear": SUMMED,
    "moe": CHAINED,
    "scaled_linear": SUMMED,
    "grouped_scaled_linear": SUMMED,
    "scaled_moe": CODED,
    "scaled_moe_block": CODED,
    "compress": SUMMED,
    "latent_attention": CHAINED,
    "latent_attention_block": CODED,
    "hyper_mix": {dtype: SUMMED["float32"] for dtype in SUMMED},  # float32, whatever it reads
    "hyper_collapse": SINGLE,
    "hyper_merge": SINGLE,
    "hyper_open": CHAINED,
    "engram_gate": SUMMED,
    "engram_block": CHAINED,
    "logit_bias": SINGLE,
    "penalties": SINGLE,
    "logprobs": SUMMED,
}


def tolerance(op: str, dtype: str) -> Tolerance:
    """Both bounds for an op; exact where the table above has no line."""
    return TOLERANCES.get(op, {}).get(dtype, EXACT)


def difference(got: Tensor, want: Tensor, bound: Tolerance) -> str | None:
    """What is wrong with ``got``, in a sentence; None if nothing is."""
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if got.dtype != want.dtype:
        return f"dtype {got.dtype}, expected {want.dtype}"
    if not want.is_floating_point():
        return _first(got != want, got, want)
    odd = ~(want.isfinite() & got.isfinite())
    same = torch.where(want.isnan(), got.isnan(), got == want)
    if bool((odd & ~same).any()):
        return _first(odd & ~same, got, want)
    return _beyond(got.double(), want.double(), odd, bound)


def _beyond(got: Tensor, want: Tensor, odd: Tensor, bound: Tolerance) -> str | None:
    error = torch.where(odd, 0.0, (got - want).abs())
    if not bool(error.any()):
        return None
    finite = want[~odd]
    error = error / (torch.where(odd, 1.0, want.abs()) + finite.square().mean().sqrt() + 1e-30)
    if float(error.max()) > bound.worst:
        where = _first(error == error.max(), got, want)
        return f"{where}: error {float(error.max()):.2e}, at most {bound.worst:.2e} (worst)"
    if float(error.mean()) > bound.mean:
        return f"average error {float(error.mean()):.2e}, at most {bound.mean:.2e} (mean)"
    return None


def _first(wrong: Tensor, got: Tensor, want: Tensor) -> str | None:
    places = wrong.nonzero()
    if len(places) == 0:
        return None
    where = tuple(places[0].tolist())
    return (
        f"{len(places)} of {wrong.numel()} elements differ, first at {list(where)}: "
        f"{got[where].item()!r}, expected {want[where].item()!r}"
    )
