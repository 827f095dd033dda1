"""Generated checkpoints: the released inventory and spread, equal files for equal seeds."""

from __future__ import annotations

import filecmp
import json
import math
from pathlib import Path

import pytest
import torch
from deepinfer.errors import ConfigError, DeepInferError
from deepinfer.models.checkpoint import open_checkpoint
from deepinfer.models.registry import adapter_for
from deepinfer.models.source import resolve
from deepinfer.models.weights import join
from deepinfer.ops.lowbit import BlockScaled, e4m3, e8m0
from deepinfer.testing.tiny_v41 import (
    SPECIALS,
    GeneratedCheckpoint,
    check_config,
    full_width_layer,
    size_of,
    write_tiny_v41,
)
from deepinfer.testing.v41_config import (
    full_width_config,
    released_config,
    schedule,
    tiny_v41_config,
)
from deepinfer.testing.v41_tensors import TensorSpec, draw, tensors

DATA = Path(__file__).parents[2] / "data" / "deepseek-v41"
# Smaller than the tiny one: these tests write it several times.
SMALL = {"text_config": {"n_routed_experts": 2, "moe_intermediate_size": 32}}


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    return write_tiny_v41(tmp_path_factory.mktemp("v41") / "one", overrides=SMALL, shards=5)


def test_the_released_inventory():
    """Section 8.1: 96,085 tensors and 475.24 GiB; 1.2: parameters of the parts."""
    specs = list(tensors(released_config()))
    assert sum(len(list(spec.stored())) for spec in specs) == 96085
    assert f"{sum(spec.nbytes for spec in specs) / 2**30:.2f}" == "475.24"
    tables = [spec for spec in specs if spec.storage == "table"]
    assert [spec.name for spec in tables] == [f"layers.{n}.engram.embed.weight" for n in (1, 14)]
    assert round(sum(math.prod(spec.shape) for spec in tables) / 1e9, 1) == 196.6
    drafts = sum(math.prod(s.shape) for s in specs if s.name.startswith("mtp."))
    assert round(drafts / 1e9, 1) == 14.2
    vision = ("vision.", "aligner.", "image_")
    seen = sum(math.prod(s.shape) for s in specs if s.name.startswith(vision))
    assert round(seen / 1e9, 3) == 0.485
    rest = sum(math.prod(s.shape) for s in specs if s not in tables) - drafts - seen
    assert round(rest / 1e9, 1) == 551.9


@pytest.mark.parametrize("golden", sorted(p.parent.name for p in DATA.glob("*/config.json")))
def test_golden_checkpoints_have_this_inventory(golden):
    checkpoint = open_checkpoint(resolve(str(DATA / golden)))
    mine = {n: (s, k) for spec in tensors(checkpoint.config) for n, s, k in spec.stored()}
    names = checkpoint.names()
    assert mine == {n: (checkpoint.shape(n), checkpoint.storage(n)) for n in names}


