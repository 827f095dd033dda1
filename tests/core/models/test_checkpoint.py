"""Safetensors directories: whole, sharded, cut short, and half fetched."""

from __future__ import annotations

import json

import pytest
import torch
from deepinfer.errors import ModelLoadError
from deepinfer.models.checkpoint import open_checkpoint
from deepinfer.models.source import resolve

safetensors = pytest.importorskip("safetensors.torch")

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8}


def weights():
    generator = torch.Generator().manual_seed(0)
    names = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    return {n: torch.randn(6, 8, generator=generator).bfloat16() for n in names}


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    safetensors.save_file(weights(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {}
    for index, (name, tensor) in enumerate(weights().items()):
        file = f"model-{index + 1:05d}-of-00003.safetensors"
        safetensors.save_file({name: tensor}, tmp_path / file)
        weight_map[name] = file
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def opened(path):
    return open_checkpoint(resolve(str(path)))


@pytest.mark.parametrize("kind", ["directory", "sharded"])
def test_tensors_come_back(kind, request):
    checkpoint = opened(request.getfixturevalue(kind))
    assert checkpoint.config == CONFIG
    assert set(checkpoint.names()) == set(weights())
    for name, expected in weights().items():
        assert checkpoint.shape(name) == (6, 8)
        assert torch.equal(checkpoint.tensor(name, torch.bfloat16), expected)
        assert torch.equal(checkpoint.tensor(name, torch.float32), expected.float())
    with pytest.raises(ModelLoadError, match=r"no tensor 'model\.nope'"):
        checkpoint.tensor("model.nope", torch.float32)


def test_generation_config_is_read_where_there_is_one(directory):
    assert opened(directory).generation_config == {"eos_token_id": [1, 2]}
    (directory / "generation_config.json").unlink()
    assert opened(directory).generation_config == {}


def test_a_tensor_has_memory_of_its_own(directory):
    checkpoint = opened(directory)
    first = checkpoint.tensor("lm_head.weight", torch.bfloat16)
    first.zero_()
    assert checkpoint.tensor("lm_head.weight", torch.bfloat16).ne(0).any()


def test_rounding_comes_before_widening(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    stored = torch.linspace(0, 1, 32)
    safetensors.save_file({"w": stored}, tmp_path / "model.safetensors")
    checkpoint = opened(tmp_path)
    found = checkpoint.tensor("w", torch.float32, round_to=torch.bfloat16)
    assert torch.equal(found, stored.bfloat16().float())
    assert torch.equal(checkpoint.tensor("w", torch.float32), stored)


@pytest.mark.parametrize(
    "said, head, tied",
    [(None, True, False), (None, False, True), (True, True, True), (False, False, False)],
)
def test_tied_follows_the_config_then_the_files(tmp_path, said, head, tied):
    config = CONFIG if said is None else CONFIG | {"tie_word_embeddings": said}
    (tmp_path / "config.json").write_text(json.dumps(config))
    kept = {n: w for n, w in weights().items() if head or n != "lm_head.weight"}
    safetensors.save_file(kept, tmp_path / "model.safetensors")
    assert opened(tmp_path).tied is tied


def test_a_file_cut_short_anywhere_is_refused_at_open(directory):
    file = directory / "model.safetensors"
    data = file.read_bytes()
    for length in [*range(0, len(data), 3), len(data) - 1]:
        file.write_bytes(data[:length])
        with pytest.raises(ModelLoadError, match="cut short"):
            opened(directory)


def test_the_message_names_the_tensor_and_the_sizes(directory):
    file = directory / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    expected = rf"model\.safetensors is cut short: tensor '[\w.]+' ends at byte {len(data)}"
    with pytest.raises(ModelLoadError, match=rf"{expected}, the file has {len(data) - 1}\."):
        opened(directory)
    file.write_bytes(data + b"xyz")
    with pytest.raises(ModelLoadError, match="has bytes left over"):
        opened(directory)


def with_header(header):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "header",
    [
        b"{not json",
        b"[1, 2]",
        b"\xff\xfe",
        {"w": {"dtype": "F32", "shape": [1]}},
        {"w": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}},
        {"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
        {"w": {"dtype": "F32", "shape": [1], "data_offsets": ["a", "b"]}},
        {"w": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}},
        {"w": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}},
        {"w": 3},
    ],
)
def test_a_damaged_header_is_named(directory, header):
    (directory / "model.safetensors").write_bytes(with_header(header) + bytes(4))
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        opened(directory).tensor("w", torch.float32)


def test_files_that_the_index_names_must_be_there(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"1 are missing: model-00002-of-00003\.safetensors"):
        opened(sharded)


