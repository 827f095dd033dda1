"""State of prefixes, seen through an engine: who hits where, who cuts, what is given up."""

import pytest
from deepinfer.engine.cache import KVCache
from deepinfer.engine.engine import Engine
from deepinfer.engine.output import OutputState
from deepinfer.engine.pages import Node
from deepinfer.engine.request import RequestState
from deepinfer.engine.snapshots import Snapshots, Want
from deepinfer.testing.naive import naive
from deepinfer.testing.stateful import StateExecutor, StateScript
from deepinfer.testing.toy import MemoryStore

LONG = tuple(1 + i % 15 for i in range(30))


def script(**given):
    return StateScript(**{"num_pages": 64, "max_model_len": 64, "snapshots": 8, **given})


def engine_on(lab, made, config=None, **rooms) -> Engine:
    executor = StateExecutor(made)
    made_engine = lab.engine(executor=executor, config=config, **rooms)
    made_engine.plans = []
    right = executor.forward
    executor.forward = lambda plan: (made_engine.plans.append(plan), right(plan))[1]
    return made_engine


def run(lab, engine, name, prompt, **options):
    """Cached tokens of a request; its tokens must be the naive loop's."""
    request = lab.request(name, prompt, **{"max_tokens": 4, "temperature": 0.0, **options})
    engine.add(request)
    ids, last = lab.run(engine)[name]
    assert ids == naive(request, engine.executor.script).ids
    engine.check_integrity()
    return last.metrics.cached_tokens


def chunks(plan):
    return [(row.start, row.count) for row in plan.rows if row.start >= 0]


def test_an_equal_prompt_hits_where_the_first_one_ended(lab):
    """The last token must run, so of 28 tokens 24 are taken over, and of 30 tokens 28."""
    engine = engine_on(lab, script())
    for name, length in (("a", 28), ("b", 30)):
        prompt = (*LONG[: length - 1], length % 15)
        assert run(lab, engine, name, prompt, cache_salt=name) == 0
        again = run(lab, engine, f"{name}2", prompt, cache_salt=name)
        assert again == (length - 1) // 4 * 4


def test_a_finished_text_can_be_gone_on_with(lab):
    engine = engine_on(lab, script())
    request = lab.request("a", LONG[:10], max_tokens=9, temperature=0.0)
    engine.add(request)
    text = (*LONG[:10], *lab.run(engine)["a"][0])
    assert run(lab, engine, "b", (*text, 1, 2)) == 16


def test_pages_without_state_are_no_hit_but_a_reason_to_cut(lab):
    """The second request finds 12 common tokens and no state: it cuts there. The third hits."""
    engine = engine_on(lab, script())
    tails = [(t,) * 14 for t in (3, 4, 5)]
    assert run(lab, engine, "a", LONG[:13] + tails[0]) == 0
    engine.plans.clear()
    assert run(lab, engine, "b", LONG[:13] + tails[1]) == 0
    assert [chunks(plan) for plan in engine.plans[:2]] == [[(0, 12)], [(12, 15)]]
    assert engine.plans[1].saves
    engine.plans.clear()
    assert run(lab, engine, "c", LONG[:13] + tails[2]) == 12
    assert len(engine.plans[0].restores) == 1


def test_who_comes_together_cuts_once_and_waits(lab):
    """Four requests at once with 21 common tokens, 6 tokens a step. The second is asked when the
    first is past the branch, goes on from its last chunk, and cuts; the others wait for that."""
    engine = engine_on(lab, script(max_num_seqs=6), {"max_num_batched_tokens": 6})
    requests = [
        lab.request(f"r{t}", (*LONG[:21], *(t,) * 6), max_tokens=4, temperature=0.0, arrival=t)
        for t in range(2, 6)
    ]
    for request in requests:
        engine.add(request)
    engine.step()
    assert len(engine.scheduler.running) == 1 and len(engine.scheduler.waiting) == 3
    found = lab.run(engine)
    for request in requests:
        assert found[request.id][0] == naive(request, engine.executor.script).ids
    assert [found[r.id][1].metrics.cached_tokens for r in requests] == [0, 16, 20, 20]


