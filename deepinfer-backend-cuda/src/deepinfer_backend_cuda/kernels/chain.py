"""Programmatic dependent launch: a kernel may start while the one before it ends.

Every kernel begins with ``follow``, before it touches memory: it lets the next one start, and waits
until all earlier kernels are complete and visible (the one before it is complete only after its own
wait, so all are). Only launch latency overlaps, and no order of reads and writes changes; weights,
which nothing writes, may be read before (``kernels.stream``).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def follow(CHAIN: tl.constexpr):
    """CHAIN False (the interpreter): nothing."""
    if CHAIN:
        gdc_launch_dependents()
        gdc_wait()
