"""Products with FP8 weights on Triton's interpreter: ``test_fp8`` runs it.

The bits of ``linear`` with the decoded weight, at odd sizes, with a bias, and for experts. The
interpreter rounds once for each ``tl.dot``, whose depth the two kernels choose differently, so that
float32 outputs are compared where K is a single one; the GPU's tests have no such limit.
"""

import sys

import interp_shim  # noqa: F401  (before any kernel)
import torch
from deepinfer_backend_cuda import bits, fp8, linear, moe

CPU = torch.device("cpu")


def wrong():
    for n, k in ((70, 96), (33, 160), (128, 64)):
        w = bits.values((n, k), 3, CPU, least=-9)
        bias = bits.values((n,), 4, CPU)
        kept = fp8.prepare(w, frozenset({"linear"}))
        plain = fp8.block_scaled(w).dequantize(torch.bfloat16)
        for rows in (1, 5, 20):
            x = bits.values((rows, k), 5, CPU)
            for more in ((), (None, torch.float32), (bias,), (bias, torch.float32)):
                got, want = fp8.linear(x, kept, *more), linear.linear(x, plain, *more)
                if (k <= 64 or got.dtype is torch.bfloat16) and not bits.same(got, want):
                    yield f"linear {rows}x{n}x{k} {len(more)}"
    w = bits.values((3, 70, 96), 6, CPU, least=-9)
    kept = fp8.prepare(w, frozenset({"grouped_linear"}))
    plain = fp8.block_scaled(w).dequantize(torch.bfloat16)
    x, offsets = bits.values((11, 96), 7, CPU), torch.tensor([0, 4, 4, 11])
    if not bits.same(moe.grouped_linear(x, kept, offsets), moe.grouped_linear(x, plain, offsets)):
        yield "grouped_linear"


def main():
    torch.set_num_threads(1)
    with torch.inference_mode():
        found = list(wrong())
    print(*found, f"{len(found)} wrong", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
