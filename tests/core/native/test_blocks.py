"""Layers and halves in one call against ops one by one: the same bits, whatever the family."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from deepinfer import native

if native.available() is None:
    from deepinfer.native.backend import NativeCPUBackend
    from deepinfer.native.blocks import FEW_ROWS

from deepinfer.api.backend import OpContext
from deepinfer.api.model import DeviceBatch
from deepinfer.ops.backend import build_ops
from deepinfer.ops.reference import blocks
from deepinfer.ops.reference.blocks import AttentionParams, LayerParams, MLPParams

HIDDEN, HEADS, KV_HEADS, DIM, INNER, PAGE = 96, 6, 2, 16, 176, 16
KINDS = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "int8": (torch.float32, "int8"),
}
FAMILIES = {"llama": {}, "qwen2": {"bias"}, "qwen3": {"norm"}, "window": {"window"}}
# requests of (query rows, cached tokens with these); one beyond a span of keys
STEPS = {
    1: [(1, 300)],
    2: [(1, 5), (1, 290)],
    7: [(1, 1), (4, 20), (0, 3), (2, 2)],
    33: [(33, 40)],
    200: [(60, 60), (1, 9), (139, 139)],
}


def op_set(kind: str, threads: int = 2):
    dtype, quantization = KINDS[kind]
    ctx = OpContext(
        dtype=dtype, device=torch.device("cpu"), num_threads=threads, page_size=PAGE,
        head_dim=DIM, quantization=quantization,
    )  # fmt: skip
    return build_ops(NativeCPUBackend(), ctx), dtype


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def attention_params(ops, dtype, family: set[str]) -> AttentionParams:
    wide = (HEADS + 2 * KV_HEADS) * DIM
    more = {}
    if "bias" in family:
        more |= {"qkv_bias": torch.randn(wide).to(dtype), "o_bias": torch.randn(HIDDEN).to(dtype)}
    if "norm" in family:
        more |= {n: torch.randn(DIM).to(dtype) for n in ("q_norm", "k_norm")} | {"head_eps": 1e-6}
    if "window" in family:
        more |= {"window": 9}
    return AttentionParams(
        torch.randn(HIDDEN).to(dtype),
        1e-5,
        ops.prepare((torch.randn(wide, HIDDEN) * 0.2).to(dtype), ("attention_block", "linear")),
        ops.prepare((torch.randn(HIDDEN, HEADS * DIM) * 0.2).to(dtype), ("linear",)),
        HEADS,
        KV_HEADS,
        DIM,
        **more,
    )


def step(ops, dtype, requests):
    """A batch, its caches and the table of angles; the last token writes nowhere."""
    rows = [rows for rows, _ in requests]
    pages = [-(-kv // PAGE) for _, kv in requests]
    order = torch.randperm(sum(pages) + 2)
    table = torch.full((len(requests), max(pages) + 1), 1 << 20, dtype=torch.int32)
    begin, slots, positions = 0, [], []
    for row, ((n, kv), count) in enumerate(zip(requests, pages, strict=True)):
        table[row, :count] = order[begin : begin + count].int()
        begin += count
        at = torch.arange(kv - n, kv)
        positions.append(at)
        slots.append(table[row, at // PAGE].long() * PAGE + at % PAGE)
    lengths = torch.tensor([kv for _, kv in requests])
    cu_q = torch.tensor([0, *rows]).cumsum(0).int()
    slot = torch.cat(slots)
    if len(slot) > 1:
        slot[-1] = -1
    batch = DeviceBatch(
        ids=torch.zeros_like(slot), positions=torch.cat(positions), row_of_token=slot,
        kv_slots=slot, attn=ops.plan_attention(table, lengths, cu_q, PAGE), logit_rows=slot[:0],
    )  # fmt: skip
    shape = (len(order), PAGE, KV_HEADS, DIM)
    return (
        batch,
        (torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)),
        torch.randn(400, DIM),
    )


@pytest.mark.parametrize("rows", STEPS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_block_has_the_bits_of_its_ops(isa, family, kind, rows) -> None:
    for threads in (2, 3) if rows < 10 else (2,):
        ops, dtype = op_set(kind, threads)
        params = attention_params(ops, dtype, FAMILIES[family])
        batch, kv, cos_sin = step(ops, dtype, STEPS[rows])
        x = torch.randn(rows, HIDDEN).to(dtype)
        for residual in (None, torch.randn(rows, HIDDEN).to(dtype)):
            caches = [tuple(c.clone() for c in kv) for _ in range(2)]
            got = ops.attention_block(x, residual, params, batch, caches[0], cos_sin)
            want = blocks.attention_block(ops, x, residual, params, batch, caches[1], cos_sin)
            assert all(map(same, got, want))
            assert all(map(same, caches[0], caches[1]))


@pytest.mark.parametrize("rows", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_mlp_block_has_the_bits_of_its_ops(isa, kind, rows) -> None:
    for threads in (2, 3) if rows < 10 else (2,):
        ops, dtype = op_set(kind, threads)
        gate_up = ops.prepare((torch.randn(2 * INNER, HIDDEN) * 0.2).to(dtype), ("linear",))
        down = ops.prepare((torch.randn(HIDDEN, INNER) * 0.2).to(dtype), ("linear",))
        x, residual = torch.randn(2, rows, HIDDEN).to(dtype)
        args = x, residual, torch.randn(HIDDEN).to(dtype), 1e-5, gate_up, down
        assert all(map(same, ops.mlp_block(*args), blocks.mlp_block(ops, *args)))


class Pool:
    """Caches of a few layers, as a pool gives them."""

    def __init__(self, layers) -> None:
        self.layers = layers

    def layer(self, index: int):
        return self.layers[index]


def decoder(ops, dtype, family: set[str], count: int = 3) -> list[LayerParams]:
    def weight(*shape: int):
        return ops.prepare((torch.randn(*shape) * 0.2).to(dtype), ("linear",))

    return [
        LayerParams(
            attention_params(ops, dtype, family),
            MLPParams(
                torch.randn(HIDDEN).to(dtype),
                1e-5,
                weight(2 * INNER, HIDDEN),
                weight(HIDDEN, INNER),
            ),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("rows", STEPS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_layers_have_the_bits_of_their_ops(isa, family, kind, rows) -> None:
    for threads in (1, 2, 3) if rows < 10 else (2,):
        ops, dtype = op_set(kind, threads)
        layers = decoder(ops, dtype, FAMILIES[family])
        batch, kv, cos_sin = step(ops, dtype, STEPS[rows])
        x = torch.randn(rows, HIDDEN).to(dtype)
        before = x.clone()
        pools = [Pool([tuple(c.clone() for c in kv) for _ in layers]) for _ in range(2)]
        got = ops.decoder_layers(x, layers, batch, pools[0], cos_sin)
        want = blocks.decoder_layers(ops, x, layers, batch, pools[1], cos_sin)
        assert same(got, want) and same(x, before)
        for mine, theirs in zip(pools[0].layers, pools[1].layers, strict=True):
            assert all(map(same, mine, theirs))


class Tapped:
    """Takes what is tapped; a :class:`deepinfer.api.model.Taps`."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers, self.hidden = layers, {}

    def put(self, layer: int, hidden: torch.Tensor) -> None:
        assert layer not in self.hidden, "put twice"
        self.hidden[layer] = hidden


