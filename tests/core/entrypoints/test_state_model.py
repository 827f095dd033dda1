"""A model with state groups through the whole engine: a tiny DeepSeek-V4.1, bit by bit."""

import json
import random

import pytest
from click.testing import CliRunner
from deepinfer import LLM, SamplingParams
from deepinfer.__main__ import cli
from deepinfer.errors import ConfigError, KVCacheTooSmallError, UnsupportedError
from deepinfer.testing.tiny import write_tiny_checkpoint
from deepinfer.testing.tiny_v41 import write_tiny_v41

DRAW = random.Random(5)
COMMON = [DRAW.randrange(20, 500) for _ in range(70)]
PROMPTS = [COMMON + [DRAW.randrange(20, 500) for _ in range(n)] for n in (5, 21, 33)]
FEW = {"num_threads": 1, "max_num_seqs": 3, "max_model_len": 128, "kv_cache_memory": "2MiB"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(write_tiny_v41(tmp_path_factory.mktemp("v41") / "tiny"))


def answers(model, groups, count=5, **config):
    """((ids, logprobs) of every prompt of every group), and the engine's counters."""
    asked = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=2)
    with LLM(model, **{**FEW, **config}) as llm:
        outs = [out for group in groups for out in llm.generate(group, [asked] * len(group))]
        assert llm.assembly.executor.call("memory")[0]["kv"] <= 2 << 20
        return [_bits(out.outputs[0]) for out in outs], llm.get_metrics()["counters"]


def _bits(out):
    tables = [sorted((t, c.logprob) for t, c in table.items()) for table in out.logprobs]
    return tuple(out.token_ids), tables


@pytest.fixture(scope="module")
def alone(tiny):
    """Each prompt by itself, with nothing kept."""
    found, _ = answers(
        tiny, [[p] for p in PROMPTS], batch_invariant=True, enable_prefix_caching=False
    )
    return found


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_num_batched_tokens": 29},
        {"yoco_prefill_truncation_mode": "off"},
        {"kv_cache_dtype": "bfloat16"},
    ],
    ids=["together", "chunks", "off", "bfloat16"],
)
def test_batches_chunks_and_hits_do_not_show(tiny, alone, config):
    """``exact`` is what invariance runs; it equals ``off``, and KV in bfloat16 the packed one."""
    found, counters = answers(tiny, [PROMPTS, PROMPTS], batch_invariant=True, **config)
    assert found == alone + alone
    assert counters.cached_tokens > sum(map(len, PROMPTS)) / 2


def test_who_gives_way_does_not_show(tiny):
    """Six pages a request at the end, 15 in all, and no snapshot: it computes again."""
    short = [p[:50] for p in PROMPTS]
    right, _ = answers(tiny, [[p] for p in short], 40, batch_invariant=True, max_num_seqs=1)
    squeezed = {"kv_cache_memory": 15 * 1680 + 3 * 14092, "max_model_len": 100}
    found, counters = answers(tiny, [short], 40, batch_invariant=True, **squeezed)
    assert found == right and counters.preemptions


def test_mask_equals_compact_and_both_truncate(tiny, alone):
    """Hits and all: a prefix is only gone on with where the floor allows it."""
    modes = {
        mode: answers(
            tiny,
            [PROMPTS, PROMPTS],
            yoco_prefill_truncation_mode=mode,
            yoco_prefill_keep_tokens=17,
        )[0]
        for mode in ("compact", "mask")
    }
    assert modes["mask"] == modes["compact"]
    assert modes["compact"][:3] == modes["compact"][3:] != alone


def test_the_command_says_what_the_engine_allocates(tiny):
    with LLM(tiny, **FEW) as llm:
        facts = llm.assembly.facts
        (memory,) = llm.assembly.executor.call("memory")
    options = ["--max-num-seqs", "3", "--max-model-len", "128", "--kv-cache-memory", "2MiB"]
    done = CliRunner().invoke(cli, ["config", "memory", tiny, *options, "--json"])
    figures = json.loads(done.output)
    assert figures["kv_bytes_used"] == memory["kv"]
    assert figures["pages"] == facts.num_pages
    assert figures["slots"] + figures["snapshots"] == facts.state_blocks
    assert figures["kv_bytes_per_token"] == facts.kv.bytes_per_token == 105
    assert figures["kv_bytes_per_request"] == facts.kv.bytes_per_request
    groups = {group["name"]: group for group in figures["groups"]}
    assert sum(g["bytes_per_token"] for g in groups.values()) == 105
    assert groups["window"]["bytes_per_token"] == 0 < groups["window"]["bytes_per_request"]


@pytest.mark.parametrize(
    "config, error, message",
    [
        ({"page_size": 15}, ConfigError, "page_size=15"),
        ({"yoco_prefill_keep_tokens": 15}, UnsupportedError, "yoco_prefill_keep_tokens=15"),
        ({"kv_cache_memory": 40_000}, KVCacheTooSmallError, "max_num_seqs=3 requests"),
    ],
)
def test_what_does_not_fit_is_refused(tiny, config, error, message):
    with pytest.raises(error, match=message):
        LLM(tiny, **{**FEW, **config})


def test_a_dense_model_refuses_to_truncate(tmp_path):
    model = str(write_tiny_checkpoint(tmp_path))
    with pytest.raises(UnsupportedError, match="yoco_prefill_truncation_mode has no effect"):
        LLM(model, num_threads=1, yoco_prefill_truncation_mode="compact")
