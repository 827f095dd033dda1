"""Sink attention and candidate blocks against recorded ones (tests/data/deepseek-v41/ops)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deepinfer.api.model import DeviceBatch, StepRequests
from deepinfer.ops.invariant import invariant_ops
from deepinfer.ops.reference.latent import Window
from deepinfer.ops.reference.sparse import Blocks, _best_blocks, _members
from deepinfer.ops.table import OpSet
from safetensors.torch import load_file

OPS = OpSet(invariant_ops(), "test")


@pytest.fixture(scope="module")
def golden():
    return load_file(Path(__file__).parents[2] / "data/deepseek-v41/ops/ops.safetensors")


@pytest.mark.parametrize("mode, bound", [("f32", 1e-6), ("bf16", 1e-2)])
def test_sink_attention(golden, mode, bound):
    """Entries alone: the window ends at a floor above every position. One row is empty."""
    dtype = torch.float32 if mode == "f32" else torch.bfloat16
    q, kv = golden["attention/q"].to(dtype), golden["attention/kv"]
    count = len(q)
    where = torch.arange(count)
    batch = DeviceBatch(
        ids=where,
        positions=where + 100,
        row_of_token=torch.zeros_like(where),
        kv_slots=where,
        attn=None,
        logit_rows=where,
        requests=StepRequests(
            cu_q=torch.tensor([0, count], dtype=torch.int32),
            starts=torch.tensor([100]),
            block_table=torch.arange(9, dtype=torch.int32)[None],
            blocks=torch.tensor([0]),
            floors=torch.tensor([1 << 30]),
        ),
    )
    ring = torch.zeros(1, 4, kv.shape[1], dtype=torch.bfloat16)
    window = Window(torch.zeros(count, kv.shape[1], dtype=dtype), ring, batch, 2, True)
    sink = golden["attention/sink"].float()
    got = OPS.latent_attention(
        q, window, batch, sink, kv.shape[1] ** -0.5, kv.view(9, 10, -1), golden["attention/indices"]
    )
    want = golden[f"attention/out_{mode}"]
    assert (got.float() - want.float()).abs().max() <= bound
    empty = (golden["attention/indices"] < 0).all(1)
    assert empty.any()
    assert not got[empty].any()


def test_candidate_blocks_with_ties(golden):
    scores, visible = golden["candidates/scores"].float(), golden["candidates/visible"]
    shown = torch.arange(scores.shape[1]) < visible[:, None]
    found = _best_blocks(scores.masked_fill(~shown, -torch.inf), visible, Blocks(3, 4))
    mask = _members(found.long(), 4, scores.shape[1])
    assert torch.equal(mask & shown, golden["candidates/mask_blocks3_size4"] & shown)
