"""Layer by layer from recorded inputs: f32 judges the logic, bf16 the roundings.

A layer that reads another's entries gets the recorded ones, so an error shows where it is made.
"""

from __future__ import annotations

import pytest
import torch
from deepinfer.models.deepseek_v41.layer import Flow
from deepinfer.ops.reference.sparse import Picks
from v41_harness import Play, relative, same_sets

PROMPT = "p33"


def inputs(golden, mode, layer):
    """Recorded streams and mix before a layer, and what the last index source chose."""
    at = f"{PROMPT}/{mode}/L"
    x = golden[f"{at}{layer:02d}/x_in"] if f"{at}{layer:02d}/x_in" in golden else None
    x = golden[f"{at}{layer - 1:02d}/x_out"] if x is None else x
    pre = golden[f"{at}00/pre_in"] if layer == 0 else golden[f"{at}{layer - 1:02d}/ffn_pre"]
    source = max((s for s in golden.config.index_sources if s < layer), default=None)
    if source is None:
        return x, pre, None
    blocks = None
    candidate = golden.config.candidates
    if candidate is not None and source >= candidate[0]:
        seen = golden[f"{at}{candidate[0]:02d}/candidates"]
        blocks = blocks_of(seen, *candidate[1])
    return x, pre, Picks(golden[f"{at}{source:02d}/selected"].int(), blocks)


def blocks_of(candidates, kept, size):
    """Candidate positions bool[T, n] as ascending block ids."""
    padded = torch.nn.functional.pad(candidates, (0, -candidates.shape[1] % size))
    inside = padded.view(len(candidates), -1, size).any(-1)
    rows = [torch.nn.functional.pad(i.nonzero()[:, 0], (0, kept), value=-1)[:kept] for i in inside]
    return torch.stack(rows).int()


