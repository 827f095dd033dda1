"""From checkpoint to model: rules in, prepared parameters out, one at a time.

Host memory at the peak is what is prepared so far plus one parameter and one tensor of it.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepinfer.api.model import Model, WeightRule
from deepinfer.errors import ModelLoadError

if TYPE_CHECKING:
    from deepinfer.models.checkpoint import Checkpoint
    from deepinfer.ops.table import OpSet

log = logging.getLogger(__name__)

# Tensors that checkpoints carry and no model needs: tables that are computed, not learnt.
_COMPUTED = re.compile(r"\.(rotary_emb\.(inv_freq|cos_cached|sin_cached)|masked_bias|attn\.bias)$")


def load_weights(
    model: Model,
    rules: Iterable[WeightRule],
    checkpoint: Checkpoint,
    ops: OpSet,
    dtype: torch.dtype,
    round_to: torch.dtype | None = None,
) -> int:
    """Load every parameter; returns the bytes that the prepared ones take.

    Args:
        round_to: round values to this type before they become ``dtype``.

    Raises:
        ModelLoadError: a tensor is missing or has another shape; found before any is read.
    """
    rules = [rule for rule in rules if not _absent(rule, checkpoint)]
    _check(rules, checkpoint)
    # The largest first: its peak comes while little is loaded, and what it leaves free fits the
    # next one, so that the allocator keeps no holes.
    rules.sort(key=lambda rule: -sum(map(math.prod, rule.shapes)))
    device = None if ops.context is None else ops.context.device
    total = 0
    for rule in rules:
        joined = join(rule, checkpoint, dtype, round_to).to(device)
        prepared = ops.prepare(joined, rule.uses)
        total += size_of(prepared)
        del joined
        model.load(rule.parameter, prepared)
    _report_unused(rules, checkpoint)
    return total


def join(
    rule: WeightRule, checkpoint: Checkpoint, dtype: torch.dtype, round_to: torch.dtype | None
) -> Tensor:
    """The tensors of one rule as one, each copied to its place as it is read."""
    if len(rule.sources) == 1 and not rule.stack:
        joined = checkpoint.tensor(rule.sources[0], dtype, round_to=round_to)
    else:
        first, *rest = rule.shapes
        if rule.stack:
            shape = (len(rule.shapes), *first)
        else:
            shape = (first[0] + sum(s[0] for s in rest), *first[1:])
        joined = torch.empty(shape, dtype=dtype, device="cpu")
        begin = 0
        for name, source in zip(rule.sources, rule.shapes, strict=True):
            rows = 1 if rule.stack else source[0]
            part = checkpoint.tensor(name, dtype, round_to=round_to)
            joined[begin : begin + rows] = part
            begin += rows
    return joined if rule.view is None else joined.view(rule.view)


def size_of(prepared: Any) -> int:
    """Bytes of a prepared parameter: a tensor, or whatever tells its own ``nbytes``."""
    return int(getattr(prepared, "nbytes", 0))


def _absent(rule: WeightRule, checkpoint: Checkpoint) -> bool:
    names = set(checkpoint.names()) if rule.optional else set()
    return rule.optional and not names.intersection(rule.sources)


def _check(rules: list[WeightRule], checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that does not fit, with the first misfit and how many there are."""
    names = set(checkpoint.names())
    problems = []
    for rule in rules:
        for name, shape in zip(rule.sources, rule.shapes, strict=True):
            if name not in names:
                problems.append(f"has no tensor {name!r} (expected shape {list(shape)})")
            elif tuple(checkpoint.shape(name)) != shape:
                found = list(checkpoint.shape(name))
                problems.append(f"has {name!r} with shape {found}, expected {list(shape)}")
        if rule.view is not None and not rule.stack:
            assert math.prod(rule.view) == sum(math.prod(s) for s in rule.shapes), rule.parameter
    if problems:
        others = len(problems) - 1
        more = f"; {others} more misfits" if others else ""
        raise ModelLoadError(
            f"The checkpoint {problems[0]}{more}.",
            next_step="Its config.json may belong to another model, or a file may be missing.",
        )


def _report_unused(rules: list[WeightRule], checkpoint: Checkpoint) -> None:
    used = {name for rule in rules for name in rule.sources}
    unused = [n for n in checkpoint.names() if n not in used and not _COMPUTED.search(n)]
    if unused:
        log.debug("%d checkpoint tensors are not used: %s", len(unused), ", ".join(unused))
