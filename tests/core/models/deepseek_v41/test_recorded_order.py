"""Whole prompts, added up in the recorder's order: no rounding falls on the other side.

The same model, loader, caches and schedule as everywhere; only the order of sums is the recorder's.
On the kind of processor that recorded the data nearly every row has the recorded bits; elsewhere
torch's products may differ in last bits, so what is asserted are the README's figures.
"""

from __future__ import annotations

import pytest
import torch
from v41_harness import Play, row_errors

EXACT = 1e-3  # an f32 row within this has no flip


def differences(golden, prompt):
    """(largest error of each row, mean error) of the recorded largest logits."""
    where, ids = f"{prompt}/f32", golden[f"{prompt}/ids"]
    logits = Play(golden.rig("f32", recorded=True), [ids]).logits([(0, len(ids))])
    errors = row_errors(golden, where, logits)
    off = logits.gather(1, golden[f"{where}/top_ids"].long()) - golden[f"{where}/top_values"]
    fine = errors <= EXACT
    print(
        golden.folder.name, prompt, f"exact {float(fine.float().mean()):.3f}",
        f"same bits {float((errors == 0).float().mean()):.3f}",
        f"mean {float(off.abs().mean()):.1e}, max {float(errors.max()):.1e}",
    )  # fmt: skip
    return errors, float(off.abs().mean())


def test_short_prompts(golden):
    errors = torch.cat([differences(golden, p)[0] for p in golden.prompts("f32", most=33)])
    fine = errors <= EXACT
    assert fine.float().mean() >= 0.7
    assert errors[fine].max() <= 2e-5


@pytest.mark.parametrize("prompt, share", [("p200", 0.2), ("p700", 0.35), ("p1500", 0.35)])
def test_long_prompts(golden, prompt, share):
    if f"{prompt}/f32/top_ids" not in golden:
        pytest.skip("not recorded")
    errors, mean = differences(golden, prompt)
    assert (errors <= EXACT).float().mean() >= share
    assert mean <= 0.1