def entries(play, group, layer, count):
    """The first entries of text 0 in a growing group."""
    cache = play.pool.tensor(group, layer)
    j = torch.arange(count)
    return cache[play.table[0, j // cache.shape[1]].long(), j % cache.shape[1]]


def fill(golden, play, mode, source):
    """Put recorded entries and index keys of a KV source into its caches."""
    at, ratio = f"{PROMPT}/{mode}/L{source:02d}", golden.config.ratios[source]
    for group, name in ((f"compressed-r{ratio}", "compressed_kv"), (f"index-r{ratio}", "index_k")):
        if f"{at}/{name}" in golden:
            rows, cache = golden[f"{at}/{name}"], play.pool.tensor(group, source)
            j = torch.arange(len(rows))
            cache[play.table[0, j // cache.shape[1]].long(), j % cache.shape[1]] = rows.bfloat16()


def run(golden, mode, layer):
    """(what a layer made of its recorded input, what its ops heard, its caches)."""
    rig = golden.rig(mode)
    play = Play(rig, [golden[f"{PROMPT}/ids"]], cache="bfloat16")
    count = len(golden[f"{PROMPT}/ids"])
    batch = play.batch([(0, count)])
    x, pre, picks = inputs(golden, mode, layer)
    image = torch.zeros(count, dtype=torch.bool)
    model, heard = rig.model, {}
    source = golden.config.kv_source(layer)
    if source is not None and source != layer:
        fill(golden, play, mode, source)
    takes = {
        "latent_attention_block": lambda args, y: (args[0], *y),
        "latent_attention": lambda args, o: (args[0], args[1].own, o),
        "select_sparse": lambda args, found: (args[0], args[1], found),
        "scaled_moe_block": lambda args, y: (args[0], y),
        "route": lambda args, y: y,
        "hyper_open": lambda args, y: y[1],
    }
    with torch.inference_mode():
        listeners = [rig.listen(n, heard.setdefault(n, []), pick) for n, pick in takes.items()]
        for listener in listeners:
            listener.__enter__()
        try:
            table = model._yarn if golden.config.ratios[layer] else model._plain
            flow = model.layers[layer](Flow(batch, x, pre, picks, image), play.pool, table, False)
        finally:
            for listener in listeners:
                listener.__exit__()
    return flow, heard, play


FLIPS = 0.05  # share of rows in which an FP8 or FP4 code may land beside the recorded one
F32 = {  # name: largest relative error of a row without a flip
    "x_out": 1e-6, "attn_in": 1e-6, "attn_out": 2e-6, "q": 2e-6, "attn_core": 2e-6,
    "ffn_in": 2e-6, "ffn_out": 2e-6, "attn_pre": 1e-6, "attn_post": 1e-6, "attn_comb": 1e-6,
    "ffn_pre": 1e-6, "ffn_post": 1e-6, "ffn_comb": 1e-6, "router_weights": 2e-6, "index_w": 2e-6,
}  # fmt: skip
EXACT = ("window_kv", "compressed_kv", "index_k", "index_q")


def parts(golden, layer, flow, heard, play):
    """Everything that was recorded of a layer, as this one made it."""
    (attn_in, attn_out, _), (q, own, core) = (
        heard["latent_attention_block"][0],
        heard["latent_attention"][0],
    )
    ffn_in, ffn_out = heard["scaled_moe_block"][0]
    attn, ffn = heard["hyper_open"]
    found = {
        "x_out": flow.x, "attn_in": attn_in, "attn_out": attn_out, "q": q, "window_kv": own,
        "attn_core": core, "ffn_in": ffn_in, "ffn_out": ffn_out, "ffn_pre": ffn[0],
        "ffn_post": ffn[1], "ffn_comb": ffn[2], "attn_pre": attn[0], "attn_post": attn[1],
        "attn_comb": attn[2],
    }  # fmt: skip
    if heard["select_sparse"]:
        index_q, index_w, _ = heard["select_sparse"][0]
        found |= {"index_q": index_q, "index_w": index_w}
    if layer in golden.config.kv_sources:
        ratio = golden.config.ratios[layer]
        count = len(flow.x) // ratio
        found["compressed_kv"] = entries(play, f"compressed-r{ratio}", layer, count)
        found["index_k"] = entries(play, f"index-r{ratio}", layer, count)
    return found


def layers(golden):
    return range(golden.config.layers)


def row_relative(got, want):
    """Relative error of each row."""
    got, want = got.double().flatten(1), want.double().flatten(1)
    return (got - want).norm(dim=1) / want.norm(dim=1)


def test_layers_in_f32(golden):
    worst, flips = {}, []
    for layer in layers(golden):
        flow, heard, play = run(golden, "f32", layer)
        found = parts(golden, layer, flow, heard, play)
        at = f"{PROMPT}/f32/L{layer:02d}"
        for name, value in found.items():
            if f"{at}/{name}" not in golden:
                continue
            want = golden[f"{at}/{name}"]
            if name in EXACT:
                equal = value.float() == want.float()
                assert equal.all(), f"layer {layer}: {int((~equal).sum())} of {name} differ"
            else:
                rows = row_relative(value, want)
                flipped = rows > F32[name]
                worst[name] = max(float(rows[~flipped].max()), worst.get(name, 0.0))
                flips += [
                    f"layer {layer}: {name} row {r}" for r in flipped.nonzero()[:, 0].tolist()
                ]
                assert flipped.float().mean() <= FLIPS, flips
                assert relative(value, want) <= 1e-2, f"layer {layer}: {name}"
        check_choices(golden, "f32", layer, heard, 0.0, 0.0)
    assert "x_out" in worst
    assert golden.folder.name != "a" or not flips
    print(golden.folder.name, {k: f"{v:.1e}" for k, v in worst.items()}, flips)


def check_choices(golden, mode, layer, heard, routers, selections):
    """Experts and entries as sets; shares of rows that may differ."""
    at = f"{PROMPT}/{mode}/L{layer:02d}"
    ids, weights = heard["route"][0]
    equal = same_sets(ids, golden[f"{at}/router_ids"])
    assert (~equal).float().mean() <= routers, f"layer {layer}: {(~equal).sum()} rows' experts"
    order = ids.long().sort(1)
    want = golden[f"{at}/router_ids"].long().sort(1)
    got = weights.gather(1, order.indices)[equal]
    error = relative(got, golden[f"{at}/router_weights"].gather(1, want.indices)[equal])
    assert error <= (1e-6 if mode == "f32" else 5e-3), f"layer {layer}: weights {error:.2g}"
    if heard["select_sparse"]:
        picks = heard["select_sparse"][0][2]
        equal = same_sets(picks.entries, golden[f"{at}/selected"])
        assert (~equal).float().mean() <= selections, f"layer {layer}: {(~equal).sum()} selections"
        if f"{at}/candidates" in golden and mode == "f32":
            kept, size = golden.config.candidates[1]
            want = blocks_of(visible(golden[f"{at}/candidates"]), kept, size)
            assert same_sets(picks.blocks, want).all()


def visible(candidates):
    """The recorded mask also marks positions behind the query, in the newest block."""
    return candidates & torch.ones_like(candidates).tril()


def test_layers_in_bf16(a):
    worst = flips = 0.0
    for layer in layers(a):
        flow, heard, _ = run(a, "bf16", layer)
        want = a[f"{PROMPT}/bf16/L{layer:02d}/x_out"]
        error = relative(flow.x, want)
        rows = row_relative(flow.x, want)
        worst, flips = max(worst, error), max(flips, float((rows > 0.01).float().mean()))
        assert error <= 2e-2, f"layer {layer} is off by {error:.2g}"
        assert (rows > 0.01).float().mean() <= 0.05, f"layer {layer}"
        check_choices(a, "bf16", layer, heard, 0.02, 0.2)
    print(f"bf16: x_out {worst:.1e}, rows off by 1 %: {flips:.3f}")


@pytest.mark.parametrize("mode", ["f32", "bf16"])
def test_engram_adds_what_was_recorded(a, mode):
    rig = a.rig(mode)
    play = Play(rig, [a[f"{PROMPT}/ids"]])
    batch = play.batch([(0, len(a[f"{PROMPT}/ids"]))])
    with torch.inference_mode():
        flow, rows = rig.model._begin(batch)
        assert torch.equal(rows.int(), a[f"{PROMPT}/{mode}/engram_rows"])
        assert torch.equal(flow.x[:, 0], a[f"{PROMPT}/{mode}/embed"])
        for i, layer in enumerate(a.config.engram.layers):
            x = a[f"{PROMPT}/{mode}/L{layer - 1:02d}/x_out"]
            before = Flow(batch, x, flow.pre, None, flow.image)
            got = rig.model.layers[layer].recall(before, rows[:, i]).x
            want = a[f"{PROMPT}/{mode}/L{layer:02d}/x_in"]
            assert relative(got, want) <= (1e-6 if mode == "f32" else 5e-3)


@pytest.mark.parametrize("mode", ["f32", "bf16"])
def test_the_last_collapse(a, mode):
    rig, at = a.rig(mode), f"{PROMPT}/{mode}"
    last = f"{at}/L{a.config.layers - 1:02d}"
    with torch.inference_mode():
        got = rig.ops.hyper_collapse(a[f"{last}/x_out"], a[f"{last}/ffn_pre"])
        logits = rig.model.logits(a[f"{at}/final_hidden"][-1:])
    assert relative(got, a[f"{at}/final_hidden"]) <= (1e-6 if mode == "f32" else 1e-3)
    assert relative(logits[0], a[f"{at}/last_logits"]) <= 1e-5
