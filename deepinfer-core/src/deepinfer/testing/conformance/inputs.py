"""The inputs: every case of every op, one function for each family of cases.

A case makes its tensors from ``run.draw``, moves them to the run's device and calls the op; what it
returns is compared with what the same function returns on the references. Values are chosen so
that a right answer is the only answer: where an op decides (an argmax, a cut at top-p), the
alternatives are either exactly equal, which is a tie and has a rule, or clearly apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepinfer.api.model import DeviceBatch
from deepinfer.ops.reference.blocks import AttentionParams, LayerParams, MLPParams
from deepinfer.sampling.philox import gumbel
from deepinfer.testing.conformance.kit import PAGE_SIZE, Run
from deepinfer.testing.conformance.pages import Paged

BOTH = ("float32", "bfloat16")
WIDE = ("float32",)
ROWS = {"no_rows": 0, "one_row": 1, "odd_rows": 7, "many_rows": 70}


@dataclass(frozen=True)
class Case:
    """One call of one op.

    ``optional``: the argument that a backend may decline by an error that names it.
    """

    op: str
    name: str
    call: Callable[[Run], Any]
    dtypes: tuple[str, ...] = BOTH
    optional: str | None = None
    head_dim: int | None = None


CASES: list[Case] = []


def case(op: str, name: str, dtypes: tuple[str, ...] = BOTH, **marks: Any) -> Callable[..., Any]:
    """Declare a case; ``given`` are arguments of the function beyond ``run``."""
    given = marks.pop("given", {})

    def declare(fn: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append(Case(op, name, partial(fn, **given), dtypes, **marks))
        return fn

    return declare


def by_rows(
    op: str, dtypes: tuple[str, ...] = BOTH, prefix: str = "", **marks: Any
) -> Callable[..., Any]:
    """Declare a case for 0, 1, 7 and 70 rows; the function takes ``rows`` and what is given."""
    given = marks.pop("given", {})

    def declare(fn: Callable[..., Any]) -> Callable[..., Any]:
        for name, rows in ROWS.items():
            full = f"{prefix}_{name}" if prefix else name
            case(op, full, dtypes, given={"rows": rows, **given}, **marks)(fn)
        return fn

    return declare


# --- dense -------------------------------------------------------------------------------------


@by_rows("embedding")
def _embedding(run: Run, rows: int) -> Any:
    table = run.weight(run.draw.normal(33, 48), "embedding")
    return run.ops.embedding(run.put(run.draw.ids(33, rows)), table)


@case("embedding", "first_last_and_repeated")
def _embedding_edges(run: Run) -> Any:
    table = run.weight(run.draw.normal(33, 5), "embedding")
    return run.ops.embedding(run.put(torch.tensor([32, 0, 32, 32, 0])), table)


@case("embedding", "tied_to_the_head", given={"first": "embedding"})
@case("linear", "tied_to_the_embedding", given={"first": "linear"})
def _tied(run: Run, first: str) -> Any:
    """One prepared weight serves both of its readers."""
    uses = ("embedding", "linear") if first == "embedding" else ("linear", "embedding")
    both = run.weight(run.draw.normal(70, 48), *uses)
    hidden = run.ops.embedding(run.put(run.draw.ids(70, 7)), both)
    if first == "embedding":
        return hidden
    return run.ops.linear(run.put(run.draw.normal(7, 48)), both, out_dtype=torch.float32)


@by_rows("linear")
def _linear(run: Run, rows: int) -> Any:
    weight = run.weight(run.draw.normal(33, 48, scale=0.2), "linear")
    return run.ops.linear(run.put(run.draw.normal(rows, 48)), weight)


@case("linear", "odd_sizes", given={"shape": (7, 37), "outputs": 5})
@case("linear", "one_output", given={"shape": (3, 1), "outputs": 1})
@case("linear", "vector", given={"shape": (48,), "outputs": 33})
@case("linear", "three_dimensions", given={"shape": (2, 3, 48), "outputs": 33})
@case("linear", "long_sums", given={"shape": (3, 2048), "outputs": 70})
def _linear_shapes(run: Run, shape: tuple[int, ...], outputs: int) -> Any:
    weight = run.weight(run.draw.normal(outputs, shape[-1], scale=0.2), "linear")
    return run.ops.linear(run.put(run.draw.normal(*shape)), weight)


@case("linear", "bias", given={"out_dtype": None})
@case("linear", "bias_and_wide_output", given={"out_dtype": torch.float32})
def _linear_bias(run: Run, out_dtype: torch.dtype | None) -> Any:
    weight = run.weight(run.draw.normal(33, 48, scale=0.2), "linear")
    bias = run.put(run.draw.normal(33, scale=8.0))
    x = run.put(run.draw.normal(7, 48))
    if out_dtype is None:
        return run.ops.linear(x, weight, bias)
    return run.ops.linear(x, weight, bias, out_dtype)


@case("linear", "wide_output")
def _linear_wide(run: Run) -> Any:
    weight = run.weight(run.draw.normal(33, 48, scale=0.2), "linear")
    return run.ops.linear(run.put(run.draw.normal(7, 48)), weight, out_dtype=torch.float32)


@case("linear", "rows_of_a_larger_tensor")
def _linear_strided(run: Run) -> Any:
    weight = run.weight(run.draw.normal(33, 48, scale=0.2), "linear")
    return run.ops.linear(run.put(run.draw.normal(9, 96))[1:8, 48:], weight)


@by_rows("rms_norm")
def _rms_norm(run: Run, rows: int) -> Any:
    weight = run.weight(run.draw.normal(64), "rms_norm")
    return run.ops.rms_norm(run.put(run.draw.normal(rows, 64)), weight, 1e-5)


@case("rms_norm", "odd_size", given={"shape": (7, 33)})
@case("rms_norm", "per_head", given={"shape": (5, 3, 16)})
@case("rms_norm", "long_rows", given={"shape": (3, 2048)})
@case("rms_norm", "no_weight", given={"shape": (7, 64), "weighted": False})
@case("rms_norm", "tiny_values", given={"shape": (7, 64), "scale": 1e-6})
@case("rms_norm", "zeros", given={"shape": (7, 64), "scale": 0.0})
@case("rms_norm", "large_values", given={"shape": (7, 64), "scale": 1e4})
def _rms_norm_shapes(
    run: Run, shape: tuple[int, ...], scale: float = 1.0, weighted: bool = True
) -> Any:
    weight = run.weight(run.draw.normal(shape[-1]), "rms_norm") if weighted else None
    return run.ops.rms_norm(run.put(run.draw.normal(*shape, scale=scale)), weight, 1e-5)


@case("rms_norm", "rows_of_a_larger_tensor")
def _rms_norm_strided(run: Run) -> Any:
    weight = run.weight(run.draw.normal(32), "rms_norm")
    return run.ops.rms_norm(run.put(run.draw.normal(9, 96))[1:8, 32:64], weight, 1e-5)


@by_rows("add_rms_norm")
def _add_rms_norm(run: Run, rows: int) -> Any:
    weight = run.weight(run.draw.normal(64), "add_rms_norm", "rms_norm")
    x, residual = run.put(run.draw.normal(rows, 64)), run.put(run.draw.normal(rows, 64))
    return run.ops.add_rms_norm(x, residual, weight, 1e-6)


@case("add_rms_norm", "no_weight")
def _add_rms_norm_bare(run: Run) -> Any:
    x, residual = run.put(run.draw.normal(7, 33)), run.put(run.draw.normal(7, 33))
    return run.ops.add_rms_norm(x, residual, None, 1e-6)


@by_rows("silu_mul")
def _silu_mul(run: Run, rows: int) -> Any:
    return run.ops.silu_mul(run.put(run.draw.normal(rows, 96, scale=3.0)))


@case("silu_mul", "odd_size", given={"limit": None, "scale": 1.0})
@case("silu_mul", "extremes", given={"limit": None, "scale": 1e3})
@case("silu_mul", "limit", given={"limit": 2.0, "scale": 3.0}, optional="limit")
def _silu_mul_more(run: Run, limit: float | None, scale: float) -> Any:
    x = run.put(run.draw.normal(7, 66, scale=scale))
    return run.ops.silu_mul(x) if limit is None else run.ops.silu_mul(x, limit)


@by_rows("gated_mlp")
def _gated_mlp(run: Run, rows: int) -> Any:
    gate_up = run.weight(run.draw.normal(2 * 40, 48, scale=0.2), "gated_mlp", "linear")
    down = run.weight(run.draw.normal(48, 40, scale=0.2), "gated_mlp", "linear")
    return run.ops.gated_mlp(run.put(run.draw.normal(rows, 48)), gate_up, down)


def angles(positions: int, rotated: int) -> Tensor:
    """float32[P, R]: cosines, then sines, as a model makes them."""
    frequency = 10_000.0 ** -(torch.arange(0, rotated, 2) / rotated)
    angle = torch.arange(positions)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), -1).float()


@by_rows("rope")
def _rope(run: Run, rows: int) -> Any:
    x, positions = run.draw.normal(rows, 3, 16), run.draw.ids(40, rows)
    return run.ops.rope(run.put(x), run.put(positions), run.put(angles(40, 16)))


@case("rope", "partly_rotated", given={"rotated": 8, "heads": 3})
@case("rope", "one_head", given={"rotated": 16, "heads": 1})
@case("rope", "interleaved", given={"rotated": 16, "heads": 3, "interleaved": True})
@case("rope", "interleaved_partly", given={"rotated": 4, "heads": 2, "interleaved": True})
def _rope_more(run: Run, rotated: int, heads: int, interleaved: bool = False) -> Any:
    x, positions = run.put(run.draw.normal(5, heads, 16)), run.put(torch.tensor([39, 0, 7, 7, 1]))
    return run.ops.rope(x, positions, run.put(angles(40, rotated)), interleaved)


@case("rope", "a_part_of_the_projection")
def _rope_strided(run: Run) -> Any:
    """Queries as a view of the fused projection, as models pass them."""
    q = run.put(run.draw.normal(5, 6 * 16))[:, : 4 * 16].view(5, 4, 16)
    return run.ops.rope(q, run.put(run.draw.ids(40, 5)), run.put(angles(40, 16)))


# --- attention ---------------------------------------------------------------------------------

DECODE = [(1, 1), (1, 5), (1, 16), (1, 17), (1, 70)]
PREFILL = [(7, 7), (33, 33), (16, 16)]
CHUNKS = [(5, 38), (1, 20), (0, 9), (16, 48), (3, 3)]


@case("attention", "decode", given={"requests": DECODE})
@case("attention", "prefill", given={"requests": PREFILL})
@case("attention", "chunks_decodes_and_idle_rows", given={"requests": CHUNKS})
@case("attention", "one_token", given={"requests": [(1, 1)]})
@case("attention", "no_requests", given={"requests": []})
@case("attention", "only_idle_requests", given={"requests": [(0, 9), (0, 0)]})
@case("attention", "a_request_without_keys", given={"requests": [(1, 0), (1, 5)]})
@case("attention", "rows_of_nobody", given={"requests": [(1, 5), (2, 9)], "spare": 3})
@case("attention", "many_decodes", given={"requests": [(1, 1 + i % 40) for i in range(70)]})
@case("attention", "equal_heads", given={"requests": CHUNKS, "heads": (3, 3)})
@case("attention", "one_kv_head", given={"requests": CHUNKS, "heads": (5, 1)})
@case("attention", "large_scores", given={"requests": CHUNKS, "scale": 40.0})
def _attention(run: Run, requests: list[tuple[int, int]], **how: Any) -> Any:
    return Paged(run, requests, **how).attend()


for _dim in (8, 24, 64, 128):
    case("attention", f"head_dim_{_dim}", given={"requests": CHUNKS, "dim": _dim}, head_dim=_dim)(
        _attention
    )
for _option, _given in (
    ("window", {"window": 6}),
    ("softcap", {"softcap": 3.0}),
    ("sink", {"sink": True}),
):
    for _name, _requests in (("decode", DECODE), ("chunks", CHUNKS)):
        case(
            "attention",
            f"{_option}_{_name}",
            given={"requests": _requests, **_given},
            optional=_option,
        )(_attention)
case(
    "attention",
    "window_of_one",
    given={"requests": CHUNKS, "window": 1},
    optional="window",
)(_attention)
case(
    "attention",
    "window_longer_than_the_text",
    given={"requests": CHUNKS, "window": 1000},
    optional="window",
)(_attention)


@case("plan_attention", "serves_every_layer")
def _plan_twice(run: Run) -> Any:
    """One plan, two layers: attention may not use a plan up."""
    paged = Paged(run, CHUNKS)
    return paged.attend(), Paged(run, CHUNKS).attend(plan=paged.plan)


@by_rows("kv_write")
def _kv_write(run: Run, rows: int) -> Any:
    k, v = run.put(run.draw.normal(rows, 2, 8)), run.put(run.draw.normal(rows, 2, 8))
    caches = [run.place(run.draw.normal(9, PAGE_SIZE, 2, 8)) for _ in range(2)]
    slots = run.draw.order(9 * PAGE_SIZE)[:rows]
    run.ops.kv_write(k, v, *caches, run.put(slots))
    return caches


@case("kv_write", "skips", given={"slots": [-1, 17, -1, 0, 143]})
@case("kv_write", "only_skips", given={"slots": [-1, -1, -1, -1, -1]})
@case("kv_write", "page_borders", given={"slots": [15, 16, 31, 32, 143]})
def _kv_write_slots(run: Run, slots: list[int]) -> Any:
    k, v = run.put(run.draw.normal(5, 2, 8)), run.put(run.draw.normal(5, 2, 8))
    caches = [run.place(run.draw.normal(9, PAGE_SIZE, 2, 8)) for _ in range(2)]
    run.ops.kv_write(k, v, *caches, run.put(torch.tensor(slots)))
    return caches


@case("kv_write", "a_part_of_the_projection")
def _kv_write_strided(run: Run) -> Any:
    """Keys and values as views of the fused projection, as models pass them."""
    fused = run.put(run.draw.normal(5, 8 * 8))
    k, v = (fused[:, i : i + 16].view(5, 2, 8) for i in (32, 48))
    caches = [run.place(run.draw.normal(3, PAGE_SIZE, 2, 8)) for _ in range(2)]
    run.ops.kv_write(k, v, *caches, run.put(torch.tensor([3, 40, 7, -1, 16])))
    return caches


# --- layers and their halves -------------------------------------------------------------------


@by_rows("mlp_block")
def _mlp_block(run: Run, rows: int) -> Any:
    mlp = _mlp_params(run)
    x, residual = run.put(run.draw.normal(rows, 48)), run.put(run.draw.normal(rows, 48))
    return run.ops.mlp_block(x, residual, *mlp)


def _mlp_params(run: Run) -> MLPParams:
    uses = ("mlp_block", "gated_mlp", "linear")
    gate_up = run.weight(run.draw.normal(2 * 40, 48, scale=0.2), *uses)
    down = run.weight(run.draw.normal(48, 40, scale=0.2), *uses)
    return MLPParams(run.weight(run.draw.normal(48), "rms_norm"), 1e-5, gate_up, down)


@case("attention_block", "decode", given={"requests": DECODE})
@case("attention_block", "chunks_decodes_and_idle_rows", given={"requests": CHUNKS})
@case("attention_block", "first_layer", given={"requests": CHUNKS, "first": True})
@case("attention_block", "biases", given={"requests": CHUNKS, "biased": True})
@case("attention_block", "head_norms", given={"requests": CHUNKS, "head_norms": True})
@case("attention_block", "window", given={"requests": CHUNKS, "window": 6}, optional="window")
@case("attention_block", "no_rows", given={"requests": []})
def _attention_block(run: Run, requests: list[tuple[int, int]], **how: Any) -> Any:
    """The step's keys and values are written by the block; its caches are among the results."""
    paged = Paged(run, requests)
    caches = run.place(paged.k_cache), run.place(paged.v_cache)
    batch = _batch(run, paged, requests)
    rows = len(batch.positions)
    x = run.put(run.draw.normal(rows, 48))
    residual = None if how.get("first") else run.put(run.draw.normal(rows, 48))
    params = _attention_params(run, how)
    y, total = run.ops.attention_block(x, residual, params, batch, caches, run.put(angles(80, 16)))
    return y, total, *caches


