"""The kit's cases of this backend's ops on Triton's interpreter: ``test_kernels`` runs it.

Needs ``TRITON_INTERPRET=1``; tiles and launches are those of the GPU, arithmetic is numpy's.
Arguments: ops, all if none; then every kernel must have run. ``some``: a case of each op. Leaves
with 1 if a case is wrong.
"""

import sys

import interp_shim  # noqa: F401  (before any kernel)
import torch
from deepinfer.api import OpContext
from deepinfer.ops.lowbit import BlockScaled
from deepinfer.ops.table import OpSet
from deepinfer.testing.conformance import inputs_latent, inputs_v41  # noqa: F401  (declare cases)
from deepinfer.testing.conformance.compare import difference, tolerance
from deepinfer.testing.conformance.inputs import CASES
from deepinfer.testing.conformance.kit import DTYPES, Run, reference_run, tensors
from deepinfer_backend_cuda import attention, linear, rows, sampling, scaled
from deepinfer_backend_cuda.backend import CudaBackend
from registry import is_gluon, kernels, unreached

CPU = torch.device("cpu")
SOME = {case.op: case for case in CASES if "many" not in case.name}.values()
"""A case of each op, as CI has it: the last one that is not of many rows."""


def run_of(dtype):
    context = OpContext(dtype=DTYPES[dtype], device=CPU)
    return Run(OpSet(CudaBackend().provide(context), "cuda", context), CPU, dtype)


def wrong(case, dtype):
    run = run_of(dtype)
    with torch.inference_mode():
        got, want = tensors(case.call(run)), tensors(case.call(reference_run(dtype)))
    bound = tolerance(case.op, dtype)
    found = [difference(g, w, bound) for g, w in zip(got, want, strict=True)]
    return [text for text in found if text]


