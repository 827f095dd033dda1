"""Cases of the ops that DeepSeek-V4.1 brought: block-scaled numbers, hyper-connections, Engram."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from deepinfer.ops.lowbit import TILE, BlockScaled
from deepinfer.ops.reference.engram import EngramHash, EngramParams
from deepinfer.ops.reference.hyper import HyperParams
from deepinfer.ops.reference.scaled import Kind, ScaledMoEParams
from deepinfer.testing.conformance.inputs import BOTH, WIDE, by_rows, case
from deepinfer.testing.conformance.kit import Run

F = TypeVar("F", bound=Callable[..., Any])
Storage = Literal["dense", "fp8", "fp4"]
STORAGES: tuple[Storage, ...] = ("dense", "fp8", "fp4")
KINDS: tuple[Kind, ...] = ("fp8", "mxfp4", "nvfp4")
LINEAR = ("scaled_linear", "linear")
GROUPED = ("grouped_scaled_linear", "grouped_linear")
BLOCK = ("scaled_moe_block",)
STREAMS = 4


def scaled_weight(run: Run, storage: Storage, shape: tuple[int, ...], *uses: str) -> Any:
    """A prepared weight [..., N, K], N a multiple of 32 unless dense or FP4, values about 1/8."""
    if storage == "dense":
        return run.weight(run.draw.normal(*shape, scale=0.15), *uses)
    *lead, outputs, inputs = shape
    if storage == "fp8":
        codes = run.draw.wide(*shape, scale=16.0).to(torch.float8_e4m3fn).view(torch.uint8)
        tiles = (*lead, -(-outputs // TILE), -(-inputs // TILE))
    else:
        codes = run.draw.ids(256, *lead, outputs, inputs // 2).to(torch.uint8)
        tiles = (*lead, outputs, inputs // TILE)
    around = 127 - (7 if storage == "fp8" else 5)
    scales = (run.draw.ids(3, *tiles) + around).to(torch.uint8)
    return run.ops.prepare(BlockScaled(run.place(codes), run.place(scales), storage), uses)


# --- scaled ------------------------------------------------------------------------------------


def each_kind(op: str, name: str, **marks: Any) -> Callable[[F], F]:
    """Declare a case for each kind of groups."""

    def declare(fn: F) -> F:
        for kind in KINDS:
            given = {"kind": kind, **marks}
            case(op, f"{name}_{kind}", given=given)(fn)
        return fn

    return declare


@each_kind("quantize", "no_rows", shape=(0, 96))
@each_kind("quantize", "one_group", shape=(1, 32))
@each_kind("quantize", "rows", shape=(70, 160))
@each_kind("quantize", "three_dimensions", shape=(3, 5, 64))
@each_kind("quantize", "tiny_values", shape=(7, 96), scale=1e-7)
@each_kind("quantize", "large_values", shape=(7, 96), scale=1e4)
@each_kind("quantize", "zeros", shape=(7, 96), scale=0.0)
def _quantize(run: Run, kind: Kind, shape: tuple[int, ...], scale: float = 1.0) -> Any:
    return run.ops.quantize(run.put(run.draw.normal(*shape, scale=scale)), kind)


@each_kind("quantize", "every_kind_of_value")
def _quantize_values(run: Run, kind: Kind) -> Any:
    return run.ops.quantize(run.put(edges(run)), kind)


def edges(run: Run) -> Tensor:
    """Ties, powers of two and a hair beside them, zeros of both signs, saturation, NaN, ∞."""
    steps = torch.arange(-128, 128).float()
    near = [2.0**e * (1 + d) for e in (-20, -3, 0, 9) for d in (-(2**-7), 0.0, 2.0**-7)]
    rows = [
        steps / 8,  # halves between the steps of every format
        steps * 1.75,
        steps.sign() * 0.0,
        torch.tensor(near).repeat(22)[:256],
        torch.tensor([1.0, -0.0, 3e38, 1e-38]).repeat_interleave(64),
        torch.tensor([1.0, torch.nan]).repeat_interleave(128),
        torch.tensor([-1.0, torch.inf]).repeat_interleave(128),
    ]
    return torch.stack(rows).to(run.dtype)


@each_kind("quantize", "rows_of_a_larger_tensor")
def _quantize_strided(run: Run, kind: Kind) -> Any:
    return run.ops.quantize(run.put(run.draw.normal(9, 192))[1:8, 64:160], kind)


@each_kind("pack_rows", "no_rows", shape=(0, 64))
@each_kind("pack_rows", "one_row", shape=(1, 64))
@each_kind("pack_rows", "rows", shape=(70, 96))
@each_kind("pack_rows", "tiny_values", shape=(7, 64), scale=1e-7)
@each_kind("pack_rows", "zeros", shape=(7, 64), scale=0.0)
def _pack_rows(run: Run, kind: Kind, shape: tuple[int, ...], scale: float = 1.0) -> Any:
    return run.ops.pack_rows(run.put(run.draw.normal(*shape, scale=scale)), kind)


@each_kind("pack_rows", "every_kind_of_number")
def _pack_values(run: Run, kind: Kind) -> Any:
    return run.ops.pack_rows(run.put(edges(run)[:5]), kind)


@each_kind("unpack_rows", "no_rows", rows=0)
@each_kind("unpack_rows", "one_row", rows=1)
@each_kind("unpack_rows", "rows", rows=70)
def _unpack_rows(run: Run, kind: Kind, rows: int) -> Any:
    return run.ops.unpack_rows(run.put(records(run, kind, rows)), kind, run.dtype)


def records(run: Run, kind: Kind, rows: int) -> Tensor:
    """uint8 records of 64 values: any code, NaN too, and scales about 1."""
    width, scales = {"fp8": (64, 2), "mxfp4": (32, 2), "nvfp4": (32, 4)}[kind]
    base, spread = (56 - 16, 32) if kind == "nvfp4" else (127 - 3, 7)
    codes, factors = run.draw.ids(256, rows, width), run.draw.ids(spread, rows, scales) + base
    return torch.cat((codes, factors), 1).to(torch.uint8)


@each_kind("unpack_rows", "what_was_packed")
def _unpack_packed(run: Run, kind: Kind) -> Any:
    """Reading gives what quantising gives."""
    x = run.put(run.draw.normal(33, 64))
    back = run.ops.unpack_rows(run.ops.pack_rows(x, kind), kind, run.dtype)
    return back, back == run.ops.quantize(x, kind)


for _storage in STORAGES:
    _given = {"storage": _storage}

    @by_rows("scaled_linear", prefix=_storage, given=_given)
    def _scaled_linear(run: Run, rows: int, storage: Storage) -> Any:
        weight = scaled_weight(run, storage, (96, 64), *LINEAR)
        return run.ops.scaled_linear(run.put(run.draw.normal(rows, 64)), weight)

    @case("scaled_linear", f"{_storage}_three_dimensions", given=_given)
    @case("scaled_linear", f"{_storage}_odd_outputs", given={**_given, "outputs": 70})
    @case("scaled_linear", f"{_storage}_long_sums", given={**_given, "inputs": 1024})
    @case("scaled_linear", f"{_storage}_many_outputs", given={**_given, "outputs": 600})
    @case("scaled_linear", f"{_storage}_wide", given={**_given, "out_dtype": torch.float32})
    def _scaled_linear_shapes(
        run: Run,
        storage: Storage,
        outputs: int = 33,
        inputs: int = 64,
        out_dtype: torch.dtype | None = None,
    ) -> Any:
        weight = scaled_weight(run, storage, (outputs, inputs), *LINEAR)
        x = run.put(run.draw.normal(2, 3, inputs))
        if out_dtype is None:
            return run.ops.scaled_linear(x, weight)
        return run.ops.scaled_linear(x, weight, out_dtype)

    @case("grouped_scaled_linear", f"{_storage}_no_rows", given={**_given, "counts": [0, 0]})
    @case("grouped_scaled_linear", f"{_storage}_idle", given={**_given, "counts": [3, 0, 40]})
    @case(
        "grouped_scaled_linear",
        f"{_storage}_rows_of_elsewhere",
        given={**_given, "counts": [3, 2], "spare": 4},
    )
    @case(
        "grouped_scaled_linear",
        f"{_storage}_wide",
        given={**_given, "counts": [3, 2], "out_dtype": torch.float32},
    )
    def _grouped_scaled_linear(
        run: Run,
        storage: Storage,
        counts: list[int],
        spare: int = 0,
        out_dtype: torch.dtype | None = None,
    ) -> Any:
        weight = scaled_weight(run, storage, (len(counts), 64, 96), *GROUPED)
        x = run.put(run.draw.normal(sum(counts) + spare, 96))
        offsets = run.put(torch.tensor([0, *counts]).cumsum(0))
        if out_dtype is None:
            return run.ops.grouped_scaled_linear(x, weight, offsets)
        return run.ops.grouped_scaled_linear(x, weight, offsets, out_dtype)

    @by_rows("scaled_moe", prefix=_storage, given=_given, optional="limit")
    def _scaled_moe(run: Run, rows: int, storage: Storage) -> Any:
        gate_up, down = scaled_experts(run, storage)
        ids, shares = run.draw.ids(5, rows, 2).int(), run.draw.wide(rows, 2).abs()
        x = run.put(run.draw.normal(rows, 64))
        return run.ops.scaled_moe(x, run.put(ids), run.put(shares), gate_up, down, 5, 10.0)

    @by_rows("scaled_moe_block", prefix=_storage, given=_given, optional="limit")
    def _scaled_moe_block(run: Run, rows: int, storage: Storage) -> Any:
        params = moe_params(run, storage)
        image = run.put(run.draw.ids(2, rows) == 1)
        return run.ops.scaled_moe_block(run.put(run.draw.normal(rows, 64)), image, params)


def scaled_experts(run: Run, storage: Storage, *block: str) -> tuple[Any, Any]:
    """Five experts of width 32 over 64 channels."""
    uses = (*block, "scaled_moe", *GROUPED)
    gate_up = scaled_weight(run, storage, (5, 2 * 32, 64), *uses)
    return gate_up, scaled_weight(run, storage, (5, 64, 32), *uses)


def moe_params(run: Run, storage: Storage, images: bool = True) -> ScaledMoEParams:
    """A router of two in five, and the experts."""
    gate_up, down = scaled_experts(run, storage, *BLOCK)
    return ScaledMoEParams(
        router=run.weight(run.draw.normal(5, 64, scale=0.3), *BLOCK, "linear", "route"),
        bias=run.put(run.draw.wide(5)),
        image_bias=run.put(run.draw.wide(5)) if images else None,
        gate_up=gate_up,
        down=down,
        shared_gate_up=scaled_weight(run, storage, (2 * 32, 64), *BLOCK, *LINEAR),
        shared_down=scaled_weight(run, storage, (64, 32), *BLOCK, *LINEAR),
        experts=5,
        chosen=2,
        scale=1.5,
        limit=2.0,
    )


@case("scaled_moe", "no_limit", given={"ids": [[4, 1], [0, 2], [4, 3]], "limit": None})
@case(
    "scaled_moe",
    "close_limit",
    given={"ids": [[4, 1], [0, 2], [4, 3]], "limit": 0.5},
    optional="limit",
)
@case("scaled_moe", "one_choice", given={"ids": [[4], [0], [4]]}, optional="limit")
@case(
    "scaled_moe", "experts_elsewhere", given={"ids": [[4, -1], [-1, -1], [7, 0]]}, optional="limit"
)
@case(
    "scaled_moe", "the_same_expert_twice", given={"ids": [[2, 2], [0, 1], [1, 0]]}, optional="limit"
)
def _scaled_moe_ids(run: Run, ids: list[list[int]], limit: float | None = 10.0) -> Any:
    gate_up, down = scaled_experts(run, "dense")
    chosen = run.put(torch.tensor(ids, dtype=torch.int32))
    shares = run.put(run.draw.wide(*chosen.shape).abs())
    x = run.put(run.draw.normal(3, 64))
    return run.ops.scaled_moe(x, chosen, shares, gate_up, down, 5, limit)


@case("scaled_moe_block", "no_image", given={"images": True}, optional="limit")
@case("scaled_moe_block", "no_image_bias", given={"images": False}, optional="limit")
def _scaled_moe_block_text(run: Run, images: bool) -> Any:
    params = moe_params(run, "dense", images)
    image = None if images else run.put(torch.ones(7, dtype=torch.bool))
    return run.ops.scaled_moe_block(run.put(run.draw.normal(7, 64)), image, params)


@by_rows("route", WIDE, prefix="bias_of_each_row")
def _route_row_bias(run: Run, rows: int) -> Any:
    logits, bias = run.put(run.draw.grid(rows, 8)), run.put(run.draw.wide(rows, 8))
    return run.ops.route(logits, bias, 3, "sqrtsoftplus", True, 1.5)


# --- hyper-connections -------------------------------------------------------------------------


def hyper_params(run: Run, width: int = 48) -> HyperParams:
    """A mix of four streams, and the norm behind it."""
    rows = (2 + STREAMS) * STREAMS
    uses = ("hyper_open", "hyper_mix", "linear")
    fn = run.draw.wide(rows, STREAMS * width, scale=(STREAMS * width) ** -0.5)
    return HyperParams(
        fn=run.weight(fn, *uses),
        scale=run.put(run.draw.wide(3)),
        base=run.put(run.draw.wide(rows)),
        iters=20,
        eps=1e-6,
        norm=run.put(run.draw.normal(width)),
        norm_eps=1e-20,
    )


@by_rows("hyper_mix")
def _hyper_mix(run: Run, rows: int) -> Any:
    return mix(run, rows, hyper_params(run))


@case("hyper_mix", "one_iteration", given={"iters": 1})
@case("hyper_mix", "tiny_values", given={"scale": 1e-8})
def _hyper_mix_more(run: Run, iters: int = 20, scale: float = 1.0) -> Any:
    return mix(run, 7, hyper_params(run)._replace(iters=iters), scale)


def mix(run: Run, rows: int, p: HyperParams, scale: float = 1.0) -> Any:
    x = run.put(run.draw.normal(rows, STREAMS, 48, scale=scale))
    return run.ops.hyper_mix(x, p.fn, p.scale, p.base, p.iters, p.eps, p.norm_eps)


@by_rows("hyper_collapse")
def _hyper_collapse(run: Run, rows: int) -> Any:
    x, pre = run.put(run.draw.normal(rows, STREAMS, 33)), run.put(run.draw.wide(rows, STREAMS))
    return run.ops.hyper_collapse(x, pre)


@case("hyper_collapse", "one_hot")
def _hyper_collapse_first(run: Run) -> Any:
    """What the first sublayer is given: the first stream as it is."""
    pre = run.put(torch.eye(STREAMS)[:1].expand(7, -1).contiguous())
    return run.ops.hyper_collapse(run.put(run.draw.normal(7, STREAMS, 33)), pre)


@by_rows("hyper_merge")
def _hyper_merge(run: Run, rows: int) -> Any:
    x, y = run.put(run.draw.normal(rows, STREAMS, 33)), run.put(run.draw.normal(rows, 33))
    post, comb = run.draw.wide(rows, STREAMS), run.draw.wide(rows, STREAMS, STREAMS)
    return run.ops.hyper_merge(x, y, run.put(post), run.put(comb))


@by_rows("hyper_open")
def _hyper_open(run: Run, rows: int) -> Any:
    x, pre = run.put(run.draw.normal(rows, STREAMS, 48)), run.put(run.draw.wide(rows, STREAMS))
    return run.ops.hyper_open(x, pre, hyper_params(run))


# --- Engram ------------------------------------------------------------------------------------


def engram_hash(run: Run, image: int = 9) -> EngramHash:
    """Two layers, N-grams up to four, two heads; products that pass 2^31."""
    primes = torch.tensor([101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157])
    flat = primes.view(2, 6)
    return EngramHash(
        token_map=run.put(run.draw.ids(40, 50)),
        multipliers=run.put(run.draw.ids(1 << 56, 2, 4) | 1),
        primes=run.put(primes.view(2, 3, 2)),
        offsets=run.put(flat.cumsum(1) - flat),
        pad=2,
        image=image,
    )


@by_rows("engram_rows", WIDE)
def _engram_rows(run: Run, rows: int) -> Any:
    tokens, before = run.put(run.draw.ids(50, rows)), run.put(run.draw.ids(50, rows, 3))
    return run.ops.engram_rows(tokens, before, engram_hash(run))


@case("engram_rows", "begin_of_the_text", WIDE, given={"before": [[-1, -1, -1], [4, -1, -1]]})
@case("engram_rows", "images", WIDE, given={"before": [[9, 3, 4], [3, 9, 4]]})
@case("engram_rows", "no_image_token", WIDE, given={"before": [[9, 3, 4], [3, 4, 9]], "image": -1})
@case("engram_rows", "longer_history", WIDE, given={"before": [[1, 2, 3, 4], [5, 6, 7, 8]]})
def _engram_rows_edges(run: Run, before: list[list[int]], image: int = 9) -> Any:
    """The second token is an image's, where there are any."""
    tokens, history = torch.tensor([3, 9]), torch.tensor(before)
    return run.ops.engram_rows(run.put(tokens), run.put(history), engram_hash(run, image))