@case("decoder_layers", "decode", given={"requests": DECODE})
@case("decoder_layers", "chunks_decodes_and_idle_rows", given={"requests": CHUNKS})
@case("decoder_layers", "biases", given={"requests": CHUNKS, "biased": True})
@case("decoder_layers", "head_norms", given={"requests": DECODE, "head_norms": True})
@case("decoder_layers", "one_layer", given={"requests": DECODE, "count": 1})
@case("decoder_layers", "no_rows", given={"requests": []})
def _decoder_layers(run: Run, requests: list[tuple[int, int]], count: int = 2, **how: Any) -> Any:
    """Each layer writes its own caches, which are among the results."""
    paged = Paged(run, requests)
    kv = _Caches([(run.place(paged.k_cache), run.place(paged.v_cache)) for _ in range(count)])
    batch = _batch(run, paged, requests)
    x = run.put(run.draw.normal(len(batch.positions), 48))
    layers = [LayerParams(_attention_params(run, how), _mlp_params(run)) for _ in range(count)]
    y = run.ops.decoder_layers(x, layers, batch, kv, run.put(angles(80, 16)))
    return y, *(cache for layer in kv.layers for cache in layer)


@dataclass(frozen=True)
class _Caches:
    """A pool with these layers."""

    layers: list[tuple[Tensor, Tensor]]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.layers[index]


