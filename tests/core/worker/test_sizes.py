"""KV memory: what is promised, what is allocated, and what does not fit."""

import contextlib
import logging

import pytest
import torch
from deepinfer.api.kv import Entry, KVGroup, KVOptions, KVSpec
from deepinfer.config import EngineConfig
from deepinfer.errors import ConfigError, KVCacheTooSmallError, UnsupportedError
from deepinfer.models.deepseek_v41.adapter import DeepseekV41Adapter
from deepinfer.models.fields import only_plain_kv
from deepinfer.testing.v41_config import released_config, tiny_v41_config
from deepinfer.worker.kvpool import KVPool
from deepinfer.worker.sizes import SNAPSHOT_SHARE, full_bytes, kv_options, size_kv
from hypothesis import given, settings
from hypothesis import strategies as st

CPU = torch.device("cpu")


def config(**given):
    return EngineConfig(**{"model": "m", "max_num_seqs": 3, **given})


def v41(raw, **options):
    adapter = DeepseekV41Adapter()
    return adapter.kv_spec(adapter.config(raw), KVOptions(dtype_bytes=4, **options))


def pool(spec, sizes, page_size=16):
    return KVPool(spec, sizes.pages, page_size, torch.float32, CPU, sizes.state_blocks)


def small(ratio=2, width=6, rows=5):
    """One growing group and one of state."""
    grows = KVGroup(
        name="grows",
        kind="full",
        layers=(0, 3),
        entry=Entry(width=width, dtype="bfloat16"),
        ratio=ratio,
        bytes_per_token=2 * 2 * width // ratio,
    )
    entry = Entry(width=3, dtype="float32")
    return KVSpec(
        (grows, KVGroup(name="state", kind="state", layers=(0, 1), entry=entry, rows=rows)), "s"
    )


@pytest.mark.parametrize("cache_dtype", ["packed", "bfloat16"])
@pytest.mark.parametrize("tokens", [1 << 10, 1 << 15, 1 << 18])
def test_bytes_per_token_are_those_allocated(tokens, cache_dtype):
    """Issue 3, line 6, at three lengths; what a request costs beside them does not grow."""
    spec = v41(tiny_v41_config(), cache_dtype=cache_dtype)
    asked = config(max_num_seqs=1, enable_prefix_caching=False)
    memory = spec.bytes_per_request + tokens * spec.bytes_per_token
    sizes = size_kv(asked, spec, tokens, memory)
    made = pool(spec, sizes)
    assert sizes.pages * 16 == tokens
    assert made.nbytes == sizes.nbytes == memory
    growing = sum(
        made.tensor(g.name, layer).nbytes
        for g in spec.groups
        if g.kind != "state"
        for layer in g.layers
    )
    assert growing / tokens == spec.bytes_per_token
    assert made.nbytes - growing == spec.bytes_per_request


@pytest.mark.parametrize("cache_dtype, each", [("packed", 890), ("bfloat16", 3200)])
def test_the_released_model_costs_what_the_specification_says(cache_dtype, each):
    assert v41(released_config(), cache_dtype=cache_dtype).bytes_per_token == each


@given(slots=st.integers(1, 9), longest=st.integers(2, 300), less=st.integers(1, 5000))
@settings(max_examples=50)
def test_a_pool_without_snapshots_says_so_once_and_what_it_needs(slots, longest, less):
    spec, asked = small(), config(max_num_seqs=slots)
    with capture() as said:
        size_kv(asked, spec, longest, 1 << 30)
        size_kv(config(max_num_seqs=slots, enable_prefix_caching=False), spec, longest, 1 << 14)
    assert not said
    least = slots * spec.bytes_per_request + spec.page_bytes(16)
    with capture() as said:
        memory = max(least, (1 << 14) - less)
        sizes = size_kv(asked, spec, longest, memory)
    assert len(said) == (sizes.snapshots == 0)
    if said:
        need = int(said[0].split("Give ")[1].split()[0])
        assert size_kv(asked, spec, longest, need).snapshots == 1
        assert size_kv(asked, spec, longest, need - 1).snapshots == 0


@contextlib.contextmanager
def capture():
    """Warnings of ``sizes``, as texts."""
    said, log = [], logging.getLogger("deepinfer.worker.sizes")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    log.addHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(handler)


