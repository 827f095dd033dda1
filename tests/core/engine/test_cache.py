"""Prefix hits, hashing cost, leases and tiers, seen through an engine."""

import pytest
from deepinfer.engine import pages
from deepinfer.engine.cache import Admission, KVCache
from deepinfer.engine.output import OutputState
from deepinfer.engine.request import RequestState, Status
from deepinfer.testing.fake import FakeExecutor, FakeScript
from deepinfer.testing.toy import MemoryStore, ToyTransfer

PROMPT = tuple(range(1, 14))  # three full pages of four, and one token


def cached(lab, engine, **options):
    """Cached tokens of one more run of a request."""
    request = lab.request(**{"name": "again", "prompt": PROMPT, "max_tokens": 2, **options})
    engine.add(request)
    _, last = lab.run(engine)[request.id]
    return last.metrics.cached_tokens


def test_a_second_request_hits_full_pages(lab):
    engine = lab.engine()
    assert cached(lab, engine) == 0
    assert cached(lab, engine) == 12
    assert cached(lab, engine, prompt=PROMPT[:7]) == 4


def test_the_last_token_always_runs(lab):
    engine = lab.engine()
    assert cached(lab, engine, prompt=PROMPT[:12]) == 0
    assert cached(lab, engine, prompt=PROMPT[:12]) == 8


def test_output_is_cached_too(lab):
    engine = lab.engine()
    engine.add(lab.request("first", PROMPT, max_tokens=9))
    ids, _ = lab.run(engine)["first"]
    assert cached(lab, engine, prompt=(*PROMPT, *ids)) == 20


def test_salts_keep_tenants_apart(lab):
    engine = lab.engine()
    assert cached(lab, engine, cache_salt="a") == 0
    assert cached(lab, engine, cache_salt="b") == 0
    assert cached(lab, engine, cache_salt="a") == 12


def test_caching_can_be_off_and_reset(lab):
    off = lab.engine(config={"enable_prefix_caching": False})
    assert [cached(lab, off), cached(lab, off)] == [0, 0]
    engine = lab.engine()
    cached(lab, engine)
    engine.reset_prefix_cache()
    assert cached(lab, engine) == 0


def test_prompt_logprobs_need_every_position(lab):
    engine = lab.engine()
    cached(lab, engine)
    assert cached(lab, engine, prompt_logprobs=0) == 0


def test_replay_starts_before_the_hit(lab):
    engine = lab.engine(FakeScript(replay=3))
    cached(lab, engine)
    assert cached(lab, engine) == 9


def test_hashing_is_linear_in_the_text(lab, monkeypatch):
    calls = []
    right = pages.chained
    engine = lab.engine(FakeScript(num_pages=64, max_model_len=256))
    pool = engine.cache.pool
    monkeypatch.setattr(pool, "hash_page", lambda p, t: calls.append(t) or right(p, t))
    engine.add(lab.request("long", PROMPT, max_tokens=200))
    lab.run(engine)
    assert len(calls) == (len(PROMPT) + 200 - 1) // 4
    assert all(len(tokens) == 16 for tokens in calls)


def test_a_preempted_request_is_not_hashed_again(lab, monkeypatch):
    calls = []
    right = pages.chained
    engine = lab.engine(FakeScript(num_pages=9, max_model_len=36), {"max_num_seqs": 3})
    pool = engine.cache.pool
    monkeypatch.setattr(pool, "hash_page", lambda p, t: calls.append((p, t)) or right(p, t))
    for i in range(3):
        engine.add(lab.request(f"r{i}", (i + 1, 2, 3, 4, 5), max_tokens=30, arrival=i))
    lab.run(engine)
    assert engine.counters.preemptions > 0
    assert len(calls) == len(set(calls))


def test_requests_that_come_together_compute_their_prefix_once(lab):
    engine = lab.engine()
    for i in range(4):
        engine.add(lab.request(f"r{i}", PROMPT, max_tokens=4, seed=i))
    engine.add(lab.request("other", PROMPT[::-1], max_tokens=4))
    engine.step()
    assert [r.id for r in engine.scheduler.running] == ["r0", "other"]
    lab.run(engine)
    assert engine.counters.prompt_tokens == 13 + 3 * 1 + 13


def test_a_short_common_beginning_is_not_waited_for(lab):
    engine = lab.engine(FakeScript(num_pages=64))
    for i in range(3):
        engine.add(lab.request(f"r{i}", (*PROMPT[:4], *[i + 1] * 20), max_tokens=4))
    engine.step()
    assert len(engine.scheduler.running) == 3


@pytest.mark.parametrize("end", ["abort", "reset"])
def test_who_waits_for_a_prefix_is_not_forgotten(lab, end):
    engine = lab.engine(config={"max_num_batched_tokens": 4})
    for i in range(3):
        engine.add(lab.request(f"r{i}", PROMPT, max_tokens=20, arrival=i))
    engine.step()
    assert [r.id for r in engine.scheduler.waiting] == ["r1", "r2"]
    if end == "abort":
        engine.abort("r0")
    else:
        engine.reset_prefix_cache()
    for _ in range(12):
        engine.step()
    assert not engine.scheduler.waiting
    lab.run(engine)