def _batch(run: Run, paged: Paged, requests: list[tuple[int, int]]) -> DeviceBatch:
    """A step of these requests as the blocks read it."""
    slots = [paged.slots(i, kv - rows, kv) for i, (rows, kv) in enumerate(requests)]
    positions = [torch.arange(kv - rows, kv) for rows, kv in requests]
    nothing = torch.zeros(0, dtype=torch.int64)
    plan = run.ops.plan_attention(
        run.put(paged.block_table), run.put(paged.lengths), run.put(paged.cu_q), PAGE_SIZE
    )
    return DeviceBatch(
        ids=run.put(nothing),
        positions=run.put(torch.cat([nothing, *positions])),
        row_of_token=run.put(nothing),
        kv_slots=run.put(torch.cat([nothing, *slots])),
        attn=plan,
        logit_rows=run.put(nothing),
    )


def _attention_params(run: Run, how: dict[str, Any]) -> AttentionParams:
    """Four query heads and two cached heads of 16."""
    uses, draw = ("attention_block", "linear"), run.draw
    biased, head_norms = how.get("biased"), how.get("head_norms")
    return AttentionParams(
        norm=run.weight(draw.normal(48), "rms_norm"),
        eps=1e-5,
        qkv=run.weight(draw.normal(8 * 16, 48, scale=0.2), *uses),
        o=run.weight(draw.normal(48, 4 * 16, scale=0.2), *uses),
        heads=4,
        kv_heads=2,
        head_dim=16,
        window=how.get("window"),
        qkv_bias=run.put(draw.normal(8 * 16)) if biased else None,
        o_bias=run.put(draw.normal(48)) if biased else None,
        q_norm=run.weight(draw.normal(16), "rms_norm") if head_norms else None,
        k_norm=run.weight(draw.normal(16), "rms_norm") if head_norms else None,
        head_eps=1e-6,
    )


