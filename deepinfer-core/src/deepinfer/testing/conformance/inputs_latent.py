"""Cases of latent attention: caches, pooled pairs, sparse selection, attention and its block.

Selections are exact: quantised queries and keys have exact products, and head weights are
multiples of 1/64, so every order of additions gives the same score; equal scores are ties.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from deepinfer.ops.reference.latent import (
    CompressorParams,
    IndexerParams,
    LatentCaches,
    LatentParams,
    LatentRows,
    Window,
)
from deepinfer.ops.reference.scaled import quantize
from deepinfer.ops.reference.sparse import Blocks, Picks
from deepinfer.testing.conformance.inputs import WIDE, angles, case
from deepinfer.testing.conformance.inputs_v41 import KINDS
from deepinfer.testing.conformance.kit import Run
from deepinfer.testing.conformance.latents import Latents, Text

F = TypeVar("F", bound=Callable[..., Any])
WIDTH, HEADS, WINDOW, RING = 64, 3, 8, 20

STEPS: dict[str, list[Text]] = {
    "prefill": [Text(21, 0)],
    "decode": [Text(1, 0), Text(1, 30), Text(1, 7), Text(1, 53)],
    "chunks": [Text(5, 12), Text(0, 9), Text(17, 3), Text(1, 33)],
    "drafts_and_a_dead_row": [Text(4, 19), Text(1, 16, dead=True), Text(3, 8)],
    "longer_than_the_ring": [Text(2, 40), Text(45, 11)],
}


def each_step(op: str, name: str, **given: Any) -> Callable[[F], F]:
    """Declare a case for each of the steps above, packed and not; two rows have no owner."""

    def declare(fn: F) -> F:
        for step in STEPS:
            for packed in (True, False):
                storage = "packed" if packed else "bfloat16"
                more = {"step": step, "packed": packed, **given}
                case(op, f"{name}_{step}_{storage}", given=more)(fn)
        return fn

    return declare


# --- latent_write, compress ----------------------------------------------------------------------


def _write_cases(fn: F) -> F:
    for kind in KINDS:
        for packed in (True, False):
            for name, slots in (("rows", [5, -1, 0, 11, -1, 7]), ("nothing", [-1] * 6)):
                given = {"kind": kind, "packed": packed, "slots": slots}
                storage = "packed" if packed else "bfloat16"
                case("latent_write", f"{name}_{kind}_{storage}", given=given)(fn)
    return fn


@_write_cases
def _latent_write(run: Run, kind: str, packed: bool, slots: list[int]) -> Any:
    cache = Latents(run, [Text(4, 0)], page=4).growing(WIDTH, 1, kind, packed)
    x = run.put(run.draw.normal(len(slots), WIDTH))
    run.ops.latent_write(x, cache, run.put(torch.tensor(slots)), kind)
    return cache.nan_to_num() if not packed else cache


@case("latent_write", "no_rows")
def _latent_write_nothing(run: Run) -> Any:
    cache = Latents(run, [Text(4, 0)]).growing(WIDTH, 1, "fp8", True)
    none = torch.zeros(0, dtype=torch.int64)
    run.ops.latent_write(run.put(run.draw.normal(0, WIDTH)), cache, run.put(none), "fp8")
    return cache


def _compress_cases(fn: F) -> F:
    for name in STEPS:
        for depth in (2, 8):
            given = {"step": name, "depth": depth}
            case("compress", f"{name}_{depth}_open", WIDE, given=given)(fn)
    return fn


@_compress_cases
def _compress(run: Run, step: str, depth: int) -> Any:
    at = Latents(run, STEPS[step], spare=2)
    u, s = (run.put(run.draw.wide(at.rows, WIDTH, scale=3.0)) for _ in range(2))
    state = at.open(WIDTH, depth)
    return run.ops.compress(u, s, state, at.batch), state.nan_to_num()


# --- select_sparse -------------------------------------------------------------------------------


def _index_inputs(run: Run, at: Latents, ratio: int, packed: bool) -> tuple[Tensor, Tensor, Tensor]:
    cache = at.growing(32, ratio, "mxfp4", packed)
    q = quantize(run.draw.normal(at.rows, 2, 32), "mxfp4")
    return run.put(q), run.put(run.draw.grid(at.rows, 2)), cache


@each_step("select_sparse", "ratio_1", ratio=1, k=6)
@each_step("select_sparse", "ratio_2", ratio=2, k=6)
@each_step("select_sparse", "all", ratio=1, k=100)
def _select(run: Run, step: str, packed: bool, ratio: int, k: int) -> Any:
    at = Latents(run, STEPS[step], spare=2)
    q, w, cache = _index_inputs(run, at, ratio, packed)
    return run.ops.select_sparse(q, w, cache, at.batch, ratio, k)


@each_step("select_sparse", "few_blocks", blocks=(4, 4))
@each_step("select_sparse", "odd_blocks", blocks=(3, 5))
@each_step("select_sparse", "all_blocks", blocks=(30, 2))
def _select_two_levels(run: Run, step: str, packed: bool, blocks: tuple[int, int]) -> Any:
    """A source keeps blocks, a later one chooses from them."""
    at = Latents(run, STEPS[step], spare=2)
    q, w, cache = _index_inputs(run, at, 1, packed)
    first = run.ops.select_sparse(q, w, cache, at.batch, 1, 6, Blocks(*blocks))
    q, w, _ = _index_inputs(run, at, 1, packed)
    return first, run.ops.select_sparse(q, w, cache, at.batch, 1, 6, None, first, blocks[1])


@case("select_sparse", "all_scores_tie", given={"sign": 0.0})
@case("select_sparse", "negative_weights", given={"sign": -1.0})
def _select_ties(run: Run, sign: float) -> Any:
    at = Latents(run, STEPS["chunks"])
    q, w, cache = _index_inputs(run, at, 1, True)
    return run.ops.select_sparse(q, run.put(w.abs() * sign), cache, at.batch, 1, 6, Blocks(3, 4))


@case("select_sparse", "more_than_a_tile")
def _select_long(run: Run) -> Any:
    at = Latents(run, [Text(70, 4000), Text(1, 2100)])
    q, w, cache = _index_inputs(run, at, 1, True)
    return run.ops.select_sparse(q, w, cache, at.batch, 1, 40, Blocks(10, 8))


# --- latent_attention ----------------------------------------------------------------------------


def _chosen(run: Run, at: Latents, ratio: int, k: int) -> Tensor:
    """Visible entries in no order that matters, −1 for some."""
    visible = (at.batch.positions.cpu() + 1) // ratio
    picks = run.draw.ids(1 << 30, at.rows, k) % visible.clamp(min=1)[:, None]
    picks = torch.where((visible > 0)[:, None] & (run.draw.ids(4, at.rows, k) > 0), picks, -1)
    return picks.int()


@each_step("latent_attention", "window", ratio=0)
@each_step("latent_attention", "ratio_1", ratio=1)
@each_step("latent_attention", "ratio_2", ratio=2)
def _latent_attention(run: Run, step: str, packed: bool, ratio: int) -> Any:
    return _attend(run, STEPS[step], packed, ratio)


@case("latent_attention", "floors")
def _latent_attention_floors(run: Run) -> Any:
    texts = [Text(12, 3, floor=9), Text(1, 20, floor=20), Text(2, 30, floor=27), Text(4, 0)]
    return _attend(run, texts, True, 1, floored=True)


@case("latent_attention", "large_logits", given={"scale": 8.0})
@case("latent_attention", "huge_sink", given={"sink": 90.0})
def _latent_attention_range(run: Run, scale: float = 1.0, sink: float = 0.0) -> Any:
    return _attend(run, STEPS["chunks"], True, 1, scale=scale, sink=sink)


def _attend(
    run: Run,
    texts: list[Text],
    packed: bool,
    ratio: int,
    floored: bool = False,
    scale: float = 1.0,
    sink: float = 0.0,
) -> Any:
    at = Latents(run, texts, spare=2)
    own = run.put(quantize(run.draw.normal(at.rows, WIDTH), "fp8"))
    window = Window(own, at.ring(WIDTH, RING, packed), at.batch, WINDOW, floored)
    q = run.put(run.draw.normal(at.rows, HEADS, WIDTH, scale=scale))
    sinks = run.put(run.draw.wide(HEADS) + sink)
    cache = entries = None
    if ratio:
        cache = at.growing(WIDTH, ratio, "nvfp4", packed)
        entries = run.put(_chosen(run, at, ratio, 5))
    return run.ops.latent_attention(q, window, at.batch, sinks, WIDTH**-0.5, cache, entries)


@case("latent_attention", "late_queries")
def _latent_attention_late(run: Run) -> Any:
    """Keys of all rows, queries of the late ones alone."""
    at = Latents(run, [Text(12, 3, floor=9), Text(5, 0, floor=20), Text(1, 40)], spare=2)
    late, _ = at.late()
    own = run.put(quantize(run.draw.normal(at.rows, WIDTH), "fp8"))
    window = Window(own, at.ring(WIDTH, RING, True), at.batch, WINDOW, False)
    q = run.put(run.draw.normal(len(late.ids), HEADS, WIDTH))
    return run.ops.latent_attention(q, window, late, run.put(run.draw.wide(HEADS)), WIDTH**-0.5)


# --- latent_attention_block ----------------------------------------------------------------------

HIDDEN, LORA, GROUPS, INDEX_HEADS = 96, 32, 1, 2


def block_params(run: Run, ratio: int, compressor: bool, indexer: bool) -> LatentParams:
    """A layer. It chooses more entries than there are, so no near tie decides anything."""
    block = "latent_attention_block"

    def scaled(*shape: int) -> Any:
        weight = run.draw.normal(*shape, scale=shape[-1] ** -0.5)
        return run.weight(weight, block, "scaled_linear", "linear")

    def dense(*shape: int) -> Any:
        return run.weight(run.draw.normal(*shape, scale=shape[-1] ** -0.5), block, "linear")

    def norm(width: int) -> Any:
        return run.weight(run.draw.normal(width, scale=0.1) + 1, block, "rms_norm")

    wide = HEADS * WIDTH
    out_a = run.draw.normal(GROUPS, 32, wide // GROUPS, scale=wide**-0.5)
    return LatentParams(
        q_kv=scaled(LORA + WIDTH, HIDDEN),
        q_norm=norm(LORA),
        kv_norm=norm(WIDTH),
        q=scaled(wide, LORA),
        out_a=run.weight(out_a, block, "grouped_linear"),
        out_b=scaled(HIDDEN, GROUPS * 32),
        sink=run.put(run.draw.wide(HEADS)),
        heads=HEADS,
        groups=GROUPS,
        eps=1e-6,
        window=WINDOW,
        ratio=ratio,
        floored=False,
        compressor=CompressorParams(
            dense(WIDTH * ratio, HIDDEN), norm(WIDTH), dense(32, WIDTH), norm(32)
        )
        if compressor
        else None,
        indexer=IndexerParams(
            scaled(INDEX_HEADS * 32, LORA), dense(INDEX_HEADS, HIDDEN), INDEX_HEADS, 64
        )
        if indexer
        else None,
    )


def _block(run: Run, texts: list[Text], packed: bool, ratio: int, source: bool, cut: bool) -> Any:
    """What a layer gives and leaves in its window. FP4 caches are seen through what it gives."""
    at = Latents(run, texts, spare=2)
    params = block_params(run, ratio, compressor=source, indexer=source)
    ring = at.ring(WIDTH, RING, packed)
    caches = LatentCaches(ring)
    if ratio:
        caches = LatentCaches(
            ring,
            at.open(WIDTH, 4) if ratio == 2 else None,
            at.growing(WIDTH, ratio, "nvfp4", packed, new=not source),
            at.growing(32, ratio, "mxfp4", packed, new=not source),
        )
    late, kept = at.late() if cut else (at.batch, None)
    picks = None
    if ratio and not source:
        picks = Picks(run.put(_chosen(run, at, ratio, 5)))
    x = run.put(run.draw.normal(at.rows, HIDDEN))
    rows = LatentRows(at.batch, late, kept)
    table = run.put(angles(64, 16))
    y, found = run.ops.latent_attention_block(x, params, caches, rows, table, picks)
    alive = late.kv_slots >= 0  # a dead row gives anything
    entries = found.entries[alive] if source and len(alive) else None
    return y[alive], entries, None if packed else ring.nan_to_num()


@each_step("latent_attention_block", "window", ratio=0, source=False)
@each_step("latent_attention_block", "source_1", ratio=1, source=True)
@each_step("latent_attention_block", "source_2", ratio=2, source=True)
@each_step("latent_attention_block", "reader", ratio=1, source=False)
def _latent_block(run: Run, step: str, packed: bool, ratio: int, source: bool) -> Any:
    return _block(run, STEPS[step], packed, ratio, source, cut=False)


@case("latent_attention_block", "late_rows", given={"floor": 9})
@case("latent_attention_block", "no_late_rows", given={"floor": 60})
def _latent_block_late(run: Run, floor: int) -> Any:
    texts = [Text(12, 3, floor=floor), Text(5, 0, floor=20)]
    return _block(run, texts, True, 1, source=True, cut=True)