def test_who_waits_for_a_promise_is_not_forgotten(lab):
    engine = engine_on(lab, script(), {"max_num_batched_tokens": 4})
    for t in range(3):
        prompt = (*LONG[:21], *(t + 1,) * 4)
        engine.add(lab.request(f"r{t}", prompt, max_tokens=20, arrival=t))
    engine.step()
    assert [r.id for r in engine.scheduler.waiting] == ["r1", "r2"]
    engine.abort("r0")
    for _ in range(20):
        engine.step()
    assert not engine.scheduler.waiting
    lab.run(engine)


def test_floors_decide_who_may_go_on_from_where(lab):
    """Keep 4 of a reach of 4: not exact. A prompt of 30 has floor 26, one of 20 has 16."""
    made = script(keep=4, late=3, window=3)
    engine = engine_on(lab, made)
    assert not made.truncation.keep > made.truncation.reach
    assert run(lab, engine, "a", LONG[:20]) == 0  # state at 16 and, behind its output, at 20
    assert run(lab, engine, "same", LONG[:20]) == 16  # at the floor
    assert run(lab, engine, "longer", LONG[:30]) in (16, 20)  # below its floor, whoever it was
    assert run(lab, engine, "shorter", LONG[:18]) == 0  # 16 is above its floor of 14


def test_a_branch_above_the_floor_is_cut_at_the_floor(lab):
    """Above it, state would serve prompts of the same length only."""
    made = script(keep=4, late=3, window=3)
    engine = engine_on(lab, made)
    run(lab, engine, "a", (*LONG[:21], 7, 7, 7))
    engine.plans.clear()
    run(lab, engine, "b", (*LONG[:21], 8))  # 20 common tokens, floor 18
    assert chunks(engine.plans[0]) == [(0, 16)]
    assert run(lab, engine, "c", (*LONG[:21], 9, 9)) == 16


def test_prompt_logprobs_run_every_layer_on_every_row(lab):
    engine = engine_on(lab, script(keep=4))
    engine.add(lab.request("a", LONG, max_tokens=2, prompt_logprobs=0))
    engine.step()
    assert engine.plans[0].admits[0].floor == 0
    lab.run(engine)
    engine.add(lab.request("b", LONG, max_tokens=2))
    engine.step()
    assert engine.plans[-1].admits[0].floor == 26


def test_a_preempted_request_goes_on_from_its_own_state(lab):
    made = script(num_pages=13, max_model_len=48, max_num_seqs=3, snapshots=6)
    engine = engine_on(lab, made)
    requests = [
        lab.request(f"r{i}", (i + 1, 2, 3, 4, 5), max_tokens=30, arrival=i, temperature=0.0)
        for i in range(3)
    ]
    for request in requests:
        engine.add(request)
    found = lab.run(engine)
    assert engine.counters.preemptions and engine.counters.cached_tokens
    for request in requests:
        assert found[request.id][0] == naive(request, made).ids


def test_the_least_recently_used_snapshot_goes_first(lab):
    engine = engine_on(lab, script(snapshots=2))
    for salt in "ab":
        run(lab, engine, salt, LONG[:10], cache_salt=salt, max_tokens=1)
    assert run(lab, engine, "a2", LONG[:10], cache_salt="a", max_tokens=1) == 8
    run(lab, engine, "c", LONG[:10], cache_salt="c", max_tokens=1)
    assert run(lab, engine, "a3", LONG[:10], cache_salt="a", max_tokens=1) == 8
    assert run(lab, engine, "b2", LONG[:10], cache_salt="b", max_tokens=1) == 0


def test_without_snapshots_nothing_hits_and_nobody_waits(lab):
    engine = engine_on(lab, script(snapshots=0))
    for i in range(3):
        engine.add(lab.request(f"r{i}", LONG, max_tokens=2))
    engine.step()
    assert len(engine.scheduler.running) == 3
    lab.run(engine)
    assert run(lab, engine, "again", LONG) == 0
    assert not any(plan.saves or plan.restores for plan in engine.plans)


def test_without_caching_nothing_is_copied(lab):
    engine = engine_on(lab, script(), {"enable_prefix_caching": False})
    assert [run(lab, engine, name, LONG) for name in "ab"] == [0, 0]
    assert not any(plan.saves for plan in engine.plans)


def test_a_reset_gives_every_snapshot_back(lab):
    engine = engine_on(lab, script())
    run(lab, engine, "a", LONG)
    assert engine.cache.snapshots._used
    engine.reset_prefix_cache()
    assert not engine.cache.snapshots._used
    assert run(lab, engine, "b", LONG) == 0