def cache_and_request(lab, prompt=PROMPT):
    cache = KVCache(FakeScript(num_pages=6).facts(), num_slots=2)
    request = lab.request(prompt=prompt)
    return cache, RequestState(request, OutputState(request, None))


def test_settle_waits_for_rows_and_transfers(lab):
    cache, r = cache_and_request(lab)
    assert cache.admit(r) is Admission.ENTERS and cache.pool.free == 2
    r.status = Status.RUNNING
    assert not cache.settle(r)
    r.status, r.leases = Status.FINISHED, 1
    assert not cache.settle(r) and cache.leaving == {r} and cache.coming() == 4
    cache.check_integrity([])
    r.leases = 0
    assert cache.settle(r) and cache.pool.free == 6 and len(cache.slots) == 2
    assert cache.settle(r), "settling twice gives nothing back twice"
    assert cache.pool.free == 6 and len(cache.slots) == 2


def test_no_room_leaves_nothing_behind(lab):
    cache, r = cache_and_request(lab)
    cache.admit(r)
    _, other = cache_and_request(lab, PROMPT[::-1])
    assert cache.admit(other) is Admission.NO_ROOM
    assert other.pages == [] and other.slot == -1 and cache.pool.free == 2


def test_integrity_finds_a_lost_page(lab):
    cache, r = cache_and_request(lab)
    cache.admit(r)
    r.pages.pop()
    with pytest.raises(AssertionError, match="refs"):
        cache.check_integrity([r])


def test_who_does_not_fit_is_told_so_quickly(lab, monkeypatch):
    engine = lab.engine(FakeScript(num_pages=16))
    engine.add(lab.request("runs", PROMPT, max_tokens=40))
    for _ in range(25):
        engine.step()
    engine.add(lab.request("late", (*PROMPT, *[3] * 35), max_tokens=4, arrival=1))
    engine.step()
    assert [r.id for r in engine.scheduler.waiting] == ["late"]
    finds = []
    monkeypatch.setattr(engine.cache.pool, "find", lambda *args: finds.append(args))
    for _ in range(4):
        engine.step()
    assert not finds
    monkeypatch.undo()
    lab.run(engine)


class Careful(MemoryStore):
    """A store without chance: every load ends as ``fails`` says."""

    fails = False

    def lookup(self, keys, ticket):
        self._asked.add(keys[-1].digest)
        return super().lookup(keys, ticket)

    def load(self, keys, pages):
        if not self.fails:
            blobs = [self.blobs[key.digest] for key in keys]
            self.loaded += 1
            return ToyTransfer(lambda: self.kv.__setitem__(list(pages), blobs), 0.001)
        return ToyTransfer(lambda: "the link is down", 0.001)


def tiered(lab):
    executor = FakeExecutor(FakeScript())
    store = Careful(executor.kv, seed=1)
    return lab.engine(executor=executor, stores=[store]), store


def test_a_tier_gives_back_what_the_device_forgot(lab):
    engine, store = tiered(lab)
    engine.add(lab.request("one", PROMPT, max_tokens=6))
    right = lab.run(engine)["one"][0]
    engine.reset_prefix_cache()
    engine.add(lab.request("two", PROMPT, max_tokens=6))
    ids, last = lab.run(engine)["two"]
    assert store.loaded == 1 and last.metrics.cached_tokens == 12
    assert ids == right


def test_a_failed_load_is_computed(lab):
    engine, store = tiered(lab)
    engine.add(lab.request("one", PROMPT, max_tokens=6))
    right = lab.run(engine)["one"][0]
    engine.reset_prefix_cache()
    store.fails = True
    engine.add(lab.request("two", PROMPT, max_tokens=6))
    ids, last = lab.run(engine)["two"]
    assert ids == right and last.metrics.cached_tokens == 0


def test_a_request_can_leave_while_it_loads(lab):
    engine, _ = tiered(lab)
    engine.add(lab.request("one", PROMPT, max_tokens=6))
    lab.run(engine)
    engine.reset_prefix_cache()
    engine.add(lab.request("two", PROMPT, max_tokens=6))
    engine.step()
    assert [r.status for r in engine.scheduler.loading] == [Status.LOADING]
    assert engine.abort("two") and engine.cache.leaving
    assert lab.run(engine)["two"][1].finish == "abort"
    assert not engine.cache.leaving


@pytest.mark.parametrize("method", ["lookup", "load", "store"])
def test_a_store_that_raises_is_used_no_more(lab, caplog, method):
    engine, store = tiered(lab)
    engine.add(lab.request("one", PROMPT, max_tokens=6))
    right = lab.run(engine)["one"][0]
    calls = []

    def fail(*args):
        calls.append(args)
        raise OSError("the disk is gone")

    setattr(store, method, fail)
    for name, seed in (("two", 1), ("three", 2)):
        engine.reset_prefix_cache()
        prompt = PROMPT if method != "store" else PROMPT[::-1]
        engine.add(lab.request(name, prompt, max_tokens=6, seed=seed))
        ids, last = lab.run(engine)[name]
        assert last.finish == "length"
        assert name != "two" or method == "store" or ids == right
    assert len(calls) == 1 and engine.cache.tiers.stores == ()
    assert "'memory' failed" in caplog.text
