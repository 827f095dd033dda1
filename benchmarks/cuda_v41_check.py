"""DeepSeek-V4.1 on the GPU at hand: right, invariant, and how far from the floors.

    python benchmarks/cuda_v41_check.py [--parts ops,bits,golden,layers] [--json FILE]

``ops``: the conformance kit's cases of V4.1's ops against the references on the CPU.
``bits``: rows alone, in company and in any place, and weights as stored against dequantised ones.
``golden``: the recorded prompts of ``tests/data/deepseek-v41/a``, whole, chunked, by the engine.
``layers``: layers of released width with random weights, one of each kind, decode as CUDA graphs;
times beside floors (4.3 TB/s, 790 TFLOPS; weights as stored, every byte once).
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import triton

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "core" / "models" / "deepseek_v41")]
BANDWIDTH, FLOPS = 4.3e12, 790e12
CUDA, BF = torch.device("cuda"), torch.bfloat16
OPTIONS = argparse.Namespace()
SIZES = (1, 2, 7, 32, 64, 100, 256)
GROUPS = (
    "quantize,pack_rows,unpack_rows,route,permute,grouped_linear,moe",
    "scaled_linear,grouped_scaled_linear",
    "scaled_moe,scaled_moe_block",
    "hyper_mix,hyper_open,hyper_collapse,hyper_merge,engram_gate,engram_block,engram_rows",
    "latent_write,compress,select_sparse",
    "latent_attention",
    "latent_attention_block",
)


def say(*parts):
    print(*parts, flush=True)


def context(dtype, invariant=True):
    from deepinfer.api import OpContext

    return OpContext(dtype=dtype, device=CUDA, invariant=invariant, activation_dtype=dtype)


def op_set(dtype=BF):
    from deepinfer.ops.table import OpSet
    from deepinfer_backend_cuda.backend import CudaBackend

    at = context(dtype)
    return OpSet(CudaBackend().provide(at), "cuda", at)


# --- conformance -------------------------------------------------------------------------------


def cases(ops):
    """Of the kit, in this process: (how many ran, what is wrong)."""
    from deepinfer.testing.conformance import inputs_latent, inputs_v41  # noqa: F401
    from deepinfer.testing.conformance.compare import difference, tolerance
    from deepinfer.testing.conformance.inputs import CASES
    from deepinfer.testing.conformance.kit import DTYPES, Run, reference_run, tensors

    ran, wrong = 0, []
    for case in CASES:
        for dtype in case.dtypes if case.op in ops else ():
            ran += 1
            try:
                run = Run(op_set(DTYPES[dtype]), CUDA, dtype)
                got, want = tensors(case.call(run)), tensors(case.call(reference_run(dtype)))
                bound = tolerance(case.op, dtype)
                found = [difference(g, w, bound) for g, w in zip(got, want, strict=True)]
                found += [f"changed an input {shape}" for shape in run.changed()]
                wrong += [f"{case.op} {case.name} {dtype}: {f}" for f in found if f]
            except Exception as why:
                wrong.append(f"{case.op} {case.name} {dtype}: {why!r}"[:300])
    return {"ran": ran, "wrong": wrong}


def part_ops(seconds=170):
    """Every group in a process of its own, side by side: compilation is most of it."""
    running = []
    for group in GROUPS:
        out = tempfile.NamedTemporaryFile(suffix=".json", delete=False).name
        command = [sys.executable, "-u", __file__, "--of", group, "--json", out]
        running.append((group, out, subprocess.Popen(command)))
    begin, ran, wrong = time.time(), 0, []
    for group, out, process in running:
        try:
            process.wait(max(1, seconds - (time.time() - begin)))
            found = json.loads(Path(out).read_text())
            ran, wrong = ran + found["ran"], wrong + found["wrong"]
        except Exception as why:
            process.kill()
            wrong.append(f"{group}: {why!r}")
    return {"ran": ran, "wrong": wrong}


# --- bits --------------------------------------------------------------------------------------


def random_kept(n, k, kind, experts=()):
    """(weight as stored, the same bytes dequantised)."""
    from deepinfer.ops.lowbit import BlockScaled

    columns = k if kind == "fp8" else k // 2
    codes = torch.randint(0, 256, (*experts, n, columns), dtype=torch.uint8, device=CUDA)
    if kind == "fp8":
        codes = torch.where((codes & 0x7F) == 0x7F, 5, codes).to(torch.uint8)
    tiles = (*experts, -(-n // 32), k // 32) if kind == "fp8" else (*experts, n, k // 32)
    around = 111 if kind == "fp8" else 117
    scales = torch.randint(around, around + 5, tiles, dtype=torch.uint8, device=CUDA)
    return BlockScaled(codes, scales, kind)


def part_bits():
    """Names of what differs between a row alone and in company; empty if nothing does."""
    from deepinfer_backend_cuda import linear, scaled

    torch.manual_seed(0)
    ops, differ, compared = op_set(), [], 0
    most = max(SIZES)
    for kind, n, k in (("fp8", 1792, 5120), ("fp8", 5120, 8192), ("fp4", 512, 2304)):
        stored = random_kept(n, k, kind)
        w, dense = scaled.keep(stored, frozenset()), stored.dequantize(BF)
        same = torch.equal(scaled.decode(w), dense)
        compared += 1
        differ += [] if same else [f"decode {kind} {n}x{k}"]
        x = scaled.quantize(torch.randn(2048, k, device=CUDA, dtype=BF), "fp8")
        whole = linear.linear(x, dense)
        for m in (*SIZES, 600, 2048):
            compared += 1
            if not torch.equal(scaled.product(x[:m], w), whole[:m]):
                differ.append(f"product {kind} {n}x{k} M={m}")
        for bm, bn, warps in ((16, 64, 4), (16, 128, 4), (64, 128, 4), (128, 128, 8)):
            y = torch.empty_like(whole)
            tile = (bm, bn, warps, 3)
            scaled.launch_product(x, w.words, w.scales, y, (n, k), w.kind, tile)
            compared += 1
            if not torch.equal(y, whole):
                differ.append(f"product {kind} {n}x{k} tile {bm}x{bn}")
    for name, fn, rows in row_functions(ops, most):
        want = fn(*rows)
        for m in SIZES:
            for first in sorted({0, 1, most // 2 - m // 2, most - m}):
                if first + m > most:
                    continue
                compared += 1
                got = fn(*(r[first : first + m].contiguous() for r in rows))
                if not all(
                    torch.equal(g, w[first : first + m]) for g, w in zip(got, want, strict=True)
                ):
                    differ.append(f"{name} M={m} at {first}")
        order = torch.randperm(most, device=CUDA)
        compared += 1
        got = fn(*(r[order] for r in rows))
        if not all(torch.equal(g, w[order]) for g, w in zip(got, want, strict=True)):
            differ.append(f"{name} permuted")
    return {"compared": compared, "differ": differ}


def row_functions(ops, rows):
    """(name, function of rows, rows) at released widths; eight experts."""
    from deepinfer.ops.reference.hyper import HyperParams
    from deepinfer.ops.reference.latent import Window
    from deepinfer.ops.reference.scaled import ScaledMoEParams
    from deepinfer.ops.reference.sparse import Blocks

    def normal(*shape):
        return torch.randn(*shape, device=CUDA, dtype=BF)

    x = normal(rows, 5120)
    for kind in ("fp8", "mxfp4", "nvfp4"):
        yield f"quantize {kind}", lambda x, kind=kind: (ops.quantize(x, kind),), (x,)
        yield f"pack_rows {kind}", lambda x, kind=kind: (ops.pack_rows(x, kind),), (x[:, :512],)

    def kept(n, k, kind, *uses, lead=()):
        return ops.prepare(random_kept(n, k, kind, lead), uses)

    shape = ScaledMoEParams(
        router=normal(24, 5120) * 0.02,
        bias=torch.rand(24, device=CUDA),
        image_bias=torch.rand(24, device=CUDA),
        gate_up=kept(4608, 5120, "fp4", "scaled_moe_block", lead=(24,)),
        down=kept(5120, 2304, "fp4", "scaled_moe_block", lead=(24,)),
        shared_gate_up=kept(4608, 5120, "fp8", "scaled_moe_block"),
        shared_down=kept(5120, 2304, "fp8", "scaled_moe_block"),
        experts=24,
        chosen=6,
        scale=1.5,
        limit=10.0,
    )
    image = torch.rand(rows, device=CUDA) < 0.3
    yield "scaled_moe_block", lambda x, i: (ops.scaled_moe_block(x, i, shape),), (x, image)
    fn = ops.prepare(torch.randn(24, 20480, device=CUDA) * 0.01, ("hyper_open", "hyper_mix"))
    mix = HyperParams(
        fn,
        torch.rand(3, device=CUDA),
        torch.rand(24, device=CUDA),
        20,
        1e-6,
        normal(5120),
        1e-20,
    )

    def opened(x, pre):
        y, parts = ops.hyper_open(x, pre, mix)
        return (y, *parts)

    streams, pre = normal(rows, 4, 5120), torch.rand(rows, 4, device=CUDA)
    yield "hyper_open", opened, (streams, pre)
    comb = torch.rand(rows, 4, 4, device=CUDA)
    yield "hyper_merge", lambda *a: (ops.hyper_merge(*a),), (streams, x, pre, comb)
    texts = Texts(rows, [3000 + 7 * i for i in range(rows)])
    q = ops.quantize(normal(rows, 32, 128), "mxfp4")
    w = torch.randn(rows, 32, device=CUDA)

    def chosen(q, w, who):
        found = ops.select_sparse(q, w, texts.index[1], texts.batch(who), 1, 512, Blocks(2048, 8))
        again = ops.select_sparse(q, w, texts.index[1], texts.batch(who), 1, 512, None, found, 8)
        return found.entries, found.blocks, again.entries

    who = torch.arange(rows, device=CUDA)
    yield "select_sparse", chosen, (q, w, who)
    heads, own = normal(rows, 64, 512), ops.quantize(normal(rows, 512), "fp8")
    entries = (torch.rand(rows, 512, device=CUDA) * 3000).int()
    sink = torch.rand(64, device=CUDA)

    def attended(q, own, entries, who):
        at = texts.batch(who)
        window = Window(own, texts.ring, at, 128, False)
        args = (q, window, at, sink, 512**-0.5, texts.compressed[1], entries)
        return (ops.latent_attention(*args),)

    yield "latent_attention", attended, (heads, own, entries, who)


class Texts:
    """Texts of given lengths, their caches full of random records; a decode step of some of them,
    or the prefill of one.
    """

    page = 64

    def __init__(self, requests, lengths):
        self.lengths = torch.tensor(lengths, device=CUDA)
        wide = -(-max(lengths) // self.page)
        total = requests * wide
        self.table = torch.randperm(total, device=CUDA).int().view(requests, wide)
        self.ring = self._records(requests, 193, 528)
        self.compressed = {r: self._records(total, self.page // r, 288) for r in (1, 2)}
        self.index = {r: self._records(total, self.page // r, 68) for r in (1, 2)}
        self.open = torch.randn(requests, 2, 1024, device=CUDA)

    def _records(self, *shape):
        """Bytes that are no NaN of any format, with scales that leave values of about one."""
        found = torch.randint(90, 120, shape, dtype=torch.uint8, device=CUDA)
        if shape[-1] == 288:  # E4M3 scales behind 256 bytes of values
            found[..., 256:] = torch.randint(24, 40, (1,), dtype=torch.uint8, device=CUDA)
        return found

    def tensor(self, group, layer):
        if group == "window":
            return self.ring
        if group == "open":
            return self.open
        kind, ratio = group.split("-r")
        return (self.compressed if kind == "compressed" else self.index)[int(ratio)]

    def batch(self, who):
        return self._batch(who, self.lengths[who] - 1, 1)

    def prefill(self, tokens):
        who = torch.zeros(1, dtype=torch.int64, device=CUDA)
        return self._batch(who, torch.zeros_like(who), tokens)

    def _batch(self, who, starts, each):
        from deepinfer.api.model import DeviceBatch, StepRequests

        count = len(who)
        row = torch.arange(count, device=CUDA).repeat_interleave(each)
        position = starts[row] + torch.arange(each, device=CUDA).repeat(count)
        table = self.table[who]
        slots = table[row, position // self.page].long() * self.page + position % self.page
        return DeviceBatch(
            ids=row,
            positions=position,
            row_of_token=row,
            kv_slots=slots,
            attn=None,
            logit_rows=row,
            requests=StepRequests(
                cu_q=(torch.arange(count + 1, device=CUDA) * each).int(),
                starts=starts,
                block_table=table,
                blocks=who,
                floors=torch.zeros_like(who),
            ),
        )


# --- golden ------------------------------------------------------------------------------------


def part_golden():
    """The recorded prompts: shares of rows within bounds, and the engine's ids."""
    found = {}
    for mode in ("f32", "bf16"):
        for dequantize in (False, True):
            try:
                name = f"{mode}{' dequantised' if dequantize else ''}"
                found[name] = golden_model(mode, dequantize)
                say(name, json.dumps(found[name]))
            except Exception:
                traceback.print_exc()
                found[mode] = "failed: " + traceback.format_exc()[-600:]
    try:
        found["engine"] = golden_engine()
        say("engine", json.dumps(found["engine"]))
    except Exception:
        traceback.print_exc()
        found["engine"] = "failed: " + traceback.format_exc()[-600:]
    return found


