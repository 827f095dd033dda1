"""What ``deepinfer-backend-cuda`` does on the GPU at hand: bits, texts, times beside their floors.

    python benchmarks/cuda_check.py [--parts ops,step,text,determinism] [--model PATH] [--json FILE]

``ops``: each kernel of an 8B decoder beside torch's own and beside the bytes it must move.
``step``: whole steps of an 8B decoder with random weights through the backend's ``decoder_layers``.
``bits``: rows alone, in company and replayed are equal bit for bit.
``text``: SmolLM2's recorded greedy ids (needs ``--model``, the demo's GGUF file, and the clone).
Numbers are medians of CUDA event times; inputs are random, and weights are larger than the cache.
"""

# ruff: noqa: B023  (what is timed runs before the loop goes on)
from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from deepinfer.api.model import DeviceBatch
from deepinfer.ops.reference.blocks import AttentionParams, LayerParams, MLPParams
from deepinfer_backend_cuda import hopper, linear, rows
from deepinfer_backend_cuda.attention import attention, plan_attention
from deepinfer_backend_cuda.layers import Layers

BANDWIDTH, FLOPS = 4.3e12, 790e12  # measured on an H200: reads and writes; bf16 products
H, INNER, LAYERS, HQ, HKV, D, V, PAGE = 4096, 14336, 32, 32, 8, 128, 128256, 64
DEVICE = torch.device("cuda")
BF = torch.bfloat16


def timed(fn, repeat=20, warm=3):
    """Median milliseconds of ``fn`` on the device."""
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
    return statistics.median(found)


def graphed(calls):
    """The calls as one graph: launch gaps as in a decode step, none of Python's time."""
    side = torch.cuda.Stream()
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for call in calls:
            call()
    return graph.replay


def weight(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=BF) * 0.02


