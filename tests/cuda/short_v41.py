"""``launches_v41`` made short (``shortened``): each of its kernels in each of its tiles."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import launches_v41 as long
import torch
from deepinfer.ops.reference.hyper import HyperParams
from deepinfer.ops.reference.latent import Window
from deepinfer.ops.reference.sparse import Blocks, Picks
from deepinfer_backend_cuda import hyper, index, launch, moe, scaled, sparse
from launches_v41 import BF, CHOSEN, EXPERTS, HIDDEN, TIGHT, U8, batch, kept
from registry import Launch
from shortened import depth, height, step

BLOCK = 128
"""Columns of a step of a product with a kept weight."""
VISIBLE = 650
"""Entries that an index query sees, of which it chooses 512; of blocks it is given so many / 8."""


def launches():
    yield from long.numbers()
    yield from products()
    yield from experts()
    yield from grouped()
    yield from long.routes()
    yield from attention()
    yield from long.latents()
    yield from indexer()
    yield from streams()


def outputs(tile):
    """Three tiles of outputs, the last one cut in half."""
    return 2 * tile + tile // 2


def products():
    seen = set()
    for m in long.ROWS:
        for n, k in long.MATRICES:
            tile = scaled.tile_of(m, n)
            if (variant := (tile, m <= launch.CHAINED_ROWS)) not in seen:
                seen.add(variant)
                yield Launch(f"scaled_linear {m}x{n}x{k}", partial(multiply, m, tile))
    yield Launch("decode", decode)


def multiply(m, tile):
    rows, columns, _, stages = tile
    x = torch.zeros(height(m, rows), depth(BLOCK, stages), dtype=BF)
    with step(m, len(x)), patch.object(scaled, "tile_of", lambda *_: tile):
        scaled.product(x, kept(outputs(columns), x.shape[1], "fp8"))


def decode():
    with step(1792, 160):
        scaled.decode(kept(160, 2 * BLOCK + 64, "fp8"))


def experts():
    for kind in ("mxfp4", "paired"):
        for tokens in long.TOKENS:
            run = partial(mix, kind, tokens)
            yield Launch(f"scaled_moe {kind} {tokens}", run, spills=TIGHT)


def mix(kind, tokens):
    """One expert has all rows: two tiles of them, if there are so many. Three tiles of outputs are
    gated; what they would be are longer rows for the products behind, which go round their ring.
    """
    slots, product = tokens * CHOSEN, moe._gated
    gated, down = moe.tile_rows(slots, EXPERTS, 128), moe.tile_rows(slots, EXPERTS)
    (columns, _, stages), (_, _, down_stages) = moe.GATED[gated], moe.DOWN[down]
    x = torch.zeros(min(tokens, gated // CHOSEN + 1), depth(BLOCK, stages), dtype=BF)
    ids = torch.zeros(len(x), CHOSEN, dtype=torch.int32)
    inner = torch.zeros(ids.numel(), depth(BLOCK, down_stages), dtype=BF)
    gate_up = kept(2 * outputs(columns), x.shape[1], kind, (EXPERTS,))
    weight = kept(x.shape[1], inner.shape[1], kind, (EXPERTS,))

    def longer(*given):
        product(*given)
        return inner

    with (
        step(tokens, len(x)),
        patch.object(moe, "tile_rows", lambda slots, experts, most=64: min(gated, most)),
        patch.object(moe, "_gated", longer),
    ):
        moe.scaled_moe(x, ids, ids.float(), gate_up, weight, EXPERTS, 10.0)


def grouped():
    """Two experts of three have rows."""
    yield Launch("grouped_linear float32", partial(group, 5, 32, 224, torch.float32))
    columns, _, stages = moe.DOWN[moe.tile_rows(99, 3)]
    run = partial(group, 99, outputs(columns), depth(BLOCK, stages), BF)
    yield Launch("grouped_linear", run)


def group(rows, columns, k, dtype):
    offsets = torch.tensor([0, 2 * rows // 3, 2 * rows // 3, rows])
    x, w = torch.zeros(rows, k, dtype=dtype), torch.zeros(3, columns, k, dtype=dtype)
    with step(rows, rows):
        moe.grouped_linear(x, w, offsets)


def attention():
    for tokens in (1, 512):
        for with_cache in (False, True):
            run = partial(attend, tokens, with_cache)
            yield Launch(f"latent_attention {tokens} {with_cache}", run, spills=TIGHT)


def attend(tokens, with_cache):
    """Three queries are as many as read one pool, and more than there are multiprocessors."""
    short = min(tokens, 3)
    ring, own = torch.zeros(4, 193, 528, dtype=U8), torch.zeros(short, 512, dtype=BF)
    cache, sink = torch.zeros(9, 32, 288, dtype=U8), torch.zeros(64)
    at = batch(short, 1, pages=16)
    window = Window(own, ring, at, 128, False)
    entries = torch.zeros(short, 512, dtype=torch.int32)
    q = torch.zeros(short, 64, 512, dtype=BF)
    more = (cache, entries) if with_cache else ()
    with step(tokens, short):
        sparse.latent_attention(q, window, at, sink, 0.04, *more)


def indexer():
    for tokens, requests in ((2, 2), (64, 1)):
        for among in (False, True):
            name = f"select_sparse {tokens}{' among' * among}"
            yield Launch(name, partial(select, tokens, requests, among))


def select(tokens, requests, among):
    """Few rows, though of one request as many as have its keys laid out for them."""
    short = min(tokens, index.SHARED_ROWS)
    at = batch(short, requests)
    at = replace(at, positions=torch.full_like(at.positions, VISIBLE - 1))
    q, w = torch.zeros(short, 32, 128, dtype=BF), torch.zeros(short, 32)
    blocks = torch.full((short, 2048), -1, dtype=torch.int32)
    blocks[:, : VISIBLE // 8] = torch.arange(VISIBLE // 8)
    more = (None, Picks(q.int(), blocks), 8) if among else (Blocks(2048, 8),)
    with step(tokens, short):
        index.select_sparse(q, w, torch.zeros(9, 64, 68, dtype=U8), at, 1, 512, *more)


def streams():
    for tokens in (1, 1024):
        yield Launch(f"hyper_open {tokens}", partial(open_streams, tokens))
    for op in (hyper.hyper_collapse, hyper.hyper_merge, hyper.engram_gate):
        yield Launch(op.__name__, partial(change, op))


def open_streams(tokens):
    """Products have two pieces, and in tiles of many rows as many; what follows has whole rows."""
    short, product = min(tokens, 5), hyper._product
    x = torch.zeros(short, 4, HIDDEN, dtype=BF)
    many = torch.zeros(513 if tokens > 512 else short, 4, 256, dtype=BF)
    fn = hyper.MixWeight(torch.zeros(3, 24, many[0].numel(), dtype=BF))
    params = HyperParams(fn, torch.zeros(3), torch.zeros(24), 20, 1e-6, x[0, 0], 1e-20)
    with step(tokens, short), patch.object(hyper, "_product", lambda x, fn: product(many, fn)):
        hyper.hyper_open(x, torch.zeros(short, 4), params)


def change(op):
    x, pre, comb = torch.zeros(5, 4, HIDDEN, dtype=BF), torch.zeros(5, 4), torch.zeros(5, 4, 4)
    more = {
        hyper.hyper_collapse: (pre,),
        hyper.hyper_merge: (x[:, 0], pre, comb),
        hyper.engram_gate: (x, x[:, 0], x[0], x[0], 1e-20),
    }
    with step(1024, 5):
        op(x, *more[op])
