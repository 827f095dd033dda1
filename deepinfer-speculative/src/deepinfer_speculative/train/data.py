"""From texts to batches of anchors: which positions are drafted from, and what lies around them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_speculative.train.answers import Texts
from deepinfer_speculative.train.target import Target

_WINDOW = 32  # batches among which texts are sorted by length, so that padding stays small
_STEP_TOKENS = 1 << 15


@dataclass(frozen=True, slots=True)
class Batch:
    """B texts with A anchors each.

    ``ids`` int64[B, S], ``lengths`` int64[B], ``anchors`` int64[B, A] with ``real`` bool[B, A];
    ``joined`` [B, S, m·H] and ``final`` [B, S, H]: the target's states.
    """

    ids: Tensor
    lengths: Tensor
    anchors: Tensor
    real: Tensor
    joined: Tensor
    final: Tensor

    def slots(self, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """(before int64[B, A, γ], token int64[B, A, γ], valid bool[B, A, γ]): the true id before
        each slot, the true id of it, and whether the text reaches so far.
        """
        place = self.anchors[..., None] + torch.arange(1, block + 1, device=self.ids.device)
        valid = (place < self.lengths[:, None, None]) & self.real[..., None]
        place = place.clamp(max=self.ids.shape[1] - 1)
        rows = torch.arange(len(self.ids), device=self.ids.device)[:, None, None]
        return self.ids[rows, place - 1], self.ids[rows, place], valid


class Pool:
    """Texts and the target's states of them.

    Args:
        keep: compute all states once and keep them on the device, (m + 1)·H values a token;
            False computes those of a batch when it is asked for.
    """

    def __init__(
        self, texts: Texts, which: NDArray[np.int64], target: Target, taps: tuple[int, ...],
        keep: bool = False,
    ) -> None:  # fmt: skip
        self.texts, self.which, self._target, self._taps = texts, which, target, taps
        self._device = target.embed.device
        self._lengths = np.diff(texts.start)
        self._kept: tuple[Tensor, Tensor] | None = None
        if keep:
            self._kept = self._states_of_all()

    def _states_of_all(self) -> tuple[Tensor, Tensor]:
        hidden, dtype = self._target.embed.shape[1], self._target.embed.dtype
        total = len(self.texts.tokens)
        joined = torch.empty((total, len(self._taps) * hidden), dtype=dtype, device=self._device)
        final = torch.empty((total, hidden), dtype=dtype, device=self._device)
        order = self.which[np.argsort(self._lengths[self.which], kind="stable")]
        begin = 0
        while begin < len(order):
            longest = int(self._lengths[order[begin]])
            count = max(1, _STEP_TOKENS // (longest + 64))
            rows = order[begin : begin + count]
            ids, lengths = self._ids(rows)
            states = self._target.states(ids, self._taps)
            mine = torch.arange(ids.shape[1], device=self._device) < lengths[:, None]
            place = torch.from_numpy(self.texts.start[rows]).to(self._device)[:, None]
            place = (place + torch.arange(ids.shape[1], device=self._device))[mine]
            joined[place], final[place] = states[0][mine], states[1][mine]
            begin += count
        return joined, final

    def _ids(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        lengths = self._lengths[rows]
        ids = np.zeros((len(rows), int(lengths.max())), np.int64)
        for row, text in enumerate(rows):
            ids[row, : lengths[row]] = self.texts.text(int(text))
        return torch.from_numpy(ids).to(self._device), torch.from_numpy(lengths).to(self._device)

    def states(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(ids, lengths, joined, final) of these texts, padded."""
        ids, lengths = self._ids(rows)
        if self._kept is None:
            return (ids, lengths, *self._target.states(ids, self._taps))
        place = torch.from_numpy(self.texts.start[rows]).to(self._device)[:, None]
        reach = torch.arange(ids.shape[1], device=self._device).minimum(lengths[:, None] - 1)
        place = place + reach
        return ids, lengths, self._kept[0][place], self._kept[1][place]

    def batch(self, step: int, size: int, anchors: int, seed: int) -> Batch:
        """The batch of a step: a function of its arguments, so a run may stop and go on."""
        rows = self._rows(step, size, seed)
        ids, lengths, joined, final = self.states(rows)
        rng = np.random.default_rng((seed, 1, step))
        score = torch.from_numpy(rng.random(ids.shape, dtype=np.float32)).to(ids.device)
        prompt = torch.from_numpy(self.texts.prompt[rows].astype(np.int64)).to(ids.device)
        place = torch.arange(ids.shape[1], device=ids.device)
        # An anchor is a token of the answer, with another behind it.
        fit = (place >= prompt[:, None]) & (place < lengths[:, None] - 1)
        best = torch.where(fit, score, -1.0).topk(min(anchors, ids.shape[1]), 1)
        return Batch(ids, lengths, best.indices, best.values >= 0, joined, final)

    def _rows(self, step: int, size: int, seed: int) -> NDArray[np.int64]:
        """Shuffled anew each epoch, then sorted by length within windows of batches."""
        size = min(size, len(self.which))
        per_epoch = len(self.which) // size
        epoch, at = divmod(step, per_epoch)
        rng = np.random.default_rng((seed, 0, epoch))
        order = rng.permutation(self.which)[: per_epoch * size]
        for begin in range(0, len(order), _WINDOW * size):
            part = order[begin : begin + _WINDOW * size]
            part[:] = part[np.argsort(self._lengths[part], kind="stable")]
        chosen = rng.permutation(per_epoch)[at]
        return np.asarray(order[chosen * size : (chosen + 1) * size])