# --- rows of a plan ----------------------------------------------------------------------------

BIG = 1 << 40


@case("expand_rows", "mixed", WIDE, given={"start": [5, 0, 9], "count": [1, 4, 2], "total": 7})
@case("expand_rows", "padding", WIDE, given={"start": [5, 0], "count": [1, 4], "total": 70})
@case("expand_rows", "cut_short", WIDE, given={"start": [5, 0], "count": [4, 4], "total": 6})
@case(
    "expand_rows",
    "empty_rows",
    WIDE,
    given={"start": [3] * 5, "count": [0, 2, 0, 0, 1], "total": 4},
)
@case("expand_rows", "no_rows", WIDE, given={"start": [], "count": [], "total": 3})
@case("expand_rows", "no_tokens", WIDE, given={"start": [1, 2], "count": [0, 0], "total": 0})
@case("expand_rows", "far_positions", WIDE, given={"start": [BIG, 0], "count": [2, 1], "total": 3})
def _expand_rows(run: Run, start: list[int], count: list[int], total: int) -> Any:
    columns = [run.put(torch.tensor(column, dtype=torch.int64)) for column in (start, count)]
    return run.ops.expand_rows(*columns, total)


@by_rows("append_rows", given={"count": 3})
@case("append_rows", "two_steps", given={"rows": 64, "count": 0, "steps": 2})
@case("append_rows", "many_rows_that_fit_just_so", given={"rows": 256, "count": 44})
@case("append_rows", "some_do_not_fit", given={"rows": 64, "count": 290})
@case("append_rows", "none_fits", given={"rows": 7, "count": 300})
@case("append_rows", "far_behind_the_end", given={"rows": 7, "count": BIG >> 10, "steps": 2})
@case("append_rows", "one_part", given={"rows": 7, "count": 5, "parts": 1})
@case("append_rows", "many_parts", given={"rows": 7, "count": 5, "parts": 9})
@case("append_rows", "many_numbers", given={"rows": 7, "count": 5, "numbers": 9})
@case("append_rows", "odd_size", given={"rows": 7, "count": 5, "width": 37})
@case("append_rows", "no_room_at_all", given={"rows": 7, "count": 0, "most": 0})
def _append_rows(
    run: Run,
    rows: int,
    count: int,
    most: int = 300,
    parts: int = 3,
    numbers: int = 2,
    width: int = 24,
    steps: int = 1,
) -> Any:
    """What is kept, what was there before among it, and the count."""
    kept = run.place(run.draw.normal(most, parts * width))
    ints = run.place(run.draw.wide_ids(numbers, most))
    at = run.place(torch.tensor([count]))
    for _ in range(steps):
        new = [run.put(run.draw.normal(rows, width)) for _ in range(parts)]
        told = [run.put(run.draw.wide_ids(rows)) for _ in range(numbers)]
        run.ops.append_rows(new, told, kept, ints, at)
    return kept, ints, at


