"""The weights of golden configuration a: bytes decoded here by the specification's words (8.2)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from deepinfer.models.checkpoint import open_checkpoint
from deepinfer.models.fit import check_fit
from deepinfer.models.registry import adapter_for
from deepinfer.models.source import resolve
from deepinfer.models.weights import join
from deepinfer.ops.lowbit import BlockScaled

A = Path(__file__).parents[3] / "data" / "deepseek-v41" / "a"
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def e4m3(codes):
    """Sign, four exponent bits of bias 7, three of mantissa; exponent 0 is subnormal."""
    codes = codes.astype(np.int64)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = np.ldexp(8.0 + mantissa, exponent - 10)
    value = np.where(exponent == 0, np.ldexp(mantissa.astype(float), -9), normal)
    return np.where(codes >> 7, -value, value)


def fp4(codes):
    nibbles = np.stack((codes & 15, codes >> 4), -1).reshape(codes.shape[0], -1)
    return np.where(nibbles >> 3, -1.0, 1.0) * np.array(FP4)[nibbles & 7]


class File:
    """The safetensors file, read without our reader."""

    def __init__(self, path):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        self.header, self.data = json.loads(data[8 : 8 + length]), data[8 + length :]

    def array(self, name):
        """(type, array): codes as uint8, BF16 widened to float64."""
        entry = self.header[name]
        begin, end = entry["data_offsets"]
        raw = np.frombuffer(self.data[begin:end], np.uint8)
        kind = entry["dtype"]
        if kind == "F32":
            raw = raw.view(np.float32).astype(float)
        elif kind == "BF16":
            raw = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(float)
        return kind, raw.reshape(entry["shape"])

    def values(self, name):
        kind, array = self.array(name)
        if kind in ("F32", "BF16"):
            return array
        exponents = self.array(name.removesuffix("weight") + "scale")[1].astype(int) - 127
        scales = np.repeat(np.ldexp(1.0, exponents), 32, 1)
        if kind == "I8":
            return fp4(array) * scales
        if ".engram.embed." not in name:
            scales = np.repeat(scales, 32, 0)
        return e4m3(array) * scales[: array.shape[0], : array.shape[1]]


@pytest.fixture(scope="module")
def stored():
    return File(A / "model.safetensors")


@pytest.fixture(scope="module")
def loaded():
    checkpoint = open_checkpoint(resolve(str(A)))
    adapter = adapter_for("DeepseekV41ForCausalLM")
    rules = list(adapter.weights(adapter.config(checkpoint.config)))
    check_fit(rules, checkpoint, adapter.unread)
    return checkpoint, rules


def expected(stored, rule):
    parts = [stored.values(name) for name in rule.sources]
    joined = np.stack(parts) if rule.stack else np.concatenate(parts)
    return torch.from_numpy(joined if rule.view is None else joined.reshape(rule.view))


def same(found, wanted):
    """Bit by bit: the values are exact in every type that they are kept in."""
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[found.dtype]
    return torch.equal(found.view(bits), wanted.to(found.dtype).view(bits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_has_the_specified_values(stored, loaded, dtype):
    checkpoint, rules = loaded
    for rule in rules:
        wanted = expected(stored, rule)
        if rule.stored == "table":
            table = join(rule, checkpoint, dtype)
            rows = torch.arange(table.rows)[:, None]
            assert same(table.gather(rows, dtype), wanted), rule.parameter
            table.close()
            continue
        assert same(join(rule, checkpoint, dtype), wanted), rule.parameter
        kept = join(rule, checkpoint, dtype, dequantize=False)
        if isinstance(kept, BlockScaled):
            assert kept.shape == wanted.shape
            assert same(kept.dequantize(dtype), wanted), rule.parameter


def test_low_bit_parameters_stay_low_bit(loaded):
    checkpoint, rules = loaded
    kept = {r.parameter: join(r, checkpoint, torch.bfloat16, dequantize=False) for r in rules}
    low = {name for name, value in kept.items() if isinstance(value, BlockScaled)}
    assert {"layers.0.attn.q_kv", "layers.0.moe.gate_up", "layers.1.engram.kv"} <= low
    assert kept["layers.0.moe.gate_up"].kind == "fp4"
    assert isinstance(kept["layers.0.attn.out_a"], torch.Tensor)  # used dequantised (8.1)
    assert kept["layers.0.attn.sink"].dtype == torch.float32
