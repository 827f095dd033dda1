"""The whole model against recorded logits, and against itself in other chunks and company.

End to end one rounding that falls on the other side moves a row and those that read it, so prompts
are judged by their shares of exact rows (the README beside the golden data says which).
"""

from __future__ import annotations

import pytest
import torch
from v41_harness import Play, bits, relative, row_errors, same_sets

EXACT = 1e-3  # an f32 row within this has no flip


def whole(golden, mode, prompt, **rig):
    play = Play(golden.rig(mode, **rig), [golden[f"{prompt}/ids"]])
    return play.logits([(0, len(golden[f"{prompt}/ids"]))])


def full_rows(golden, where, logits):
    """Recorded mean, deviation, log-sum-exp and probe of every full row."""
    stats = golden[f"{where}/row_stats"]
    wide = logits.double()
    found = torch.stack(
        (
            wide.mean(1),
            wide.std(1, correction=0),
            wide.amin(1),
            wide.amax(1),
            wide.logsumexp(1),
            wide @ golden["row_probe_vector"],
        ),
        1,
    )
    return (found - stats).abs().amax(1)


@pytest.mark.parametrize("native", [False, True], ids=["reference", "cpu"])
def test_short_prompts_in_f32(golden, native):
    rows, exact = 0, 0
    for prompt in golden.prompts("f32", most=33):
        logits = whole(golden, "f32", prompt, native=native)
        errors = row_errors(golden, f"{prompt}/f32", logits)
        fine = errors <= EXACT
        assert errors[fine].max() <= 2e-5
        assert full_rows(golden, f"{prompt}/f32", logits)[errors <= 2e-5].max() <= 2e-4
        rows, exact = rows + len(fine), exact + int(fine.sum())
        print(golden.folder.name, prompt, f"{float(errors.max()):.1e}", int(fine.sum()), len(fine))
    assert exact / rows >= 0.7


def test_block_scaled_weights_give_the_same(a):
    """Weights as stored, multiplied block by block, against weights dequantised once."""
    stored, dense = whole(a, "f32", "p33", dequantize=False), whole(a, "f32", "p33")
    assert row_errors(a, "p33/f32", stored).max() <= 2e-5
    assert relative(stored, dense) <= 1e-5
    got = whole(a, "bf16", "p33", dequantize=False)
    assert (got.argmax(1) == a["p33/bf16/top_ids"][:, 0]).float().mean() >= 0.75


def test_200_tokens_in_f32(golden):
    errors = row_errors(golden, "p200/f32", whole(golden, "f32", "p200"))
    fine = errors <= EXACT
    print(golden.folder.name, "p200", f"{float(fine.float().mean()):.3f}")
    assert fine.float().mean() >= 0.2


@pytest.mark.parametrize("prompt, mean, top", [("p33", 0.25, 0.75), ("p200", 0.45, 0.60)])
def test_whole_prompts_in_bf16(golden, prompt, mean, top):
    logits, where = whole(golden, "bf16", prompt), f"{prompt}/bf16"
    ids = golden[f"{where}/top_ids"].long()
    off = (logits.gather(1, ids) - golden[f"{where}/top_values"]).abs().mean()
    agree = (logits.argmax(1) == ids[:, 0]).float().mean()
    print(golden.folder.name, prompt, f"bf16 mean {float(off):.3f}, top-1 {float(agree):.2f}")
    assert off <= mean
    assert agree >= top


@pytest.mark.parametrize("mode", ["f32", "bf16"])
@pytest.mark.parametrize("sizes", [(1,), (7,), (64,), (3, 1, 20, 2, 5)], ids=str)
def test_chunks_do_not_show(a, mode, sizes):
    """Bit for bit, packed caches and bfloat16 ones alike."""
    ids = a["p33/ids"] if mode == "bf16" or sizes == (1,) else a["p200/ids"][:70]
    want = Play(a.rig(mode), [ids]).chunks(len(ids))
    for cache in ("packed", "bfloat16"):
        got = Play(a.rig(mode), [ids], cache=cache, seed=11).chunks(*sizes)
        assert torch.equal(bits(got), bits(want)), f"{cache} caches"


@pytest.mark.parametrize("mode", ["f32", "bf16"])
def test_company_does_not_show(a, mode):
    """Prefill, chunks, decode, padding and a dead row in one step: each text's own bits."""
    texts = [a[f"{p}/ids"] for p in ("p31", "p33", "p5", "p32")]
    alone = [Play(a.rig(mode), [t]).chunks(len(t)) for t in texts]
    play = Play(a.rig(mode), texts, seed=5)
    got = [[] for _ in texts]
    steps = (
        [(1, 9), (0, 31)],
        [(1, 1), (2, 4), (3, 7)],
        [(3, 20), (2, 1), (1, 13)],
        [(1, 10), (3, 5)],
    )
    for rows in steps:
        dead = [t for t in (0,) if play.done[t] == len(texts[t])]
        play.done[0] -= len(dead)  # its last row again, which writes nothing
        out = play.logits([*rows, *((t, 1) for t in dead)], padding=3, dead=dead)
        play.done[0] += len(dead)
        for (text, _), part in zip(
            rows, out.split([c for _, c in rows] + [1] * len(dead)), strict=False
        ):
            got[text].append(part)
    for text, parts in enumerate(got):
        assert torch.equal(bits(torch.cat(parts)), bits(alone[text])), f"text {text}"