@case("append_rows", "rows_of_larger_tensors")
def _append_rows_strided(run: Run) -> Any:
    x, y = run.put(run.draw.normal(9, 96)), run.put(run.draw.normal(7, 96))
    numbers = run.put(run.draw.wide_ids(8, 2))
    kept, ints = run.place(run.draw.normal(20, 96)), run.place(run.draw.wide_ids(2, 20))
    at = run.place(torch.tensor([9]))
    run.ops.append_rows((x[1:8, 48:], y[:, ::2]), (numbers[1:, 0], numbers[:7, 1]), kept, ints, at)
    return kept, ints, at


# --- experts -----------------------------------------------------------------------------------


@by_rows("route", WIDE)
def _route(run: Run, rows: int) -> Any:
    return run.ops.route(run.put(run.draw.grid(rows, 8)), None, 2, "softmax", True, 1.0)


@case("route", "sigmoid_bias", WIDE, given={"score": "sigmoid", "bias": True})
@case("route", "sqrtsoftplus_bias", WIDE, given={"score": "sqrtsoftplus", "bias": True})
@case("route", "scaled", WIDE, given={"score": "softmax", "scale": 2.5})
@case("route", "not_renormalised", WIDE, given={"score": "softmax", "renorm": False})
@case("route", "one_choice", WIDE, given={"score": "softmax", "k": 1})
@case("route", "all_experts", WIDE, given={"score": "sigmoid", "k": 8})
def _route_more(
    run: Run, score: str, bias: bool = False, renorm: bool = True, scale: float = 1.0, k: int = 3
) -> Any:
    logits = run.put(run.draw.grid(7, 8))
    offset = run.put(run.draw.wide(8)) if bias else None
    return run.ops.route(logits, offset, k, score, renorm, scale)


@case("route", "ties", WIDE)
def _route_ties(run: Run) -> Any:
    """Equal scores: the lower expert first, whatever the row looks like."""
    logits = torch.tensor([[0.0] * 8, [1, 2, 2, 2, 1, 2, 0, 0], [0, 0, 0, 0, 0, 0, 1, 1]])
    return run.ops.route(run.put(logits), None, 3, "softmax", True, 1.0)


@case("permute", "no_rows", WIDE, given={"rows": 0})
@case("permute", "one_row", WIDE, given={"rows": 1})
@case("permute", "many_rows", WIDE, given={"rows": 70})
@case("permute", "ids_of_elsewhere", WIDE, given={"rows": 20, "low": -2, "high": 9})
@case("permute", "one_expert", WIDE, given={"rows": 7, "high": 1, "experts": 1})
@case("permute", "idle_experts", WIDE, given={"rows": 7, "high": 3})
def _permute(run: Run, rows: int, low: int = 0, high: int = 5, experts: int = 5) -> Any:
    ids = (run.draw.ids(high - low, rows, 3) + low).int()
    return run.ops.permute(run.put(ids), experts)


@case("grouped_linear", "no_rows", given={"counts": [0, 0, 0]})
@case("grouped_linear", "one_row", given={"counts": [0, 1, 0]})
@case("grouped_linear", "idle_experts", given={"counts": [3, 0, 40, 0, 1]})
@case("grouped_linear", "rows_of_elsewhere", given={"counts": [3, 2], "spare": 4})
@case("grouped_linear", "wide_output", given={"counts": [3, 2], "out_dtype": torch.float32})
def _grouped_linear(
    run: Run, counts: list[int], spare: int = 0, out_dtype: torch.dtype | None = None
) -> Any:
    weight = run.weight(run.draw.normal(len(counts), 33, 48, scale=0.2), "grouped_linear")
    x = run.put(run.draw.normal(sum(counts) + spare, 48))
    offsets = run.put(torch.tensor([0, *counts]).cumsum(0))
    if out_dtype is None:
        return run.ops.grouped_linear(x, weight, offsets)
    return run.ops.grouped_linear(x, weight, offsets, out_dtype)