def test_a_shard_must_hold_what_the_index_says(sharded):
    safetensors.save_file({"other": torch.ones(2)}, sharded / "model-00003-of-00003.safetensors")
    with pytest.raises(
        ModelLoadError, match=r"no tensor 'lm_head\.weight', which the index places"
    ):
        opened(sharded)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_a_damaged_index_is_named(sharded, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors\.index\.json"):
        opened(sharded)


def test_other_weight_files_are_mentioned(directory):
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors.*does hold pytorch_model\.bin"):
        opened(directory)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_json_is_named(directory, name):
    (directory / name).write_text('{"a": ')
    with pytest.raises(ModelLoadError, match=name):
        opened(directory)


def test_the_fingerprint_tells_fine_tunes_apart(directory):
    first = opened(directory).fingerprint()
    assert opened(directory).fingerprint() == first
    tuned = weights()
    tuned["model.norm.weight"][0, 0] += 1
    safetensors.save_file(tuned, directory / "model.safetensors", metadata={"format": "pt"})
    assert opened(directory).fingerprint() != first


@pytest.mark.model
def test_the_demo_model_opens(demo_gguf):
    checkpoint = open_checkpoint(resolve(str(demo_gguf)))
    assert checkpoint.tied and len(checkpoint.names()) == 272
    assert checkpoint.config["rms_norm_eps"] == 1e-5
    assert checkpoint.generation_config["eos_token_id"] == 2
    q = checkpoint.tensor("model.layers.0.self_attn.q_proj.weight", torch.bfloat16)
    assert q.shape == (576, 576)


@pytest.mark.parametrize(
    "second, said",
    [
        ([2, 6], r"tensor 'b' begins at byte \d+, expected"),  # a byte that belongs to two
        ([5, 9], r"tensor 'b' begins at byte \d+, expected"),  # a byte that belongs to none
        ([4, 10], "of shape .* has 6 bytes"),
        ([4, -8], "offsets"),
        ([4, 8.0], "offsets"),
    ],
)
def test_tensors_lie_side_by_side(directory, second, said):
    entries = {"a": [0, 4], "b": second}
    header = {n: {"dtype": "F32", "shape": [1], "data_offsets": at} for n, at in entries.items()}
    (directory / "model.safetensors").write_bytes(with_header(header) + bytes(10))
    with pytest.raises(ModelLoadError, match=rf"(?s)damaged safetensors header.*{said}"):
        opened(directory)


@pytest.mark.parametrize("shape", [[-1], [True], ["4"], 4, [1.0]])
def test_a_shape_is_a_list_of_sizes(directory, shape):
    header = {"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}
    (directory / "model.safetensors").write_bytes(with_header(header) + bytes(4))
    with pytest.raises(ModelLoadError, match="'w' has the shape"):
        opened(directory)


def test_a_file_cut_short_after_it_was_opened_is_named(directory):
    checkpoint = opened(directory)
    file = directory / "model.safetensors"
    with file.open("r+b") as short:
        short.truncate(file.stat().st_size - 60)
    with pytest.raises(ModelLoadError, match=r"ends inside tensor '[\w.]+': it was cut short"):
        for name in checkpoint.names():
            checkpoint.tensor(name, torch.float32)


def test_bytes_come_as_they_are_stored_also_from_the_middle(directory):
    checkpoint = opened(directory)
    stored = weights()["model.norm.weight"].view(torch.uint8).view(-1)
    whole = torch.empty(96, dtype=torch.uint8)
    checkpoint.bytes_into("model.norm.weight", whole)
    part = torch.empty(10, dtype=torch.uint8)
    checkpoint.bytes_into("model.norm.weight", part, 7)
    assert torch.equal(whole, stored) and torch.equal(part, stored[7:17])
    extent = checkpoint.extent("model.norm.weight")
    raw = extent.path.read_bytes()[extent.begin : extent.begin + 96]
    assert raw == stored.numpy().tobytes() and extent.shape == (6, 8)
    assert checkpoint.storage("model.norm.weight") == "BF16"


def test_low_bit_bytes_are_no_numbers(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    header = {"w": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}
    (tmp_path / "model.safetensors").write_bytes(with_header(header) + bytes(4))
    with pytest.raises(ModelLoadError, match="'w' is stored as F8_E4M3, which is no number"):
        opened(tmp_path).tensor("w", torch.float32)


def test_a_wide_tensor_is_converted_in_pieces_without_a_seam(tmp_path, monkeypatch):
    monkeypatch.setattr("deepinfer.models.shards._PIECE", 7)
    (tmp_path / "config.json").write_text("{}")
    stored = {"w": torch.randn(5, 9).bfloat16(), "s": torch.tensor(2.5), "e": torch.empty(0, 3)}
    safetensors.save_file(stored, tmp_path / "model.safetensors")
    checkpoint = opened(tmp_path)
    for name, expected in stored.items():
        found = checkpoint.tensor(name, torch.float32)
        assert found.shape == expected.shape and torch.equal(found, expected.float())
        assert torch.equal(checkpoint.tensor(name, torch.bfloat16), expected.bfloat16())