def test_an_evicted_page_takes_its_snapshot_along(lab):
    engine = engine_on(lab, script(num_pages=12, max_model_len=48))
    run(lab, engine, "a", LONG[:20])
    run(lab, engine, "b", LONG[::-1], max_tokens=10)
    snapshots = engine.cache.snapshots
    assert all(node.alive for node in snapshots._used.values())
    assert run(lab, engine, "a2", LONG[:20]) == 0


def test_a_tier_is_not_asked(lab):
    executor = StateExecutor(script())
    store = MemoryStore(executor.kv, 1)
    engine = lab.engine(executor=executor, stores=[store])
    engine.add(lab.request("a", LONG, max_tokens=4))
    lab.run(engine)
    assert not store.blobs and engine.cache.tiers.stores == ()


# The book of blocks alone.


def book(lab, **given):
    made = script(**given)
    facts = made.facts()
    cache = KVCache(facts, num_slots=made.max_num_seqs)
    request = lab.request(prompt=LONG)
    return cache.snapshots, RequestState(request, OutputState(request, None))


@pytest.mark.parametrize(
    "floor, boundary, mine, right",
    [
        (0, 8, 8, True),  # mine begins behind it
        (5, 8, 5, True),  # the same floor
        (2, 8, 5, False),
        (0, 8, 5, False),
    ],
)
def test_usable_without_exactness(lab, floor, boundary, mine, right):
    snapshots, _ = book(lab, keep=4, window=3, late=3)
    assert snapshots.usable(floor, boundary, mine) == right


@pytest.mark.parametrize(
    "floor, boundary, mine, right",
    [
        (2, 6, 5, True),  # four rows behind its floor truncation shows no more
        (3, 6, 5, False),
        (0, 6, 5, True),  # nothing was truncated
        (0, 2, 0, True),
    ],
)
def test_usable_where_enough_is_kept(lab, floor, boundary, mine, right):
    snapshots, _ = book(lab, keep=5, window=3, late=3)  # a reach of 4
    assert snapshots.usable(floor, boundary, mine) == right


def test_a_chunk_is_saved_by_the_plan_behind_it(lab):
    snapshots, r = book(lab)
    r.slot, r.prefilled, r.prefill_to = 2, 13, 30
    snapshots.chunked(r)
    snapshots.copy()
    assert snapshots.take() == ((), ())
    snapshots.copy()
    ((slot, block),), restores = snapshots.take()
    assert slot == 2 and block in snapshots.blocks and restores == ()
    assert r.chain.pending == {12: block}


def test_a_save_waits_for_a_plan_that_is_sent(lab):
    snapshots, r = book(lab)
    node = Node(None, b"", b"", 0)
    snapshots._wants.append(Want(r, 1, 4, node))
    r.chain.digests.append(b"x")
    snapshots.copy()
    snapshots.copy()
    assert len(snapshots.take()[0]) == 1 and snapshots.take() == ((), ())


def test_what_stops_inside_drafts_may_be_too_far_on(lab):
    """b + page + γ + 2 is the bound; with a row in flight L + 2γ may be written."""
    for length, kept in ((13, True), (14, True), (15, False), (16, False)):
        snapshots, r = book(lab, draft_len=4)
        r.slot, r.chain.nodes = 0, [Node(None, b"", b"", 0)] * 3  # b = 12
        r.tokens, r.prefilled = list(LONG[:length]), r.prefill_to
        r.in_flight.append(None)
        snapshots.leaves(r, finished=True)
        assert bool(snapshots._wants) == kept, length


def test_integrity_finds_a_lost_block(lab):
    snapshots, _ = book(lab)
    snapshots._blank.pop()
    with pytest.raises(AssertionError, match="state block is lost"):
        snapshots.check([])


def test_snapshots_of_one_entry_are_not_doubled(lab, monkeypatch):
    """Equal prompts keep the one that is there."""
    engine = engine_on(lab, script())
    saved = []
    right = Snapshots.take
    monkeypatch.setattr(
        Snapshots, "take", lambda self: (lambda t: (saved.extend(t[0]), t)[1])(right(self))
    )
    for name in "abc":
        run(lab, engine, name, LONG, max_tokens=1)
    assert len(saved) == 1