def golden_model(mode, dequantize):
    import dataclasses

    import v41_harness as harness
    from deepinfer.models.weights import LoadPlan, load_weights
    from deepinfer.parallel import single
    from deepinfer.worker.kvpool import KVPool

    golden = harness.Golden(ROOT / "tests" / "data" / "deepseek-v41" / "a")
    dtype = harness.DTYPES[mode]
    rig = harness.Rig.__new__(harness.Rig)
    rig.golden, rig.config, rig.dtype, rig.ops = golden, golden.config, dtype, op_set(dtype)
    rig.model = golden.adapter.build(rig.config, rig.ops, single())
    load_weights(
        rig.model, golden.adapter.weights(rig.config), golden.checkpoint, rig.ops, dtype,
        plan=LoadPlan(known=golden.adapter.unread, dequantize=dequantize),
    )  # fmt: skip

    class Play(harness.Play):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            requests = len(self.texts)
            self.pool = KVPool(self.spec, self.table.numel(), self.page, dtype, CUDA, requests)

        def batch(self, *args, **more):
            at = super().batch(*args, **more)
            moved = {
                f.name: getattr(at, f.name).to(CUDA)
                for f in dataclasses.fields(at)
                if isinstance(getattr(at, f.name), torch.Tensor)
            }
            there = {
                f.name: getattr(at.requests, f.name).to(CUDA)
                for f in dataclasses.fields(at.requests)
            }
            return dataclasses.replace(
                at, **moved, requests=dataclasses.replace(at.requests, **there)
            )

    out, rows, close = {}, 0, 0
    for prompt in golden.prompts(mode, 200):
        whole = Play(rig, [golden[f"{prompt}/ids"]]).logits([(0, int(prompt[1:]))])
        chunks = Play(rig, [golden[f"{prompt}/ids"]]).chunks(7)
        errors = harness.row_errors(golden, f"{prompt}/{mode}", whole.cpu())
        ids = golden[f"{prompt}/{mode}/top_ids"].long()
        gap = (whole.cpu().gather(1, ids) - golden[f"{prompt}/{mode}/top_values"]).abs().mean()
        top = (whole.argmax(1).cpu() == ids[:, 0]).float().mean()
        out[prompt] = {
            "rows_within_1e-3": float((errors <= 1e-3).float().mean()),
            "mean_error": float(gap),
            "top1": float(top),
            "chunks_equal": bool(torch.equal(whole, chunks)),
        }
        if int(prompt[1:]) <= 33:
            rows, close = rows + len(errors), close + int((errors <= 1e-3).sum())
    out["short_rows_within_1e-3"] = close / max(rows, 1)
    return out


