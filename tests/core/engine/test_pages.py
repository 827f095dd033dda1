"""Page pool: counts, eviction order, verification; and a random walk against a simple model."""

from collections import Counter

import pytest
from deepinfer.engine.pages import PagePool, chained, pack
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule


def publish(pool, salt, *texts):
    """Take a page for each text and enter them as one chain; returns the pages."""
    parent, digest, pages = pool.root(salt), pool.root(salt).digest, []
    for text in texts:
        digest = pool.hash_page(digest, pack(text))
        pages.append(pool.take())
        parent = pool.insert(parent, digest, pack(text), pages[-1])
        assert parent is not None
    return pages


def lookup(pool, salt, *texts):
    """The pages of the longest cached prefix."""
    parent, digest, pages = pool.root(salt), pool.root(salt).digest, []
    for text in texts:
        digest = pool.hash_page(digest, pack(text))
        parent = pool.find(parent, digest, pack(text))
        if parent is None:
            break
        pages.append(parent.page)
    return pages


A, B, C = (1, 2), (3, 4), (5, 6)


def test_a_released_chain_can_be_found_again():
    pool = PagePool(4)
    pages = publish(pool, "", A, B)
    pool.release(reversed(pages))
    assert pool.free == 4 and pool.cached == 2
    assert lookup(pool, "", A, B, C) == pages
    assert lookup(pool, "", B) == []


def test_salts_do_not_share():
    pool = PagePool(4)
    publish(pool, "one", A)
    assert lookup(pool, "two", A) == []


def test_models_and_layouts_do_not_share_hashes():
    digests = {PagePool(1, identity).root("").digest for identity in (("a", "b"), ("ab", ""), ())}
    assert len(digests) == 3


def test_eviction_takes_the_least_recently_used_leaf_first():
    pool = PagePool(4)
    old, young = publish(pool, "", A, B), publish(pool, "", C)
    pool.release(reversed(old))
    pool.release(young)
    pool.take()  # the blank one
    assert pool.take() == old[1]
    assert lookup(pool, "", A, B) == old[:1]
    assert pool.take() == old[0]
    assert pool.take() == young[0]


def test_a_hit_makes_young_again():
    pool = PagePool(2)
    one, two = publish(pool, "", A), publish(pool, "", B)
    pool.release(one)
    pool.release(two)
    pool.hold(one[0])
    pool.release(one)
    assert pool.take() == two[0]


def test_held_pages_are_never_evicted():
    pool = PagePool(3)
    pages = publish(pool, "", A, B)
    pool.release([pages[1]])
    taken = {pool.take(), pool.take()}
    assert pages[0] not in taken and pool.free == 0


def test_an_idle_inner_page_goes_when_nothing_else_is_left():
    pool = PagePool(2)
    first = publish(pool, "", A)
    root = pool.root("")
    node = pool.find(root, chained(root.digest, pack(A)), pack(A))
    page = pool.take()  # another request, with its own copy of A, publishes B below it
    pool.insert(node, chained(node.digest, pack(B)), pack(B), page)
    pool.release(first)
    assert pool.free == 1
    assert pool.take() == first[0]
    assert pool.cached == 0 and lookup(pool, "", A, B) == []
    pool.check(Counter([first[0], page]))


def test_colliding_hashes_never_share():
    pool = PagePool(4, hash_page=lambda parent, tokens: b"same")
    publish(pool, "", A)
    page = pool.take()
    assert pool.insert(pool.root(""), b"same", pack(B), page) is None
    assert lookup(pool, "", B) == []
    assert lookup(pool, "", A, A) == lookup(pool, "", A)
    assert lookup(pool, "other", A) == []


def test_a_parent_that_has_gone_takes_no_children():
    pool = PagePool(3)
    pages = publish(pool, "", A)
    root = pool.root("")
    node = pool.find(root, chained(root.digest, pack(A)), pack(A))
    pool.clear()
    assert pool.insert(node, b"x" * 16, pack(B), pool.take()) is None
    assert pool.cached == 0 and pages[0] not in {pool.take()}


def test_clear_keeps_what_is_held():
    pool = PagePool(3)
    pages = publish(pool, "", A, B)
    pool.release([pages[1]])
    pool.clear()
    assert pool.free == 2 and pool.cached == 0
    pool.release([pages[0]])
    pool.check(Counter())


def test_salts_that_nobody_uses_are_forgotten():
    pool = PagePool(4)
    for number in range(1000):
        lookup(pool, f"tenant {number}", A)
    assert len(pool._roots) <= 5


def test_the_eviction_list_stays_short():
    pool = PagePool(2)
    pages = publish(pool, "", A)
    pool.release(pages)
    for _ in range(1000):
        pool.hold(pages[0])
        pool.release(pages)
    assert len(pool._leaves) < 100


def test_releasing_twice_is_a_bug_that_shows():
    pool = PagePool(1)
    page = pool.take()
    pool.release([page])
    with pytest.raises(AssertionError, match="too often"):
        pool.release([page])


class PoolWalk(RuleBasedStateMachine):
    """Requests come, hit, publish and leave; texts of two letters so that they often share."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(6)
        self.held = {}  # request: (texts, pages)
        self.next = 0

    @precondition(lambda self: self.pool.free)
    @rule(texts=st.lists(st.sampled_from([A, B]), min_size=1, max_size=4))
    def enter(self, texts):
        pages = lookup(self.pool, "", *texts)
        for page in pages:
            self.pool.hold(page)
        while len(pages) < len(texts) and self.pool.free:
            pages.append(self.pool.take())
        parent, digest = self.pool.root(""), self.pool.root("").digest
        for text, page in zip(texts, pages, strict=False):
            digest = self.pool.hash_page(digest, pack(text))
            parent = self.pool.insert(parent, digest, pack(text), page)
            if parent is None:
                break
        self.held[self.next] = (texts, pages)
        self.next += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data):
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.release(reversed(self.held.pop(name)[1]))

    @rule()
    def clear(self):
        self.pool.clear()

    @invariant()
    def counts_agree(self):
        holders = Counter(page for _, pages in self.held.values() for page in pages)
        self.pool.check(holders)
        assert self.pool.free == 6 - len(holders)

    @invariant()
    def every_entry_is_reached_by_its_own_text(self):
        for node in self.pool._nodes.values():
            tokens, above = [], node
            while above.parent is not None:
                tokens.append(above.tokens)
                above = above.parent
            digest = self.pool.root("").digest
            for part in reversed(tokens):
                digest = chained(digest, part)
            assert digest == node.digest


TestPoolWalk = PoolWalk.TestCase
TestPoolWalk.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
