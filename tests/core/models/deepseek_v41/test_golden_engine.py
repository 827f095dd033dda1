"""Golden prompts through the whole engine: recorded greedy ids, and equal bits in any schedule.

Chunks, prefix hits, preemption and company may not show: in invariant mode the engine gives the
same log-probabilities bit for bit, in float32 and in bfloat16.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from conftest import DATA
from deepinfer import LLM, SamplingParams

PROMPTS = ("p31", "p33", "p200")


def engine(**options):
    return LLM(model=str(DATA / "a"), num_threads=1, **options)


def ask(llm, prompts, count=6):
    """[(ids, log-probabilities as bits)] of greedy answers."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0)
    given = [{"prompt_token_ids": list(p)} for p in prompts]
    found = []
    for answer in llm.generate(given, params, use_tqdm=False):
        one = answer.outputs[0]
        ids = list(one.token_ids)
        scores = [step[i].logprob for step, i in zip(one.logprobs, ids, strict=True)]
        found.append((ids, np.array(scores, np.float32).view(np.int32).tolist()))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("storage", ["packed", "bfloat16"])
def test_greedy_ids_are_the_recorded_ones(a, dtype, storage):
    """All 25 of three prompts at once, by the native linears, which flip nothing in these."""
    pytest.importorskip("deepinfer.native._kernels")
    with engine(backend="cpu", dtype=dtype, kv_cache_dtype=storage, max_num_seqs=4) as llm:
        found = ask(llm, [a[f"{p}/ids"].tolist() for p in PROMPTS], 25)
    for prompt, (ids, _) in zip(PROMPTS, found, strict=True):
        assert ids == a[f"{prompt}/f32/decode/tokens"].tolist(), prompt


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def alone(request, goldens):
    """(dtype, prompts, each one's answer alone in an invariant engine that runs it whole)."""
    golden = goldens("a")
    prompts = [golden[f"{p}/ids"].tolist() for p in ("p31", "p33", "p32", "p5", "p200")]
    found = []
    with engine(dtype=request.param, batch_invariant=True, enable_prefix_caching=False) as llm:
        for prompt in prompts:
            found += ask(llm, [prompt])
    return request.param, prompts, found


SCHEDULES = {
    "together": {},
    "chunks_of_1": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "chunks_of_7": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "chunks_of_64": {"max_num_batched_tokens": 64, "max_num_seqs": 3},
    "one_at_a_time": {"overlap": False, "max_num_seqs": 2},
    "wide_pages": {"page_size": 64},
    "wide_cache": {"kv_cache_dtype": "bfloat16"},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_do_not_show(alone, schedule):
    dtype, prompts, want = alone
    options = SCHEDULES[schedule]
    if schedule == "chunks_of_1" or dtype == "bfloat16":
        prompts, want = prompts[2:4], want[2:4]
    with engine(dtype=dtype, batch_invariant=True, **options) as llm:
        assert ask(llm, prompts) == want
        assert ask(llm, prompts[::-1]) == want[::-1], "from the prefix cache"


@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_company_does_not_show(alone, size):
    """Batches of 2 to 16 requests, nothing shared between them but the steps."""
    dtype, prompts, want = alone
    chosen = [i % 4 for i in range(size)]
    with engine(dtype=dtype, batch_invariant=True, enable_prefix_caching=False) as llm:
        assert ask(llm, [prompts[i] for i in chosen]) == [want[i] for i in chosen]


@pytest.mark.parametrize("seed", range(8))
def test_random_schedules_do_not_show(alone, seed):
    """Any order and company, page, chunk, slots, storage and cache; the second round may hit."""
    dtype, prompts, want = alone
    draw = random.Random(seed)
    options = {
        "page_size": draw.choice((2, 4, 16, 32)),
        "max_num_batched_tokens": draw.randint(3, 70),
        "max_num_seqs": draw.randint(1, 7),
        "kv_cache_dtype": draw.choice(("packed", "bfloat16")),
        "enable_prefix_caching": draw.random() < 0.8,
        "overlap": draw.random() < 0.7,
    }
    with engine(dtype=dtype, batch_invariant=True, **options) as llm:
        for _ in range(2):
            chosen = [draw.randrange(4) for _ in range(6)]
            assert ask(llm, [prompts[i] for i in chosen]) == [want[i] for i in chosen], options


def test_preemption_does_not_show(alone):
    """Pages for little more than one text of 64 tokens: others give way and resume."""
    dtype, prompts, want = alone
    short, answers = prompts[:3] * 2, want[:3] * 2
    state, pages = 6 * 21848, 10 * 16 * 106
    with engine(
        dtype=dtype,
        batch_invariant=True,
        max_model_len=64,
        max_num_seqs=6,
        kv_cache_memory=state + pages,
    ) as llm:
        assert ask(llm, short) == answers
        assert llm.get_metrics()["counters"].preemptions > 0
