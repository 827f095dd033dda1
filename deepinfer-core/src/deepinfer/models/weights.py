"""From checkpoint to model: rules in, prepared parameters out, one at a time.

Host memory at the peak is what is prepared so far plus one parameter and one tensor of it, so it
never holds a shard. Files are read one after the other.
"""

from __future__ import annotations

import ctypes
import logging
import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor

from deepinfer.api.model import Model, WeightRule
from deepinfer.errors import ModelLoadError
from deepinfer.models.fit import check_fit, parts_of, scale_name, stored_shapes, unused
from deepinfer.models.tables import MappedTable
from deepinfer.ops.lowbit import TILE, BlockScaled

if TYPE_CHECKING:
    from deepinfer.api.parallel import ParallelContext
    from deepinfer.models.checkpoint import Checkpoint
    from deepinfer.ops.table import OpSet

log = logging.getLogger(__name__)

_EXPERT: Final = re.compile(r"\.experts\.(\d+)\.")
_NAN_SCALE: Final = 255
_PIECE: Final = 1 << 17  # values that are dequantised at a time: what the allocator keeps is small


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """How the weights of one rank are loaded.

    Attributes:
        dequantize: turn low-bit weights into the engine's dtype once; False keeps them as stored.
        known: beginnings of checkpoint names that a family knows and may leave unread; any other
            name that no rule reads is then an error. None: unread names are only logged.
        parallel: experts of other ranks are not read; None for a rank that is alone.
    """

    dequantize: bool = True
    known: tuple[str, ...] | None = None
    parallel: ParallelContext | None = None


ALONE: Final = LoadPlan()


def load_weights(
    model: Model,
    rules: Iterable[WeightRule],
    checkpoint: Checkpoint,
    ops: OpSet,
    dtype: torch.dtype,
    round_to: torch.dtype | None = None,
    plan: LoadPlan = ALONE,
) -> int:
    """Load every parameter; returns the bytes that the prepared ones take.

    Args:
        round_to: round values to this type before they become ``dtype``.

    Raises:
        ModelLoadError: a tensor is missing, has another shape or type or is not called for, found
            before any is read; or a scale is NaN.
    """
    names = set(checkpoint.names())
    rules = [r for r in rules if not (r.optional and names.isdisjoint(r.sources))]
    check_fit(rules, checkpoint, plan.known)
    if plan.known is None and (left := unused(rules, checkpoint)):
        log.debug("%d checkpoint tensors are not used: %s", len(left), ", ".join(left))
    mine = [own for rule in rules if (own := owned(rule, plan.parallel)) is not None]
    # File by file. Within one the largest first: its peak comes while little is loaded, and what
    # it leaves free fits the next one, so that the allocator keeps no holes.
    mine.sort(key=lambda r: (checkpoint.file(r.sources[0]), -sum(map(math.prod, r.shapes))))
    device = None if ops.context is None else ops.context.device
    total = 0
    for rule in mine:
        joined = join(rule, checkpoint, dtype, round_to, plan.dequantize)
        if not isinstance(joined, MappedTable):
            joined = ops.prepare(joined.to(device), rule.uses)
        total += size_of(joined)
        model.load(rule.parameter, joined)
        del joined
    give_back()
    return total


