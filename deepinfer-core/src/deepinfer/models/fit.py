"""Whether a checkpoint is the one that a model's rules describe, judged by its headers alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from deepinfer.errors import ModelLoadError
from deepinfer.models.shards import FLOATS
from deepinfer.ops.lowbit import TILE

if TYPE_CHECKING:
    from deepinfer.api.model import WeightRule
    from deepinfer.models.checkpoint import Checkpoint

# Tensors that checkpoints carry and no model needs: tables that are computed, not learnt.
_COMPUTED: Final = re.compile(
    r"\.(rotary_emb\.(inv_freq|cos_cached|sin_cached)|masked_bias|attn\.bias)$"
)
_CODES: Final = {"fp8": "F8_E4M3", "fp4": "I8", "table": "F8_E4M3"}
_SHOWN: Final = 4


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a checkpoint as a rule needs it: its stored shape and the types it may have."""

    name: str
    shape: tuple[int, ...]
    storages: tuple[str, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def scale_name(name: str) -> str:
    """``x.weight`` → ``x.scale``."""
    assert name.endswith(".weight"), name
    return f"{name.removesuffix('.weight')}.scale"


def parts_of(rule: WeightRule) -> Iterator[Part]:
    """Every tensor that a rule reads; a low-bit weight is followed by its scales."""
    for name, shape in zip(rule.sources, rule.shapes, strict=True):
        if rule.stored is None:
            yield Part(name, shape, tuple(FLOATS))
        else:
            codes, scales = stored_shapes(rule, shape)
            yield Part(name, codes, (_CODES[rule.stored],))
            yield Part(scale_name(name), scales, ("F8_E8M0",))


def stored_shapes(
    rule: WeightRule, shape: tuple[int, ...]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of the bytes of codes and scales of a low-bit weight with values [N, K]."""
    rows, columns = shape
    if rule.stored == "fp8":
        return (rows, columns), (-(-rows // TILE), -(-columns // TILE))
    assert columns % TILE == 0, f"{rule.parameter}: {columns} columns of {rule.stored}"
    return (rows, columns // 2 if rule.stored == "fp4" else columns), (rows, columns // TILE)


def check_fit(
    rules: list[WeightRule], checkpoint: Checkpoint, known: tuple[str, ...] | None
) -> None:
    """Refuse a checkpoint that does not fit, with the first misfit and how many there are.

    Args:
        rules: all of the model, also those whose weights other ranks own; without absent optionals.
        known: beginnings of names that may be there beside the rules' own; None allows all.
    """
    names = set(checkpoint.names())
    parts = [part for rule in rules for part in parts_of(rule)]
    problems = [text for part in parts if (text := _misfit(part, names, checkpoint))]
    if known is not None:
        problems += _extras(unused(rules, checkpoint), known, checkpoint)
    if problems:
        others = len(problems) - 1
        more = f"; {others} more misfits" if others else ""
        raise ModelLoadError(
            f"The checkpoint {problems[0]}{more}.",
            next_step="Its config.json may belong to another model, or a file may be missing.",
        )


def unused(rules: Iterable[WeightRule], checkpoint: Checkpoint) -> list[str]:
    """Names of tensors that no rule reads, without those that no model needs."""
    used = {part.name for rule in rules for part in parts_of(rule)}
    return [n for n in checkpoint.names() if n not in used and not _COMPUTED.search(n)]


def _misfit(part: Part, names: set[str], checkpoint: Checkpoint) -> str | None:
    """What is wrong with a tensor, as the end of a sentence about the checkpoint."""
    if part.name not in names:
        return f"has no tensor {part.name!r} (expected shape {list(part.shape)})"
    where = f"in {checkpoint.file(part.name).name}"
    shape, storage = tuple(checkpoint.shape(part.name)), checkpoint.storage(part.name)
    if shape != part.shape:
        return f"has {part.name!r} with shape {list(shape)}, expected {list(part.shape)}, {where}"
    if storage not in part.storages:
        expected = " or ".join(part.storages)
        return f"has {part.name!r} stored as {storage}, expected {expected}, {where}"
    return None


def _extras(extra: list[str], known: tuple[str, ...], checkpoint: Checkpoint) -> list[str]:
    found = [name for name in extra if not name.startswith(known)]
    if not found:
        return []
    shown = ", ".join(f"{n!r} (in {checkpoint.file(n).name})" for n in found[:_SHOWN])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return [f"has tensors that its config.json does not call for: {shown}{more}"]
