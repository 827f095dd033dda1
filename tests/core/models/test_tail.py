"""The last layer of the rows that are looked at alone: the bits that it has when it runs all."""

import dataclasses
import importlib.util

import pytest
import torch
from deepinfer.api.backend import Impl, OpContext
from deepinfer.api.model import DeviceBatch
from deepinfer.native.backend import NativeCPUBackend
from deepinfer.ops.backend import ReferenceBackend, build_ops
from deepinfer.testing.textbook import Pools, TextbookRunner
from deepinfer.testing.tiny import FAMILIES, VOCAB, write_tiny_checkpoint

PAGE, SIZES, DRAFTS = 4, (6, 1, 19, 4, 5), {3: 3}  # the fourth decodes, with three drafts
SLOW = ("llama", "mistral", "qwen3", "qwen3_moe")  # of the references
BACKENDS = {"reference": ReferenceBackend, "cpu": NativeCPUBackend}


@pytest.fixture(scope="module", params=FAMILIES)
def path(request, tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp(request.param), request.param, seed=1)


def textbook(path, backend, dtype):
    if backend == "cpu" and importlib.util.find_spec("deepinfer.native._kernels") is None:
        pytest.skip("the native kernels are not built")
    ctx = OpContext(dtype=dtype, device=torch.device("cpu"), page_size=PAGE, invariant=True)
    return TextbookRunner(path, BACKENDS[backend](), ctx, max_model_len=128)


