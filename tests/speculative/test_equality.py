"""With speculation the text is the text without it: ids and logprobs, bit for bit.

300 random loads on the real runner in invariant mode, half in float32, half in bfloat16: perfect,
garbage and biased drafts, static, cap and random numbers of rows, a grammar on a third of the
requests, and so few pages that requests give way.
"""

import pytest
from bench_rig import TRUTH, Bench, crowded, requests_of
from deepinfer.testing.tiny import write_tiny_checkpoint

DRAFTERS = ("Perfect", "Garbage", "Biased")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def compare(tiny, numbers, dtype):
    total = {"verified": 0, "accepted": 0, "preemptions": 0, "grammar": 0, "requests": 0}
    with Bench(tiny, dtype=dtype, enable_prefix_caching=False) as plain:
        for number in numbers:
            one_load(plain, tiny, number, dtype, total)
    return total


def one_load(plain, tiny, number, dtype, total):
    requests = requests_of(number)
    right = plain.run(requests)
    TRUTH.clear()
    for request in requests:
        signed = (request.seed ^ (1 << 63)) - (1 << 63) if request.seed >> 63 else request.seed
        TRUTH[signed] = [*request.token_ids, *right[request.id][0]]
    with crowded(tiny, number, requests, drafter=DRAFTERS[number % 3], dtype=dtype) as speculating:
        got = speculating.run(requests, arrivals=number)
    for request in requests:
        name = request.id
        where = f"load {number}, {name}"
        if right[name][2] == "error":  # nothing was allowed: before or after the same tokens
            assert got[name][2] == "error", where
        assert got[name][:3] == right[name][:3], where
        metrics = got[name][3]
        assert metrics.drafted >= metrics.verified >= metrics.accepted, where
        assert metrics.accepted < max(1, metrics.output_tokens), where
        total["verified"] += metrics.verified
        total["accepted"] += metrics.accepted
        total["preemptions"] += metrics.preemptions
        total["grammar"] += request.structured is not None
        total["requests"] += 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "numbers",
    [range(20), pytest.param(range(20, 150), marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_the_text_is_the_same(tiny, dtype, numbers):
    offset = 150 if dtype == "bfloat16" else 0
    total = compare(tiny, [number + offset for number in numbers], dtype)
    assert total["accepted"] > 2 * len(numbers), total
    assert total["verified"] > total["accepted"] and total["preemptions"] > 0, total
    assert total["requests"] / 5 < total["grammar"] < total["requests"] / 2, total
