"""Compiles two kernels into a folder, and one of somebody else's: ``test_kernel_cache`` runs it.

Argument: the folder. Prints, as JSON, what the cache counted, and whether the host was left alone.
"""

import json
import os
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl
from deepinfer_backend_cuda import rows
from deepinfer_backend_cuda.kernel_cache import KernelCache, of_others
from dry_driver import DryDriver
from triton.runtime import driver


@triton.jit
def foreign_kernel(x_ptr):
    tl.store(x_ptr, 1.0)


def main():
    before = dict(os.environ)
    driver.set_active(DryDriver(90))
    cache, elsewhere = KernelCache(Path(sys.argv[1])), of_others()
    cache.serve()
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    for _ in range(2):
        rows.silu_mul(x)
        rows.rms_norm(x, None, 1e-5)
    foreign_kernel[(1,)](torch.zeros(1))
    second = KernelCache(Path(sys.argv[1]))
    second.serve()  # another engine of this process: what is loaded stays
    rows.silu_mul(x)
    alone = dict(os.environ) == before and not vars(triton.knobs.cache)
    print(json.dumps([cache.counts, second.counts, elsewhere, alone]))


main()
