"""``launches_dense`` made short (``shortened``): each of its kernels in each of its tiles."""

from functools import partial
from unittest.mock import patch

import launches_dense as long
import torch
from deepinfer_backend_cuda import attention, hopper, launch, linear
from launches_dense import BF, TIGHT
from registry import SM90, Launch
from shortened import PROCESSORS, depth, height, step, width

LENGTH = 330
"""Keys of a text: six blocks in two pieces, the last one with an edge."""


def launches():
    yield from attentions()
    yield from products()
    yield from hoppers()
    yield from longs()
    yield from flashes()
    yield from long.others()


def plan(lengths, cu_q, page=16):
    """Texts of so many keys, whose rows are cut at ``cu_q``."""
    table = torch.zeros(len(lengths), 64, dtype=torch.int32)
    cuts = torch.tensor(cu_q, dtype=torch.int32)
    return attention.plan_attention(table, torch.tensor(lengths), cuts, page)


def attentions():
    for heads, kv_heads, dim in long.HEADS:
        for tokens, requests in long.TOKENS:
            run = partial(attend, (heads, kv_heads, dim), tokens, requests)
            name = f"attention {heads}/{kv_heads}x{dim} {tokens} of {requests}"
            yield Launch(name, run, spills=TIGHT)


def attend(shape, tokens, requests):
    """Three texts for all that decode; for a whole prompt a tile of rows and the edge of one."""
    heads, kv_heads, dim = shape
    decode, group = tokens <= requests, heads // kv_heads
    tile = attention.tile_of(group, dim, BF, decode, tokens * kv_heads)
    rows = tile.rows // group
    short = min(tokens, 3 if decode else rows + 3)
    cache = torch.zeros(4, 16, kv_heads, dim, dtype=BF)
    q = torch.zeros(short, heads, dim, dtype=BF)
    every = plan([1] * requests, [i * tokens // requests for i in range(requests + 1)])
    programs = (tokens if decode else every.bound(rows, tokens)) * kv_heads
    pieces = attention.split(every, programs, tokens * heads * dim, q.device)
    few = plan([LENGTH], [0, short])
    if decode:
        few = plan([LENGTH, 100, 1][:short], [*range(short + 1)])
    with step(tokens, short):
        every.tiles(rows, tokens)  # to cut the rows of many requests takes little
        attention.launch(q, cache, cache.clone(), few, 0.1, (None,) * 3, tile, pieces)


def products():
    """By the kernels that any GPU has."""
    seen = set()
    for m in reversed(long.ROWS):
        for n, k in long.MATRICES:
            for gated in (False, True):
                bucket, columns = linear.bucket(m), n // (1 + gated)
                if gated:
                    tile = linear.gated_tile(bucket, columns)
                else:
                    tile = linear.tile_for(bucket, columns, 2)
                if (variant := (tile, gated, m <= launch.CHAINED_ROWS)) in seen:
                    continue
                seen.add(variant)
                name = f"{'gated' if gated else 'linear'} {m}x{columns}x{k}"
                yield Launch(name, partial(multiply, m, tile, gated))
    x, w = torch.zeros(40, 160), torch.zeros(80, 160)
    yield Launch("linear float32", partial(linear.linear, x, w))
    yield Launch("linear K=149", partial(linear.linear, x[:, :149].to(BF), w[:, :149].to(BF)))


def multiply(m, tile, gated):
    rows, k = height(m, tile.m), depth(tile.k, tile.stages)
    columns = width(tile.n, 1 + (rows > tile.m))
    x, w = torch.zeros(rows, k, dtype=BF), torch.zeros(columns * (1 + gated), k, dtype=BF)
    chooser = "gated_tile" if gated else "tile_for"
    with step(m, rows), patch.object(linear, chooser, lambda *_: tile):
        (linear.gated if gated else linear.linear)(x, w)


def hoppers():
    """What a Hopper GPU runs in their place, of the rows of both and of all matrices, gated or not:
    what of ``products`` is left to it there has more tiles than ``launches_dense.hoppers``.
    """
    seen, device = set(), torch.zeros(()).device
    for m in (1, 16, 32, 64, 128, 256):
        for n, k in long.MATRICES:
            for gated in (False, True):
                columns, streamed = n // (1 + gated), m <= hopper.STREAMED_ROWS
                if streamed:
                    tile = hopper.stream_tile(m, columns, k, gated, device)
                else:
                    tile = hopper.wide_tile(-(-m // 128) * 128, columns, gated, device)
                if (variant := (m, tile, gated)) in seen:
                    continue
                seen.add(variant)
                name = f"{'stream' if streamed else 'wide'}_kernel {m}x{n} gated {gated}"
                run = partial(stream if streamed else wide, m, tile, gated)
                yield Launch(name, run, targets=(SM90,))
    for gated in (False, True):  # a tile of rows with an edge
        run = partial(wide, 200, hopper.Wide((128, 64, 32), 4), gated)
        yield Launch(f"wide_kernel 200 rows gated {gated}", run, targets=(SM90,))
    for parts in long.PARTS:
        run = partial(wide, 256, hopper.Wide(parts, 4), biased=True, out=torch.float32)
        yield Launch(f"wide_kernel {parts}", run, targets=(SM90,))


def operands(rows, columns, k, gated, biased=False, out=BF):
    x, w = torch.zeros(rows, k, dtype=BF), torch.zeros(columns * (1 + gated), k, dtype=BF)
    bias = torch.zeros(columns, dtype=BF) if biased else None
    return x, w, bias, torch.zeros(rows, columns, dtype=out), gated


def stream(m, tile, gated):
    columns = width(tile.n // (1 + gated), residents=tile.residents)
    with step(m, m):
        hopper.stream(*operands(m, columns, depth(tile.k, tile.stages), gated), tile)


def wide(m, tile, gated=False, biased=False, out=BF):
    """All rows: how they are fetched may follow their number, and a tile takes all it has."""
    columns = width(sum(tile.parts) // (1 + gated), 1 + (m > 128))
    with step(m, m):
        hopper.wide(*operands(m, columns, depth(64, tile.stages), gated, biased, out), tile)


def longs():
    for tile in (hopper.LOW, hopper.TALL):
        for gated in (False, True):
            name = f"long_kernel {tile.parts} parts gated {gated}"
            yield Launch(name, partial(whole, tile, gated), targets=(SM90,))
    run = partial(whole, hopper.LOW, biased=True)
    yield Launch("long_kernel biased", run, targets=(SM90,))


def whole(tile, gated=False, biased=False):
    """Two tiles of rows and three of columns, which have no edge there."""
    rows = height(300, tile.rows * tile.parts)
    columns = 3 * (128 if gated else 256)
    with step(300, rows):
        hopper.long(*operands(rows, columns, depth(64, tile.stages), gated, biased), tile)


def flashes():
    for heads, kv_heads, dim, page in long.PAGES:
        run = partial(flash, heads, kv_heads, dim, page)
        name = f"flash_kernel {heads}/{kv_heads}x{dim} page {page}"
        yield Launch(name, run, spills=TIGHT, targets=(SM90,))


def flash(heads, kv_heads, dim, page):
    """Of one request a tile of rows and an edge, of another an edge; and a tile that is none."""
    rows = hopper.FLASH_ROWS * kv_heads // heads
    cuts = [0, rows + 5, rows + 12]
    cache = torch.zeros(4, page, kv_heads, dim, dtype=BF)
    q = torch.zeros(cuts[2], heads, dim, dtype=BF)
    assert hopper.flashes(q, cache, cache)
    with step(512, len(q)):
        few = plan([LENGTH, 100], cuts, page)
        assert few.bound(rows, len(q)) * kv_heads > 2 * PROCESSORS
        attention._flash(q, cache, cache.clone(), few, 0.1, None)
