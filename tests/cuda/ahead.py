"""Every launch of the registry, compiled for a target without a GPU.

``python ahead.py 90`` (or 100) prints a line for each kernel and leaves with 1 if one takes more
registers, shared or tensor memory than a program may have, spills, lacks an instruction that it is
meant to use, or is reached by no launch. With ``once`` it compiles one variant of each kernel, as
CI does; ``90 short`` compiles what an H200 has in the short launches. ``test_kernels`` runs it.
"""

import sys

import triton
from dry_driver import DryDriver, resources
from registry import launches, unnamed, unreached
from traffic import as_an_h200
from triton.runtime import driver


def faults(launch, kernel, target, usage):
    """What is wrong with a compiled kernel, as texts."""
    missing = launch.needs.get(kernel, {}).get(target, frozenset()) - set(usage.found)
    if missing:
        yield f"has no {', '.join(sorted(missing))}"
    known = launch.spills.get(kernel, {}).get(target, 0)
    if usage.stack > known:
        yield f"spills {usage.stack} bytes a thread, {known} are known"


def main():
    target = int(sys.argv[1])
    dry = DryDriver(target)
    driver.set_active(dry)
    bad, reached = 0, set()
    short = sys.argv[2:] == ["short"]
    if short:
        as_an_h200()
    if sys.argv[2:] == ["once"]:
        triton.knobs.runtime.jit_cache_hook = lambda fn, **_: fn.jit_function.__name__ in reached
    for launch in launches(short):
        if target not in launch.targets:
            reached |= set(launch.needs)
            continue
        launch.run()  # raises where shared or tensor memory do not suffice
        for kernel, cubin, shared in dry.built:
            reached.add(kernel)
            usage = resources(cubin)
            said = "; ".join(faults(launch, kernel, target, usage))
            bad += bool(said)
            print("FAULTY" if said else "ok", launch.name, kernel, said, f"shared {shared}", usage)
        dry.built.clear()
    for name in unreached(reached):
        bad += 1
        print("FAULTY", name, "is reached by no launch of tests/cuda/launches_*.py")
    for name in unnamed(reached):
        bad += 1
        print("FAULTY", name, "is no kernel by its name: it must end in _kernel")
    print(f"{len(reached)} kernels, {bad} faulty")
    return 1 if bad or not reached else 0


if __name__ == "__main__":
    sys.exit(main())