def golden_engine():
    import numpy as np
    from deepinfer import LLM, SamplingParams
    from safetensors.torch import load_file

    folder = ROOT / "tests" / "data" / "deepseek-v41" / "a"
    arrays = load_file(folder / "golden.safetensors")
    names = ("p31", "p33", "p200")
    prompts = [arrays[f"{p}/ids"].tolist() for p in names]
    found = {}

    def ask(llm, prompts, count):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0)
        given = [{"prompt_token_ids": p} for p in prompts]
        answers = []
        for answer in llm.generate(given, params, use_tqdm=False):
            one = answer.outputs[0]
            ids = list(one.token_ids)
            scores = [step[i].logprob for step, i in zip(one.logprobs, ids, strict=True)]
            answers.append((ids, np.array(scores, np.float32).view(np.int32).tolist()))
        return answers

    for dtype in ("float32", "bfloat16"):
        options = {"model": str(folder), "backend": "cuda", "dtype": dtype, "batch_invariant": True}
        with LLM(**options, enable_prefix_caching=False) as llm:
            alone = [ask(llm, [p], 25)[0] for p in prompts]
        with LLM(**options, max_num_batched_tokens=64, max_num_seqs=8) as llm:
            together = ask(llm, prompts * 4, 25)
            cached = ask(llm, prompts, 25)
        want = [arrays[f"{p}/f32/decode/tokens"].tolist() for p in names]
        found[dtype] = {
            "recorded": [a[0] == w for a, w in zip(alone, want, strict=True)],
            "together_equal": together == alone * 4,
            "cached_equal": cached == alone,
        }
        say(dtype, json.dumps(found[dtype]))
    return found


