"""With speculation the text is the text without it: ids and logprobs, bit for bit.

300 random loads on the real runner in invariant mode, half in float32, half in bfloat16: perfect,
garbage and biased drafts; static, cap and random numbers of rows, and the engine's own planner,
which pauses and tries again; a grammar on a third of the requests; stop texts; and so few pages
that requests give way. ``test_draft_loads`` has trained drafts.
"""

from collections import Counter

import pytest
from load_rig import COSTS, DRAFTERS, MODES, draw, same_texts, tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "numbers",
    [range(20), pytest.param(range(20, 150), marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_the_text_is_the_same(tiny, dtype, numbers):
    offset, count = 150 if dtype == "bfloat16" else 0, len(numbers)
    tally = same_texts(tiny, dtype, [draw(number + offset) for number in numbers])
    happens_to(tally)
    if count > 100:
        happens_to(tally, often=count // 10)
        assert 0.28 < tally.share("grammar", "requests") < 0.39, tally
        assert 0.42 < tally.share("greedy", "requests") < 0.58, tally
        assert tally["own comebacks"] > 1, tally


def happens_to(tally, often=1):
    """Everything that these loads are for has happened, rare things ``often``."""
    assert tally["verified"] > 20 * tally["loads"], tally
    assert tally["accepted"] > 5 * tally["loads"], tally
    assert tally.share("accepted Perfect", "verified Perfect") > 0.8, tally
    assert tally["verified Garbage"] > 10 * tally["accepted Garbage"], tally
    assert 0.2 < tally.share("accepted Biased", "verified Biased") < 0.8, tally
    assert tally["verified grammar"] > tally["accepted grammar"], tally
    assert tally.share("loads that preempted", "loads") > 0.3, tally
    for rare in (
        *(f"{drafter} together" for drafter in DRAFTERS),
        "accepted grammar",
        "grammar",
        "stop texts",
        "stop texts behind drafts",
        "own steps with drafts",
        "own steps in a pause",
        "aborted",
    ):
        assert tally[rare] >= often, (rare, tally)


def test_anything_meets_anything():
    """What the loads are, before any runs: no two properties hang together."""
    loads = [draw(number) for number in range(300)]
    mixed = Counter((load.drafter, load.mode, load.costs) for load in loads)
    assert len(mixed) == len(DRAFTERS) * len(MODES) * (1 + len(COSTS)), mixed
    wished = Counter()
    for load in loads:
        several = load.config["max_num_seqs"] > 1 and len(load.requests) > 1
        for r in load.requests:
            for kind, there in wishes(r).items():
                wished[kind] += there
                wished[kind, load.drafter] += there and several
                wished[kind, "greedy"] += there and r.sampling.temperature == 0
                wished[kind, "T = 1"] += there and r.sampling.temperature == 1
                wished[kind, load.overlap, load.looks] += there
    total = sum(len(load.requests) for load in loads)
    assert 0.3 < wished["grammar"] / total < 0.37
    kinds = wishes(loads[0].requests[0])
    ways = [*((way,) for way in (*DRAFTERS, "greedy", "T = 1"))]
    ways += [(overlap, looks) for overlap in (True, False) for looks in (True, False)]
    rare = {(kind, *way): wished[(kind, *way)] for kind in kinds for way in ways}
    assert min(rare.values()) > 5, rare


def wishes(request):
    """What a request asks for, by name."""
    asked = request.sampling
    return {
        "any": True,
        "grammar": request.structured is not None,
        "stop texts": bool(asked.stop),
        "stop ids": bool(asked.stop_token_ids),
        "min_tokens": asked.min_tokens > 0,
        "penalty": asked.presence_penalty != 0,
        "penalty by count": asked.frequency_penalty != 0,
        "repetition": asked.repetition_penalty != 1,
        "bias": asked.logit_bias is not None,
        "allowed": asked.allowed_token_ids is not None,
        "several": asked.n > 1,
        "filters": bool(asked.top_k or asked.min_p or asked.top_p < 1),
        "logprobs": asked.logprobs is not None,
        "prompt logprobs": asked.prompt_logprobs is not None,
    }
