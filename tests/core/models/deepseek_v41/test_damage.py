"""A checkpoint in released format, whole and damaged: each damage is named before a weight is read.

The message names the tensor or the file and says what to do.
"""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from deepinfer.api.backend import OpContext
from deepinfer.errors import ModelLoadError
from deepinfer.models.checkpoint import open_checkpoint
from deepinfer.models.registry import adapter_for, model_config
from deepinfer.models.source import resolve
from deepinfer.models.weights import LoadPlan, load_weights
from deepinfer.ops.backend import ReferenceBackend, build_ops
from deepinfer.testing.tiny_v41 import write_tiny_v41

CTX = OpContext(dtype=torch.float32, device=torch.device("cpu"))
INDEX = "model.safetensors.index.json"
Q = "layers.1.attn.wq_b"
EXPERT = "layers.2.ffn.experts.1.w2"
TABLE = "layers.0.engram.embed"


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    return write_tiny_v41(tmp_path_factory.mktemp("v41") / "whole", shards=12)


@pytest.fixture
def model(whole, tmp_path):
    """A copy to damage."""
    return shutil.copytree(whole, tmp_path / "model")


def load(path, dequantize=True):
    """What a start does: open, check, load. Returns the parameters."""
    store = {}
    checkpoint = open_checkpoint(resolve(str(path)))
    adapter = adapter_for(checkpoint.config["architectures"][0])
    rules = adapter.weights(model_config(adapter, checkpoint))
    plan = LoadPlan(dequantize=dequantize, known=adapter.unread)
    target = SimpleNamespace(load=store.__setitem__)
    try:
        load_weights(
            target, rules, checkpoint, build_ops(ReferenceBackend(), CTX), torch.float32, plan=plan
        )
    except ModelLoadError as why:
        why.parameters = store
        raise
    return store


def home(path, name):
    return path / json.loads((path / INDEX).read_text())["weight_map"][name]


def parse(file):
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def unparse(file, header, data):
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def reheader(path, name, **fields):
    """Say something else of a tensor in its header."""
    file = home(path, name)
    header, data = parse(file)
    header[name] |= fields
    unparse(file, header, data)


def reindex(path, change):
    index = json.loads((path / INDEX).read_text())
    change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def add(path, tensors):
    """A further shard."""
    header, data = {}, b""
    for name, (kind, shape, content) in tensors.items():
        end = len(data) + len(content)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), end]}
        data += content
    unparse(path / "extra.safetensors", header, data)
    reindex(path, lambda places: places.update(dict.fromkeys(tensors, "extra.safetensors")))


def shape_of(path, name):
    return parse(home(path, name))[0][name]["shape"]


def poke(path, name, offset, value):
    file = home(path, name)
    header, data = parse(file)
    changed = bytearray(data)
    changed[header[name]["data_offsets"][0] + offset] = value
    unparse(file, header, bytes(changed))


def cut_rows(path, name):
    """Shorten a tensor by its last row, consistently in header, offsets and data."""
    file = home(path, name)
    header, data = parse(file)
    _, end = header[name]["data_offsets"]
    rows, width = header[name]["shape"]
    header[name] |= {"shape": [rows - 1, width]}
    for entry in header.values():
        offsets = entry.get("data_offsets")
        if offsets:
            entry["data_offsets"] = [n - width if n >= end else n for n in offsets]
    unparse(file, header, data[: end - width] + data[end:])


def missing_shard(path):
    home(path, f"{Q}.weight").unlink()
    return r"of which 1 are missing: model-000\d\d-of-00012\.safetensors.*Fetch the missing files"


def swapped_shapes(path):
    rows, columns = shape_of(path, f"{Q}.weight")
    reheader(path, f"{Q}.weight", shape=[columns, rows])
    said = rf"'layers\.1\.attn\.wq_b\.weight' with shape \[{columns}, {rows}\], "
    return said + rf"expected \[{rows}, {columns}\], in model-.*config\.json may belong"


def wrong_dtype(path):
    reheader(path, f"{Q}.weight", dtype="I8")
    return r"'layers\.1\.attn\.wq_b\.weight' stored as I8, expected F8_E4M3, in model-"


def wrong_dtype_of_experts(path):
    reheader(path, f"{EXPERT}.weight", dtype="F8_E4M3")
    return r"'layers\.2\.ffn\.experts\.1\.w2\.weight' stored as F8_E4M3, expected I8, in model-"


def wrong_dtype_of_scales(path):
    reheader(path, f"{EXPERT}.scale", dtype="U8")
    return r"'layers\.2\.ffn\.experts\.1\.w2\.scale' stored as U8, expected F8_E8M0, in model-"


def integers_for_numbers(path):
    reheader(path, "layers.0.attn.attn_sink", dtype="I32")
    return r"'layers\.0\.attn\.attn_sink' stored as I32, expected F64 or F32 or F16 or BF16"


def truncated_file(path):
    file = home(path, f"{EXPERT}.weight")
    file.write_bytes(file.read_bytes()[:-5000])
    return r"model-.* is cut short: tensor '[\w.]+' ends at byte \d+.*Fetch the file again"


def wrong_scale_shape(path):
    rows, columns = shape_of(path, f"{Q}.scale")
    reheader(path, f"{Q}.scale", shape=[rows * columns, 1])
    return rf"'layers\.1\.attn\.wq_b\.scale' with shape \[{rows * columns}, 1\], expected "


