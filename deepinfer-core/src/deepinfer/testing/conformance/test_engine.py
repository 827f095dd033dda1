"""A tiny llama through the whole engine on this backend: what only shows when all parts run.

Texts are compared by id, and an id may differ only where the reference's best two candidates lie
closer than rounding can tell (``MARGIN``); from there on texts may part. In invariant mode nothing
may differ: ids and logprobs are compared bit for bit.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.config import EngineConfig
from deepinfer.entrypoints.async_llm import AsyncLLM
from deepinfer.entrypoints.llm import LLM
from deepinfer.entrypoints.outputs import RequestOutput
from deepinfer.errors import ConfigError
from deepinfer.sampling_params import SamplingParams
from deepinfer.testing.conformance.kit import Kit
from deepinfer.testing.tiny import write_tiny_checkpoint

CONTEXT = 128
PAGE = 16
MARGIN = {"float32": 1e-3, "bfloat16": 0.15}
GREEDY = SamplingParams(temperature=0, max_tokens=20, logprobs=2, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=1.0, top_p=0.95, seed=7, max_tokens=20, logprobs=2, ignore_eos=True
)
PROMPTS = [[3 + (7 * i + 11 * j) % 300 for j in range(n)] for i, n in enumerate((5, 1, 33, 70, 16))]
Make = Callable[..., LLM]


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread() -> Iterator[None]:
    """Tensors are tiny here: torch's threads would only wait for each other. A backend's own
    threads are two all the same (``num_threads``).
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of 64 channels and random weights."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


@pytest.fixture
def make(kit: Kit, checkpoint: Path) -> Iterator[Make]:
    """Engines on this backend, closed behind the test."""
    made: list[LLM] = []

    def engine(dtype: str, **arguments: Any) -> LLM:
        made.append(LLM(str(checkpoint), **_arguments(kit.name, dtype, **arguments)))
        return made[-1]

    yield engine
    for llm in made:
        llm.close()


@pytest.fixture(scope="module")
def reference(kit: Kit, checkpoint: Path) -> Callable[[str], list[RequestOutput]]:
    """Greedy answers of core's reference backend, one prompt at a time."""
    known: dict[str, list[RequestOutput]] = {}

    def answers(dtype: str) -> list[RequestOutput]:
        if dtype not in known:
            with LLM(str(checkpoint), **_arguments("reference", dtype)) as llm:
                known[dtype] = [llm.generate(p, GREEDY)[0] for p in _prompts(PROMPTS)]
        return known[dtype]

    return answers


def _arguments(backend: str, dtype: str, **more: Any) -> dict[str, Any]:
    """Small engines; what a test names wins."""
    pages = more.pop("pages", 40)
    defaults = {
        "backend": backend,
        "dtype": dtype,
        "max_model_len": CONTEXT,
        "page_size": PAGE,
        "max_num_seqs": 8,
        "generation_config": "none",
        "batch_invariant": False,
        "num_threads": 2,
        "kv_cache_memory": pages * PAGE * 3 * 2 * 2 * 16 * (4 if dtype == "float32" else 2),
    }
    return {**defaults, **more}


def _prompts(ids: Sequence[Sequence[int]]) -> list[Any]:
    return [{"prompt_token_ids": list(p)} for p in ids]


def part(one: RequestOutput, two: RequestOutput, margin: float) -> str | None:
    """Where two greedy texts part without a reason; None if they do not."""
    first, second = one.outputs[0], two.outputs[0]
    for at, (a, b) in enumerate(zip(first.token_ids, second.token_ids, strict=True)):
        if a != b:
            known = (first.logprobs or [])[at].values()
            best = sorted((lp.logprob for lp in known), reverse=True)
            gap = best[0] - best[1]
            return f"token {at} is {b}, expected {a} (gap {gap:.2g})" if gap > margin else None
    return None


def same(got: Sequence[RequestOutput], want: Sequence[RequestOutput], dtype: str) -> None:
    """Equal texts, but for ties within the margin."""
    for i, (one, two) in enumerate(zip(want, got, strict=True)):
        assert two.error is None, two.error
        wrong = part(one, two, MARGIN[dtype])
        assert wrong is None, f"prompt {i}: {wrong}"


def bitwise(outputs: Sequence[RequestOutput]) -> list[Any]:
    """Ids and logprobs as they are; floats compare exactly."""
    return [
        (
            o.outputs[0].token_ids,
            [{k: v.logprob for k, v in lp.items()} for lp in o.outputs[0].logprobs or ()],
        )
        for o in outputs
    ]


