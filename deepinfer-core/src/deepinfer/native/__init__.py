"""Native CPU kernels: an optional C extension behind functions on torch tensors.

Where you are: ``ops.py`` is what a backend calls; ``weights.py`` is the packed form of a weight;
``_kernels`` is C (``module.c`` for arguments and threads, one ``isa_*.c`` per instruction set, each
compiling the same templates). Importing this package loads nothing; ``available()`` loads the
extension and says why it cannot.
"""

from __future__ import annotations


def available() -> str | None:
    """None if the kernels can run here, else the reason why not, for people."""
    try:
        from deepinfer.native import loader
    except ImportError as error:  # no torch, or the extension was not built or does not load
        return f"the native CPU kernels cannot be loaded: {error}"
    return loader.problem()