def long_text(dtype):
    """What is wrong with attention to several pieces of a text, walked or side by side.

    The kit's texts are shorter than one piece.
    """
    kind, keys, page = DTYPES[dtype], 2 * attention.PIECE + 90, 16
    pages = -(-keys // page)
    source = torch.Generator().manual_seed(5)
    q = torch.randn(3, 4, 32, generator=source).to(kind)
    k, v = (torch.randn(pages, page, 2, 32, generator=source).to(kind) for _ in range(2))
    table = torch.randperm(pages, generator=source).int()[None]
    step = table, torch.tensor([keys]), torch.tensor([0, 3], dtype=torch.int32), page
    reference = reference_run(dtype).ops
    want = reference.attention(q, k, v, reference.plan_attention(*step), 0.2)
    bound, results = tolerance("attention", dtype), []
    for pieces in (1, 3):
        tile, plan = attention.Tile(16, 4, 1), attention.plan_attention(*step)
        got = attention.launch(q, k, v, plan, 0.2, (None, None, None), tile, pieces)
        results.append(got)
        for one, other in zip(got, want, strict=True):
            if said := difference(one, other, bound):
                yield f"attention of {pieces} pieces, {dtype}: {said}"
    if not all(map(torch.equal, *results)):
        yield f"attention, {dtype}: pieces side by side are not the bits of one walk"


def mixed():
    """What is wrong with a step in which requests decode, verify and prefill: each alone has the
    same bits.
    """
    counts, keys = (1, 40, 3, 1, 20), (70, 300, 33, 1, 20)
    source = torch.Generator().manual_seed(6)
    q = torch.randn(sum(counts), 4, 32, generator=source).bfloat16()
    k, v = (torch.randn(100, 16, 2, 32, generator=source).bfloat16() for _ in range(2))
    table = torch.randperm(100, generator=source).int().view(5, 20)
    cu_q = torch.tensor((0, *counts)).cumsum(0).int()
    plan = attention.plan_attention(table, torch.tensor(keys), cu_q, 16)
    whole = attention.attention(q, k, v, plan, 0.2)
    for i, (count, length) in enumerate(zip(counts, keys, strict=True)):
        at = slice(int(cu_q[i]), int(cu_q[i + 1]))
        alone = torch.tensor([length]), torch.tensor([0, count], dtype=torch.int32), 16
        plan = attention.plan_attention(table[i : i + 1], *alone)
        parts = attention.attention(q[at], k, v, plan, 0.2)
        if not all(torch.equal(part, full[at]) for part, full in zip(parts, whole, strict=True)):
            yield f"attention of {count} rows beside others is not what it is alone"


def staged():
    """What is wrong with a step of 3 rows of 2 requests among the inputs of a graph for 5."""

    def inputs(rows, requests, width, fill):
        ints = [torch.full((count,), fill) for count in (rows, rows, requests)]
        table = torch.full((requests, width), fill, dtype=torch.int32)
        return [torch.full((rows, 24), float(fill)), table, *ints, torch.zeros(requests + 1).int()]

    step, standing = inputs(3, 2, 2, 7), inputs(5, 5, 4, 9)
    step[5] = torch.tensor((0, 1, 3), dtype=torch.int32)
    rows.stage(tuple(step), tuple(standing))
    x, table, positions, slots, lengths, cu_q = standing
    whole = torch.equal(x[:3], step[0]) and torch.equal(table[:2, :2], step[1])
    if not whole or positions[:3].tolist() != [7, 7, 7]:
        yield "stage: rows, pages or positions are not the step's"
    if (slots.tolist(), lengths.tolist()) != ([7, 7, 7, -1, -1], [7, 7, 0, 0, 0]):
        yield f"stage: slots {slots.tolist()}, lengths {lengths.tolist()}"
    if cu_q.tolist() != [0, 1, 3, 3, 3, 3]:
        yield f"stage: cu_q {cu_q.tolist()}"


def filtered():
    """Where random rows, ties and −inf among them, survive otherwise than in the reference."""
    source, reference = torch.Generator().manual_seed(3), reference_run("float32").ops
    for trial in range(6):
        vocab = int(torch.randint(2, 300, (1,), generator=source))
        z = torch.randn(4, vocab, generator=source) * 3
        if trial % 2:
            z = z.round() / 2
        z[trial % 4, : vocab // 2] = -torch.inf
        t, p, least = (torch.rand(4, generator=source) for _ in range(3))
        k = torch.randint(-1, vocab + 3, (4,), generator=source)
        p[2], least[:3] = 1.0, 0.0
        given = z, 2 * t, k, p, 0.3 * least
        if not torch.equal(sampling.filter_top(*given), reference.filter_top(*given)):
            yield f"filter_top: trial {trial}, {vocab} ids, differs from the reference"


def gates():
    """Where gate and up with their activation are far from the ops that they stand for. (Equal bits
    are the tensor cores' promise: here tiles of other depths round elsewhere.)
    """
    bound = tolerance("linear", "bfloat16")
    source = torch.Generator().manual_seed(7)
    for m in (1, 20, 50, 100, 300):
        for n, k in ((40, 72), (136, 200)):
            x, w = (torch.randn(rows, k, generator=source).bfloat16() for rows in (m, 2 * n))
            if said := difference(linear.gated(x, w), rows.silu_mul(linear.linear(x, w)), bound):
                yield f"gated {m}x{n}x{k}: {said}"


def kept_weights():
    """Weights as stored, put in the kernels' order and decoded: the same values, any shape."""
    source = torch.Generator().manual_seed(5)
    for kind, n, k in (("fp8", 70, 160), ("fp8", 64, 128), ("fp4", 70, 160), ("fp4", 130, 256)):
        columns, tiles = (k, (-(-n // 32), k // 32)) if kind == "fp8" else (k // 2, (n, k // 32))
        codes = torch.randint(0, 256, (n, columns), generator=source).to(torch.uint8)
        if kind == "fp8":
            codes[(codes & 0x7F) == 0x7F] = 5
        scales = torch.randint(100, 129, tiles, generator=source).to(torch.uint8)
        stored = BlockScaled(codes, scales, kind)
        got = scaled.decode(scaled.keep(stored, frozenset()))
        if not torch.equal(got, stored.dequantize(torch.bfloat16)):
            yield f"a kept {kind} weight {n}x{k} is not what was stored"


def watched():
    """The names of kernels that are launched from here on."""
    reached = set()
    for name, kernel in kernels().items():
        if not is_gluon(kernel):
            kernel.add_pre_run_hook(lambda *args, name=name, **kwargs: reached.add(name))
    return reached


def main():
    torch.set_num_threads(1)
    reached = watched()
    served = {op for op, origin in run_of("float32").ops.origin.items() if origin == "cuda"}
    some = sys.argv[1:] == ["some"]
    ops, bad, ran = served if some else set(sys.argv[1:]) or served, 0, 0
    for case in SOME if some else CASES:
        dtypes = case.dtypes[-1:] if some else case.dtypes
        for dtype in dtypes if case.op in ops else ():
            ran += 1
            if said := wrong(case, dtype):
                bad += 1
                print(case.op, case.name, dtype, said)
    for dtype in () if sys.argv[1:] else ("float32", "bfloat16"):
        for said in long_text(dtype):
            bad += 1
            print(said)
    for said in () if sys.argv[1:] else (*staged(), *mixed(), *filtered(), *gates()):
        bad += 1
        print(said)
    for said in () if sys.argv[1:] else kept_weights():
        bad += 1
        print(said)
    for name in () if sys.argv[1:] else unreached(reached, gluon=False):
        bad += 1
        print(name, "is run by no case of the conformance kit, nor by one of this file")
    print(f"{ran} cases, {bad} wrong")
    return 1 if bad or not ran else 0


if __name__ == "__main__":
    sys.exit(main())