def expert_weights(run: Run) -> tuple[Any, Any]:
    """Five experts of width 24 over 32 channels."""
    uses = ("moe", "grouped_linear")
    gate_up = run.weight(run.draw.normal(5, 2 * 24, 32, scale=0.2), *uses)
    return gate_up, run.weight(run.draw.normal(5, 32, 24, scale=0.2), *uses)


@by_rows("moe")
def _moe(run: Run, rows: int) -> Any:
    gate_up, down = expert_weights(run)
    ids, shares = run.put(run.draw.ids(5, rows, 2).int()), run.put(run.draw.wide(rows, 2).abs())
    return run.ops.moe(run.put(run.draw.normal(rows, 32)), ids, shares, gate_up, down, 5)


@case("moe", "one_choice", given={"ids": [[4], [0], [4]]})
@case("moe", "experts_elsewhere", given={"ids": [[4, -1], [-1, -1], [7, 0]]})
@case("moe", "the_same_expert_twice", given={"ids": [[2, 2], [0, 1], [1, 0]]})
def _moe_ids(run: Run, ids: list[list[int]]) -> Any:
    gate_up, down = expert_weights(run)
    chosen = run.put(torch.tensor(ids, dtype=torch.int32))
    shares = run.put(run.draw.wide(*chosen.shape).abs())
    return run.ops.moe(run.put(run.draw.normal(3, 32)), chosen, shares, gate_up, down, 5)


# --- from logits to ids ------------------------------------------------------------------------

VOCAB = 70  # no multiple of 32
EDGE = torch.tensor([0, -1, 1, 1 << 31, 1 << 32, -(1 << 63), (1 << 63) - 1])


def same_storage(out: Tensor, given: Tensor) -> Tensor:
    """Ops that work in place return what they were given."""
    assert out.data_ptr() == given.data_ptr(), "the op must work in place and return its argument"
    return out


@by_rows("logit_bias", WIDE)
def _logit_bias(run: Run, rows: int) -> Any:
    logits = run.place(run.draw.wide(5, VOCAB))
    place = run.put(run.draw.ids(5, rows)), run.put(run.draw.ids(VOCAB, rows))
    return same_storage(run.ops.logit_bias(logits, *place, run.put(run.draw.wide(rows))), logits)


@case("logit_bias", "forbids_ignores_and_adds_up", WIDE)
def _logit_bias_edges(run: Run) -> Any:
    logits = run.place(run.draw.wide(3, VOCAB))
    rows, ids = torch.tensor([0, -1, 2, 2, 1, -1]), torch.tensor([69, 5, 7, 7, 0, 0])
    values = torch.tensor([-torch.inf, 9.0, 1.0, 0.5, 100.0, -torch.inf])
    return run.ops.logit_bias(logits, run.put(rows), run.put(ids), run.put(values))


@by_rows("penalties", WIDE)
def _penalties(run: Run, rows: int) -> Any:
    tokens = run.draw.ids(VOCAB, rows, 25)
    tokens[torch.arange(25) >= 5 + run.draw.ids(20, rows, 1)] = -1
    amounts = [run.draw.wide(rows), run.draw.wide(rows), run.draw.wide(rows).abs() + 0.5]
    logits = run.place(run.draw.wide(rows, VOCAB))
    prompt = run.draw.ids(12, rows)
    given = [run.put(t) for t in (tokens, prompt, *amounts)]
    return same_storage(run.ops.penalties(logits, *given), logits)


@case("penalties", "neutral", WIDE, given={"amounts": (0.0, 0.0, 1.0)})
@case("penalties", "presence_only", WIDE, given={"amounts": (1.5, 0.0, 1.0)})
@case("penalties", "frequency_only", WIDE, given={"amounts": (0.0, 0.5, 1.0)})
@case("penalties", "repetition_only", WIDE, given={"amounts": (0.0, 0.0, 1.3)})
@case("penalties", "negative", WIDE, given={"amounts": (-1.0, -0.5, 0.5)})
def _penalties_of(run: Run, amounts: tuple[float, float, float]) -> Any:
    """Row 0 counts a repeated output id, row 1 has a prompt only, row 2 padding only."""
    tokens = torch.full((3, 6), -1)
    tokens[0], tokens[1, :3] = torch.tensor([7, 8, 7, 9, 9, 69]), torch.tensor([0, 0, 1])
    logits = run.draw.wide(3, VOCAB)
    logits[0, 9], logits[1, 0], logits[1, 2] = -torch.inf, -0.0, torch.nan
    columns = [run.put(torch.full((3,), amount)) for amount in amounts]
    placed = run.place(logits)
    return run.ops.penalties(placed, run.put(tokens), run.put(torch.tensor([2, 3, 0])), *columns)


@case("apply_bitmask", "no_rows", WIDE, given={"rows": 0})
@case("apply_bitmask", "one_row", WIDE, given={"rows": 1})
@case("apply_bitmask", "many_rows", WIDE, given={"rows": 70})
@case("apply_bitmask", "words_beyond_the_vocabulary", WIDE, given={"rows": 7, "words": 5})
@case("apply_bitmask", "a_padded_vocabulary", WIDE, given={"rows": 7, "words": 2})
@case("apply_bitmask", "vocabulary_of_whole_words", WIDE, given={"rows": 7, "vocab": 96})
@case("apply_bitmask", "vocabulary_of_one", WIDE, given={"rows": 7, "vocab": 1, "words": 1})
def _apply_bitmask(run: Run, rows: int, words: int = 3, vocab: int = VOCAB) -> Any:
    mask = (run.draw.ids(1 << 32, rows, words) - (1 << 31)).int()
    logits = run.place(run.draw.wide(rows + 2, vocab))
    index = run.put(run.draw.order(rows + 2)[:rows])
    return same_storage(run.ops.apply_bitmask(logits, run.put(mask), index), logits)