@by_rows("engram_gate")
def _engram_gate(run: Run, rows: int) -> Any:
    active = run.put(run.draw.ids(4, rows) > 0)
    return gate(run, rows, 1.0, active)


@case("engram_gate", "all_active", given={"scale": 1.0})
@case("engram_gate", "zeros", given={"scale": 0.0})
@case("engram_gate", "tiny_values", given={"scale": 1e-6})
def _engram_gate_more(run: Run, scale: float) -> Any:
    return gate(run, 7, scale, None)


def gate(run: Run, rows: int, scale: float, active: Tensor | None) -> Any:
    x, keys = (run.put(run.draw.normal(rows, STREAMS, 48, scale=scale)) for _ in range(2))
    weights = (run.put(run.draw.normal(STREAMS, 48)) for _ in range(2))
    return run.ops.engram_gate(x, keys, run.put(run.draw.normal(rows, 48)), *weights, 1e-20, active)


for _storage in STORAGES[:2]:

    @by_rows("engram_block", BOTH, prefix=_storage, given={"storage": _storage})
    def _engram_block(run: Run, rows: int, storage: Storage) -> Any:
        params = engram_params(run, storage)
        x, read = run.draw.normal(rows, STREAMS, 32), run.draw.normal(rows, 96)
        active = run.put(run.draw.ids(4, rows) > 0)
        return run.ops.engram_block(run.put(x), run.put(read), active, params)


def engram_params(run: Run, storage: Storage) -> EngramParams:
    """Four streams of 32 channels, rows of 96."""
    kv = scaled_weight(run, storage, ((STREAMS + 1) * 32, 96), "engram_block", *LINEAR)
    asks, answers = (run.put(run.draw.normal(STREAMS, 32)) for _ in range(2))
    return EngramParams(kv, asks, answers, 1e-20)