def pages(llm: LLM | AsyncLLM) -> tuple[int, int]:
    """(free pages, all pages); cached prefixes of nobody count as free."""
    pool = llm._driver.ask(lambda engine: engine.cache.pool)
    return pool.free, pool.num_pages


def all_free(llm: LLM | AsyncLLM) -> None:
    """Every page is back a moment after the last request ended."""
    until = time.monotonic() + 5
    while pages(llm)[0] != pages(llm)[1] and time.monotonic() < until:
        time.sleep(0.01)
    free, total = pages(llm)
    assert free == total, f"{total - free} of {total} pages are held though nothing runs"


def test_texts_match_the_reference(make: Make, reference: Any, dtype: str) -> None:
    """Greedy, one prompt at a time: the ids of core's reference backend."""
    llm = make(dtype)
    same([llm.generate(p, GREEDY)[0] for p in _prompts(PROMPTS)], reference(dtype), dtype)


def test_texts_match_in_a_batch(make: Make, reference: Any, dtype: str) -> None:
    """The same prompts at once, in another order, with chunked prefills."""
    llm = make(dtype, max_num_batched_tokens=24)
    got = llm.generate(_prompts(PROMPTS[::-1]), GREEDY)[::-1]
    same(got, reference(dtype), dtype)
    all_free(llm)


def test_preemption_changes_no_text(make: Make, reference: Any, dtype: str) -> None:
    """KV for one long request and a little: others give way, come back and say the same."""
    llm = make(dtype, pages=CONTEXT // PAGE + 2)
    got = llm.generate(_prompts(PROMPTS), GREEDY)
    assert llm.get_metrics()["counters"].preemptions > 0, "nothing was preempted: no test"
    same(got, reference(dtype), dtype)
    all_free(llm)


def test_prefix_cache_changes_no_text(make: Make, reference: Any, dtype: str) -> None:
    """The second time prompts hit the cache; without the cache they say the same."""
    llm = make(dtype)
    for _ in range(2):
        got = llm.generate(_prompts(PROMPTS), GREEDY)
        same(got, reference(dtype), dtype)
    assert got[3].metrics is not None and got[3].metrics.cached_tokens >= 64
    all_free(llm)


def test_seeds_repeat(make: Make, dtype: str) -> None:
    """The same seed, the same batch: the same text; another seed, another text."""
    llm = make(dtype, enable_prefix_caching=False)
    first, again = (llm.generate(_prompts(PROMPTS), SAMPLED) for _ in range(2))
    assert bitwise(first) == bitwise(again)
    other = SAMPLED.model_copy(update={"seed": 8})
    assert bitwise(llm.generate(_prompts(PROMPTS), other)) != bitwise(first)


def test_masks_and_penalties_reach_the_draw(make: Make, dtype: str) -> None:
    """allowed_token_ids, logit_bias, min_tokens and a heavy penalty, each beside a free request."""
    llm = make(dtype)
    wishes: list[dict[str, Any]] = [
        {"allowed_token_ids": (5, 6, 319)},
        {"logit_bias": {9: 100.0}},
        {"logit_bias": {i: -100.0 for i in range(310)}},
        {"repetition_penalty": 1e6, "presence_penalty": 2.0},
        {},
    ]
    asked = [GREEDY.model_copy(update=wish) for wish in wishes]
    got = [o.outputs[0].token_ids for o in llm.generate(_prompts([PROMPTS[0]] * 5), asked)]
    assert set(got[0]) <= {5, 6, 319}
    assert set(got[1]) == {9}
    assert min(got[2]) >= 310
    assert len(set(got[3])) == len(got[3])
    assert len({len(ids) for ids in got}) == 1


def test_abort_frees_everything(kit: Kit, checkpoint: Path, dtype: str) -> None:
    """Readers that leave in the middle give pages back; who stays gets the text of before."""
    config = EngineConfig.make(model=str(checkpoint), **_arguments(kit.name, dtype))
    asyncio.run(_leave(AsyncLLM.from_config(config)))


async def _leave(llm: AsyncLLM) -> None:
    long = GREEDY.model_copy(update={"max_tokens": 60})

    async def read(name: str, prompt: Any, stop_after: int | None) -> list[int]:
        ids: list[int] = []
        stream = llm.generate(prompt, long, request_id=name)
        async for output in stream:
            ids = output.outputs[0].token_ids
            if stop_after is not None and len(ids) >= stop_after:
                break
        await stream.aclose()
        return ids

    try:
        prompts = _prompts(PROMPTS[:4])
        alone = await read("alone", prompts[0], None)
        stops = [None, 1, 9, 2]
        names = "abcd"
        crowd = await asyncio.gather(
            *(read(n, p, s) for n, p, s in zip(names, prompts, stops, strict=True))
        )
        assert len(alone) == len(crowd[0]) == 60
        all_free(llm)
    finally:
        llm.close()


def test_no_page_leaks(make: Make, dtype: str) -> None:
    """Pages are free when nothing runs, and the pool's memory is gone after ``close``."""
    llm = make(dtype, pages=37)
    before = _storages()
    llm.generate(_prompts(PROMPTS), GREEDY)
    all_free(llm)
    facts = llm.assembly.facts
    size = facts.num_pages * facts.page_size * facts.kv.bytes_per_token
    llm.close()
    del before, llm
    _forget(make)
    kept = [nbytes for nbytes in _storages().values() if nbytes == size]
    assert not kept, f"a KV pool of {size} bytes is still alive after close()"


def _forget(make: Make) -> None:
    """The fixture's own list of engines must not be what keeps them."""
    for cell in make.__closure__ or ():
        if isinstance(cell.cell_contents, list):
            cell.cell_contents.clear()


def _storages() -> dict[int, int]:
    """Address and size of every tensor's memory."""
    gc.collect()
    found = (o for o in gc.get_objects() if issubclass(type(o), torch.Tensor))
    return {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in found)}


