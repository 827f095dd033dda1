"""Native CPU kernels against their floors and against torch, in interleaved rounds.

    python benchmarks/native_kernels.py [--isa avx2] [--rounds 15] [--only linear] [--threads 1]

Floor: bytes that must be read / read bandwidth, or multiply-adds / arithmetic peak, whichever is
longer; both are measured on this machine in the same rounds: torch's sum over 256 MiB, and our own
product of small operands, which reaches about 0.9 of the instructions' peak (so 1.1 is the most).
Columns: median time, floor / time, torch's time / time.
Weights rotate through more copies than the last-level cache holds, as in a decode step. With one
thread the clock is that thread's CPU time, so that a busy machine disturbs less.
"""

# ruff: noqa: B023  (every lambda is used up before its loop moves on)

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from deepinfer.native import loader, ops
from deepinfer.ops.reference import sample

SHAPES = [("qkv", 960, 576), ("o", 576, 576), ("gate_up", 3072, 576), ("down", 576, 1536)]
HEAD = ("head", 49152, 576)
F32, BF16 = torch.float32, torch.bfloat16


def seconds(fn: Callable[[], object], at_least: float = 0.004) -> float:
    """Time of one call, from as many calls as fill ``at_least``."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    fn()
    once = clock() - begin
    count = max(1, int(at_least / max(once, 1e-7)))
    if count == 1:
        return once
    begin = clock()
    for _ in range(count):
        fn()
    return (clock() - begin) / count


class Machine:
    """Read bandwidth (bytes/s) and fp32 peak (multiply-adds/s), as reached by our own loops."""

    def __init__(self) -> None:
        self.big = torch.ones(64 << 20)
        self.x = torch.randn(96, 128)
        self.small = ops.prepare_linear(torch.randn(8 * 1024, 128))

    def bandwidth(self) -> float:
        return self.big.nbytes / seconds(lambda: self.big.sum())

    def peak(self) -> float:
        return 96 * 128 * 8192 / seconds(lambda: ops.linear(self.x, self.small))


class Rotating:
    """The i-th call gets the i-th of several equal objects."""

    def __init__(self, make: Callable[[], object], copies: int) -> None:
        self.items, self.at = [make() for _ in range(copies)], 0

    def __call__(self) -> object:
        self.at = (self.at + 1) % len(self.items)
        return self.items[self.at]


def compare(
    name: str,
    native: Callable[[], object],
    torch_fn: Callable[[], object] | None,
    floor: Callable[[float, float], float],
    machine: Machine,
    rounds: int,
) -> None:
    """One line. ``floor(bandwidth, peak)`` is in seconds."""
    mine, theirs, floors = [], [], []
    for _ in range(rounds):
        bandwidth, peak = machine.bandwidth(), machine.peak()
        mine.append(seconds(native))
        floors.append(floor(bandwidth, peak))
        if torch_fn:
            theirs.append(seconds(torch_fn))
    to_floor = statistics.median(f / m for f, m in zip(floors, mine, strict=True))
    line = f"{name:34s} {statistics.median(mine) * 1e3:9.3f} ms   floor {to_floor:5.2f}"
    if torch_fn:
        ratio = statistics.median(t / m for t, m in zip(theirs, mine, strict=True))
        line += f"   torch {ratio:6.2f}"
    print(line, flush=True)


def linear(machine: Machine, rounds: int) -> None:
    for kind in ("fp32", "bf16", "int8"):
        for name, n, k in [*SHAPES, HEAD]:
            w = torch.randn(n, k).to(BF16 if kind == "bf16" else F32)
            quantization = "int8" if kind == "int8" else None
            first = ops.prepare_linear(w, quantization)
            copies = max(1, min(200, (128 << 20) // first.nbytes))
            packed = Rotating(lambda w=w, q=quantization: ops.prepare_linear(w, q), copies)
            plain = Rotating(w.clone, copies)
            for m in (1, 2, 4, 8, 16, 32, 128, 512):
                if (kind != "fp32" and m not in (1, 4, 32)) or (name == "head" and m > 128):
                    continue
                x = torch.randn(m, k)
                xt = x.to(w.dtype)
                compare(
                    f"linear {kind} {name} {n}x{k} M={m}",
                    lambda x=x, p=packed: ops.linear(x, p()),
                    None if kind == "int8" else lambda x=xt, p=plain: F.linear(x, p()),
                    lambda bw, peak, b=first.nbytes, f=m * n * k: max(b / bw, f / peak),
                    machine,
                    rounds,
                )


def cache_of(lengths: list[int], hkv: int, d: int, page: int) -> tuple[torch.Tensor, ...]:
    need = [-(-n // page) for n in lengths]
    k, v = (torch.randn(sum(need), page, hkv, d) for _ in range(2))
    order, table = torch.randperm(sum(need)), torch.zeros(len(lengths), max(need))
    at = 0
    for b, n in enumerate(need):
        table[b, :n] = order[at : at + n]
        at += n
    return k, v, table.int()


def attention(machine: Machine, rounds: int) -> None:
    hq, hkv, d, page = 9, 3, 64, 16
    cases = [("decode", 1, 1, 512), ("decode", 1, 1, 4096), ("decode", 32, 1, 1024)]
    cases += [("verify", 1, 8, 1024), ("prefill", 1, 512, 512), ("chunk", 1, 256, 4096)]
    for name, batch, q_len, kv in cases:
        k, v, table = cache_of([kv] * batch, hkv, d, page)
        q = torch.randn(batch * q_len, hq, d)
        lengths = torch.full((batch,), kv, dtype=torch.int32)
        cu = torch.arange(0, batch * q_len + 1, q_len, dtype=torch.int32)
        dense_k, dense_v = (
            c[table.long()].view(batch, kv, hkv, d).transpose(1, 2).contiguous() for c in (k, v)
        )
        dense_q = q.view(batch, q_len, hq, d).transpose(1, 2)
        pairs = sum(kv - q_len + i + 1 for i in range(q_len)) * batch * hq

        def sdpa(dense_q=dense_q, dense_k=dense_k, dense_v=dense_v, q_len=q_len, kv=kv):
            mask = None
            if q_len > 1:
                mask = torch.ones(q_len, kv, dtype=torch.bool).tril(kv - q_len)
            return F.scaled_dot_product_attention(
                dense_q, dense_k, dense_v, attn_mask=mask, enable_gqa=True
            )

        compare(
            f"attention {name} B={batch} q={q_len} kv={kv}",
            lambda q=q, k=k, v=v, t=table, n=lengths, c=cu: ops.attention(q, k, v, t, n, c, 0.125),
            sdpa,
            lambda bw, peak, b=2 * batch * kv * hkv * d * 4, f=2 * pairs * d: max(b / bw, f / peak),
            machine,
            rounds,
        )


def rows(machine: Machine, rounds: int) -> None:
    for t in (1, 32, 512):
        x, res, w = torch.randn(t, 576), torch.randn(t, 576), torch.randn(576)
        wide = torch.randn(t, 3072)
        q, at = torch.randn(t, 9, 64), torch.arange(t)
        table = torch.randn(2048, 64)
        k, v = torch.randn(t, 3, 64), torch.randn(t, 3, 64)
        kc, vc = torch.zeros(64, 16, 3, 64), torch.zeros(64, 16, 3, 64)
        packed = ops.prepare_linear(torch.randn(49152, 576))
        plain = ops.unpack(packed)
        ids = torch.randint(0, 49152, (t,))
        for name, fn, ref, size in [
            ("rms_norm", lambda x=x: ops.rms_norm(x, w, 1e-5),
             lambda x=x: F.rms_norm(x, (576,), w, 1e-5), 2 * x.nbytes),
            ("add_rms_norm", lambda x=x, r=res: ops.add_rms_norm(x, r, w, 1e-5),
             lambda x=x, r=res: F.rms_norm(x + r, (576,), w, 1e-5), 4 * x.nbytes),
            ("silu_mul", lambda x=wide: ops.silu_mul(x),
             lambda x=wide: F.silu(x[:, :1536]) * x[:, 1536:], wide.nbytes * 3 // 2),
            ("rope", lambda x=q: ops.rope(x, at, table), None, 2 * q.nbytes),
            ("kv_write", lambda k=k, v=v: ops.kv_write(k, v, kc, vc, at), None, 4 * k.nbytes),
            ("embedding", lambda i=ids: ops.embedding(i, packed),
             lambda i=ids: F.embedding(i, plain), 2 * x.nbytes),
        ]:  # fmt: skip
            compare(f"{name} T={t}", fn, ref, lambda bw, _, b=size: b / bw, machine, rounds)


def sampling(machine: Machine, rounds: int) -> None:
    for m in (1, 32):
        z = torch.randn(m, 49152) * 4
        t, seed, at = torch.full((m,), 0.8), torch.arange(m), torch.arange(m)
        pick = torch.randint(0, 49152, (m,))
        k50, p95 = (t, seed * 0 + 50, t / t, t * 0), (t, seed * 0, t / t * 0.95, t * 0)
        for name, fn, ref in [
            ("filter top-k 50", lambda z=z: ops.filter_top(z, *k50),
             lambda z=z: sample.filter_top(z, *k50)),
            ("filter top-p 0.95", lambda z=z: ops.filter_top(z, *p95),
             lambda z=z: sample.filter_top(z, *p95)),
            ("filter top-p 0.95 flat", lambda z=z: ops.filter_top(z / 400, *p95),
             lambda z=z: sample.filter_top(z / 400, *p95)),
            ("argmax", lambda z=z: ops.gumbel_argmax(z, torch.zeros(m), seed, at),
             lambda z=z: z.argmax(1)),
            ("gumbel_argmax T=0.8", lambda z=z: ops.gumbel_argmax(z, t, seed, at),
             lambda z=z: (z / 0.8 - torch.empty_like(z).exponential_().log()).argmax(1)),
            ("logprobs k=5", lambda z=z: ops.logprobs(z, 5, pick),
             lambda z=z: z.log_softmax(1).topk(5)),
        ]:  # fmt: skip
            floor = z.nbytes
            compare(f"{name} m={m}", fn, ref, lambda bw, _, b=floor: b / bw, machine, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", default="avx512", choices=loader.ISA_NAMES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=["linear", "attention", "rows", "sampling"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"isa {loader.set_isa(args.isa)}, torch {torch.__version__}", torch.get_num_threads())
    machine = Machine()
    print(
        f"read {max(machine.bandwidth() for _ in range(9)) / 1e9:.1f} GB/s, "
        f"peak {2 * max(machine.peak() for _ in range(9)) / 1e9:.0f} GFLOP/s"
    )
    for part in (linear, attention, rows, sampling):
        if args.only in (None, part.__name__):
            part(machine, args.rounds)


if __name__ == "__main__":
    main()