# --- layers ------------------------------------------------------------------------------------

KINDS = {
    "window": 0,
    "engram": 1,
    "source r2": 2,
    "reuse r2": 3,
    "source r1": 20,
    "reuse r1": 21,
    "reindex": 24,
}


def build_layers():
    """A layer of each kind; all share one set of experts, which is larger than any cache."""
    from deepinfer.models.deepseek_v41.layer import Layer
    from deepinfer.models.registry import adapter_for
    from deepinfer.models.weights import join
    from deepinfer.testing.tiny_v41 import GeneratedCheckpoint, full_width_config, write_config

    ops = op_set()
    with tempfile.TemporaryDirectory() as folder:
        raw = write_config(Path(folder), full_width_config(40))
        adapter = adapter_for(raw["architectures"][0])
        config = adapter.config(raw)
        rules = list(adapter.weights(config))
    checkpoint = GeneratedCheckpoint(raw, 0, CUDA)
    shared = {}
    layers = {}
    for name, number in KINDS.items():
        layer = Layer(config, number, ops)
        for rule in rules:
            prefix = f"layers.{number}."
            if not rule.parameter.startswith(prefix) or rule.stored == "table":
                continue
            parameter = rule.parameter.removeprefix(prefix)
            if rule.stored == "fp4":
                if parameter not in shared:
                    experts, n, k = rule.view
                    stored = random_kept(n, k, "fp4", (experts,))
                    shared[parameter] = ops.prepare(stored, rule.uses)
                value = shared[parameter]
            else:
                value = join(rule, checkpoint, BF, dequantize=False, device=CUDA)
                value = ops.prepare(value, rule.uses)
            if parameter.endswith("moe.bias"):
                value = value * 0  # the router of random weights is to use its experts alike
            at = layer
            *path, last = parameter.split(".")
            for step in path:
                at = getattr(at, step)
            setattr(at, last, value)
        layers[name] = layer
    return config, ops, layers


