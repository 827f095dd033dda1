"""Where prefills stop for a snapshot: :class:`Branches`. Below ``cache.py``.

A prefix can be entered only where its state was kept (``snapshots.py``), and texts part where they
like: behind a common system prompt, for one. So the first request that finds more common text than
state cuts its prefill there, and *promises* the snapshot; who comes meanwhile and would gain by it
waits, or asks somebody who is still on the way there to cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.engine.request import RequestState
    from deepinfer.engine.snapshots import Snapshots


class Branches:
    """Promised snapshots, by the digest of the page they end."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._page_size = snapshots.page_size
        self._promised: dict[bytes, RequestState] = {}

    def branch(self, pages: int, floor: int) -> int:
        """Where, within so many common pages, state serves most others.

        Above its floor a request's state serves only those with the same floor, which is to say the
        same length; at or below it, every longer one.
        """
        if floor and pages * self._page_size > floor:
            return floor // self._page_size
        return pages

    def soon(
        self, r: RequestState, found: int, common: int, coming: Mapping[bytes, RequestState]
    ) -> bool:
        """Somebody will keep state that spares ``r`` at least half of what it lacks.

        Args:
            r: who asks; its digests reach to ``common`` at least.
            found: pages that it could take over now.
            common: leading pages that are there or being computed.
            coming: who computes a page.
        """
        end = (len(r.tokens) - 1) // self._page_size
        least = found + max(1, -(-(end - found) // 2))
        digests, size = r.chain.digests, self._page_size
        for depth in range(common, least - 1, -1):
            owner = self._promised.get(digests[depth - 1])
            if owner and self._snapshots.usable(owner.floor, depth * size, r.floor):
                return True
        depth = self.branch(common, r.floor)
        if depth < least:
            return False
        owner, boundary = coming.get(digests[depth - 1]), depth * size
        if owner is None or not owner.prefilled < boundary < owner.prefill_to:
            return False
        if not self._snapshots.usable(owner.floor, boundary, r.floor):
            return False
        owner.chain.cuts.add(boundary)
        self._promise(owner, boundary)
        return True

    def enter(self, r: RequestState, found: int, common: int) -> None:
        """An admitted request: where it will cut, and what it promises."""
        size = self._page_size
        last = (len(r.tokens) - 1) // size
        branch = min(self.branch(common, r.floor), last)
        if branch > found:
            r.chain.cuts.add(branch * size)
            self._promise(r, branch * size)
        if last > found:
            self._promise(r, last * size)

    def _promise(self, r: RequestState, boundary: int) -> None:
        r.chain.promised.add(boundary)
        self._promised.setdefault(r.chain.digests[boundary // self._page_size - 1], r)

    def kept(self, r: RequestState, boundary: int) -> None:
        """The snapshot is there, or will not be."""
        digest = r.chain.digests[boundary // self._page_size - 1]
        if self._promised.get(digest) is r:
            del self._promised[digest]

    def retract(self, r: RequestState) -> None:
        """``r`` keeps none of its promises any more."""
        for boundary in r.chain.promised:
            self.kept(r, boundary)
        r.chain.promised, r.chain.cuts = set(), set()

    def clear(self) -> None:
        """The index was emptied."""
        self._promised.clear()

    def check(self, holders: set[RequestState]) -> None:
        """Every promise is somebody's."""
        assert holders.issuperset(self._promised.values()), "a snapshot is promised by nobody"
