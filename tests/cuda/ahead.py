"""Every kernel as the launchers choose it for an 8B and a 135M decoder, compiled without a GPU.

``python ahead.py 90`` (or 100): prints a line for each kernel; leaves with 1 if one takes more than
a program may have, or a product runs without the target's matrix instruction. ``test_kernels`` runs
it. Spills are printed, and fail above ``SPILLED`` bytes a thread.
"""

import sys

import torch
from dry_driver import DryDriver, resources
from triton.runtime import driver

MATRIX = {90: {"HGMMA", "HMMA"}, 100: {"UTCHMMA", "HMMA"}}
SPILLED = 64
BF = torch.bfloat16


def launches():
    """Names and launches; arguments lie on the CPU and are never read."""
    from deepinfer_backend_cuda import attention, linear, rows, sampling

    for heads, kv_heads, dim in ((32, 8, 128), (9, 3, 64)):
        cache = torch.zeros(4, 16, kv_heads, dim, dtype=BF)
        for tokens, requests in ((1, 1), (512, 512), (512, 2)):
            cu_q = torch.linspace(0, tokens, requests + 1).int()
            lengths = torch.ones(requests, dtype=torch.int64)
            table = torch.zeros(requests, 64, dtype=torch.int32)
            plan = attention.plan_attention(table, lengths, cu_q, 16)
            q = torch.zeros(tokens, heads, dim, dtype=BF)
            name = f"attention {heads}/{kv_heads}x{dim} {tokens} of {requests}"
            yield name, lambda q=q, c=cache, p=plan: attention.attention(q, c, c.clone(), p, 0.1)
    for m in (1, 32, 64, 128, 256, 512):
        for n, k in ((576, 576), (4096, 4096), (6144, 4096), (28672, 4096)):
            x, w = torch.zeros(m, k, dtype=BF), torch.zeros(n, k, dtype=BF)
            yield f"linear {m}x{n}x{k}", lambda x=x, w=w: linear.linear(x, w)
    x, at = torch.zeros(5, 8192, dtype=BF), torch.zeros(5, dtype=torch.int64)
    cache, angles = torch.zeros(4, 16, 8, 128, dtype=BF), torch.zeros(9, 128)
    qkv = torch.zeros(5, 48 * 128, dtype=BF)
    yield "add_rms_norm", lambda: rows.add_rms_norm(x, x, x[0], 1e-5)
    yield "silu_mul", lambda: rows.silu_mul(x)
    yield "rope_write", lambda: rows.rope_write(qkv, (32, 8, 128), at, angles, (cache, cache), at)
    yield "gumbel", lambda: sampling.gumbel_argmax(torch.zeros(5, 50000), at.float(), at, at)


def main():
    target = int(sys.argv[1])
    dry = DryDriver(target)
    driver.set_active(dry)
    bad = 0
    for name, launch in launches():
        launch()  # raises where shared or tensor memory do not suffice
        for kernel, cubin, shared in dry.built:
            registers, stack, found = resources(cubin)
            product = kernel in ("gemm_kernel", "attention_kernel")
            faulty = stack > SPILLED or (product and not MATRIX[target] & set(found))
            bad += faulty
            line = (name, kernel, f"shared {shared}", f"registers {registers}", f"stack {stack}")
            print("FAULTY" if faulty else "ok", *line, found)
        dry.built.clear()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
