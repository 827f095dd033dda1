"""Pages and slots of requests: :class:`KVCache`. Fifth stop of the reading tour.

The scheduler asks here for room; ``settle`` is the one place where pages and slots come back, when
nothing holds them any more: no running request, no row in flight, no transfer. Tiers and peers
(:class:`~deepinfer.api.kv.KVStore`) hide behind ``admit`` and ``settle``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from deepinfer.api.kv import PageKey
from deepinfer.engine.branches import Branches
from deepinfer.engine.pages import Node, PagePool, pack, pack_images
from deepinfer.engine.request import RequestState, Status
from deepinfer.engine.snapshots import Snapshots
from deepinfer.engine.tiers import Found, Tiers

if TYPE_CHECKING:
    from deepinfer.api.executor import ModelFacts
    from deepinfer.api.kv import KVStore

NOWHERE = Found()


class Admission(Enum):
    """What came of asking for room."""

    ENTERS = "it has a slot and pages for its whole text"
    LOADS = "the same, and KV is on its way into them: rows come later"
    ASK_AGAIN = "its prefix is being computed or looked for; others may pass"
    NO_ROOM = "not now"


class KVCache:
    """Gives out pages and slots, knows which prefixes are there, and takes everything back."""

    def __init__(
        self,
        facts: ModelFacts,
        *,
        num_slots: int,
        caching: bool = True,
        stores: Sequence[KVStore] = (),
    ) -> None:
        self.page_size = facts.page_size
        self.caching = caching
        self.pool = PagePool(facts.num_pages, (facts.fingerprint, facts.kv.layout))
        self.slots = list(range(num_slots - 1, -1, -1))
        self.leaving: set[RequestState] = set()
        blocks = range(num_slots, facts.state_blocks) if caching else range(0)
        self.snapshots = Snapshots(facts, blocks, lambda r, b: self.branches.kept(r, b))
        self.branches = Branches(self.snapshots)
        self.pool.dropped = self.snapshots.forget
        # Pages alone are no prefix of a model with state, and a tier has nothing else.
        self._stateful = facts.kv.bytes_per_request > 0
        self.tiers = Tiers(() if self._stateful else stores)
        self._replay = facts.kv.replay
        self._coming: dict[bytes, RequestState] = {}

    # Room.

    def pages_for(self, tokens: int) -> int:
        """Pages that a text of this length takes."""
        return -(-tokens // self.page_size)

    def admit(self, r: RequestState) -> Admission:
        """Find what is cached, and give a slot and room for the whole text so far.

        The last token always runs again, since its logits are wanted; so a hit never covers it.
        """
        if self._hopeless(r):
            return Admission.NO_ROOM
        found, common = self._match(r) if self._may_hit(r) else (0, 0)
        keys = self._keys(r, (len(r.tokens) - 1) // self.page_size)[found:]
        tier = self.tiers.find(keys, r.request.ticket) if self._may_hit(r) else NOWHERE
        soon = not tier.pages and self._may_hit(r) and self._soon_here(r, found, common)
        ask_again = tier.retry or soon
        if ask_again or not self.reserve(r, len(r.tokens)):
            self._release(r)
            return Admission.ASK_AGAIN if ask_again else Admission.NO_ROOM
        r.slot = self.slots.pop()
        common = self._computed(r, common) if self.snapshots.blocks else 0
        self._announce(r, found)
        if self.snapshots.blocks:
            self._enter_state(r, found, common)
        if tier.store is not None and self.tiers.load(r, tier.store, keys[: tier.pages], found):
            r.status = Status.LOADING
            return Admission.LOADS
        return Admission.ENTERS

    def _enter_state(self, r: RequestState, found: int, common: int) -> None:
        """Go on from the snapshot behind what was found, and plan those to take."""
        r.chain.saved = found * self.page_size
        if self._may_hit(r):
            self.branches.enter(r, found, common)
        if found:
            self.snapshots.restore(r)

    def _hopeless(self, r: RequestState) -> bool:
        """There is certainly no room: says so quickly to who asks in every step."""
        known = self.pool.leading(r.chain.digests)
        certain = known < len(r.chain.digests)  # what lies behind the first unknown page is lost
        return certain and self.pages_for(len(r.tokens)) - known > self.pool.free

    def likely(self, r: RequestState) -> int:
        """Leading tokens of a waiting request that an admission will probably find: a look at the
        index, which holds nothing and verifies nothing.
        """
        if not self._may_hit(r):
            return 0
        pages = (len(r.tokens) - 1) // self.page_size
        digests = r.chain.digests
        for i in range(pages):
            known = digests[i] if i < len(digests) else self._digest(r, i, self._page_tokens(r, i))
            if not self.pool.leading((known,)):
                return i * self.page_size
        return pages * self.page_size

    def start(self, r: RequestState) -> int:
        """The first position that an admitted request must run.

        Positions below ``r.chain.hit`` are replayed: their rows write only window groups.
        """
        return r.chain.hit - min(self._replay, r.chain.hit)

    def reserve(self, r: RequestState, tokens: int) -> bool:
        """Positions below ``tokens`` get pages; False, and nothing changed, if there is no room."""
        need = self.pages_for(tokens) - len(r.pages)
        if need > self.pool.free:
            return False
        r.pages.extend([self.pool.take() for _ in range(need)])
        return True

    def coming(self) -> int:
        """Pages, at most, that come back by themselves when what is in flight has arrived."""
        return sum(len(r.pages) for r in self.leaving)

    def settle(self, r: RequestState) -> bool:
        """Give everything back that ``r`` held, if nothing holds it; True once it is back."""
        if r.status is not Status.PREEMPTED and r.status is not Status.FINISHED:
            return False
        if r.in_flight or r.leases:
            self.leaving.add(r)
            self._retract(r)
            return False
        self.leaving.discard(r)
        self._release(r)
        if r.slot >= 0:
            self.slots.append(r.slot)
            r.slot = -1
        if r.status is Status.PREEMPTED:
            r.status = Status.WAITING
        return True

    def _release(self, r: RequestState) -> None:
        self._retract(r)
        self.snapshots.release(r)
        self.pool.release(reversed(r.pages))
        r.pages = []
        r.chain.nodes = []
        r.chain.hit = 0

    # Prefixes.

    def publish(self, r: RequestState, written: int) -> None:
        """Enter full pages of ``r`` below position ``written``: emitted tokens with KV written."""
        if not self.caching:
            return
        nodes = r.chain.nodes
        parent = nodes[-1] if nodes else self.pool.root(r.request.cache_salt)
        for i in range(len(nodes), min(written // self.page_size, len(r.pages))):
            tokens = self._page_tokens(r, i)
            digest = self._digest(r, i, tokens)
            node = self.pool.insert(parent, digest, tokens, r.pages[i])
            if node is None:
                self._retract(r)
                self.snapshots.release(r)
                return
            self._coming.pop(digest, None)
            nodes.append(node)
            parent = node
        if r.chain.pending:
            self.snapshots.attach(r)

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes; requests that run keep their pages, stores what they have."""
        self.pool.clear()
        self._coming.clear()
        self.branches.clear()

    def _may_hit(self, r: RequestState) -> bool:
        return self.caching and not r.output.wants_prompt

    def _match(self, r: RequestState) -> tuple[int, int]:
        """Hold the longest cached prefix of ``r`` that it can go on from.

        Returns (its pages, the pages whose KV is there; more where no state was kept behind them).
        """
        path, parent = list[Node](), self.pool.root(r.request.cache_salt)
        for i in range((len(r.tokens) - 1) // self.page_size):
            tokens = self._page_tokens(r, i)
            node = self.pool.find(parent, self._digest(r, i, tokens), tokens)
            if node is None:
                break
            path.append(node)
            parent = node
        found = self.snapshots.deepest(path, r.floor) if self._stateful else len(path)
        for node in path[:found]:
            self._adopt(r, node)
        r.chain.hit = found * self.page_size
        return found, len(path)

    def _adopt(self, r: RequestState, node: Node) -> None:
        self.pool.hold(node.page)
        r.pages.append(node.page)
        r.chain.nodes.append(node)

    def _page_tokens(self, r: RequestState, i: int) -> bytes:
        start, stop = i * self.page_size, (i + 1) * self.page_size
        ids = pack(r.tokens[start:stop])
        images = r.request.images
        return ids + pack_images(images, start, stop) if images else ids

    def _digest(self, r: RequestState, i: int, tokens: bytes) -> bytes:
        """Of full page ``i``; pages are asked for in order and each is hashed once."""
        digests = r.chain.digests
        if i < len(digests):
            return digests[i]
        assert i == len(digests), "a page is hashed before its parent"
        parent = digests[-1] if digests else self.pool.root(r.request.cache_salt).digest
        digests.append(self.pool.hash_page(parent, tokens))
        return digests[i]

    # Prefixes in the making. Requests that come together (samples of one prompt, a common system
    # prompt) would all compute the same; so one does, and the others ask again.

    def _announce(self, r: RequestState, found: int) -> None:
        """An admitted request will compute these pages of its text."""
        if self.caching:
            for i in range(found, len(r.tokens) // self.page_size):
                self._coming.setdefault(self._digest(r, i, self._page_tokens(r, i)), r)

    def _retract(self, r: RequestState) -> None:
        """It will not, or no longer."""
        for digest in r.chain.digests[len(r.chain.nodes) :]:
            if self._coming.get(digest) is r:
                del self._coming[digest]
        if r.chain.promised:
            self.branches.retract(r)

    def _soon_here(self, r: RequestState, found: int, common: int) -> bool:
        """Others are about to compute at least half of what ``r`` lacks: waiting is cheaper."""
        soon, end = self._computed(r, common), (len(r.tokens) - 1) // self.page_size
        if self._stateful:
            known = bool(self.snapshots.blocks)
            return known and self.branches.soon(r, found, soon, self._coming)
        return soon > found and 2 * (soon - found) >= end - found

    def _computed(self, r: RequestState, common: int) -> int:
        """Leading pages that are there (``common``) or being computed by others."""
        end, coming = (len(r.tokens) - 1) // self.page_size, self._coming
        while common < end and self._digest(r, common, self._page_tokens(r, common)) in coming:
            common += 1
        return common

    # Tiers and peers.

    def poll(self) -> None:
        """Take in transfers that have ended; a failed load falls back to computing."""
        for transfer, r, end in self.tiers.arrived():
            if r.status is Status.LOADING:
                r.status = Status.RUNNING
                if transfer.failed() is None:
                    r.chain.hit = end * self.page_size
                    self.publish(r, r.chain.hit)
            self.settle(r)

    @property
    def busy(self) -> bool:
        """Transfers are under way."""
        return self.tiers.busy

    def keep(self, r: RequestState) -> None:
        """Offer the finished request's published pages to the stores that lack them."""
        self.tiers.keep(r, self._keys(r, len(r.chain.nodes)))

    def _keys(self, r: RequestState, count: int) -> list[PageKey]:
        """Of the first pages; nothing is hashed where nobody will ask."""
        if not self.tiers.stores:
            return []
        digests = [self._digest(r, i, self._page_tokens(r, i)) for i in range(count)]
        return [PageKey(d, (i + 1) * self.page_size) for i, d in enumerate(digests)]

    # Tests.

    def check_integrity(self, holders: Iterable[RequestState]) -> None:
        """References are exactly what these requests hold; nothing is lost or held twice."""
        everyone = {*holders, *self.leaving}
        assert everyone.issuperset(self._coming.values()), "a page is announced by nobody"
        self.pool.check(Counter(page for r in everyone for page in r.pages))
        self.snapshots.check(everyone)
        self.branches.check(everyone)
        taken = [r.slot for r in everyone if r.slot >= 0]
        assert len(set(taken)) == len(taken), "two requests in one slot"
        assert not set(taken) & set(self.slots), "a free slot is in use"