def test_the_files_are_whole(small):
    checkpoint = open_checkpoint(resolve(str(small)))
    config = checkpoint.config
    index = json.loads((small / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{n:05d}-of-00005.safetensors" for n in range(1, 6)]
    assert all(file.stat().st_size > 10_000 for file in small.glob("*.safetensors"))
    expected = [spec.nbytes for spec in tensors(config)]
    assert index["metadata"]["total_size"] == sum(expected)
    names = set(checkpoint.names())
    assert {"mtp.0.main_proj.scale", "vision.norm.weight", "image_start"} <= names
    last = checkpoint.file("layers.1.engram.embed.weight").name
    assert last == files[-1]  # tables come last, as released


def test_another_reader_of_the_format_agrees(small):
    safetensors = pytest.importorskip("safetensors")
    checkpoint = open_checkpoint(resolve(str(small)))
    for file in small.glob("*.safetensors"):
        with safetensors.safe_open(str(file), "pt") as theirs:
            for name in theirs.keys():
                mine = torch.empty(theirs.get_tensor(name).nbytes, dtype=torch.uint8)
                checkpoint.bytes_into(name, mine)
                raw = theirs.get_tensor(name).contiguous().view(-1).view(torch.uint8)
                assert torch.equal(raw, mine), name


def test_equal_seeds_give_equal_files_and_shards_change_no_tensor(small, tmp_path):
    again = write_tiny_v41(tmp_path / "again", overrides=SMALL, shards=5)
    for file in small.iterdir():
        assert filecmp.cmp(file, again / file.name, shallow=False), file.name
    one = open_checkpoint(resolve(str(write_tiny_v41(tmp_path / "1", overrides=SMALL))))
    other = open_checkpoint(resolve(str(write_tiny_v41(tmp_path / "2", 1, overrides=SMALL))))
    many = open_checkpoint(resolve(str(small)))
    name = "layers.1.attn.wq_b.weight"
    raw = [torch.empty(many.shape(name), dtype=torch.uint8) for _ in range(3)]
    for checkpoint, out in zip((many, one, other), raw, strict=True):
        checkpoint.bytes_into(name, out)
    assert torch.equal(raw[0], raw[1]) and not torch.equal(raw[0], raw[2])


def test_the_tokenizer_knows_the_special_tokens(small):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(small / "tokenizer.json"))
    config = json.loads((small / "config.json").read_text())
    assert [tokenizer.token_to_id(token) for token in SPECIALS] == list(range(len(SPECIALS)))
    assert tokenizer.get_vocab_size() == config["text_config"]["vocab_size"]
    assert tokenizer.id_to_token(config["image_token_id"]) == "<｜deepseek_image｜>"
    assert tokenizer.id_to_token(config["text_config"]["dspark_noise_token_id"]) == "<｜System｜>"
    assert tokenizer.decode(tokenizer.encode("Grüße, 世界!").ids) == "Grüße, 世界!"


@pytest.mark.parametrize(
    "name, shape, storage, rms",
    [
        ("embed.weight", (512, 256), "BF16", 0.7),
        ("layers.0.attn.wkv.weight", (512, 512), "fp8", 1.8 * 512**-0.5),
        ("layers.0.attn.wq_b.weight", (512, 256), "fp8", 0.95 * 256**-0.5),
        ("layers.0.ffn.experts.1.w1.weight", (512, 512), "fp4", 1.5 * 512**-0.5),
        ("layers.0.ffn.experts.1.w2.weight", (512, 512), "fp4", 1.05 * 512**-0.5),
        ("layers.0.ffn.gate.weight", (384, 512), "BF16", 2.9 * 512**-0.5),
        ("layers.0.attn_norm.weight", (4096,), "BF16", 0.025),
        ("layers.0.attn.kv_norm.weight", (4096,), "BF16", 0.4),
        ("layers.0.engram.embed.weight", (4096, 64), "table", 1.0),
    ],
)
def test_values_have_the_released_spread(name, shape, storage, rms):
    """Section 12, but for the embedding. Tiles differ, so that a wrong scale would show."""
    drawn = draw(TensorSpec(name, shape, storage), seed=3)
    if storage == "table":
        values = e4m3(drawn[0]) * e8m0(drawn[1]).repeat_interleave(32, -1)
    else:
        low = storage in ("fp8", "fp4")
        values = BlockScaled(*drawn, storage).dequantize() if low else drawn[0].float()
    assert values.square().mean().sqrt().item() == pytest.approx(rms, rel=0.06)
    if len(drawn) == 2:
        assert drawn[1].unique().numel() > 2 and int(drawn[1].max()) < 255


def test_a_generated_checkpoint_is_the_written_one(small):
    written = open_checkpoint(resolve(str(small)))
    generated = GeneratedCheckpoint(written.config, 0, "cpu")
    tables = {n for n in written.names() if ".engram.embed." in n}
    assert set(generated.names()) == set(written.names()) - tables
    adapter = adapter_for("DeepseekV41ForCausalLM")
    for rule in adapter.weights(adapter.config(written.config)):
        if rule.stored != "table":
            here, there = (join(rule, c, torch.bfloat16, None, False) for c in (generated, written))
            assert type(here) is type(there) and here.shape == there.shape
            if isinstance(here, BlockScaled):
                assert torch.equal(here.codes, there.codes)
                assert torch.equal(here.scales, there.scales)
            else:
                assert torch.equal(here.view(torch.uint8), there.view(torch.uint8))


def test_a_layer_is_made_without_the_rest(small):
    config = json.loads((small / "config.json").read_text())
    layer = full_width_layer(config, 3, "cpu")
    assert layer["moe.gate_up"].shape == (2, 64, 256) and layer["moe.gate_up"].kind == "fp4"
    assert layer["attn.q_kv"].kind == "fp8" and layer["attn.sink"].dtype == torch.float32
    assert not any("table" in name for name in full_width_layer(config, 1, "cpu"))


def test_real_widths():
    """Section 1.1; a layer has the sizes of the released one."""
    config = full_width_config(1)
    text = config["text_config"]
    assert (text["hidden_size"], text["n_routed_experts"]) == (5120, 384)
    real = {s.name: s.shape for s in tensors(released_config()) if s.name.startswith("layers.2.")}
    mine = {s.name: s.shape for s in tensors(config) if s.name.startswith("layers.0.")}
    mine = {name.replace("layers.0", "layers.2"): shape for name, shape in mine.items()}
    del real["layers.2.ffn.gate.bias_vl"]  # belongs to vision
    assert mine == real
    assert size_of(config) > 6 << 30


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 6, 7, 12, 39, 40])
def test_every_number_of_layers_is_a_model(layers):
    check_config(full_width_config(layers))
    check_config(tiny_v41_config({"text_config": schedule(layers, drafts=1)}))


def test_forty_layers_have_the_released_schedule():
    text, released = full_width_config(40)["text_config"], released_config()["text_config"]
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        assert text[name] == released[name]
    assert text["compress_ratios"] == released["compress_ratios"][:40]


@pytest.mark.parametrize(
    "overrides, said",
    [
        ({"text_config": {"head_dim": "x"}}, "head_dim"),
        ({"text_config": 3}, "text_config=3"),
        ({"text_config": {"num_hidden_layers": 9}}, "compress_ratios"),
        ({"vision_config": {"hidden_size": None}}, "hidden_size"),
        ({"text_config": {"dspark_markov_rank": "x"}}, "describes no checkpoint"),
    ],
)
def test_what_is_no_configuration_is_refused(overrides, said, tmp_path):
    with pytest.raises(DeepInferError, match=said):
        write_tiny_v41(tmp_path, overrides=overrides)
    assert not list(tmp_path.glob("*.safetensors"))


def test_more_files_than_tensors_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="shards=100000"):
        write_tiny_v41(tmp_path, overrides=SMALL, shards=100000)
