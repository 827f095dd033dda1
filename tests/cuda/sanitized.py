"""Every op of the backend once, in small shapes, for ``compute-sanitizer``.

``compute-sanitizer --tool memcheck python sanitized.py [SECONDS]``: the kit's cases, compared with
their references, then attention of several pieces. Leaves with 1 if something is wrong by itself.
"""

import sys

import torch
from deepinfer.testing.selftest import check_ops


def pieces():
    """Attention that is split and merged, which the kit's short texts do not reach."""
    from deepinfer_backend_cuda import attention, bits

    device = torch.device("cuda", 0)
    q = bits.values((3, 4, 64), 1, device, least=-5)
    k, v = (bits.values((50, 16, 2, 64), seed, device, least=-5) for seed in (2, 3))
    table = torch.arange(50, device=device).int()[None].repeat(2, 1)
    lengths, cu_q = torch.tensor([777, 300], device=device), torch.tensor([0, 2, 3], device=device)
    plan = attention.plan_attention(table, lengths, cu_q, 16)
    out, _ = attention.attention(q, k, v, plan, 0.1)
    return bool(out.isfinite().all())


def main():
    found = check_ops("cuda", float(sys.argv[1]) if sys.argv[1:] else 60.0)
    for sentence in found.wrong:
        print(sentence)
    with torch.inference_mode():
        fine = pieces()
    torch.cuda.synchronize()
    print(
        f"{found.ran} cases of {found.ops} ops, {found.left} left, {len(found.wrong)} wrong, {fine}"
    )
    return 1 if found.wrong or not fine else 0


if __name__ == "__main__":
    sys.exit(main())