def flow_of(config, layer, batch, texts, streams):
    from deepinfer.models.deepseek_v41.layer import Flow
    from deepinfer.ops.reference.sparse import Picks

    tokens = len(batch.ids)
    visible = (batch.positions + 1) // max(config.ratios[layer], 1)
    entries = (torch.rand(tokens, config.index_topk, device=CUDA) * visible[:, None]).int()
    entries = entries.sort(1).values
    blocks = None
    if config.ratios[layer] == 1:
        kept, size = config.candidates[1]
        most = torch.clamp(visible // size, min=1)
        at = torch.arange(kept, device=CUDA)[None, :]
        blocks = torch.where(at < most[:, None], at * torch.clamp(most // kept, min=1)[:, None], -1)
        blocks = blocks.int()
    pre = torch.rand(tokens, 4, device=CUDA)
    image = torch.zeros(tokens, dtype=torch.bool, device=CUDA)
    return Flow(batch, streams[:tokens], pre, Picks(entries, blocks), image)


def floor_us(config, layer, tokens, context, prefill, hit):
    """(µs, of which experts): each op's larger time of bytes as stored and operations."""
    hidden, wide, inner = 5120, 32768, 2304
    parts = {}

    def need(name, nbytes, flops):
        parts[name] = 1e6 * max(nbytes / BANDWIDTH, flops / FLOPS)

    def product(name, n, k, bytes_each=1.0):
        need(name, n * k * bytes_each + tokens * (n + k) * 2, 2.0 * tokens * n * k)

    product("q_kv", 1792, hidden)
    product("q", wide, 1280)
    need("out_a", 8192 * 4096 + tokens * (wide + 8192) * 2, 2.0 * tokens * 8192 * 4096)
    product("out_b", hidden, 8192)
    product("shared", 3 * inner, hidden)
    product("router", 384, hidden, 2)
    need("hyper", tokens * 4 * hidden * 2 * 5 + 2 * 24 * 20480 * 4, 2 * 2.0 * tokens * 24 * 20480)
    need("experts", hit * 3 * inner * hidden * 0.53125, tokens * 6 * 2.0 * 3 * inner * hidden)
    ratio = config.ratios[layer]
    mean = context / 2 if prefill else context
    slots = min(128, mean) + (min(512, mean / ratio) if ratio else 0)
    gathered = 0 if prefill else tokens * slots * 400
    need("attention", gathered, 4.0 * tokens * 64 * 512 * slots)
    if layer in config.index_sources:
        entries = mean / ratio
        if not prefill and layer != config.last_source and ratio == 1:
            entries = min(entries, 16384)
        product("index q", 4096, 1280)
        nbytes = (1 if prefill else tokens) * entries * 68
        need("index", nbytes, 2.0 * tokens * entries * 32 * 128)
    if layer in config.kv_sources:
        product("compress", 512 * ratio, hidden, 2)
    if layer == 1:
        product("engram", 25600, 6144)
    return sum(parts.values()), parts["experts"]


def timed(fn, repeat, warm=2):
    for _ in range(warm):
        fn()
    found = []
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        fn()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return 1e3 * statistics.median(found)


def graphed(fn):
    """A replay; a wait for the device inside would end the capture with an error."""
    side = torch.cuda.Stream()
    fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        fn()
    return graph.replay


def profile(fn, count=14):
    """[(kernel, µs)] of one run, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    fn()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        fn()
        torch.cuda.synchronize()
    rows = [(e.key[:60], round(e.self_device_time_total, 1), e.count) for e in found.key_averages()]
    return sorted(rows, key=lambda r: -r[1])[:count]


def part_layers():
    begin, budget = time.time(), OPTIONS.seconds
    config, ops, layers = build_layers()
    torch.cuda.synchronize()
    say(f"layers made in {time.time() - begin:.0f} s")
    from deepinfer.models.deepseek_v41.rotary import frequencies, table

    streams = torch.randn(8192, 4, 5120, device=CUDA, dtype=BF)
    found = []
    engram = torch.randn(8192, 6144, device=CUDA, dtype=BF)
    with torch.inference_mode():
        for tokens, length, prefill in (
            (64, 4096, False),
            (8192, 8192, True),
            (64, 65536, False),
            (1, 4096, False),
            (256, 4096, False),
            (1, 65536, False),
            (256, 65536, False),
        ):
            texts = Texts(1 if prefill else tokens, [length] * (1 if prefill else tokens))
            who = torch.arange(tokens, device=CUDA)
            batch = texts.prefill(tokens) if prefill else texts.batch(who)
            angles = {
                0: table(frequencies(64, config.theta), length + 1, CUDA),
                1: table(frequencies(64, config.compress_theta, config.yarn), length + 1, CUDA),
            }
            for name, number in KINDS.items():
                if time.time() - begin > budget:
                    say("no time left for", tokens, length, name)
                    continue
                layer = layers[name]
                flow = flow_of(config, number, batch, texts, streams)
                cos_sin = angles[int(config.ratios[number] > 0)]

                def run(layer=layer, flow=flow, cos_sin=cos_sin, tokens=tokens, texts=texts):
                    if layer.engram is not None:
                        x = ops.engram_block(
                            flow.x, engram[:tokens], ~flow.image, layer.engram.params()
                        )
                        flow = type(flow)(flow.batch, x, flow.pre, flow.picks, flow.image)
                    return layer(flow, texts, cos_sin, False)

                try:
                    line = measure(config, name, number, run, tokens, length, prefill, ops, layer)
                    if (tokens, length) in ((64, 4096), (8192, 8192)) and name in (
                        "source r1", "reuse r2", "engram",
                    ):  # fmt: skip
                        line["kernels"] = profile(run)
                except Exception:
                    line = {"kind": name, "tokens": tokens, "context": length}
                    line["failed"] = traceback.format_exc()[-700:]
                found.append(line)
                say(json.dumps(line))
            del texts, batch
            torch.cuda.empty_cache()
    return found


def measure(config, name, number, run, tokens, length, prefill, ops, layer):
    heard = []
    real = ops.scaled_moe_block

    def listening(x, image, params):
        heard.append(x)
        return real(x, image, params)

    ops.scaled_moe_block = listening
    run()
    ops.scaled_moe_block = real
    params = layer.moe.params()
    logits = ops.linear(heard[0], params.router, None, torch.float32)
    chosen, _ = ops.route(logits, params.bias, params.chosen, params.score, True, params.scale)
    hit = len(chosen.unique())
    least, experts = floor_us(config, number, tokens, length, prefill, hit)
    us = timed(run, 5, 1) if prefill else timed(graphed(run), 15)
    return {
        "kind": name,
        "mode": "prefill" if prefill else "decode",
        "tokens": tokens,
        "context": length,
        "us": round(us, 1),
        "floor_us": round(least, 1),
        "of_floor": round(least / us, 3),
        "floor_of_experts_us": round(experts, 1),
        "experts_hit": hit,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default="bits,layers,golden,ops")
    parser.add_argument("--of", default="")
    parser.add_argument("--json", default="")
    parser.add_argument("--seconds", type=float, default=200, help="for the layers")
    options = parser.parse_args(namespace=OPTIONS)
    if options.of:
        with torch.inference_mode():
            Path(options.json).write_text(json.dumps(cases(set(options.of.split(",")))))
        return
    found = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    for part in options.parts.split(","):
        begin = time.time()
        try:
            with torch.inference_mode():
                found[part] = globals()[f"part_{part}"]()
        except Exception:
            found[part] = "failed: " + traceback.format_exc()[-1500:]
        said = json.dumps(found[part])
        say(f"== {part}, {time.time() - begin:.0f} s:", said if part != "layers" else "")
        if options.json:
            Path(options.json).write_text(json.dumps(found, indent=1))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