def one_step(ours, emits, before=7):
    """Prompts behind ``before`` tokens of each; (batch, its tail, pages in use)."""
    n, each = len(SIZES), -(-(before + max(SIZES)) // PAGE)
    table = torch.arange(n * each, dtype=torch.int32).view(n, each)
    counts = torch.tensor(SIZES)
    rows, offset = ours.ops.expand_rows(torch.zeros(n, dtype=torch.int64), counts, sum(SIZES))
    positions = before + offset
    ends = counts.cumsum(0)
    lines = [(1 + DRAFTS.get(i, 0)) * (i in emits) for i in range(n)]
    chosen = [
        end - 1 - j for end, k in zip(ends.tolist(), lines, strict=True) for j in reversed(range(k))
    ]
    pages = table.long()[rows, positions // PAGE]

    def plan(q):
        cu_q = torch.tensor([0, *torch.tensor(q).cumsum(0).tolist()], dtype=torch.int32)
        return ours.ops.plan_attention(table, before + counts, cu_q, PAGE)

    batch = DeviceBatch(
        ids=torch.randint(3, VOCAB, (sum(SIZES),), generator=torch.Generator().manual_seed(2)),
        positions=positions,
        row_of_token=rows,
        kv_slots=pages * PAGE + positions % PAGE,
        attn=plan(SIZES),
        logit_rows=torch.tensor(chosen, dtype=torch.int64),
    )
    return batch, plan(lines), n * each


class Seen:
    def __init__(self, *layers):
        self.layers, self.rows = layers, {}

    def put(self, layer, hidden):
        self.rows[layer] = hidden.clone()


def filled(ours, pages):
    """A cache of numbers, the same in every call."""
    pools, g = Pools(ours.config, pages, ours.ctx), torch.Generator().manual_seed(4)
    for layer in range(ours.config.layers):
        for cache in pools.layer(layer):
            cache.copy_(torch.randn(cache.shape, generator=g))
    return pools


def same(one, two):
    """Bit for bit."""
    return one.dtype == two.dtype and torch.equal(
        *(t.contiguous().view(torch.int16) for t in (one, two))
    )


@pytest.mark.parametrize(
    "backend, dtype",
    [("reference", torch.float32), ("cpu", torch.float32), ("cpu", torch.bfloat16)],
    ids=["reference", "cpu", "cpu-bfloat16"],
)
def test_the_tail_has_the_bits_of_all_rows(path, backend, dtype):
    if backend == "reference" and path.name[:-1] not in SLOW:
        pytest.skip("the slow one runs four families")
    ours = textbook(path, backend, dtype)
    batch, _, pages = one_step(ours, ())
    last, pool, outer = ours.config.layers - 1, filled(ours, pages), Seen(-1, 0)
    with torch.inference_mode():
        whole = ours.model.forward(batch, pool, outer)
    for emits in (0, 2, 3, 4), (1, 3), ():
        batch, tail, _ = one_step(ours, emits)
        batch, mine, inner = dataclasses.replace(batch, tail=tail), filled(ours, pages), Seen(-1, 0)
        with torch.inference_mode():
            got = ours.model.forward(batch, mine, inner)
        assert got.shape == (len(batch.logit_rows), whole.shape[1])
        assert same(got, whole[batch.logit_rows])
        assert set(inner.rows) == {-1, 0}
        assert all(same(rows, outer.rows[layer]) for layer, rows in inner.rows.items())
        for layer in range(last + 1):
            for one, two in zip(pool.layer(layer), mine.layer(layer), strict=True):
                assert same(one, two), f"the cache of layer {layer}"
    every = Seen(last)
    with torch.inference_mode():
        assert same(ours.model.forward(batch, filled(ours, pages), every), whole)
    assert same(every.rows[last], whole), "who taps the last layer sees all of it"


class Fused(ReferenceBackend):
    """A fused block with a layout of its own, or with other bits than its parts."""

    def __init__(self, way):
        self.way = way

    def provide(self, ctx):
        plain = build_ops(ReferenceBackend(), ctx)

        def block(x, residual, params, *rest):
            params = params._replace(qkv=params.qkv.t(), o=params.o.t())
            return plain.attention_block(x, residual, params, *rest)

        def wide(x, residual, *rest):
            y, total = plain.attention_block(x, residual, *rest)
            return torch.nextafter(y, torch.ones_like(y)), total

        def layers(*args):
            return plain.decoder_layers(*args) + 1.0

        ways = {
            "its own layout": {"attention_block": Impl(block, lambda w, _: w.t().contiguous())},
            "other bits": {"attention_block": Impl(wide)},
            "other layers": {"decoder_layers": Impl(layers)},
        }
        return {**super().provide(ctx), **ways[self.way]}


@pytest.mark.parametrize("way", ["its own layout", "other bits", "other layers"])
def test_a_backend_whose_blocks_are_not_their_parts_runs_all_rows(tmp_path, way):
    path = write_tiny_checkpoint(tmp_path, "llama", seed=1)
    ctx = OpContext(dtype=torch.float32, device=torch.device("cpu"), page_size=PAGE)
    ours = TextbookRunner(path, Fused(way), ctx, max_model_len=128)
    batch, tail, pages = one_step(ours, (0, 2))
    with torch.inference_mode():
        whole = ours.model.forward(batch, filled(ours, pages))
        got = ours.model.forward(dataclasses.replace(batch, tail=tail), filled(ours, pages))
    assert same(got, whole)


def test_ops_never_see_a_step_without_lines(tmp_path):
    ours = textbook(write_tiny_checkpoint(tmp_path, "qwen3", seed=1), "reference", torch.float32)
    batch, tail, pages = one_step(ours, ())
    seen, real = [], ours.ops.attention

    def attention(q, *rest):
        seen.append(len(q))
        return real(q, *rest)

    ours.ops.attention = attention
    with torch.inference_mode():
        ours.model.forward(dataclasses.replace(batch, tail=tail), filled(ours, pages))
    assert seen == [len(batch.ids)] * (ours.config.layers - 1)


def test_a_single_layer_is_the_last(tmp_path):
    path = write_tiny_checkpoint(tmp_path, "llama", seed=1, overrides={"num_hidden_layers": 1})
    ours = textbook(path, "reference", torch.float32)
    batch, tail, pages = one_step(ours, (0, 2))
    with torch.inference_mode():
        whole = ours.model.forward(batch, filled(ours, pages))
        got = ours.model.forward(dataclasses.replace(batch, tail=tail), filled(ours, pages))
    assert same(got, whole[batch.logit_rows])


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_an_engine_says_what_it_says_in_small_chunks(tmp_path, monkeypatch, family):
    from deepinfer import LLM, SamplingParams
    from deepinfer.models.llama import DecoderLayer

    path, right, cut = write_tiny_checkpoint(tmp_path, family), DecoderLayer.tail, []

    def tail(layer, x, *rest):
        cut.append(len(x))
        return right(layer, x, *rest)

    monkeypatch.setattr(DecoderLayer, "tail", tail)
    prompts = [{"prompt_token_ids": list(range(5 + i, 45 + 9 * i))} for i in range(7)]
    params = [
        SamplingParams(
            temperature=i % 2,
            seed=i,
            max_tokens=6,
            logprobs=2,
            prompt_logprobs=1 if i == 5 else None,
        )
        for i in range(7)
    ]
    found, how = [], {"kv_cache_memory": "16MiB", "max_model_len": 160, "batch_invariant": True}
    for most in (32, 48, 400):
        with LLM(str(path), max_num_batched_tokens=most, max_num_seqs=5, **how) as llm:
            outs = llm.generate(prompts, params)
        found.append(
            [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outs]
        )
        cut, seen = cut[:0], list(cut)
        assert bool(seen) == (most > 32) and min(seen, default=33) > 32
    assert found[0] == found[1] == found[2]
