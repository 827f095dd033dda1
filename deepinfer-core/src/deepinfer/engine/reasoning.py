"""A grammar for the answer of a model that thinks first: :class:`AfterReasoning`.

Until the ids that end the reasoning have been emitted, everything but the end of the text is
allowed; then the grammar begins, and ``output.py`` puts it in this object's place.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from deepinfer.api.grammar import Grammar


class AfterReasoning:
    """A :class:`~deepinfer.api.grammar.Grammar` that stays open until ``mark`` has come.

    Args:
        inner: the answer's grammar, in its first state.
        mark: the ids that end the reasoning; not empty.
        ends: ids that would end the text, and its answer with it: not allowed before ``mark``.
    """

    def __init__(self, inner: Grammar, mark: Sequence[int], ends: Collection[int]) -> None:
        assert mark, "a reasoning that nothing ends"
        self.inner = inner
        self._mark = tuple(mark)
        self._ends = frozenset(ends)
        self._last: tuple[int, ...] = ()

    @property
    def over(self) -> bool:
        """The reasoning has ended: ``inner`` says what may follow."""
        return self._last == self._mark

    def _pushed(self, last: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*last, token)[-len(self._mark) :]

    def fill(self, rows: NDArray[np.int32], drafts: Sequence[int]) -> int:
        last = self._last
        for done, draft in enumerate((*drafts, None)):
            if last == self._mark:
                return done + self.inner.fill(rows[done:], drafts[done:])
            self._open(rows[done])
            if draft is None or draft in self._ends:
                return done
            last = self._pushed(last, draft)
        return len(drafts)

    def _open(self, row: NDArray[np.int32]) -> None:
        row[:] = -1
        words = row.view(np.uint32)
        for token in self._ends:
            if token < 32 * len(row):
                words[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)

    def accept(self, tokens: Sequence[int]) -> int:
        for done, token in enumerate(tokens):
            if self.over:
                return done + self.inner.accept(tokens[done:])
            self._last = self._pushed(self._last, token)
        return len(tokens)

    def done(self) -> bool:
        return self.over and self.inner.done()

    def fork(self) -> AfterReasoning:
        twin = AfterReasoning(self.inner.fork(), self._mark, self._ends)
        twin._last = self._last
        return twin

    def unproven(self) -> bool:
        return self.inner.unproven()

    def violation(self) -> str | None:
        return self.inner.violation()