def give_back() -> None:
    """Memory that loading has freed, to the system: glibc keeps some 60 MB of it otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def owned(rule: WeightRule, parallel: ParallelContext | None) -> WeightRule | None:
    """A rule with the experts of this rank only, or None if it has none of them.

    Experts are told by ``.experts.N.`` in the names of their tensors. Rank r of R owns the run
    from ⌊r·E/R⌋ to below ⌊(r+1)·E/R⌋ of E experts. Other rules stay as they are.
    """
    numbers = [int(match[1]) for name in rule.sources if (match := _EXPERT.search(name))]
    if parallel is None or parallel.ep.size == 1 or not numbers:
        return rule
    assert len(numbers) == len(rule.sources), rule.parameter
    rank, size, count = parallel.ep.rank, parallel.ep.size, max(numbers) + 1
    run = range(rank * count // size, (rank + 1) * count // size)
    kept = [i for i, number in enumerate(numbers) if number in run]
    if not kept:
        return None
    return replace(
        rule,
        sources=tuple(rule.sources[i] for i in kept),
        shapes=tuple(rule.shapes[i] for i in kept),
        view=None if rule.view is None else (len(run), *rule.view[1:]),
    )


def join(
    rule: WeightRule,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    round_to: torch.dtype | None = None,
    dequantize: bool = True,
    device: torch.device | None = None,
) -> Tensor | BlockScaled | MappedTable:
    """The tensors of one rule as one, each copied to its place as it is read.

    Args:
        device: where the checkpoint gives its tensors; None is the host.
    """
    if rule.exact:
        dtype, round_to = torch.float32, None
    if rule.stored == "table":
        (name,) = rule.sources
        return MappedTable(name, checkpoint.extent(name), checkpoint.extent(scale_name(name)))
    if not dequantize and block_scaled(rule):
        return _as_stored(rule, checkpoint, device)
    if rule.stored is None and len(rule.sources) == 1 and not rule.stack:
        joined = checkpoint.tensor(rule.sources[0], dtype, round_to=round_to)
    else:
        joined = torch.empty(
            joined_shape(rule.shapes, rule.stack), dtype=dtype, device=device or "cpu"
        )
        places = _places(joined, rule.shapes, rule.stack)
        for name, place in zip(rule.sources, places, strict=True):
            if rule.stored is None:
                place.copy_(checkpoint.tensor(name, dtype, round_to=round_to))
            else:
                _dequantize(rule.stored, name, checkpoint, place, round_to)
    return joined if rule.view is None else joined.view(rule.view)


def block_scaled(rule: WeightRule) -> bool:
    """Whether a weight can be kept as stored: an op that multiplies block by block reads it."""
    return rule.stored is not None and any("scaled" in use for use in rule.uses)


def joined_shape(shapes: Sequence[tuple[int, ...]], stack: bool) -> tuple[int, ...]:
    """Of tensors of these shapes joined along dimension 0, or along a new one."""
    first, *rest = shapes
    if stack:
        return (len(shapes), *first)
    return (first[0] + sum(shape[0] for shape in rest), *first[1:])


def _places(joined: Tensor, shapes: Sequence[tuple[int, ...]], stack: bool) -> list[Tensor]:
    """Where in a joined tensor each of its parts goes."""
    if stack:
        return list(joined.unbind())
    ends = list(accumulate(shape[0] for shape in shapes))
    return [joined[end - shape[0] : end] for end, shape in zip(ends, shapes, strict=True)]


def _dequantize(
    kind: Literal["fp8", "fp4"],
    name: str,
    checkpoint: Checkpoint,
    out: Tensor,
    round_to: torch.dtype | None,
) -> None:
    """A low-bit tensor's values into ``out`` [N, K], read some whole tiles of rows at a time."""
    rows = max(_PIECE // out.shape[1] // TILE, 1) * TILE
    per_tile = TILE if kind == "fp8" else 1
    height, width = checkpoint.shape(scale_name(name))
    scales = _bytes(checkpoint, [scale_name(name)], [(height, width)], False, out.device)
    columns = checkpoint.shape(name)[1]
    codes = torch.empty(min(rows, out.shape[0]), columns, dtype=torch.uint8, device=out.device)
    for begin in range(0, out.shape[0], rows):
        place = out[begin : begin + rows]
        piece = codes[: place.shape[0]]
        checkpoint.bytes_into(name, piece, begin * columns)
        tiles = scales[begin // per_tile : (begin + rows) // per_tile]
        place.copy_(BlockScaled(piece, tiles, kind).dequantize(round_to or out.dtype))


def _as_stored(
    rule: WeightRule, checkpoint: Checkpoint, device: torch.device | None
) -> BlockScaled:
    """The bytes of a rule's tensors, joined; scales that are NaN are refused."""
    assert rule.stored in ("fp8", "fp4"), rule.parameter
    shapes = [stored_shapes(rule, shape) for shape in rule.shapes]
    if rule.stored == "fp8" and not rule.stack:
        _check_tiles(rule)
    codes = _bytes(checkpoint, list(rule.sources), [c for c, _ in shapes], rule.stack, device)
    names = [scale_name(name) for name in rule.sources]
    scales = _bytes(checkpoint, names, [s for _, s in shapes], rule.stack, device)
    if rule.view is not None:
        lead = rule.view[:-1]
        codes = codes.view(*lead, codes.shape[-1])
        if rule.stored == "fp8":
            lead = (*lead[:-1], lead[-1] // TILE)
        scales = scales.view(*lead, scales.shape[-1])
    return BlockScaled(codes, scales, rule.stored)


def _check_tiles(rule: WeightRule) -> None:
    """Tiles of 32 rows belong to one tensor, and to one matrix of a view."""
    heights = [shape[0] for shape in rule.shapes[:-1]]
    heights += [] if rule.view is None or len(rule.view) < 3 else [rule.view[-2]]
    if any(height % TILE for height in heights):
        pairs = zip(rule.sources, rule.shapes, strict=True)
        shown = ", ".join(f"{name} ({shape[0]} rows)" for name, shape in list(pairs)[:3])
        raise ModelLoadError(
            f"The weight {rule.parameter!r} is joined from {shown}, where {TILE}×{TILE} scale "
            "tiles do not meet, so it cannot be kept as stored.",
            setting="dequantize_weights",
            next_step="Set dequantize_weights=True.",
        )


def _bytes(
    checkpoint: Checkpoint,
    names: list[str],
    shapes: list[tuple[int, int]],
    stack: bool,
    device: torch.device | None,
) -> Tensor:
    """Raw tensors as one uint8, read straight into their places."""
    lead = (len(shapes), shapes[0][0]) if stack else (sum(rows for rows, _ in shapes),)
    out = torch.empty(*lead, shapes[0][1], dtype=torch.uint8, device=device or "cpu")
    for name, place in zip(names, _places(out, shapes, stack), strict=True):
        checkpoint.bytes_into(name, place)
        if name.endswith(".scale"):
            _refuse_nan(place, name, checkpoint)
    return out


def _refuse_nan(scales: Tensor, name: str, checkpoint: Checkpoint) -> None:
    bad = scales == _NAN_SCALE
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise ModelLoadError(
            f"{checkpoint.file(name)}: tensor {name!r} has a NaN scale (byte 255) at row {row}, "
            f"column {column}{f' and {int(bad.sum()) - 1} more' if int(bad.sum()) > 1 else ''}.",
            setting="model",
            next_step="Fetch the file again.",
        )


def weight_bytes(
    rules: Iterable[WeightRule],
    dtype: torch.dtype,
    dequantize: bool,
    parallel: ParallelContext | None = None,
) -> int:
    """Bytes in memory of the parameters of rules, before a backend prepares them.

    Mapped tables take none (:func:`mapped_bytes`); optional rules count as present.
    """
    total = 0
    for rule in rules:
        own = owned(rule, parallel)
        if own is None or own.stored == "table":
            continue
        if not dequantize and block_scaled(own):
            total += sum(part.elements for part in parts_of(own))
        else:
            size = torch.float32.itemsize if own.exact else dtype.itemsize
            total += size * sum(map(math.prod, own.shapes))
    return total


def mapped_bytes(rules: Iterable[WeightRule]) -> int:
    """Bytes of the tables that stay in their files."""
    tables = (rule for rule in rules if rule.stored == "table")
    return sum(part.elements for rule in tables for part in parts_of(rule))


def size_of(prepared: Any) -> int:
    """Bytes of a prepared parameter: a tensor, or whatever tells its own ``nbytes``."""
    return int(getattr(prepared, "nbytes", 0))