def test_no_thread_is_left(make: Make, dtype: str) -> None:
    """After ``close`` every thread that came with the engine is gone."""
    before = set(threading.enumerate())
    llm = make(dtype)
    llm.generate(_prompts(PROMPTS[:2]), GREEDY)
    llm.close()
    until = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < until:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before


def test_an_engine_changes_nothing_of_its_host(make: Make, dtype: str) -> None:
    """Environment, signal handlers, default dtype, threads of torch's own pool."""

    def state() -> dict[str, Any]:
        return {
            "environment": dict(os.environ),
            "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
            "default dtype": torch.get_default_dtype(),
            "gradients": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "random state": torch.get_rng_state().tolist(),
        }

    before = state()
    llm = make(dtype)
    llm.generate(_prompts(PROMPTS[:2]), SAMPLED)
    assert state() == before
    llm.close()
    assert state() == before


def test_two_engines_live_side_by_side(make: Make, reference: Any, dtype: str) -> None:
    """Interleaved calls on two engines; closing one leaves the other alone."""
    one, two = make(dtype), make(dtype, max_num_batched_tokens=24)
    same(one.generate(_prompts(PROMPTS), GREEDY), reference(dtype), dtype)
    same(two.generate(_prompts(PROMPTS), GREEDY), reference(dtype), dtype)
    one.close()
    same(two.generate(_prompts(PROMPTS[:1]), GREEDY), reference(dtype)[:1], dtype)


def test_batch_invariant_engine(kit: Kit, make: Make, dtype: str) -> None:
    """Alone, crowded, in chunks, preempted, from the prefix cache: the same bits, if offered."""
    if "invariant" not in kit.offer.spec.offers:
        pytest.skip("invariance is not offered")
    for params in (GREEDY, SAMPLED):
        llm = make(dtype, batch_invariant=True, enable_prefix_caching=False)
        alone = bitwise([llm.generate(p, params)[0] for p in _prompts(PROMPTS)])
        ways = {
            "crowded": llm,
            "cached": make(dtype, batch_invariant=True),
            "in chunks": make(dtype, batch_invariant=True, max_num_batched_tokens=24),
            "preempted": make(dtype, batch_invariant=True, pages=CONTEXT // PAGE + 2),
        }
        ways["cached"].generate(_prompts(PROMPTS), params)
        for way, engine in ways.items():
            got = bitwise(engine.generate(_prompts(PROMPTS[::-1]), params))[::-1]
            for i, (one, two) in enumerate(zip(got, alone, strict=True)):
                assert one == two, f"prompt {i}, {way}: other bits than alone"


def test_invariance_that_is_not_offered_is_refused(kit: Kit, make: Make, dtype: str) -> None:
    """An engine with ``batch_invariant=True`` does not start on such a backend."""
    if "invariant" in kit.offer.spec.offers:
        pytest.skip("invariance is offered")
    with pytest.raises(ConfigError, match="invariant"):
        make(dtype, batch_invariant=True)