@case("apply_bitmask", "all_nothing_nobody_and_twice", WIDE)
def _apply_bitmask_edges(run: Run) -> Any:
    """All bits, no bit, the sign bit, a mask of row −1, and two masks for one row."""
    words = [[-1] * 3, [0] * 3, [-(1 << 31)] * 3, [0] * 3, [0b1111] * 3, [0b0110] * 3]
    logits = run.draw.wide(5, VOCAB)
    logits[4, 1] = torch.nan
    index = torch.tensor([0, 1, 2, -1, 4, 4])
    placed = run.place(logits)
    mask = run.put(torch.tensor(words, dtype=torch.int32))
    return run.ops.apply_bitmask(placed, mask, run.put(index))


def sampling_rows(rows: int) -> Tensor:
    """float32[rows] temperatures, 0 among them."""
    return torch.tensor([0.7, 1.0, 0.0, 2.5, 1e-2])[torch.arange(rows) % 5]


def cut(logits: Tensor, temperature: Tensor, run: Run) -> tuple[Tensor, Tensor, Tensor]:
    """top_k, top_p, min_p for each row, with thresholds in the middle between two candidates."""
    top_k, top_p, min_p = [], [], []
    for row, t in zip(logits.double(), temperature.tolist(), strict=True):
        p = (row.nan_to_num(nan=-torch.inf) / (t or 1.0)).softmax(-1).sort(descending=True).values
        kind = int(run.draw.ids(5, 1))
        k = int(run.draw.ids(len(p), 1)) + 1 if kind in (0, 3) else 0
        p = p[: k or len(p)] / p[: k or len(p)].sum()
        at = int(run.draw.ids(max(len(p) - 1, 1), 1))
        sums = torch.cat((p.new_zeros(1), p.cumsum(0)))
        q = float(sums[at : at + 2].mean()) if kind in (1, 3) else 1.0
        floor = float(p[at : at + 2].mean() / p[0]) if kind in (2, 3) else 0.0
        top_k.append(k if kind != 4 else -1)
        top_p.append(max(q, 1e-6))
        min_p.append(floor)
    return torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p)


@by_rows("filter_top", WIDE)
def _filter_top(run: Run, rows: int) -> Any:
    logits, temperature = run.draw.wide(rows, VOCAB, scale=2.0), sampling_rows(rows)
    filters = (
        cut(logits, temperature, run) if rows else (torch.zeros(0).long(), *[torch.ones(0)] * 2)
    )
    given = [run.put(t) for t in (logits, temperature, *filters)]
    return run.ops.filter_top(*given)


@case("filter_top", "ties", WIDE)
def _filter_top_ties(run: Run) -> Any:
    """Of equals the lower ids stay: 3 of 8 by top-k, 2 of 4 by top-p, all of them by min-p."""
    logits = torch.zeros(3, 8)
    logits[1, ::2] = 30.0
    filters = [torch.tensor([3, 0, 0]), torch.tensor([1.0, 0.375, 1.0]), torch.tensor([0, 0, 0.9])]
    given = [run.put(t) for t in (logits, torch.ones(3), *filters)]
    return run.ops.filter_top(*given)


@case("filter_top", "not_a_number_and_minus_infinity", WIDE)
def _filter_top_odd(run: Run) -> Any:
    logits = torch.tensor([[0.0, torch.nan, 2.0, -torch.inf, 1.0]] * 3 + [[-torch.inf] * 5])
    filters = [torch.tensor([2, 0, 4, 2]), torch.tensor([1, 0.5, 1, 0.5]), torch.zeros(4)]
    given = [run.put(t) for t in (logits, torch.ones(4), *filters)]
    out = run.ops.filter_top(*given)
    return torch.where(out.isnan(), -torch.inf, out)  # a NaN may stay or go; it counts as −inf


@case("filter_top", "extreme_temperatures", WIDE)
def _filter_top_temperatures(run: Run) -> Any:
    logits = run.draw.grid(3, VOCAB)
    temperature = torch.tensor([1e-5, 1e5, 0.0])
    filters = [torch.tensor([0, 5, 1]), torch.tensor([0.5, 1.0, 0.1]), torch.tensor([0, 0.5, 0.9])]
    given = [run.put(t) for t in (logits, temperature, *filters)]
    return run.ops.filter_top(*given)


