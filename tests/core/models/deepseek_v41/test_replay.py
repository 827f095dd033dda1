"""Truncated prompts: late layers on the last rows alone, against recorded logits and each other.

Layers behind the last KV source run from a floor on. The recorded arrays come from an independent
implementation: prompt p200, then eight tokens that are fed in.
"""

from __future__ import annotations

import pytest
import torch
from deepinfer.api.kv import KVOptions
from deepinfer.errors import UnsupportedError
from v41_harness import Play, bits

PROMPT = 200


def run(golden, keep, compact, sizes=(PROMPT,), mode="f32", native=False):
    """(last logits of the prompt, logits of the continuation, logits of all kept rows)."""
    ids = torch.cat((golden["p200/ids"], golden["replay/continuation_ids"]))
    floor = max(0, PROMPT - keep)
    rig = golden.rig(mode, native=native)
    play = Play(rig, [ids], floors=[floor], compact=compact)
    parts, plan = [], list(sizes)
    while play.done[0] < PROMPT:
        size = plan.pop(0) if len(plan) > 1 else plan[0]
        parts.append(play.logits([(0, min(size, PROMPT - play.done[0]))]))
    more = torch.cat([play.logits([(0, 1)]) for _ in range(8)])
    prompt = torch.cat(parts)
    return prompt[-1], more, prompt[floor:]


def errors(golden, keep, found):
    last, more, kept = found
    at = "replay/full" if keep >= PROMPT else f"replay/R{keep}"
    ids = (
        golden[f"{at}/kept_row_logits_top_ids"].long()
        if f"{at}/kept_row_logits_top_ids" in golden
        else None
    )
    agree = 1.0 if ids is None else float((kept.argmax(1) == ids[:, 0]).float().mean())
    return (
        float((last - golden[f"{at}/last_logits"]).abs().max()),
        float((more - golden[f"{at}/continuation_logits"]).abs().max()),
        agree,
    )


def test_recorded_replays(golden):
    """To 1e-3, where no code flips on the way: with one of two linears that round differently."""
    keeps = sorted(
        int(k.split("/")[1][1:]) for k in golden.arrays if k.startswith("replay/R") and "last" in k
    )
    for keep in (*keeps, PROMPT):
        found = [
            errors(golden, keep, run(golden, keep, True, native=native)) for native in (True, False)
        ]
        last, _, agree = min(found)
        print(golden.folder.name, keep, [tuple(f"{x:.1e}" for x in f) for f in found])
        assert last <= 1e-3, keep
        assert agree >= 0.9


@pytest.mark.parametrize("mode", ["f32", "bf16"])
@pytest.mark.parametrize("keep", [8, 33])
def test_mask_and_compact_are_equal(a, mode, keep):
    """Bit for bit, in any chunks, also where a chunk keeps no row or one."""
    last, more, kept = run(a, keep, False, mode=mode)
    for sizes in ((64,), (PROMPT - keep, 1, 30), (PROMPT - keep + 1, 7)):
        found = run(a, keep, True, sizes, mode)
        for got, want in zip(found, (last, more, kept), strict=True):
            assert torch.equal(bits(got), bits(want)), sizes


@pytest.mark.parametrize("mode", ["f32", "bf16"])
def test_exact_is_off(a, mode):
    """1 + (window − 1) · N rows give the last row all it needs, bit for bit; one less does not."""
    options = KVOptions(dtype_bytes=4, truncation="exact")
    spec = a.adapter.kv_spec(a.config, options).truncation
    assert (spec.keep, spec.reach, spec.first_layer) == (36, 35, 7)
    off, more, _ = run(a, PROMPT, False, mode=mode)
    for sizes in ((PROMPT,), (64,)):
        last, after, _ = run(a, spec.keep, True, sizes, mode)
        assert torch.equal(bits(last), bits(off))
        assert torch.equal(bits(after), bits(more))
    last, after, _ = run(a, spec.keep - 1, True, mode=mode)
    assert mode == "bf16" or not torch.equal(bits(last), bits(off))  # bf16 rounds it away
    assert torch.equal(bits(after), bits(more))


def test_rows_are_exact_from_reach_on(a):
    """What Truncation.reach promises: rows so far behind the floor read what they would without."""
    ids = a["p200/ids"]
    want = Play(a.rig("f32"), [ids]).chunks(len(ids))
    floor, reach = 60, 35
    got = Play(a.rig("f32"), [ids], floors=[floor], compact=True).chunks(64)
    assert torch.equal(bits(got[floor + reach :]), bits(want[floor + reach :]))
    assert not torch.equal(got[floor : floor + reach], want[floor : floor + reach])


def test_rows_below_the_floor_are_zero(a):
    ids = a["p33/ids"]
    hidden = Play(a.rig("f32"), [ids], floors=[20], compact=True).step([(0, 33)])
    assert not hidden[:20].any()
    assert hidden[20:].any(1).all()


def test_floors_of_a_batch_are_each_requests_own(a):
    texts = [a["p33/ids"], a["p31/ids"], a["p32/ids"]]
    floors = [20, 0, 31]
    play = Play(a.rig("f32"), texts, floors=floors, compact=True)
    rows = play.logits([(0, 33), (1, 31), (2, 10)], padding=2)
    after = play.logits([(2, 22)])
    for text, part in ((0, rows[20:33]), (1, rows[33:64]), (2, after[-1:])):
        alone = Play(a.rig("f32"), [texts[text]], floors=[floors[text]])
        want = alone.chunks(len(texts[text]))[floors[text] :]
        assert torch.equal(bits(part), bits(want)), text


def test_too_few_rows_are_refused(a):
    def spec(**options):
        return a.adapter.kv_spec(a.config, KVOptions(dtype_bytes=4, **options))

    with pytest.raises(UnsupportedError, match=r"yoco_prefill_keep_tokens=7 .*window of 8"):
        spec(truncation="compact", keep_tokens=7)
    with pytest.raises(UnsupportedError, match="8 tokens and the 3 tokens of a draft"):
        spec(truncation="mask", keep_tokens=10, draft_len=3)
    assert spec(truncation="mask", keep_tokens=11, draft_len=3).truncation.compact is False
    assert spec(truncation="off").truncation is None
