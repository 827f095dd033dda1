"""The arithmetic of a tensor core's bfloat16 products, bit for bit, in numpy.

After published measurements (MMA-Sim, arXiv 2511.10909; Khattak and Mikaitis, arXiv 2512.07004): a
step takes 16 terms of K and the accumulator, aligns all to the largest exponent among them, cuts
each to 25 fractional bits, adds exactly, and cuts the sum to float32, toward zero. The order
within a step cannot matter; that of the steps does. SM90 (mma.sync, wgmma) and SM100 (tcgen05) are
alike in this.
"""

import numpy as np
import torch

STEP, FRACTION, LEAST = 16, 25, -126


def product(x, w):
    """x bfloat16[M, K] · w[N, K]ᵀ as one chain of steps over K -> torch float32[M, N]."""
    a, b = (t.detach().cpu().double().numpy() for t in (x, w))
    pad = -a.shape[1] % STEP
    a, b = (np.pad(v, ((0, 0), (0, pad))) for v in (a, b))
    total = np.zeros((len(a), len(b)), np.float64)
    for k in range(0, a.shape[1], STEP):
        total = step(a[:, k : k + STEP], b[:, k : k + STEP], total)
    return torch.from_numpy(total.astype(np.float32))


def step(a, b, total):
    """One step: a [M, 16], b [N, 16], total [M, N], float64 that hold floats of fewer bits."""
    top = exponent(total)
    exponents = exponent(a)[:, None, :] + exponent(b)[None, :, :]
    top = np.maximum(top, exponents.max(-1))
    unit = FRACTION - top
    added = np.trunc(np.ldexp(total, unit))
    for i in range(a.shape[1]):  # a loop keeps memory at M·N
        added += np.trunc(np.ldexp(a[:, i, None] * b[None, :, i], unit))
    return cut(np.ldexp(added, -unit))


def exponent(x):
    """e of 1.m · 2^e, int32; zeros and subnormals count as the least normal one."""
    _, e = np.frexp(x)
    return np.where(x == 0, LEAST, np.maximum(e - 1, LEAST)).astype(np.int32)


def cut(x):
    """To the 23 fractional bits of float32, toward zero."""
    e = exponent(x)
    return np.ldexp(np.trunc(np.ldexp(x, 23 - e)), e - 23)
