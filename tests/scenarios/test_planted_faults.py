"""Scenarios are only worth something if they fail when the brain or the device is wrong."""

import numpy as np
import pytest
from deepinfer.engine import cache, scheduler
from deepinfer.engine.pages import PagePool
from deepinfer.engine.request import Status
from deepinfer.engine.stops import StopStrings
from deepinfer.testing import fake
from deepinfer.testing.fake import FakeExecutor
from deepinfer.testing.scenarios import make, run_scenario
from deepinfer.testing.toy import ToyGrammar

TRIES = 120


def caught(tiers=None, **types):
    """Whether some scenario of the first ones fails."""
    for number in range(TRIES):
        scenario = make(number)
        if tiers is None or scenario.tiers == tiers:
            try:
                run_scenario(scenario, True, **types)
            except Exception:
                return True
    return False


def test_without_a_fault_nothing_is_caught():
    assert not caught(tiers=False)


def test_grammar_that_is_not_rolled_back():
    class Stuck(ToyGrammar):
        def restore(self, state):
            pass

    assert caught(grammar_type=Stuck)


def test_publishing_a_page_that_is_not_written(monkeypatch):
    right = cache.KVCache.publish
    monkeypatch.setattr(cache.KVCache, "publish", lambda self, r, _: right(self, r, len(r.tokens)))
    monkeypatch.setattr(scheduler.Scheduler, "land", _eager_land(scheduler.Scheduler.land))
    assert caught()


def _eager_land(right):
    """``land`` looks before it publishes; here it publishes whatever the tokens are."""

    def land(self, planned, out):
        right(self, planned, out)
        for r in planned:
            if r.pages and r.status is Status.RUNNING:
                self.cache.publish(r, len(r.tokens))

    return land


def test_noise_that_depends_on_the_batch(monkeypatch):
    class Crowded(FakeExecutor):
        def _sample(self, plan, works, inputs):
            right = fake.draw
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(fake, "draw", lambda z, s, p, t: right(z, s ^ len(works), p, t))
                return super()._sample(plan, works, inputs)

    assert caught(executor_type=Crowded)


def test_pages_freed_while_a_transfer_reads_them(monkeypatch):
    right = cache.KVCache.settle

    def settle(self, r):
        leases, r.leases = r.leases, 0
        try:
            return right(self, r)
        finally:
            r.leases = leases

    monkeypatch.setattr(cache.KVCache, "settle", settle)
    assert caught(tiers=True)


def test_a_hit_that_covers_the_whole_text(monkeypatch):
    right = cache.KVCache._match

    def match(self, r):
        r.tokens.append(0)
        try:
            return right(self, r)
        finally:
            r.tokens.pop()

    monkeypatch.setattr(cache.KVCache, "_match", match)
    assert caught()


def test_room_for_too_few_drafts(monkeypatch):
    right = scheduler.Scheduler._grow
    monkeypatch.setattr(
        scheduler.Scheduler, "_grow", lambda self, d, r, want: right(self, d, r, len(r.tokens))
    )
    assert caught()


@pytest.fixture
def two_hashes(monkeypatch):
    """Every digest is one of two."""
    right = PagePool.__init__
    monkeypatch.setattr(
        PagePool,
        "__init__",
        lambda self, n, identity=(): right(self, n, identity, lambda p, t: bytes([p[0] & 1 ^ 1])),
    )


def test_hashes_that_collide_are_harmless(two_hashes):
    assert not caught(tiers=False)  # a store knows pages by their hash alone


def test_hashes_that_collide_and_are_not_verified(two_hashes, monkeypatch):
    monkeypatch.setattr(PagePool, "find", lambda self, _, digest, tokens: self._nodes.get(digest))
    assert caught()


def test_stop_strings_that_do_not_hold_back(monkeypatch):
    monkeypatch.setattr(StopStrings, "_safe", lambda self, text: len(text))
    assert caught()


def test_a_token_that_the_device_did_not_draw():
    class Sloppy(FakeExecutor):
        def _sample(self, plan, works, inputs):
            out = super()._sample(plan, works, inputs)
            if plan.step == 5 and out.counts[0]:
                out.tokens[0, 0] = (out.tokens[0, 0] + 1) % np.int32(self.script.vocab_size)
            return out

    assert caught(executor_type=Sloppy)


def test_a_request_that_waits_for_a_page_nobody_makes(monkeypatch):
    monkeypatch.setattr(cache.KVCache, "_retract", lambda self, r: None)
    assert caught()


def test_a_slot_that_comes_back_with_rows_in_flight(monkeypatch):
    right = cache.KVCache.settle

    def settle(self, r):
        flying, r.in_flight = r.in_flight, ()
        try:
            return right(self, r)
        finally:
            r.in_flight = flying

    monkeypatch.setattr(cache.KVCache, "settle", settle)
    assert caught()
