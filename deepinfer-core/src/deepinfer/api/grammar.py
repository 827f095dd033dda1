"""Structured output: :class:`GrammarBackend` and :class:`Grammar`. House section 7.6."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Grammar(Protocol):
    """The state of one request's matcher. It moves by emitted tokens only."""

    def fill(self, rows: NDArray[np.int32], drafts: Sequence[int]) -> int:
        """Fill 1+len(drafts) mask rows; return how many drafts are legal. State is unchanged."""
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """Emitted tokens; raises on a refused one, which is an engine bug."""
        ...

    def done(self) -> bool:
        """Nothing but the end may follow."""
        ...

    def fork(self) -> Grammar: ...


class GrammarBackend(Protocol):
    """Compiles specs."""

    def compile(self, spec: Any) -> Grammar:
        """Thread-safe, may be slow. Refuses by name what it cannot enforce."""
        ...
