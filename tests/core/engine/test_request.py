"""Seeds of parallel samples, and bounds."""

from deepinfer.engine.output import OutputState
from deepinfer.engine.request import Ahead, RequestState, mix


def test_sample_zero_keeps_the_seed():
    assert mix(7, 0) == 7
    assert mix(-1, 0) == (1 << 64) - 1


def test_seeds_are_64_bits_and_differ():
    seeds = {mix(seed, i) for seed in range(100) for i in range(100)}
    assert len(seeds) == 10_000 and max(seeds) < 1 << 64
    assert mix(7, 1) == 7191089600892374487, "published: this may not change"


def test_bounds_follow_what_is_in_flight(lab):
    request = lab.request(max_tokens=6)
    r = RequestState(request, OutputState(request, None))
    assert (r.lo, r.hi) == (5, 5)
    r.launch(Ahead(1, 3, -1))
    r.launch(Ahead(1, 3, -1))
    assert (r.lo, r.hi) == (7, 11)
    r.launch(Ahead(1, 3, -1))
    assert r.hi == request.limit
    assert r.recall() == r.land() == Ahead(1, 3, -1)
    assert (r.lo, r.hi) == (6, 8)


def test_parallel_samples_share_their_prompt(lab):
    engine = lab.engine()
    for i in range(3):
        engine.add(lab.request(f"r#{i}", range(1, 14), seed=mix(5, i), max_tokens=12, arrival=i))
    texts = {ids for ids, _ in lab.run(engine).values()}
    assert len(texts) == 3 and engine.counters.cached_tokens == 2 * 12
