"""Native CPU kernels: an optional C extension behind functions on torch tensors.

Where you are: ``ops.py`` is what a backend calls; ``weights.py`` is the packed form of a weight;
``_kernels`` is C (``module.c`` for arguments and threads, one ``isa_*.c`` per instruction set, each
compiling the same templates). Importing this package loads nothing; ``misfit()`` looks whether the
extension belongs to this code, ``available()`` whether it also runs here.
"""

from __future__ import annotations

from importlib.machinery import PathFinder
from typing import Final

INTERFACE: Final = 3  # goes with INTERFACE in module.c


def misfit() -> str | None:
    """None if a compiled extension lies here that this code may call, else the reason why not.

    Loads the extension, which is plain C, and no torch.
    """
    if PathFinder.find_spec(f"{__name__}._kernels", __path__) is None:
        return "native kernels were not built (no C compiler at install time)"
    try:
        from deepinfer.native import _kernels
    except ImportError as why:
        return f"the native kernels cannot be loaded ({why}): reinstall deepinfer-core"
    found = getattr(_kernels, "interface", 0)
    if found == INTERFACE:
        return None
    return (
        f"the native kernels were compiled from other sources (interface {found}, this code needs "
        f"{INTERFACE}): reinstall deepinfer-core, which compiles them"
    )


def available() -> str | None:
    """None if the kernels can run here, else the reason why not, for people."""
    try:
        from deepinfer.native import loader
    except ImportError as error:  # no torch, or a misfit
        return str(error)
    return loader.problem()
