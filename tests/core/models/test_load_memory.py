"""The memory that a load takes, as the system counts it, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20
SHARDS, ROWS, COLUMNS = 6, 4096, 2048  # of each shard: 16 MiB of BF16, 8 of FP8
TABLE_ROWS = 1 << 20  # 128 MiB of a table that stays in its file

CHILD = """
import json, sys, types
import torch
from deepinfer.api.backend import OpContext
from deepinfer.api.model import WeightRule
from deepinfer.models.checkpoint import open_checkpoint
from deepinfer.models.source import resolve
from deepinfer.models.weights import LoadPlan, load_weights
from deepinfer.ops.backend import ReferenceBackend, build_ops

path, rows, columns, table, dequantize, shards = json.loads(sys.argv[1])

def memory(field):
    with open("/proc/self/status") as status:
        return next(int(l.split()[1]) << 10 for l in status if l.startswith(field + ":"))

def rule(name, shape, **how):
    return WeightRule(parameter=name, sources=(name,), shapes=(shape,), **how)

def rules(index):
    yield rule(f"b{index}.weight", (rows, columns), uses=())
    yield rule(f"f{index}.weight", (rows, columns), uses=("scaled_linear",), stored="fp8")

wanted = [r for i in range(shards) for r in rules(i)]
wanted.append(rule("t.weight", (table, 128), uses=(), stored="table"))
ops = build_ops(ReferenceBackend(), OpContext(dtype=torch.bfloat16, device=torch.device("cpu")))
torch.ones(64, 64) @ torch.ones(64, 64)
store = {}
model = types.SimpleNamespace(load=store.__setitem__)
checkpoint = open_checkpoint(resolve(path))
before, before_peak = memory("VmRSS"), memory("VmHWM")
size = load_weights(model, wanted, checkpoint, ops, torch.bfloat16,
                    plan=LoadPlan(dequantize=dequantize, known=()))
resident, peak = memory("VmRSS"), memory("VmHWM")
store["t.weight"].gather(torch.tensor([[0, table - 1]]), torch.float32)
touched = memory("VmRSS")
print(json.dumps({"before": before, "before_peak": before_peak, "size": size,
                  "resident": resident, "peak": peak, "touched": touched}))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("large")
    (directory / "config.json").write_text("{}")
    tile = (ROWS // 32, COLUMNS // 32)
    places = {}
    for index in range(SHARDS):
        shapes = {
            f"b{index}.weight": ("BF16", (ROWS, COLUMNS), 2),
            f"f{index}.weight": ("F8_E4M3", (ROWS, COLUMNS), 1),
            f"f{index}.scale": ("F8_E8M0", tile, 1),
        }
        places |= dict.fromkeys(shapes, _sparse(directory / f"model-{index}.safetensors", shapes))
    shapes = {
        "t.weight": ("F8_E4M3", (TABLE_ROWS, 128), 1),
        "t.scale": ("F8_E8M0", (TABLE_ROWS, 4), 1),
    }
    places |= dict.fromkeys(shapes, _sparse(directory / "model-t.safetensors", shapes))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return directory


def _sparse(file: Path, shapes):
    """A file whose tensors are zeros that the disk does not hold; returns its name."""
    header, end = {}, 0
    for name, (kind, (rows, columns), size) in shapes.items():
        begin, end = end, end + rows * columns * size
        header[name] = {"dtype": kind, "shape": [rows, columns], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)
    return file.name


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's counters")
@pytest.mark.parametrize("dequantize", [True, False])
def test_the_peak_is_what_stays_and_less_than_a_shard(checkpoint, dequantize):
    asked = [str(checkpoint), ROWS, COLUMNS, TABLE_ROWS, dequantize, SHARDS]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(asked)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    values = SHARDS * ROWS * COLUMNS
    expected = values * (2 + (2 if dequantize else 1))
    assert expected <= found["size"] <= expected * 1.01
    shard = 24 * MIB
    # The start itself must not hide the peak.
    assert found["before_peak"] <= found["before"] + found["size"]
    assert found["peak"] - found["before"] <= found["size"] + shard, found
    # Two rows of the table cost pages, not the table.
    assert found["touched"] - found["resident"] <= 4 * MIB, found
