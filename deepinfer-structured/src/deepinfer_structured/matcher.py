"""One request's matcher: :class:`Matcher`, a ``deepinfer.api.grammar.Grammar`` over xgrammar's.

xgrammar knows the grammar of the text and nothing of its end: it is told no end tokens, says by
``is_completed`` whether the text may end, and its mask says whether it may go on. What ends a text
is the request's: its end ids are allowed where the text may end, and where it cannot go on it ends
without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Validator = Callable[[bytes], str | None]


class Matcher:
    """Where a text stands in its grammar.

    Args:
        inner: an ``xgrammar.GrammarMatcher`` of a grammar without end tokens.
        size: columns of the logits.
        ends: ids that end the text.
        texts: int32 mask of the ids that may stand in the text, where not all that xgrammar allows.
    """

    __slots__ = ("_done", "_ends", "_size", "_texts", "_tokens", "_validate", "_written", "inner")

    def __init__(
        self,
        inner: Any,
        size: int,
        ends: frozenset[int],
        texts: NDArray[np.int32] | None = None,
    ) -> None:
        self.inner = inner
        self._size = size
        self._ends = ends
        self._texts = texts
        self._tokens: Sequence[bytes] = ()
        self._validate: Validator | None = None
        self._written = bytearray()
        self._done = self._final()

    def validate_with(self, tokens: Sequence[bytes], validate: Validator) -> None:
        """Have the whole text looked at when it has ended: its grammar is larger than its spec.

        ``tokens``: what each id spells.
        """
        self._tokens, self._validate = tokens, validate

    def fill(self, rows: NDArray[np.int32], drafts: Sequence[int]) -> int:
        self.inner.fill_next_token_bitmask(rows, 0)
        self.allow_ends(rows[0])
        return self.fill_behind(rows, drafts) if drafts else 0

    def fill_behind(self, rows: NDArray[np.int32], drafts: Sequence[int]) -> int:
        """Rows 1 … of :meth:`fill`; row 0 is filled already."""
        legal = moved = 0
        try:
            for draft in drafts:
                if not self._allows(rows[legal], draft):
                    break
                legal += 1
                if draft in self._ends and self.inner.is_completed():
                    rows[legal] = -1  # the text ends before this row
                    break
                if not self.inner.accept_token(draft):
                    raise RuntimeError(f"xgrammar allows token {draft} and refuses it")
                moved += 1
                self.inner.fill_next_token_bitmask(rows, legal)
                if self._final():
                    rows[legal] = -1  # likewise, and without an end token
                    break
                self.allow_ends(rows[legal])
        finally:
            if moved:
                self.inner.rollback(moved)
        return legal

    def _allows(self, row: NDArray[np.int32], token: int) -> bool:
        return 0 <= token < self._size and bool(row[token // 32] >> token % 32 & 1)

    def allow_ends(self, row: NDArray[np.int32]) -> bool:
        """Whether the text may end here; its end ids are allowed then. Special tokens go."""
        if self._texts is not None:
            row &= self._texts
        if not self.inner.is_completed():
            return False
        words = row.view(np.uint32)
        for token in self._ends:
            if token < self._size:
                words[token // 32] |= np.uint32(1 << token % 32)
        return True

    def accept(self, tokens: Sequence[int]) -> int:
        for place, token in enumerate(tokens):
            if self._done:
                return place
            if token in self._ends and self.inner.is_completed():
                self._done = True
                return place + 1
            if not self.inner.accept_token(token):
                raise RuntimeError(f"Token {token} was emitted against the grammar.")
            if self._validate is not None:
                self._written += self._tokens[token]
            self._done = self._final()
        return len(tokens)

    def _final(self) -> bool:
        """The text may end here, and no token may follow."""
        if not self.inner.is_completed():
            return False
        row = np.empty((1, -(-self._size // 32)), np.int32)
        self.inner.fill_next_token_bitmask(row, 0)
        return not self._any(row[0] if self._texts is None else row[0] & self._texts)

    def _any(self, row: NDArray[np.int32]) -> bool:
        """Some id is allowed; bits behind the last one do not count."""
        behind = -self._size % 32
        return bool(row[:-1].any() or row.view(np.uint32)[-1] << np.uint32(behind))

    def done(self) -> bool:
        return self._done

    def fork(self) -> Matcher:
        twin = Matcher(self.inner.fork(), self._size, self._ends, self._texts)
        twin._tokens, twin._validate = self._tokens, self._validate
        twin._written = bytearray(self._written)
        twin._done = self._done
        return twin

    def unproven(self) -> bool:
        return self._validate is not None

    def violation(self) -> str | None:
        assert self._validate is not None
        return self._validate(bytes(self._written))
