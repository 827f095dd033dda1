"""Pages of KV and the index of what they hold: :class:`PagePool`. Below ``cache.py``.

A page is blank, held (by one request or several), or idle: held by nobody, yet still in the
prefix index and so worth keeping. Index entries form a tree whose edges are pages of tokens. A
hash finds an entry; the entry's own tokens and its parent decide, so that two texts whose hashes
collide never share KV.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.api.plan import Image


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids as the bytes that are hashed and compared."""
    return array("i", tokens).tobytes()


def pack_images(images: Sequence[Image], start: int, stop: int) -> bytes:
    """What positions ``start … stop−1`` hold of images, to be hashed and compared with their ids.

    Each image's digest and how far in it the first of them lies; nothing for a page of text. The
    page's ids, always as many bytes, come first, so that no text passes for an image.
    """
    seen = [image for image in images if image.start < stop and start < image.stop]
    return b"".join(i.digest + array("q", (start - i.start,)).tobytes() for i in seen)


def chained(parent: bytes, tokens: bytes) -> bytes:
    """The digest of a page from its parent's digest and its tokens."""
    return blake2b(tokens, digest_size=16, key=parent).digest()


class Node:
    """An index entry: this page holds the KV of ``tokens`` after everything above it.

    ``block``: the state block as it stands behind this page, −1 if none was kept; ``floor``: of
    the request that it was copied from.
    """

    __slots__ = (
        "alive",
        "block",
        "children",
        "digest",
        "floor",
        "page",
        "parent",
        "tick",
        "tokens",
    )

    def __init__(self, parent: Node | None, digest: bytes, tokens: bytes, page: int) -> None:
        self.parent = parent
        self.digest = digest
        self.tokens = tokens
        self.page = page
        self.children: set[Node] = set()
        self.alive = True
        self.tick = 0
        self.block = -1
        self.floor = 0


