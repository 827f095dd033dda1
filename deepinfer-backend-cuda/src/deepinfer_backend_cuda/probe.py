"""Whether this machine can run the backend, found out without importing torch or touching a GPU.

The management library (NVML) is asked, not the CUDA driver: a process that has initialised CUDA
can no longer fork children that use it, and a probe may not do that to its host.
"""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path

OLDEST = (9, 0)
"""Compute capability that the kernels are written for: tensor descriptors need it."""


def why_not() -> str | None:
    """None, or why the backend cannot run here."""
    return _packages() or _devices()


def _packages() -> str | None:
    missing = [name for name in ("torch", "triton") if find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} is not installed"
    torch = find_spec("torch")
    assert torch is not None
    homes = [Path(place) for place in torch.submodule_search_locations or ()]
    if not any((home / "lib" / "libtorch_cuda.so").exists() for home in homes):
        return "the installed torch is not a CUDA build"
    return None


def _devices() -> str | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "there is no NVIDIA driver here (libnvidia-ml.so.1 is not found)"
    if code := nvml.nvmlInit_v2():
        return f"the NVIDIA driver does not answer (NVML error {code})"
    try:
        found = _capabilities(nvml)
    finally:
        nvml.nvmlShutdown()
    if not found:
        return "the NVIDIA driver shows no GPU"
    if max(found) < OLDEST:
        best, least = (".".join(map(str, pair)) for pair in (max(found), OLDEST))
        return f"the GPU has compute capability {best}; the kernels need {least} or newer"
    return None


def _capabilities(nvml: ctypes.CDLL) -> list[tuple[int, int]]:
    """(major, minor) of every GPU."""
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    found = []
    for index in range(count.value):
        handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
            continue
        where = ctypes.byref(major), ctypes.byref(minor)
        if not nvml.nvmlDeviceGetCudaComputeCapability(handle, *where):
            found.append((major.value, minor.value))
    return found