def caches(requests, context):
    """(k, v, block table, lengths) of one layer, pages permuted."""
    pages = -(-context // PAGE)
    k, v = (weight(requests * pages, PAGE, HKV, D) * 50 for _ in range(2))
    table = torch.randperm(requests * pages, device=DEVICE).int().view(requests, pages)
    lengths = torch.full((requests,), context, device=DEVICE, dtype=torch.int64)
    return k, v, table, lengths


def floor(nbytes, flops=0.0):
    """Milliseconds below which no version runs."""
    return 1e3 * max(nbytes / BANDWIDTH, flops / FLOPS)


def report(name, mine, other, least):
    line = {"name": name, "ms": mine, "floor_ms": least, "of_floor": least / mine}
    if other is not None:
        line |= {"torch_ms": other, "torch_over_mine": other / mine}
    print(json.dumps({k: round(x, 4) if isinstance(x, float) else x for k, x in line.items()}))
    sys.stdout.flush()
    return line


def products():
    """The four products of a layer, eight weights in turn so that none is cached."""
    found = []
    for name, n, k in (
        ("qkv", 6144, H),
        ("o", H, H),
        ("gate_up", 2 * INNER, H),
        ("down", H, INNER),
    ):
        weights = [weight(n, k) for _ in range(8)]
        for m in (1, 64, 256, 8192):
            x = weight(m, k) * 50
            some = weights if m <= 256 else weights[:2]
            fused = name == "gate_up"  # … and its activation

            def ours(w, x=x, fused=fused):
                (linear.gated if fused else linear.linear)(x, w)

            def theirs(w, x=x, fused=fused):
                y = F.linear(x, w)
                if fused:
                    F.silu(y[:, :INNER]) * y[:, INNER:]

            mine = timed(graphed([lambda w=w: ours(w) for w in some] * 2)) / len(some) / 2
            other = timed(graphed([lambda w=w: theirs(w) for w in some] * 2)) / len(some) / 2
            least = floor(2 * (n * k + m * n + m * k), 2.0 * m * n * k)
            found.append(report(f"linear {name} M={m}", mine, other, least))
        del weights
    return found


def attentions():
    """Decode at several contexts, beside scaled_dot_product_attention on contiguous keys."""
    found = []
    for requests, context in ((1, 1024), (64, 1024), (256, 1024), (64, 8192), (1, 32768)):
        k, v, table, lengths = caches(requests, context)
        q = weight(requests, HQ, D) * 50
        cu_q = torch.arange(requests + 1, device=DEVICE, dtype=torch.int32)
        plan = plan_attention(table, lengths, cu_q, PAGE)
        mine = timed(graphed([lambda: attention(q, k, v, plan, D**-0.5)] * 4)) / 4
        ks, vs = (c.view(requests, -1, HKV, D).transpose(1, 2) for c in (k, v))
        query = q[:, :, None]

        def sdpa(query=query, ks=ks, vs=vs):
            F.scaled_dot_product_attention(query, ks, vs, enable_gqa=True)

        other = timed(graphed([sdpa] * 4)) / 4
        least = floor(2 * 2 * requests * context * HKV * D)
        found.append(report(f"attention decode B={requests} context={context}", mine, other, least))
        del k, v, ks, vs
    for requests, tokens in ((16, 512), (4, 2048), (1, 8192)):
        k, v, table, lengths = caches(requests, tokens)
        q = weight(requests * tokens, HQ, D) * 50
        cu_q = torch.arange(requests + 1, device=DEVICE, dtype=torch.int32) * tokens
        plan = plan_attention(table, lengths, cu_q, PAGE)
        mine = timed(graphed([lambda: attention(q, k, v, plan, D**-0.5)] * 4)) / 4
        ks, vs = (c.view(requests, -1, HKV, D).transpose(1, 2) for c in (k, v))
        query = q.view(requests, tokens, HQ, D).transpose(1, 2)

        def sdpa(query=query, ks=ks, vs=vs):
            F.scaled_dot_product_attention(query, ks, vs, is_causal=True, enable_gqa=True)

        other = timed(graphed([sdpa] * 4)) / 4
        flops = 2.0 * requests * tokens**2 * HQ * D
        least = floor(4 * requests * tokens * HKV * D, flops)
        found.append(report(f"attention prefill {requests}×{tokens}", mine, other, least))
    return found


def row_ops():
    found = []
    for m in (64, 8192):
        x, residual, w = weight(m, H), weight(m, H), weight(H)
        mine = timed(graphed([lambda: rows.add_rms_norm(x, residual, w, 1e-5)] * 8)) / 8
        other = timed(graphed([lambda: F.rms_norm(x + residual, (H,), w, 1e-5)] * 8)) / 8
        found.append(report(f"add_rms_norm M={m}", mine, other, floor(8 * m * H)))
        x = weight(m, 2 * INNER)
        mine = timed(graphed([lambda: rows.silu_mul(x)] * 8)) / 8
        other = timed(graphed([lambda: F.silu(x[:, :INNER]) * x[:, INNER:]] * 8)) / 8
        found.append(report(f"silu_mul M={m}", mine, other, floor(6 * m * INNER)))
    return found


def decoder():
    """(layers, head, angles) of an 8B decoder with random weights."""
    layers = []
    for _ in range(LAYERS):
        norm = torch.ones(H, device=DEVICE, dtype=BF)
        attn = AttentionParams(
            norm, 1e-5, weight((HQ + 2 * HKV) * D, H), weight(H, HQ * D), HQ, HKV, D
        )
        layers.append(
            LayerParams(attn, MLPParams(norm, 1e-5, weight(2 * INNER, H), weight(H, INNER)))
        )
    angle = torch.rand(65536, D, device=DEVICE) * 2 - 1
    return tuple(layers), weight(V, H), angle


class Pools:
    """Keys and values of all layers."""

    def __init__(self, requests, context):
        self.pairs = []
        for _ in range(LAYERS):
            k, v, self.table, self.lengths = caches(requests, context)
            self.pairs.append((k, v))

    def layer(self, index):
        return self.pairs[index]


def decode_batch(pools, requests, context):
    cu_q = torch.arange(requests + 1, device=DEVICE, dtype=torch.int32)
    position = pools.lengths - 1
    page = pools.table[:, (context - 1) // PAGE].long()
    return DeviceBatch(
        ids=position,
        positions=position,
        row_of_token=cu_q[:-1].long(),
        kv_slots=page * PAGE + (context - 1) % PAGE,
        attn=plan_attention(pools.table, pools.lengths, cu_q, PAGE),
        logit_rows=cu_q[:-1].long(),
    )


CASES = ((1, 1024), (8, 1024), (64, 1024), (256, 1024), (64, 4096))


def steps(prefill=True, cases=CASES):
    """Decode and prefill steps: layers, final norm and head; of ``cases`` (requests, context)."""
    layers, head, angles = decoder()
    weights = (
        sum(w.nbytes for a, m in layers for w in (a.qkv, a.o, m.gate_up, m.down)) + head.nbytes
    )
    found = []
    for requests, context in cases:
        pools = Pools(requests, context)
        x = weight(requests, H) * 50
        run = Layers(DEVICE)

        def step(run=run, x=x, pools=pools, requests=requests, context=context):
            batch = decode_batch(pools, requests, context)
            hidden = run(x, layers, batch, pools, angles)
            normed = rows.rms_norm(hidden, layers[0].mlp.norm, 1e-5)
            return linear.linear(normed, head, None, torch.float32)

        step()
        step()
        mine = timed(step, warm=3, repeat=15)
        began = time.perf_counter()
        for _ in range(10):
            step()
        host = (time.perf_counter() - began) * 100
        torch.cuda.synchronize()
        cache = 4 * requests * context * HKV * D * LAYERS
        least = floor(weights + cache, 2.0 * requests * weights / 2)
        line = report(f"decode step 8B B={requests} context={context}", mine, None, least)
        line["host_ms"] = host
        print("   host", round(host, 3), "ms")
        found.append(line)
        del pools, run
        torch.cuda.empty_cache()
    if not prefill:
        return found
    tokens = 2048
    pools = Pools(4, tokens)
    cu_q = torch.arange(5, device=DEVICE, dtype=torch.int32) * tokens
    at = torch.arange(tokens, device=DEVICE).repeat(4)
    page = pools.table.long().repeat_interleave(PAGE, 1).flatten()
    batch = DeviceBatch(
        ids=at,
        positions=at,
        row_of_token=at,
        kv_slots=page * PAGE + at % PAGE,
        attn=plan_attention(pools.table, pools.lengths, cu_q, PAGE),
        logit_rows=at,
    )
    x = weight(4 * tokens, H) * 50
    run = Layers(DEVICE)
    mine = timed(lambda: run(x, layers, batch, pools, angles), warm=1, repeat=3)
    flops = 2.0 * 4 * tokens * (weights - head.nbytes) / 2 + 4 * 2.0 * tokens**2 * HQ * D * LAYERS
    line = report("prefill step 8B 4×2048", mine, None, floor(weights, flops))
    line["tokens_per_s"] = 4 * tokens / mine * 1e3
    print("   tokens/s", round(line["tokens_per_s"]))
    return [*found, line]


def bits():
    """Failures of bitwise equality: rows alone against rows in company, pieces against one walk."""
    wrong, checked = [], 0

    def same(name, one, two):
        nonlocal checked
        checked += 1
        if not torch.equal(one, two):
            wrong.append(name)

    for dtype in (BF, torch.float32):
        for n, k in ((576, 576), (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)):
            if dtype is torch.float32 and n > 4096:
                continue
            w = weight(n, k).to(dtype)
            x = weight(2048, k).to(dtype) * 50
            all_rows = linear.linear(x, w)
            if dtype is BF and hopper.serves(DEVICE):
                twin = torch.empty_like(all_rows)
                linear._tensor_cores(x, w, None, twin)
                same(f"linear {n}x{k}: the kernel for any GPU", twin, all_rows)
            if dtype is BF:
                one_by_one = rows.silu_mul(all_rows)
                for m in (1, 9, 64, 65, 256, 2048):
                    same(f"gated {n}x{k} M={m}", linear.gated(x[:m], w), one_by_one[:m])
            for m in (1, 2, 7, 16, 17, 32, 33, 64, 65, 100, 256, 257):
                for at in (0, 5, 2048 - m):
                    same(
                        f"linear {dtype} {n}x{k} M={m}",
                        linear.linear(x[at : at + m], w),
                        all_rows[at : at + m],
                    )
    for heads, kv_heads, dim, dtype in (
        (32, 8, 128, BF),
        (9, 3, 64, BF),
        (9, 3, 64, torch.float32),
    ):
        for context in (40, 300, 1100, 5000):
            pages = -(-context // 16)
            k, v = (torch.randn(pages, 16, kv_heads, dim, device=DEVICE, dtype=dtype) for _ in "kv")
            table = torch.randperm(pages, device=DEVICE).int()[None]
            q = torch.randn(context, heads, dim, device=DEVICE, dtype=dtype)

            def ask(begin, end, times=1, table=table, q=q, k=k, v=v, dim=dim):
                cu_q = torch.arange(times + 1, device=DEVICE, dtype=torch.int32) * (end - begin)
                lengths = torch.full((times,), end, device=DEVICE, dtype=torch.int64)
                plan = plan_attention(table.repeat(times, 1), lengths, cu_q, 16)
                return attention(q[begin:end].repeat(times, 1, 1), k, v, plan, dim**-0.5)

            whole = ask(0, context)
            for begin, end, times in (
                (context - 1, context, 1), (context - 1, context, 3), (context - 1, context, 200),
                (context - 7, context, 1), (context // 2, context // 2 + 20, 1), (3, 4, 1),
                (0, context // 3, 1),
            ):  # fmt: skip
                for part, full in zip(ask(begin, end, times), whole, strict=True):
                    want = full[begin:end].repeat(times, *[1] * (full.dim() - 1))
                    name = f"attention {heads}/{kv_heads}x{dim} {dtype} {begin}:{end} ×{times}"
                    same(name, part, want)
    print(json.dumps({"bits": checked, "differ": len(wrong), "first": wrong[:12]}), flush=True)
    return {"checked": checked, "differ": wrong}


def texts(model):
    """Greedy ids of SmolLM2 in float32 against recorded ones; in bfloat16 against themselves."""
    from deepinfer import LLM, SamplingParams

    data = Path(__file__).parents[1] / "tests" / "data" / "smollm2.json"
    cases = json.loads(data.read_text("utf-8"))["cases"]
    prompts = [{"prompt_token_ids": case["input_ids"]} for case in cases]
    length = len(cases[0]["output_ids"])
    greedy = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    found = {}
    for dtype in ("float32", "bfloat16"):
        began = time.perf_counter()
        with LLM(model, backend="cuda", dtype=dtype, batch_invariant=True, max_num_seqs=64,
                 max_model_len=2048, page_size=16) as llm:  # fmt: skip
            opened = time.perf_counter() - began
            got = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, greedy)]
            first = time.perf_counter() - began
            alone = [list(llm.generate(p, greedy)[0].outputs[0].token_ids) for p in prompts]
            crowd = llm.generate(prompts * 12, greedy)
            crowd = [list(o.outputs[0].token_ids) for o in crowd]
            began = time.perf_counter()
            llm.generate(prompts * 12, greedy)
            took = time.perf_counter() - began
        found[dtype] = {
            "equal_to_golden": sum(g == c["output_ids"] for g, c in zip(got, cases, strict=True)),
            "of": len(cases),
            "alone_equals_batch": alone == got,
            "crowd_equals_batch": crowd == got * 12,
            "open_s": opened,
            "first_answers_s": first,
            "tokens_per_s_60_requests": 60 * length / took,
        }
        print(json.dumps({dtype: found[dtype]}), flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="bits,ops,step")
    parser.add_argument("--model")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.manual_seed(0)
    result = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    with torch.inference_mode():
        for part in args.parts.split(","):
            began = time.perf_counter()
            result[part] = {
                "bits": bits,
                "ops": lambda: [*products(), *attentions(), *row_ops()],
                "step": steps,
                "text": lambda: texts(args.model),
            }[part]()
            print(f"-- {part}: {time.perf_counter() - began:.0f} s", flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
