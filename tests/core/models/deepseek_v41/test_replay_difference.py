"""How far truncated prompts lie from whole ones, beside the recorded distances.

``pytest -s`` prints the table of docs/deepseek-v41.md.
"""

from __future__ import annotations

import torch
from test_replay import PROMPT, run
from v41_harness import bits


def distances(one, two):
    """(last row max, last row mean, continuation max)."""
    (last, more, _), (whole, after, _) = one, two
    off = (last - whole).abs()
    return float(off.max()), float(off.mean()), float((more - after).abs().max())


def recorded(golden, keep):
    at = ("last_logits", "continuation_logits")
    one, two = ([golden[f"replay/{name}/{a}"] for a in at] for name in (f"R{keep}", "full"))
    return distances((*one, None), (*two, None))


def test_differences_are_the_recorded_ones(golden):
    """Ours compact beside ours off, and theirs: to 2e-3, where no code flips on the way with one of
    two linears that round differently. With 1 + reach kept rows no bit differs.
    """
    keeps = sorted(int(k[8:-12]) for k in golden.arrays if k[:8] == "replay/R" and "last_" in k)
    reach = (golden.config.window - 1) * (golden.config.layers - 1 - golden.config.last_source)
    found = {keep: [] for keep in (*keeps, reach, reach + 1)}
    for native in (True, False):
        off = run(golden, PROMPT, False, native=native)
        for keep, both in found.items():
            ours = run(golden, keep, True, native=native)
            both.append(distances(ours, off))
        assert torch.equal(bits(ours[0]), bits(off[0]))
        assert torch.equal(bits(ours[1]), bits(off[1]))
    for keep, both in found.items():
        print(f"\n{golden.folder.name}, {keep} rows kept:", *map(shown, both), end="")
        if keep in keeps:
            want = recorded(golden, keep)
            print("; recorded", shown(want), end="")
            near = [all(abs(a - b) <= 2e-3 for a, b in zip(o, want, strict=True)) for o in both]
            assert any(near), keep


def shown(found):
    return "({:.2g}, {:.2g}, {:.2g})".format(*found)
