"""The logits stages, device half: bias … grammar, each row with that row's own history.

Where you are: ``runner.sample`` calls :meth:`LogitsPipeline.apply` before the verifier. The order
is fixed: bias → allowed ids → penalties → bad words → min tokens → grammar; temperature, top-k,
top-p and min-p follow in the sampler. Who uses what is known on the host when a request enters
(:func:`gather_stages`), so a stage that nobody in the batch uses costs nothing.

A *line* is a row of the logits; an emitting row of the plan owns one line for each token that it
may emit, and line j sees the text with the first j drafts behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deepinfer.api.plan import Fault
from deepinfer.sampling.transfer import to_device

if TYPE_CHECKING:
    from deepinfer.api.plan import RowParams
    from deepinfer.api.sampler import SampleRows
    from deepinfer.ops.table import OpSet


NEUTRAL = (0.0, 0.0, 1.0)
"""Penalties of who uses none: presence, frequency, repetition."""


@dataclass(frozen=True, slots=True)
class Bias:
    """``row``, ``ids`` int64[k], ``values`` float32[k]."""

    row: Tensor
    ids: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Allowed:
    """``row`` int64[u], ``bitmask`` int32[u, ⌈V/32⌉]."""

    row: Tensor
    bitmask: Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """``row`` int64[u] uses them; the parameters stand for all R emitting rows."""

    row: Tensor
    prompt_len: Tensor
    presence: Tensor
    frequency: Tensor
    repetition: Tensor


@dataclass(frozen=True, slots=True)
class BadWords:
    """``row``, ``last``, ``prompt_len`` int64[w]; ``prefix`` int64[w, p], −1 before short ones."""

    row: Tensor
    prefix: Tensor
    last: Tensor
    prompt_len: Tensor


@dataclass(frozen=True, slots=True)
class MinTokens:
    """``row``, ``ids``, ``min_len`` int64[s]: one entry for each stop id."""

    row: Tensor
    ids: Tensor
    min_len: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """What the emitting rows of a step use; ``row`` counts emitting rows. None: nobody does."""

    bias: Bias | None = None
    allowed: Allowed | None = None
    penalties: Penalties | None = None
    bad_words: BadWords | None = None
    min_tokens: MinTokens | None = None

    @property
    def any(self) -> bool:
        """Whether some stage will change logits in place."""
        parts = (self.bias, self.allowed, self.penalties, self.bad_words, self.min_tokens)
        return any(part is not None for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """The lines of a step.

    ``grid`` int64[R, w]: the line of each emitting row's j-th draw, −1 none. ``owner`` int64[m]:
    the emitting row of each line (padding: any). ``text`` int32[slots, width]: the token table,
    with the drafts behind the text. ``longest``: no line draws at a later position.
    """

    sample: SampleRows
    grid: Tensor
    owner: Tensor
    stages: Stages
    text: Tensor
    longest: int


class LogitsPipeline:
    """Applies the stages.

    Args:
        ops: serves ``logit_bias``, ``apply_bitmask`` and ``penalties``.
        never: an id that nobody may draw, whatever he asks for (an image's), or −1.
    """

    def __init__(self, ops: OpSet, never: int = -1) -> None:
        self._ops = ops
        self._never = never

    def apply(
        self, logits: Tensor, lines: Lines, bitmask: Tensor | None, index: Tensor | None
    ) -> Tensor:
        """All stages before the temperature, in place on ``logits`` float32[m, V].

        ``bitmask`` int32[k, ⌈V/32⌉] with ``index`` int64[k], the line of each mask or −1.

        Returns:
            uint8[m]: each line's :class:`Fault`; NaN is looked for before the first stage.
        """
        peak = logits.amax(1)  # carries a NaN through, so one pass answers both questions
        broken = peak.isnan()
        if self._never >= 0:
            logits[:, self._never] = -torch.inf
        self._own_stages(logits, lines)
        if bitmask is not None and index is not None:
            self._ops.apply_bitmask(logits, bitmask, index)
        if bitmask is not None or lines.stages.any:
            peak = logits.amax(1)
        empty = (peak == -torch.inf).to(torch.uint8) * Fault.NOTHING_ALLOWED
        return empty.masked_fill_(broken, Fault.NAN)

    def _own_stages(self, logits: Tensor, lines: Lines) -> None:
        stages = lines.stages
        if stages.bias is not None:
            self._bias(logits, lines, stages.bias)
        if stages.allowed is not None:
            self._allow(logits, lines, stages.allowed)
        if stages.penalties is not None:
            self._penalise(logits, lines, stages.penalties)
        if stages.bad_words is not None:
            self._forbid_words(logits, lines, stages.bad_words)
        if stages.min_tokens is not None:
            self._forbid_stops(logits, lines, stages.min_tokens)

    def _bias(self, logits: Tensor, lines: Lines, stage: Bias) -> None:
        self._add(logits, lines.grid[stage.row], stage.ids, stage.values[:, None])

    def _allow(self, logits: Tensor, lines: Lines, stage: Allowed) -> None:
        at = lines.grid[stage.row]
        self._ops.apply_bitmask(
            logits, stage.bitmask.repeat_interleave(at.shape[1], 0), at.flatten()
        )

    def _penalise(self, logits: Tensor, lines: Lines, stage: Penalties) -> None:
        alone = lines.grid.shape[1] == 1 and len(stage.row) < len(lines.grid)
        # Without drafts, users' lines are their rows. With drafts only the device knows the
        # lines: all are penalised, and neutral parameters change no bit of the others.
        line = stage.row if alone else None
        owner = stage.row if alone else lines.owner
        z = logits if line is None else logits[line]
        self._ops.penalties(
            z,
            _history(lines, line),
            stage.prompt_len[owner],
            stage.presence[owner],
            stage.frequency[owner],
            stage.repetition[owner],
        )
        if line is not None:
            logits[line] = z

    def _forbid_words(self, logits: Tensor, lines: Lines, stage: BadWords) -> None:
        at = lines.grid[stage.row]
        line = at.clamp(min=0)
        size = stage.prefix.shape[1]
        offset = torch.arange(-size, 0, device=logits.device)
        where = lines.sample.position[line][..., None] + offset  # [w, 1+g, size]
        real = (stage.prefix >= 0)[:, None]
        slot = lines.sample.slot[line][..., None]
        same = lines.text[slot, where.clamp(min=0)] == stage.prefix[:, None]
        same &= where >= stage.prompt_len[:, None, None]
        hit = (same | ~real).all(-1)
        self._add(logits, at, stage.last, torch.where(hit, -torch.inf, 0.0))

    def _forbid_stops(self, logits: Tensor, lines: Lines, stage: MinTokens) -> None:
        at = lines.grid[stage.row]
        early = lines.sample.position[at.clamp(min=0)] < stage.min_len[:, None]
        self._add(logits, at, stage.ids, torch.where(early, -torch.inf, 0.0))

    def _add(self, logits: Tensor, at: Tensor, ids: Tensor, values: Tensor) -> None:
        """Entries [k, 1+g] at lines ``at``, id ``ids[k]``: one call of the op."""
        ids, values = ids[:, None].expand_as(at), values.expand_as(at)
        self._ops.logit_bias(logits, at.flatten(), ids.flatten(), values.flatten())


def _history(lines: Lines, line: Tensor | None) -> Tensor:
    """int64[m, L]: the text that each line follows, drafts included, then −1."""
    slot, position = lines.sample.slot, lines.sample.position
    if line is not None:
        slot, position = slot[line], position[line]
    text = lines.text[:, : lines.longest].index_select(0, slot).long()
    place = torch.arange(text.shape[1], device=text.device)
    return torch.where(place < position[:, None], text, -1)


def gather_stages(params: Sequence[RowParams], vocab: int, device: torch.device) -> Stages:
    """Who of these emitting rows uses what, as device tensors."""
    return Stages(
        bias=_bias(params, device),
        allowed=_allowed(params, vocab, device),
        penalties=_penalties(params, device),
        bad_words=_bad_words(params, device),
        min_tokens=_min_tokens(params, device),
    )


def uses_stage(p: RowParams) -> bool:
    """Whether :func:`gather_stages` finds anything in it."""
    return bool(
        p.logit_bias
        or p.allowed_token_ids is not None
        or (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) != NEUTRAL
        or any(p.bad_words)
        or (p.stop_ids and p.min_len > p.prompt_len)
    )


def _bias(params: Sequence[RowParams], device: torch.device) -> Bias | None:
    found = [(r, i, v) for r, p in enumerate(params) for i, v in p.logit_bias]
    if not found:
        return None
    row, ids, values = zip(*found, strict=True)
    return Bias(
        _ids(row, device),
        _ids(ids, device),
        to_device(torch.tensor(values, dtype=torch.float32), device),
    )


def _allowed(params: Sequence[RowParams], vocab: int, device: torch.device) -> Allowed | None:
    users = [r for r, p in enumerate(params) if p.allowed_token_ids is not None]
    if not users:
        return None
    bits = np.zeros((len(users), -(-vocab // 32) * 32), np.uint8)
    for u, r in enumerate(users):
        bits[u, list(params[r].allowed_token_ids or ())] = 1
    words = np.packbits(bits, axis=1, bitorder="little").view("<i4").astype(np.int32)
    return Allowed(_ids(users, device), to_device(torch.from_numpy(words), device))


def _penalties(params: Sequence[RowParams], device: torch.device) -> Penalties | None:
    values = [(p.presence_penalty, p.frequency_penalty, p.repetition_penalty) for p in params]
    users = [r for r, three in enumerate(values) if three != NEUTRAL]
    if not users:
        return None
    table = to_device(torch.tensor(values, dtype=torch.float32).t().contiguous(), device)
    prompt_len = _ids([p.prompt_len for p in params], device)
    return Penalties(_ids(users, device), prompt_len, *table.unbind(0))


def _bad_words(params: Sequence[RowParams], device: torch.device) -> BadWords | None:
    found = [(r, w, p.prompt_len) for r, p in enumerate(params) for w in p.bad_words if w]
    if not found:
        return None
    size = max(len(word) for _, word, _ in found) - 1
    prefix = [(-1,) * (size - len(word) + 1) + word[:-1] for _, word, _ in found]
    return BadWords(
        _ids([r for r, _, _ in found], device),
        _ids(prefix, device).reshape(len(found), size),
        _ids([word[-1] for _, word, _ in found], device),
        _ids([start for _, _, start in found], device),
    )


def _min_tokens(params: Sequence[RowParams], device: torch.device) -> MinTokens | None:
    found = [
        (r, i, p.min_len)
        for r, p in enumerate(params)
        if p.min_len > p.prompt_len
        for i in p.stop_ids
    ]
    if not found:
        return None
    row, ids, min_len = zip(*found, strict=True)
    return MinTokens(_ids(row, device), _ids(ids, device), _ids(min_len, device))


def _ids(values: Sequence[object], device: torch.device) -> Tensor:
    return to_device(torch.tensor(values, dtype=torch.int64), device)