@given(
    memory=st.integers(1, 40_000),
    slots=st.integers(1, 9),
    longest=st.integers(2, 300),
    cached=st.booleans(),
    width=st.integers(1, 7),
    named=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_what_is_divided_is_what_is_allocated(memory, slots, longest, cached, width, named):
    spec = small(width=2 * width)
    given = {"max_model_len": longest} if named else {}
    asked = config(max_num_seqs=slots, page_size=4, enable_prefix_caching=cached, **given)
    try:
        sizes = size_kv(asked, spec, longest, memory)
    except KVCacheTooSmallError as why:
        whole = max(spec.page_bytes(4), -(-longest // 4) * spec.page_bytes(4) if named else 0)
        least = max(whole, spec.page_bytes(4))
        assert memory < slots * spec.bytes_per_request + least or "max_model_len" in str(why)
        return
    assert pool(spec, sizes, 4).nbytes == sizes.nbytes <= memory
    assert sizes.max_len <= min(longest, sizes.pages * 4)
    assert memory - sizes.nbytes < sizes.page_bytes
    assert not sizes.snapshots or cached
    assert sizes.snapshots <= 4 * slots
    left = memory - slots * sizes.block_bytes
    assert sizes.snapshots * sizes.block_bytes <= left // SNAPSHOT_SHARE


def test_full_memory_holds_every_request_at_its_longest():
    spec, asked = small(), config(page_size=4)
    sizes = size_kv(asked, spec, 100, full_bytes(asked, spec, 100))
    assert sizes.pages >= 3 * 25 and sizes.snapshots


def test_state_that_does_not_fit_is_refused_with_numbers():
    spec = small()
    block, page = spec.bytes_per_request, spec.page_bytes(4)
    with pytest.raises(KVCacheTooSmallError) as caught:
        size_kv(config(page_size=4), spec, 100, 2 * block + page)
    message = str(caught.value)
    assert f"max_num_seqs=3 requests (3 · {block} bytes)" in message
    assert f"kv_cache_memory={3 * block + page} or more" in message
    assert "max_num_seqs=2 or less" in message


def test_pages_of_whole_entries_only():
    with pytest.raises(ConfigError, match=r"page_size=7: .* multiple of 2 tokens.* Give 8"):
        size_kv(config(page_size=7), small(), 100, 1 << 20)


def test_blocks_are_copied_in_every_state_group():
    spec = small()
    made = KVPool(spec, 2, 4, torch.float32, CPU, state_blocks=5)
    for layer in (0, 1):
        blocks = made.tensor("state", layer)
        assert blocks.shape == (5, 5, 3) and blocks.dtype == torch.float32
        blocks[:] = torch.arange(5.0)[:, None, None] + 10 * layer
    made.copy_blocks(((0, 3), (3, 1)))
    made.copy_blocks(())
    for layer in (0, 1):
        assert (made.tensor("state", layer)[:, 0, 0] - 10 * layer).tolist() == [0, 3, 2, 0, 4]
    assert made.tensor("grows", 3).shape == (2, 2, 6)


# Truncation as configured.


def test_arguments_win_over_the_environment_and_it_over_defaults(monkeypatch):
    assert config().truncation()[:2] == ("compact", 140)
    monkeypatch.setenv("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "mask")
    monkeypatch.setenv("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "77")
    assert config().truncation() == ("mask", 77, frozenset())
    mode, keep, asked = config(yoco_prefill_truncation_mode="off").truncation()
    assert (mode, keep, asked) == ("off", 77, {"yoco_prefill_truncation_mode"})
    monkeypatch.setenv("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "few")
    with pytest.raises(ConfigError, match="DEEPINFER_YOCO_PREFILL_KEEP_TOKENS='few'"):
        EngineConfig.make(model="m")


@pytest.mark.parametrize(
    "asked, mode", [("compact", "exact"), ("mask", "exact"), ("exact", "exact"), ("off", "off")]
)
def test_invariance_leaves_nothing_to_approximation(asked, mode):
    made = config(batch_invariant=True, yoco_prefill_truncation_mode=asked)
    assert made.truncation()[0] == mode


def test_other_models_refuse_what_was_asked_for(monkeypatch):
    monkeypatch.setenv("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "mask")
    only_plain_kv(kv_options(config(), 4))  # the environment speaks to those whom it concerns
    with pytest.raises(UnsupportedError, match="yoco_prefill_keep_tokens has no effect"):
        only_plain_kv(kv_options(config(yoco_prefill_keep_tokens=200), 4))


def test_too_few_rows_are_refused_with_numbers():
    adapter = DeepseekV41Adapter()
    options = kv_options(config(yoco_prefill_keep_tokens=15), 4, draft_len=2)
    with pytest.raises(UnsupportedError, match=r"yoco_prefill_keep_tokens=15 .* at least 18"):
        adapter.kv_spec(adapter.config(tiny_v41_config()), options)
