"""Brain and hands together, crowded: chunks, preemption and prefix hits against the naive loop."""

import numpy as np
import pytest
from deepinfer import LLM, SamplingParams
from rig import Req, expected, load

PAGE_BYTES = 16 * 3 * 2 * 2 * 16 * 4


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def naive(place):
    return load(place)


def requests_of(seed, n):
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, 320, 36).tolist()
    for i in range(n):
        own = rng.integers(3, 320, int(rng.integers(1, 12))).tolist()
        text = shared[: int(rng.choice([0, 17, 36]))] + own
        params = dict(
            temperature=float(rng.choice([0.0, 0.9])),
            top_p=float(rng.choice([1.0, 0.8])),
            frequency_penalty=float(rng.choice([0.0, 0.5])),
            repetition_penalty=float(rng.choice([1.0, 1.2])),
        )
        limit = min(len(text) + int(rng.integers(2, 16)), 64)
        yield Req(text, limit, seed=int(rng.integers(1 << 63)), params=params), i


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("pages", [5, 40], ids=["crowded", "roomy"])
def test_every_request_is_what_it_is_alone(naive, place, seed, pages):
    requests = [request for request, _ in requests_of(seed, 9)]
    with LLM(
        str(place),
        backend="reference",
        batch_invariant=True,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=19,
        kv_cache_memory=pages * PAGE_BYTES,
    ) as llm:
        outputs = llm.generate(
            [r.prompt for r in requests],
            [
                SamplingParams(
                    **r.params,
                    seed=r.seed,
                    max_tokens=r.limit - len(r.prompt),
                    ignore_eos=True,
                    logprobs=0,
                )
                for r in requests
            ],
            use_tqdm=False,
        )
    for request, output in zip(requests, outputs, strict=True):
        ids, raw = expected(naive, request)
        assert list(output.outputs[0].token_ids) == ids
        got = [entry[i].logprob for entry, i in zip(output.outputs[0].logprobs, ids, strict=True)]
        want = [float(row[i]) for row, i in zip(raw, ids, strict=True)]
        assert got == pytest.approx(want, abs=1e-5)
