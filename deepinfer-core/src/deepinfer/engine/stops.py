"""Stop strings in a stream of text: :class:`StopStrings`. Beside ``output.py``, which feeds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Held(NamedTuple):
    """What a piece of text releases; ``stop`` is the stop string that it completed."""

    text: str
    stop: str | None = None


class StopStrings:
    """Finds stop strings in a stream of text pieces, whatever the pieces' borders.

    Text that may be the beginning of a stop string is held until it is known not to be. If one
    piece completes several, the one that ends first counts, and of those the longest.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, stops))
        self._heads = {stop[0] for stop in stops}
        self._held = ""

    def push(self, piece: str, armed: bool = True) -> Held:
        """Take text. Not ``armed``: no stop string may end in this piece, later ones may."""
        if not self._held and self._heads.isdisjoint(piece):
            return Held(piece)  # nothing can begin here
        text, known = self._held + piece, len(self._held)
        found = self._first(text, known) if armed else None
        if found is not None:
            start, stop = found
            self._held = ""
            return Held(text[: start + len(stop)] if self._include else text[:start], stop)
        cut = self._safe(text)
        self._held = text[cut:]
        return Held(text[:cut])

    def flush(self) -> str:
        """What was held; no more text will come."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, known: int) -> tuple[int, str] | None:
        """(start, stop) of the first stop string that ends behind ``known``."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            at = text.find(stop, max(0, known - len(stop) + 1))
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        return None if best is None else (best[1], best[2])

    def _safe(self, text: str) -> int:
        """Where the longest ending begins that a stop string may still begin with."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._heads:
                tail = text[at:]
                if any(len(s) > len(tail) and s.startswith(tail) for s in self._stops):
                    return at
        return len(text)
