"""Programmatic dependent launch: a kernel may start while the one before it ends.

Every kernel begins with ``follow``, before it touches memory: it waits until all earlier kernels
are complete and visible, and lets the next one start. So only launch latency overlaps, and no order
of reads and writes changes.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def follow(CHAIN: tl.constexpr):
    """CHAIN False (the interpreter): nothing."""
    if CHAIN:
        gdc_wait()
        gdc_launch_dependents()