def clear_winner(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """The same logits with the id that will be drawn raised a little, so that rounding is idle."""
    noise = gumbel(seed, position, logits.shape[1])
    t = temperature[:, None]
    score = torch.where(t == 0, logits, logits / t + noise)
    lift = torch.maximum(temperature, torch.tensor(1e-3))[:, None] * 0.02
    return logits.scatter_add(1, score.argmax(1, keepdim=True), lift)


@by_rows("gumbel_argmax", WIDE)
def _gumbel_argmax(run: Run, rows: int) -> Any:
    temperature, seed = sampling_rows(rows), run.draw.wide_ids(rows)
    position = run.draw.ids(1 << 20, rows)
    logits = clear_winner(run.draw.wide(rows, VOCAB), temperature, seed, position)
    given = [run.put(t) for t in (logits, temperature, seed, position)]
    return run.ops.gumbel_argmax(*given)


@case("gumbel_argmax", "ties", WIDE)
def _gumbel_argmax_ties(run: Run) -> Any:
    """At T = 0 the lowest of the best ids wins, wherever they lie."""
    logits = torch.zeros(6, VOCAB)
    logits[1, [69, 40, 3]] = 1.0
    logits[2, [68, 69]] = 1.0
    logits[3, 1:] = 1.0
    logits[4, [31, 32, 63, 64]] = 5.0
    logits[5] = -torch.inf
    logits[5, [7, 50]] = -3.0
    given = [run.put(t) for t in (logits, torch.zeros(6), run.draw.wide_ids(6), torch.arange(6))]
    return run.ops.gumbel_argmax(*given)


@case("gumbel_argmax", "not_a_number", WIDE)
def _gumbel_argmax_nan(run: Run) -> Any:
    """NaN counts as −inf, so it is never drawn; a row of nothing else gives 0."""
    logits = torch.full((5, VOCAB), torch.nan)
    logits[0, 9], logits[1, 9], logits[2] = 1.0, -1e30, -torch.inf
    logits[3, ::2] = -torch.inf
    temperature = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    given = [run.put(t) for t in (logits, temperature, run.draw.wide_ids(5), torch.arange(5))]
    return run.ops.gumbel_argmax(*given)


@case("gumbel_argmax", "only_one_allowed", WIDE)
def _gumbel_argmax_masked(run: Run) -> Any:
    logits = torch.full((VOCAB, VOCAB), -torch.inf)
    logits.fill_diagonal_(-5.0)
    given = [logits, torch.ones(VOCAB), run.draw.wide_ids(VOCAB), torch.arange(VOCAB)]
    return run.ops.gumbel_argmax(*(run.put(t) for t in given))


@case("gumbel_argmax", "extreme_seeds_and_positions", WIDE)
def _gumbel_argmax_extremes(run: Run) -> Any:
    seed = EDGE.repeat_interleave(4)
    position = torch.tensor([0, (1 << 31) - 1, 1 << 32, 1 << 40]).repeat(len(EDGE))
    temperature = torch.ones(len(seed))
    logits = clear_winner(run.draw.wide(len(seed), VOCAB), temperature, seed, position)
    given = [run.put(t) for t in (logits, temperature, seed, position)]
    return run.ops.gumbel_argmax(*given)


for _vocab in (1, 3, 1025):

    @case("gumbel_argmax", f"vocabulary_of_{_vocab}", WIDE, given={"vocab": _vocab})
    def _gumbel_argmax_vocab(run: Run, vocab: int) -> Any:
        temperature, seed, position = sampling_rows(7), run.draw.wide_ids(7), torch.arange(7)
        logits = clear_winner(run.draw.wide(7, vocab), temperature, seed, position)
        given = [run.put(t) for t in (logits, temperature, seed, position)]
        return run.ops.gumbel_argmax(*given)


@by_rows("logprobs", WIDE)
def _logprobs(run: Run, rows: int) -> Any:
    chosen = run.put(run.draw.ids(VOCAB, rows))
    return run.ops.logprobs(run.put(run.draw.grid(rows, VOCAB)), 5, chosen)


@case("logprobs", "none_asked", WIDE, given={"k": 0})
@case("logprobs", "one_asked", WIDE, given={"k": 1})
@case("logprobs", "all_asked", WIDE, given={"k": VOCAB})
def _logprobs_of(run: Run, k: int) -> Any:
    chosen = run.put(torch.tensor([0, 69, 33]))
    return run.ops.logprobs(run.put(run.draw.grid(3, VOCAB)), k, chosen)


@case("logprobs", "ties_not_a_number_and_minus_infinity", WIDE)
def _logprobs_odd(run: Run) -> Any:
    """Equal values rank by id; what cannot be drawn has −inf and ranks last, lower id first."""
    logits = torch.zeros(4, 8)
    logits[1, [2, 5]], logits[1, 3], logits[1, 6] = 1.0, torch.nan, -torch.inf
    logits[2] = torch.tensor([3.0, 3, 3, 3, 3, 3, 3, 4])
    logits[3, :7] = -torch.inf
    return run.ops.logprobs(run.put(logits), 8, run.put(torch.tensor([7, 6, 6, 0])))


@case("accept_prefix", "no_drafts", WIDE, given={"gamma": 0, "rows": 3})
@case("accept_prefix", "no_rows", WIDE, given={"gamma": 3, "rows": 0})
@case("accept_prefix", "one_draft", WIDE, given={"gamma": 1, "rows": 70})
@case("accept_prefix", "many_drafts", WIDE, given={"gamma": 5, "rows": 70})
def _accept_prefix(run: Run, gamma: int, rows: int) -> Any:
    """Two ids only, so that drafts often agree, also behind a difference and past the length."""
    sampled, drafts = run.draw.ids(2, rows, 1 + gamma), run.draw.ids(2, rows, gamma)
    drafts[: rows // 3] = sampled[: rows // 3, :gamma]
    lengths = run.draw.ids(gamma + 1, rows)
    return run.ops.accept_prefix(*(run.put(t) for t in (sampled, drafts, lengths)))
