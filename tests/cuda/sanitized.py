"""Kernels of the backend in small shapes, for ``compute-sanitizer``.

``compute-sanitizer --tool memcheck python sanitized.py [SECONDS [PART]]``: with PART ``kit``, as
without, attention of several pieces and the kit's cases, compared with their references, while the
seconds last; with ``2/8`` the third of eight shares of the short launches that name every kernel
and variant (``registry``). ``racecheck.py`` runs all of them side by side, so that they share what
compiling takes. Prints which kernels were launched; leaves with 1 if something is wrong by itself.
"""

import sys
import time

import torch
import triton
from deepinfer.testing.selftest import check_ops
from registry import launches, ordered
from traffic import recorded, traffic


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


def served():
    """The short launches for this GPU: each kernel's least first, then by what they take."""
    major, minor = torch.cuda.get_device_capability()
    found = [one for one in launches(short=True) if 10 * major + minor in one.targets]
    calls = [recorded(one.run) for one in found]
    reached = [{call.name for call in each} for each in calls]
    return ordered(zip(map(traffic, calls), reached, found, strict=True))


def launch_all(group, groups, until):
    """(launches that time had no room for, sentences about those that failed)"""
    late, wrong = [], []
    with torch.device("cuda"):
        for launch in served()[group::groups]:
            if time.monotonic() > until:
                late.append(launch.name)
                continue
            try:
                launch.run()
                torch.cuda.synchronize()
            except Exception as why:  # whatever a driver or a compiler can raise
                wrong.append(f"{launch.name}: {type(why).__name__}: {str(why)[:200]}")
    return late, wrong


def main():
    seconds = float(sys.argv[1]) if sys.argv[1:] else 60.0
    part = sys.argv[2] if sys.argv[2:] else "kit"
    began, launched = time.monotonic(), set()
    triton.knobs.runtime.launch_enter_hook.add(lambda about: launched.add(about.get()["name"]))
    if part == "kit":
        found = check_ops("cuda", seconds)
        wrong, said = list(found.wrong), f"{found.ran} cases of {found.ops} ops, {found.left} left"
        with torch.inference_mode():
            if not pieces():
                wrong.append("attention of several pieces is not finite")
    else:
        group, groups = map(int, part.split("/"))
        with torch.inference_mode():
            late, wrong = launch_all(group, groups, began + seconds)
        said = f"{len(late)} launches late"
    torch.cuda.synchronize()
    print("launched:", *sorted(launched))
    for sentence in wrong:
        print(sentence)
    print(f"{said}, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