TAPS = [(), (0,), (3,), (2, 0), (0, 1, 2, 3), (-1, 1, 3)]  # of four layers; −1 is not theirs


@pytest.mark.parametrize("rows", STEPS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tapped_rows_have_the_bits_of_their_ops(isa, family, kind, rows) -> None:
    """Result, caches and all that is tapped, and none of it changes when layers after it run."""
    ops, dtype = op_set(kind)
    layers = decoder(ops, dtype, FAMILIES[family], 4)
    batch, kv, cos_sin = step(ops, dtype, STEPS[rows])
    x = torch.randn(rows, HIDDEN).to(dtype)
    everything = Tapped((0, 1, 2, 3))
    pool = Pool([tuple(c.clone() for c in kv) for _ in layers])
    want = blocks.decoder_layers(ops, x, layers, batch, pool, cos_sin, everything)
    for wanted in TAPS:
        mine, taps = Pool([tuple(c.clone() for c in kv) for _ in layers]), Tapped(wanted)
        got = ops.decoder_layers(x, layers, batch, mine, cos_sin, taps)
        assert same(got, want)
        for caches, theirs in zip(mine.layers, pool.layers, strict=True):
            assert all(map(same, caches, theirs))
        assert sorted(taps.hidden) == sorted(layer for layer in wanted if layer >= 0)
        for layer, hidden in taps.hidden.items():
            assert same(hidden, everything.hidden[layer]), layer


def test_tapped_layers_are_one_native_call(monkeypatch) -> None:
    """Whatever is tapped; and nothing is handed to it where nothing is."""
    from deepinfer.native import _kernels

    calls = []
    kernel = _kernels.decoder_layers
    monkeypatch.setattr(_kernels, "decoder_layers", lambda *a: calls.append(a) or kernel(*a))
    ops, dtype = op_set("fp32")
    layers = decoder(ops, dtype, set(), 4)
    batch, kv, cos_sin = step(ops, dtype, [(1, 20)])
    for taps, places in ((None, 0), *((Tapped(t), len({*t} & {0, 1, 2})) for t in TAPS)):
        calls.clear()
        ops.decoder_layers(torch.randn(1, HIDDEN), layers, batch, Pool([kv] * 4), cos_sin, taps)
        (args,) = calls
        assert (args[11] is None) == (places == 0)


def test_rows_without_an_owner_are_as_in_the_ops() -> None:
    """Padding behind the last request: attention gives zeros there, in every layer."""
    ops, dtype = op_set("fp32")
    layers = decoder(ops, dtype, set())
    batch, kv, cos_sin = step(ops, dtype, [(1, 5), (1, 9)])
    pad = torch.tensor([0, 0])
    batch = dataclasses.replace(
        batch,
        positions=torch.cat((batch.positions, pad)),
        kv_slots=torch.cat((batch.kv_slots, pad - 1)),
    )
    x = torch.randn(4, HIDDEN)
    pools = [Pool([tuple(c.clone() for c in kv) for _ in layers]) for _ in range(2)]
    got = ops.decoder_layers(x, layers, batch, pools[0], cos_sin)
    assert same(got, blocks.decoder_layers(ops, x, layers, batch, pools[1], cos_sin))


def test_the_native_calls_were_taken(monkeypatch) -> None:
    """Few rows of a whole step are one call; more, and odd ones, are ops."""
    from deepinfer.native import _kernels

    calls = []
    for name in ("attention_block", "mlp_block", "decoder_layers"):
        kernel = getattr(_kernels, name)
        monkeypatch.setattr(
            _kernels, name, lambda *a, kernel=kernel, name=name: calls.append(name) or kernel(*a)
        )
    ops, dtype = op_set("fp32")
    params = attention_params(ops, dtype, {"norm", "bias"})
    for rows, taken in ((1, True), (FEW_ROWS, True), (FEW_ROWS + 1, False)):
        batch, kv, cos_sin = step(ops, dtype, [(rows, rows + 3)])
        ops.attention_block(torch.randn(rows, HIDDEN), None, params, batch, kv, cos_sin)
        assert calls == ["attention_block"] * taken
        calls.clear()
    gate_up = ops.prepare(torch.randn(2 * INNER, HIDDEN), ("mlp_block", "linear"))
    down = ops.prepare(torch.randn(HIDDEN, INNER), ("mlp_block", "linear"))
    for rows, taken in ((0, False), (1, True), (FEW_ROWS + 1, False)):
        ops.mlp_block(*torch.randn(2, rows, HIDDEN), None, 1e-5, gate_up, down)
        assert calls == ["mlp_block"] * taken
        calls.clear()
    layers = decoder(ops, dtype, {"norm", "bias"})
    batch, kv, cos_sin = step(ops, dtype, [(1, 20)])
    ops.decoder_layers(torch.randn(1, HIDDEN), layers, batch, Pool([kv] * 3), cos_sin)
    assert calls == ["decoder_layers"]


def test_wrong_steps_are_named() -> None:
    ops, dtype = op_set("fp32")
    params = attention_params(ops, dtype, set())
    batch, kv, cos_sin = step(ops, dtype, [(1, 20)])
    x = torch.randn(1, HIDDEN)
    bad = {
        "position": dataclasses.replace(batch, positions=torch.tensor([400])),
        "slot": dataclasses.replace(batch, kv_slots=torch.tensor([1 << 40])),
        "cu_q": dataclasses.replace(
            batch, attn=batch.attn._replace(cu_q=torch.tensor([0, 2]).int())
        ),
    }
    for word, wrong in bad.items():
        with pytest.raises(ValueError, match=word):
            ops.attention_block(x, None, params, wrong, kv, cos_sin)
