"""The kit's cases of this backend's ops on Triton's interpreter: ``test_kernels`` runs it.

Needs ``TRITON_INTERPRET=1``; tiles and launches are those of the GPU, arithmetic is numpy's.
Arguments: ops, all if none. Leaves with 1 if a case is wrong.
"""

import sys

import interp_shim  # noqa: F401  (before any kernel)
import torch
from deepinfer.api import OpContext
from deepinfer.ops.table import OpSet
from deepinfer.testing.conformance.compare import difference, tolerance
from deepinfer.testing.conformance.inputs import CASES
from deepinfer.testing.conformance.kit import DTYPES, Run, reference_run, tensors
from deepinfer_backend_cuda.backend import CudaBackend

CPU = torch.device("cpu")


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


def main():
    torch.set_num_threads(1)
    served = {op for op, origin in run_of("float32").ops.origin.items() if origin == "cuda"}
    ops, bad, ran = set(sys.argv[1:]) or served, 0, 0
    for case in CASES:
        for dtype in case.dtypes if case.op in ops else ():
            ran += 1
            if said := wrong(case, dtype):
                bad += 1
                print(case.op, case.name, dtype, said)
    print(f"{ran} cases, {bad} wrong")
    return 1 if bad or not ran else 0


if __name__ == "__main__":
    sys.exit(main())