def nan_scale(path):
    columns = shape_of(path, f"{EXPERT}.scale")[1]
    poke(path, f"{EXPERT}.scale", 3 * columns + 1, 255)
    return r"model-.*'layers\.2\.ffn\.experts\.1\.w2\.scale' has a NaN scale.*row 3, column 1\."


def extra_experts(path):
    names = {f"layers.3.ffn.experts.4.{w}": None for w in ("w1", "w2", "w3")}
    add(path, {f"{name}.weight": ("I8", [1, 1], b"\0") for name in names})
    return r"does not call for: 'layers\.3\.ffn\.experts\.4\.w1\.weight' \(in extra\.safetensors\)"


def unknown_tensor(path):
    add(path, {"layers.0.attn.q_bias": ("F32", [1], bytes(4))})
    return r"its config\.json does not call for: 'layers\.0\.attn\.q_bias' \(in extra"


def missing_tensor(path):
    reindex(path, lambda places: places.pop("layers.2.attn.kv_norm.weight"))
    return r"no tensor 'layers\.2\.attn\.kv_norm\.weight' \(expected shape \[64\]\).*a file may be"


def missing_scale(path):
    reindex(path, lambda places: places.pop(f"{EXPERT}.scale"))
    return r"no tensor 'layers\.2\.ffn\.experts\.1\.w2\.scale' \(expected shape \[256, 4\]\)"


def wrong_home(path):
    other = home(path, "embed.weight").name
    reindex(path, lambda places: places.update({f"{EXPERT}.weight": other}))
    return rf"{other} holds no tensor 'layers\.2\.ffn\.experts\.1\.w2\.weight', which the index"


def unparseable_header(path):
    file = home(path, f"{Q}.weight")
    data = bytearray(file.read_bytes())
    data[8:12] = b"\xff{{{"
    file.write_bytes(data)
    return r"model-.* has a damaged safetensors header: .*Fetch the file again"


def overlapping_tensors(path):
    name = f"{Q}.weight"
    header, _ = parse(home(path, name))
    begin, end = header[name]["data_offsets"]
    reheader(path, name, data_offsets=[begin - 32, end - 32])
    return (
        r"model-.* has a damaged safetensors header: tensor '[\w.]+' begins at byte \d+, expected"
    )


def short_table(path):
    cut_rows(path, f"{TABLE}.weight")
    return r"'layers\.0\.engram\.embed\.weight' with shape \[659, 32\], expected \[660, 32\], in "


def short_table_scales(path):
    cut_rows(path, f"{TABLE}.scale")
    return r"'layers\.0\.engram\.embed\.scale' with shape \[659, 1\], expected \[660, 1\], in "


def no_table(path):
    reindex(path, lambda places: (places.pop(f"{TABLE}.weight"), places.pop(f"{TABLE}.scale")))
    return r"no tensor 'layers\.0\.engram\.embed\.weight' \(expected shape \[660, 32\]\)"


def no_index_entry(path):
    (path / INDEX).write_text(json.dumps({"weight_map": {}}))
    return r"model\.safetensors\.index\.json holds no 'weight_map'"


DAMAGES = [
    missing_shard,
    swapped_shapes,
    wrong_dtype,
    wrong_dtype_of_experts,
    wrong_dtype_of_scales,
    integers_for_numbers,
    truncated_file,
    wrong_scale_shape,
    nan_scale,
    extra_experts,
    unknown_tensor,
    missing_tensor,
    missing_scale,
    wrong_home,
    unparseable_header,
    overlapping_tensors,
    short_table,
    short_table_scales,
    no_table,
    no_index_entry,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_a_damage_is_named(model, damage):
    said = damage(model)
    with pytest.raises(ModelLoadError, match=f"(?s){said}") as why:
        load(model)
    # Whatever a header shows is found before the first weight; a NaN takes reading.
    assert damage is nan_scale or not getattr(why.value, "parameters", {})


def test_a_nan_in_a_table_is_named_when_its_row_is_read(model):
    poke(model, f"{TABLE}.scale", 5, 255)
    table = load(model)["layers.0.engram.table"]
    with pytest.raises(ModelLoadError, match=r"'layers\.0\.engram\.embed\.weight'.* in row 5\."):
        table.gather(torch.tensor([[5, 6]]), torch.float32)


def test_the_whole_checkpoint_loads_and_drafts_and_vision_may_stay_unread(whole):
    dense, stored = load(whole), load(whole, dequantize=False)
    assert dense.keys() == stored.keys()
    for name, value in dense.items():
        if isinstance(value, torch.Tensor):
            other = stored[name]
            again = other if isinstance(other, torch.Tensor) else other.dequantize()
            assert torch.equal(value.view(torch.int32), again.view(torch.int32)), name


def test_a_checkpoint_of_f32_where_bf16_is_usual_loads_alike(model, whole):
    """Section 8.1: read the header, tolerate F32."""
    name = "layers.1.attn.compressor.wkv.weight"
    header, data = parse(home(model, name))
    begin, end = header[name]["data_offsets"]
    wide = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.bfloat16).float()
    add(model, {name: ("F32", header[name]["shape"], wide.numpy().tobytes())})
    before, after = load(whole), load(model)
    for key, value in before.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value.view(torch.int32), after[key].view(torch.int32)), key
