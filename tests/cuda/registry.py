"""Every kernel of the backend, found and not listed; and the launches that must reach each.

A kernel is a ``triton.jit`` (or Gluon) function of a module in ``deepinfer_backend_cuda.kernels``
whose name ends in ``_kernel``; a ``launches_*.py`` of this folder holds launches as the backend's
own launchers choose them. A kernel that no launch reaches fails ``test_kernels``, by its name.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SM90, SM100 = 90, 100


@dataclass(frozen=True)
class Launch:
    """One call of a launcher, with arguments that are never read.

    ``needs``: kernel → target → SASS mnemonics that must be there; a target left out needs none.
    ``spills``: kernel → target → bytes of local memory a thread that are known and accepted; all
    else must have none. ``targets``: what the launch is for; on others ``needs`` names the kernels
    that it would have reached.
    """

    name: str
    run: Callable[[], Any]
    needs: Mapping[str, Mapping[int, frozenset[str]]] = field(default_factory=dict)
    spills: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    targets: tuple[int, ...] = (SM90, SM100)


def launches(short: bool = False) -> list[Launch]:
    """Of all ``launches_*.py``; ``short``: of all ``short_*.py``, which have the same kernels in
    the same tiles and little to do, for tools under which a large product takes minutes.
    """
    found = []
    for path in sorted(HERE.glob("short_*.py" if short else "launches_*.py")):
        found += importlib.import_module(path.stem).launches()
    return found


def ordered(sized: Iterable[tuple[int, Set[str], Launch]]) -> list[Launch]:
    """Launches by what they take, least first, given that and the kernels they reach; but before
    all others those with a kernel that none before has, for when time ends.
    """
    first, rest, seen = [], [], set()
    for _, reached, launch in sorted(sized, key=lambda one: one[0]):
        (rest if reached <= seen else first).append(launch)
        seen |= reached
    return first + rest


def kernels() -> dict[str, Any]:
    """Name → function, of all modules of the package."""
    package = importlib.import_module("deepinfer_backend_cuda.kernels")
    found: dict[str, Any] = {}
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            function = getattr(value, "fn", None)
            if not inspect.isfunction(function) or function.__module__ != module.__name__:
                continue
            if name.endswith("_kernel"):
                assert name not in found, f"two kernels are called {name}"
                found[name] = value
    return found


def is_gluon(kernel: Any) -> bool:
    """Gluon kernels do not run on the interpreter: a plain twin, also found here, has to."""
    return type(kernel).__module__.startswith("triton.experimental.gluon")


def unreached(reached: set[str], gluon: bool = True) -> list[str]:
    """Kernels that were not among those launched; ``gluon`` False leaves Gluon's out."""
    return sorted(
        n for n, k in kernels().items() if n not in reached and (gluon or not is_gluon(k))
    )


def unnamed(reached: set[str]) -> list[str]:
    """What was launched and is no kernel by name, so that its absence would not be noticed."""
    return sorted(reached - set(kernels()))