def test_threads_do_not_show(a):
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (2, 1):
            torch.set_num_threads(threads)
            found.append(whole(a, "f32", "p33"))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(bits(found[0]), bits(found[1]))


@pytest.mark.parametrize("mode", ["f32", "bf16"])
@pytest.mark.parametrize("prompt", ["p31", "p33", "p200"])
def test_decode_with_recorded_tokens(golden, mode, prompt):
    """Row s predicts position n + s; greedy ids are binding while the gap exceeds the error.

    In float32 on the native linears, whose sums flip nothing in p31.
    """
    at = f"{prompt}/{mode}/decode"
    if f"{at}/tokens" not in golden:
        pytest.skip("not recorded")
    ids, tokens = golden[f"{prompt}/ids"], golden[f"{at}/tokens"]
    play = Play(golden.rig(mode, native=mode == "f32"), [torch.cat((ids, tokens))])
    out = [play.logits([(0, len(ids))])[-1:]]
    out += [play.logits([(0, 1)]) for _ in range(len(tokens) - 1)]
    logits, want = torch.cat(out), golden[f"{at}/logits"]
    errors = (logits - want).abs().amax(1)
    sure = golden[f"{at}/top1_gap"].float() > 2 * errors
    assert torch.equal(logits.argmax(1)[sure], tokens.long()[sure])
    fine = (errors <= EXACT).float().mean()
    print(
        golden.folder.name,
        at,
        f"exact {float(fine):.2f}, mean {float((logits - want).abs().mean()):.3f}",
    )
    assert (logits - want).abs().mean() <= (0.1 if mode == "f32" else 0.45)


def test_a_batch_of_three(a):
    ids = a["batch33/ids"]
    play = Play(a.rig("f32"), list(ids))
    logits = play.logits([(0, 33), (1, 33), (2, 33)])[[32, 65, 98]]
    errors = (logits - a["batch33/f32/last_logits"]).abs().amax(1)
    print("batch33", errors.tolist())
    assert errors.median() <= 2e-5


@pytest.mark.parametrize("recorded", [False, True], ids=["ours", "recorded order"])
@pytest.mark.parametrize("prompt", ["p200", "p700", "p1500"])
def test_choices_of_long_prompts(golden, prompt, recorded):
    """Experts and entries, as sets: all but the rows behind a flip."""
    if f"{prompt}/f32/top_ids" not in golden:
        pytest.skip("not recorded")
    heard = {"route": [], "select_sparse": []}
    rig = golden.rig("f32", recorded=recorded)
    with (
        rig.listen("route", heard["route"], lambda _, y: y[0]),
        rig.listen("select_sparse", heard["select_sparse"], lambda _, y: y.entries),
    ):
        logits = whole(golden, "f32", prompt, recorded=recorded)
    sources, shares = iter(heard["select_sparse"]), []
    for layer in range(golden.config.layers):
        at = f"{prompt}/f32/L{layer:02d}"
        chosen = [("router_ids", heard["route"][layer])]
        if layer in golden.config.index_sources:
            chosen.append(("selected", next(sources)))
        for name, ids in chosen:
            if f"{at}/{name}" in golden:
                equal = same_sets(ids, golden[f"{at}/{name}"])
                shares.append((float(equal.float().mean()), f"layer {layer} {name}"))
    where = f"{prompt}/f32"
    got = logits.gather(1, golden[f"{where}/top_ids"].long())
    off = float((got - golden[f"{where}/top_values"]).abs().mean())
    fine = float((row_errors(golden, where, logits) <= EXACT).float().mean())
    print(golden.folder.name, prompt, f"exact {fine:.2f}, mean {off:.3f}", *sorted(shares)[:1])
    if shares:  # p1500 has logits alone
        assert shares[0][0] == 1.0  # nothing lies before the first layer that could flip
        assert min(share for share, _ in shares[:3]) >= 0.99
    # In b a code flips at row 32 of p700, with either linear (noise of 2e-7 flips it back), and
    # every later row reads it: deep selections differ, logits by less than bf16's from f32's.
    # Added up in the recorder's order it does not (test_recorded_order).
    measured = recorded or golden.folder.name == "a"
    assert not measured or min(shares, default=(1.0,))[0] >= 0.7
    assert off <= (0.1 if measured else 0.42)
