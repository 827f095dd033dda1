"""What a text costs, and which rotary angles, truncations and storages the model has."""

from __future__ import annotations

import pytest
import torch
from deepinfer.api.kv import KVOptions
from deepinfer.errors import UnsupportedError
from deepinfer.models.deepseek_v41.cache import kv_spec
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.rotary import Yarn, frequencies, table
from deepinfer.testing.v41_config import released_config
from deepinfer.worker.kvpool import KVPool
from safetensors.torch import load_file

RELEASED = DeepseekV41Config.read(released_config())


def spec(config=RELEASED, **options):
    return kv_spec(config, KVOptions(dtype_bytes=2, **options))


@pytest.mark.parametrize("storage, per_token", [("auto", 890), ("packed", 890), ("bfloat16", 3200)])
def test_bytes_of_the_released_model(storage, per_token):
    """Specification 9.1."""
    found = spec(cache_dtype=storage)
    assert found.bytes_per_token == per_token
    packed = storage != "bfloat16"
    window = 40 * (128 + 16 + 1) * (528 if packed else 1024)
    assert found.bytes_per_request == window + 3 * 2 * 4096
    assert found.lookback == 3
    assert found.page_multiple == 2
    assert {g.name for g in found.groups} == {
        "window", "compressed-r2", "index-r2", "compressed-r1", "index-r1", "open",
    }  # fmt: skip


def test_packed_and_wide_caches_do_not_share_pages():
    assert spec(cache_dtype="packed").layout != spec(cache_dtype="bfloat16").layout
    assert spec().layout == spec(cache_dtype="packed").layout


@pytest.mark.parametrize("drafts, rows", [(0, 2), (1, 4), (2, 4), (5, 8), (6, 8), (7, 16)])
def test_drafts_lengthen_what_rolls(drafts, rows):
    groups = {g.name: g for g in spec(draft_len=drafts).groups}
    assert groups["open"].rows == rows >= drafts + 2
    assert groups["window"].rows == 128 + 16 + drafts + 1


@pytest.mark.parametrize("storage", ["packed", "bfloat16"])
def test_a_pool_takes_what_the_spec_says(a, storage):
    found = a.adapter.kv_spec(a.config, KVOptions(dtype_bytes=4, cache_dtype=storage))
    pool = KVPool(found, 3, 16, torch.float32, torch.device("cpu"), 2)
    assert pool.nbytes == 48 * found.bytes_per_token + 2 * found.bytes_per_request


def test_unknown_storage_is_refused():
    with pytest.raises(UnsupportedError, match="kv_cache_dtype='float16'"):
        spec(cache_dtype="float16")


def test_truncation_of_the_released_model():
    """Specification 3.12: exact from 1 + 127 · 19 rows on."""
    exact = spec(truncation="exact").truncation
    assert (exact.keep, exact.reach, exact.first_layer, exact.compact) == (2414, 2413, 21, True)
    assert spec(truncation="compact").truncation.keep == 140
    assert spec(truncation="mask", keep_tokens=500).truncation.compact is False
    assert spec(truncation="off").truncation is None
    with pytest.raises(UnsupportedError, match="at least 128"):
        spec(truncation="compact", keep_tokens=127)


def test_models_that_cannot_be_truncated_say_why():
    raw = released_config()
    raw["text_config"] |= {"engram_layer_ids": [1, 30]}
    with pytest.raises(UnsupportedError, match="layer 30 has Engram") as why:
        spec(DeepseekV41Config.read(raw), truncation="compact")
    assert why.value.setting == "yoco_prefill_truncation_mode"
    assert spec(DeepseekV41Config.read(raw)).truncation is None


def test_rotary_tables_are_the_recorded_ones(a):
    positions = torch.tensor([0, 1, 2, 7, 31, 63, 64, 100, 255, 500, 767])
    model = a.rig("f32").model
    for name, found in (("plain", model._plain), ("yarn", model._yarn)):
        pairs = torch.stack(found[positions].chunk(2, 1), -1)
        assert torch.equal(pairs, a[f"rope_cos_sin_{name}"])


def test_released_rotary_tables_are_the_recorded_ones(request):
    """Up to position 1,048,575, bit for bit: angles are float32 as they are recorded."""
    golden = load_file(request.path.parents[3] / "data/deepseek-v41/ops/ops.safetensors")
    positions = golden["rope_released/positions"]
    yarn = Yarn(factor=16, beta_fast=32, beta_slow=1, original=65536)
    for name, frequency in (
        ("plain", frequencies(64, 10000.0)),
        ("yarn", frequencies(64, 160000.0, yarn)),
    ):
        pairs = torch.stack(table(frequency, 1 << 20)[positions].chunk(2, 1), -1)
        assert torch.equal(pairs, golden[f"rope_released/{name}_cos_sin"])
