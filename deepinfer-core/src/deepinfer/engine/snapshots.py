"""State of prefixes: :class:`Snapshots`. Below ``cache.py``, for models with state groups.

Pages hold what grows with a text. What has a fixed size per request (windows, open groups) lies in
its slot's *state block*, which rolls on; a text that begins with a cached prefix needs the block as
it stood there. So some blocks are snapshots: copies of a slot's block, each belonging to the index
entry of the page that ends where it was taken. Least recently used ones are given up.

**Order.** A snapshot is wanted when a plan is made (behind a prefill chunk) or when a request ends
or gives way, and copied by the *next* plan, before anything else in it. Plans run in order, so the
block then holds all rows planned so far and none that is planned later, and a slot cannot have been
entered by another request, since admissions travel in plans too. No lease is needed: the copy comes
before whatever the plan does with slot and snapshot, and a plan's restores come behind its saves.

**Which boundary.** The contract of a state group: a block saved while no position at or above
b + page_size + draft_len + 2 was written serves a text that goes on at page boundary b. With
L tokens on the host, b is at least L − page_size (full pages below L − 1 are published):

* behind a chunk that ends at e, exactly e positions are written, and b > e − page_size, or
  b = e − page_size behind the last chunk (so that an equal prompt hits, whose last token must run);
* a request that gives way has one decode row in flight at most (one step ahead). It begins at L,
  for a request that goes on keeps all that it emits, and writes below L + draft_len;
* one that has ended may have stopped inside what its last row emitted: the device's text is up to
  draft_len longer, and so is what the row in flight writes. Where that is too much for b, no
  snapshot is taken (:meth:`Snapshots.leaves`). Without drafts it never is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from deepinfer.api.executor import ModelFacts
    from deepinfer.engine.pages import Node
    from deepinfer.engine.request import RequestState

Copies = tuple[tuple[int, int], ...]


class Want(NamedTuple):
    """A snapshot to take: of the owner's slot, for a boundary.

    ``node`` is its index entry, or None as long as the step that writes the page is in flight.
    """

    owner: RequestState
    slot: int
    boundary: int
    node: Node | None


class Snapshots:
    """Which state blocks hold which prefix's state, and the copies of the next plan.

    ``kept(r, boundary)`` is called when a wanted snapshot of ``r`` is there, or will never be.
    """

    def __init__(
        self,
        facts: ModelFacts,
        blocks: range,
        kept: Callable[[RequestState, int], None] = lambda r, boundary: None,
    ) -> None:
        self.page_size = facts.page_size
        self.truncation = facts.kv.truncation
        self.blocks = blocks
        self.kept = kept
        self._draft_len = facts.draft_len
        self._blank = list(reversed(self.blocks))
        self._used: OrderedDict[int, Node] = OrderedDict()
        self._wants: list[Want] = []
        self._behind: list[Want] = []  # of chunks in the plan in the making: for the one after it
        self._saves: dict[int, int] = {}
        self._restores: list[tuple[int, int]] = []

    # Looking.

    def usable(self, floor: int, boundary: int, mine: int) -> bool:
        """Whether state at a boundary, of a text with this floor, is what mine would be there.

        Below my floor late layers read nothing, so any will do. Above it, late layers have run
        from the other's floor on: the same only if the floors agree, or if it lies so far back
        that truncation no longer shows, in a mode that keeps enough rows to promise this.
        """
        cut = self.truncation
        if boundary <= mine or floor == mine:
            return True
        exact = cut is not None and cut.keep > cut.reach
        return exact and cut is not None and (floor == 0 or boundary >= floor + cut.reach)

    def deepest(self, path: Sequence[Node], floor: int) -> int:
        """Leading entries of ``path`` up to the last with state that this floor can use."""
        for depth in range(len(path), 0, -1):
            node = path[depth - 1]
            if node.block >= 0 and self.usable(node.floor, depth * self.page_size, floor):
                return depth
        return 0

    # Wanting.

    def chunked(self, r: RequestState) -> None:
        """A chunk of ``r`` has entered the plan in the making."""
        last = r.prefilled == r.prefill_to
        boundary = (r.prefilled - last) // self.page_size * self.page_size
        if self.blocks and boundary > r.chain.saved:
            r.chain.saved = boundary
            self._behind.append(Want(r, r.slot, boundary, None))

    def leaves(self, r: RequestState, finished: bool) -> None:
        """``r`` ends or gives way: keep the state of what it has published."""
        depth = len(r.chain.nodes)
        boundary = depth * self.page_size
        if not self.blocks or not depth or r.slot < 0 or boundary <= r.chain.hit:
            return
        written = r.prefilled
        if r.prefilled == r.prefill_to:
            written = len(r.tokens) + self._draft_len
            written += self._draft_len if finished and r.in_flight else 0
        if written <= boundary + self.page_size + self._draft_len + 2:
            self._wants.append(Want(r, r.slot, boundary, r.chain.nodes[-1]))

    def restore(self, r: RequestState) -> None:
        """An admitted request goes on from the state of the last page that it found."""
        node = r.chain.nodes[-1]
        self._used.move_to_end(node.block)
        self._restores.append((node.block, r.slot))

    # Copying.

    def copy(self) -> None:
        """Give blocks to what is wanted so far; the plan in the making copies."""
        wants, self._wants = self._wants, []
        for want in wants:
            self._save(want)

    def take(self) -> tuple[Copies, Copies]:
        """(saves, restores) of a plan that is sent now."""
        saves = tuple((slot, block) for block, slot in self._saves.items())
        restores = tuple(self._restores)
        self._saves, self._restores = {}, []
        self._wants, self._behind = self._wants + self._behind, []
        return saves, restores

    def attach(self, r: RequestState) -> None:
        """Pages of ``r`` have been published: state that was saved for them can be found now."""
        pending, nodes = r.chain.pending, r.chain.nodes
        for boundary in [b for b in pending if b <= len(nodes) * self.page_size]:
            node = nodes[boundary // self.page_size - 1]
            self._attach(node, pending.pop(boundary), r, boundary)

    def release(self, r: RequestState) -> None:
        """``r`` gives everything back: what still waits for its pages is lost."""
        for block in r.chain.pending.values():
            self._free(block)
        r.chain.pending = {}
        self._wants = [w for w in self._wants if w.owner is not r or w.node is not None]
        self._behind = [w for w in self._behind if w.owner is not r]

    def forget(self, node: Node) -> None:
        """An entry leaves the index."""
        if node.block >= 0:
            del self._used[node.block]
            self._free(node.block)
            node.block = -1

    def _save(self, want: Want) -> None:
        r, boundary = want.owner, want.boundary
        node, depth = want.node, boundary // self.page_size
        if node is None and depth <= len(r.chain.nodes):
            node = r.chain.nodes[depth - 1]
        if node is not None and (not node.alive or self._serves(node, r, boundary)):
            self.kept(r, boundary)
            return
        block = self._blank_block()
        if block is None:
            self.kept(r, boundary)
            return
        self._saves[block] = want.slot
        if node is None:
            r.chain.pending[boundary] = block
        else:
            self._attach(node, block, r, boundary)

    def _serves(self, node: Node, r: RequestState, boundary: int) -> bool:
        """There is state already that this request could use."""
        if node.block < 0 or not self.usable(node.floor, boundary, r.floor):
            return False
        self._used.move_to_end(node.block)
        return True

    def _attach(self, node: Node, block: int, r: RequestState, boundary: int) -> None:
        if not node.alive or self._serves(node, r, boundary):
            self._free(block)
        else:
            self.forget(node)
            node.block, node.floor = block, r.floor
            self._used[block] = node
        self.kept(r, boundary)

    def _blank_block(self) -> int | None:
        """A blank block, or the oldest snapshot's. None if all wait for their pages.

        Before the plan's admissions: what this plan restores from cannot be among them.
        """
        assert not self._restores, "a snapshot is read and given away in one plan"
        if not self._blank and self._used:
            self.forget(next(iter(self._used.values())))
        return self._blank.pop() if self._blank else None

    def _free(self, block: int) -> None:
        self._saves.pop(block, None)
        self._blank.append(block)

    # Tests.

    def check(self, holders: Iterable[RequestState]) -> None:
        """Every block is blank, an entry's or about to be one's; nothing twice."""
        pending = [block for r in holders for block in r.chain.pending.values()]
        found = [*self._blank, *self._used, *pending]
        assert sorted(found) == list(self.blocks), "a state block is lost or in two places"
        for block, node in self._used.items():
            assert node.alive and node.block == block, "a snapshot of no entry"
        assert not set(self._saves) & set(self._blank), "a blank block is saved to"
