"""Loads the extension and gives it torch's threads.

The extension links no OpenMP runtime. It is handed the address of ``GOMP_parallel`` in the runtime
that torch has loaded, so that kernels and torch share one pool. If there is none (a torch without
OpenMP, a runtime that lacks the GNU entry points), kernels run on the calling thread only.
"""

from __future__ import annotations

import ctypes

import torch  # noqa: F401  (loads the OpenMP runtime, globally)

from deepinfer.native import misfit

if (_reason := misfit()) is not None:  # before anything calls what may take other arguments
    raise ImportError(_reason)

from deepinfer.native import _kernels

ISA_NAMES = ("baseline", "avx2", "avx512")


def _parallel_address() -> int:
    try:
        entry = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return 0
    return ctypes.cast(entry, ctypes.c_void_p).value or 0


THREADED = _parallel_address() != 0
_kernels.set_threads(_parallel_address())


def problem() -> str | None:
    """Why the loaded kernels should not be used here, or None."""
    if _kernels.best_isa == 0 and _kernels.is_x86:
        return "the native CPU kernels need AVX2 and FMA, which this processor lacks"
    return None


def describe() -> str:
    """One line for people: instruction set and threads."""
    threads = "torch's OpenMP pool" if THREADED else "one thread (no GOMP_parallel in this process)"
    return f"{ISA_NAMES[_kernels.best_isa]}, {threads}"


def set_isa(name: str) -> str:
    """For tests: run at most this instruction set from now on; returns the one chosen.

    Bits of ``avx2`` and ``avx512`` are equal; ``baseline`` has no fused multiply-add on x86.
    """
    return ISA_NAMES[_kernels.set_isa(ISA_NAMES.index(name))]