class PagePool:
    """Reference counts, blank pages, the index, and eviction: least recently used leaf first.

    ``hash_page`` is an argument so that tests can make every hash collide. ``dropped`` is told of
    every entry that leaves the index.
    """

    def __init__(
        self,
        num_pages: int,
        identity: Sequence[str] = (),
        hash_page: Callable[[bytes, bytes], bytes] = chained,
    ) -> None:
        self.num_pages = num_pages
        self.refs = [0] * num_pages
        self.hash_page = hash_page
        self._identity = identity
        self._blank = deque(range(num_pages))
        self._idle = 0
        self._roots: dict[bytes, Node] = {}
        self._nodes: dict[bytes, Node] = {}
        self._node_of: list[Node | None] = [None] * num_pages
        self._leaves: list[tuple[int, int]] = []
        self._tick = 0
        self.dropped: Callable[[Node], None] = lambda node: None

    @property
    def free(self) -> int:
        """Pages that ``take`` can give now."""
        return len(self._blank) + self._idle

    @property
    def cached(self) -> int:
        """Pages in the index."""
        return len(self._nodes)

    def take(self) -> int:
        """A page for new KV, with one reference. The caller has looked at ``free``."""
        if not self._blank:
            self._evict()
        page = self._blank.popleft()
        self.refs[page] = 1
        return page

    def hold(self, page: int) -> None:
        """One more reference to a page of the index."""
        if self.refs[page] == 0:
            self._idle -= 1
        self.refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference each. Give pages last first: what is dropped first, goes first."""
        for page in pages:
            self.refs[page] -= 1
            if self.refs[page]:
                assert self.refs[page] > 0, f"page {page} was released too often"
                continue
            node = self._node_of[page]
            if node is None:
                self._blank.append(page)
                continue
            self._idle += 1
            self._tick += 1
            node.tick = self._tick
            if not node.children:
                self._push(node)

    # The index.

    def root(self, salt: str) -> Node:
        """Where texts under this salt begin; salts are compared as they are, not hashed."""
        key = salt.encode("utf-8", "surrogatepass")
        node = self._roots.get(key)
        if node is None:
            if len(self._roots) > self.num_pages:
                self._roots = {k: root for k, root in self._roots.items() if root.children}
            text = b"\0".join((*(part.encode() for part in self._identity), key))
            digest = blake2b(text, digest_size=16).digest()
            node = self._roots[key] = Node(None, digest, key, -1)
        return node

    def find(self, parent: Node, digest: bytes, tokens: bytes) -> Node | None:
        """The entry of these tokens below ``parent``; verified."""
        node = self._nodes.get(digest)
        if node is None or node.parent is not parent or node.tokens != tokens:
            return None
        return node

    def leading(self, digests: Sequence[bytes]) -> int:
        """How many of a text's first digests are known; quick, and not verified."""
        for count, digest in enumerate(digests):
            if digest not in self._nodes:
                return count
        return len(digests)

    def insert(self, parent: Node, digest: bytes, tokens: bytes, page: int) -> Node | None:
        """Enter a held page; returns the entry of these tokens, which may be an older page's.

        None if it cannot be entered: its parent has been evicted, or its digest is another's.
        """
        if not parent.alive:
            return None
        if digest in self._nodes:
            return self.find(parent, digest, tokens)
        if self._node_of[page] is not None:
            return None
        node = Node(parent, digest, tokens, page)
        parent.children.add(node)
        self._nodes[digest] = self._node_of[page] = node
        return node

    def clear(self) -> None:
        """Empty the index; held pages stay held."""
        for root in list(self._roots.values()):
            for child in list(root.children):
                self._drop(child)

    # Eviction.

    def _push(self, node: Node) -> None:
        """An idle leaf may be evicted. Entries that no longer hold are skipped when popped."""
        if len(self._leaves) > 4 * self.num_pages + 64:
            self._leaves = [entry for entry in self._leaves if self._evictable(*entry)]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (node.tick, node.page))

    def _evictable(self, tick: int, page: int) -> bool:
        node = self._node_of[page]
        return node is not None and node.tick == tick and not node.children and self.refs[page] == 0

    def _evict(self) -> None:
        """Make at least one idle page blank."""
        while self._leaves:
            tick, page = heapq.heappop(self._leaves)
            if self._evictable(tick, page):
                node = self._node_of[page]
                assert node is not None
                self._drop(node)
                return
        # Idle inner pages below which somebody still works on equal text of his own.
        idle = [n for n in self._nodes.values() if self.refs[n.page] == 0]
        self._drop(min(idle, key=lambda n: n.tick))

    def _drop(self, top: Node) -> None:
        """Take an entry and all below it out of the index."""
        parent = top.parent
        assert parent is not None
        parent.children.discard(top)
        stack = [top]
        while stack:
            node = stack.pop()
            stack.extend(node.children)
            node.alive = False
            node.children = set()
            del self._nodes[node.digest]
            self.dropped(node)
            self._node_of[node.page] = None
            if self.refs[node.page] == 0:
                self._idle -= 1
                self._blank.append(node.page)
        if not parent.children:
            self._lonely(parent)

    def _lonely(self, node: Node) -> None:
        """An entry has lost its last child: it may go next, and a root goes at once."""
        if node.parent is None:
            node.alive = False
            del self._roots[node.tokens]
        elif self.refs[node.page] == 0:
            self._push(node)

    def check(self, holders: Counter[int]) -> None:
        """Every count and link agrees, given who holds which page. For tests and ``close``."""
        for page, count in enumerate(self.refs):
            assert count == holders[page], f"page {page}: {count} refs, held {holders[page]} times"
        idle = {n.page for n in self._nodes.values() if self.refs[n.page] == 0}
        held = {page for page, count in enumerate(self.refs) if count}
        assert len(idle) == self._idle, "idle pages are miscounted"
        assert len(set(self._blank)) == len(self._blank), "a page is blank twice"
        assert held | idle | set(self._blank) == set(range(self.num_pages)), "a page is lost"
        assert len(held) + len(idle) + len(self._blank) == self.num_pages, "a page is in two places"
        for digest, node in self._nodes.items():
            assert node.digest == digest and node.alive and self._node_of[node.page] is node
            assert node.parent is not None and node.parent.alive and node in node.parent.children
