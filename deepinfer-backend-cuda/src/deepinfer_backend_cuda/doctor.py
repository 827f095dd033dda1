"""What ``deepinfer doctor`` asks of a GPU machine: versions, bits, invariance, ceilings.

Findings are (mark, sentence, what to do next), see ``BackendSpec.doctor``. Nothing here changes
anything; half a gigabyte of the GPU is used for some seconds.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import triton
from torch import Tensor

from deepinfer_backend_cuda import bits, linear
from deepinfer_backend_cuda.graphs import cuda

Finding = tuple[str, str, str]

TESTED: Final = "3.6"
"""Triton whose code was measured; its version decides bits."""
MEASURED: Final = {"NVIDIA H200": (4.3, 790.0)}
"""Device → TB/s of a copy, reads and writes, and TFLOP/s of a bfloat16 product, as seen."""
SHARE: Final = 0.9
"""Of what was measured on such a device: less is worth a note."""


def examine() -> Iterator[Finding]:
    """Everything, cheapest first."""
    yield from versions()
    device = torch.device("cuda", 0)
    with torch.cuda.device(device), torch.inference_mode():
        yield from recorded_bits(device)
        yield from company(device)
        yield from ceilings(device)


def versions() -> Iterator[Finding]:
    """Driver, GPUs, and what torch and Triton were built for."""
    driver, newest = driver_versions()
    built = str(torch.version.cuda)
    yield "ok", f"driver {driver} for CUDA {newest}, torch {torch.__version__} for {built}", ""
    if int(built.partition(".")[0]) > int(newest.partition(".")[0]):
        step = "Install a newer driver, or torch for the driver's CUDA."
        yield "FAIL", f"torch is built for CUDA {built}, the driver knows up to {newest}", step
    for index in range(torch.cuda.device_count()):
        yield "ok", described(index), ""
    if triton.__version__.startswith(f"{TESTED}."):
        yield "ok", f"Triton {triton.__version__}", ""
    else:
        text = f"Triton {triton.__version__}: only {TESTED} was tested, another gives other bits"
        yield "FAIL", text, f"pip install 'triton=={TESTED}.*'"


def described(index: int) -> str:
    """A GPU in words."""
    at: Any = torch.cuda.get_device_properties(index)
    with torch.cuda.device(index):
        free, total = torch.cuda.mem_get_info()
    measured = {90: "measured", 100: "compiled, never run"}.get(
        10 * at.major + at.minor, "untested"
    )
    return (
        f"GPU {index}: {at.name}, capability {at.major}.{at.minor} ({measured}), "
        f"{at.multi_processor_count} processors, {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
    )


def driver_versions() -> tuple[str, str]:
    """The driver's own version and the newest CUDA that it knows, by NVML."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    nvml.nvmlInit_v2()
    try:
        text, number = ctypes.create_string_buffer(96), ctypes.c_int()
        nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(96))
        nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number))
    finally:
        nvml.nvmlShutdown()
    return text.value.decode(), f"{number.value // 1000}.{number.value % 1000 // 10}"


def recorded_bits(device: torch.device) -> Iterator[Finding]:
    """Whether kernels give the bits that were recorded on a GPU of this capability."""
    capability = torch.cuda.get_device_capability(device)
    known = bits.golden(capability)
    if not known:
        yield "note", f"no bits are recorded for capability {'.'.join(map(str, capability))}", ""
        return
    others = bits.moved(device, known)
    if others:
        step = "Use the tested Triton; texts may differ from those of other machines."
        yield "FAIL", f"other bits than recorded: {', '.join(others)}", step
    else:
        yield "ok", f"the bits of {len(known)} ops are those recorded", ""


def company(device: torch.device) -> Iterator[Finding]:
    """Whether a row's bits depend on what shares its step."""
    wrong, count = [], 0
    for probe in bits.probes():
        count += 1
        if found := bits.unequal(probe, device):
            wrong.append(f"{probe.name} ({found[0]})")
    if wrong:
        yield "FAIL", f"rows depend on their company: {', '.join(wrong)}", "Report it."
    else:
        yield "ok", f"rows of {count} ops have the same bits alone and among 2 to 2048 others", ""


def ceilings(device: torch.device) -> Iterator[Finding]:
    """Bandwidth and product rate, ours and the library's, beside what such a device once gave."""
    copied, ours, library = bandwidth(device), *products(device)
    known = MEASURED.get(torch.cuda.get_device_name(device))
    for what, unit, got, index in (
        ("copy, reads and writes", "TB/s", copied, 0),
        ("bfloat16 product 8192³, torch's", "TFLOP/s", library, 1),
    ):
        text = f"{what}: {got:.3g} {unit}"
        if known is None:
            yield "ok", text, ""
            continue
        text += f", {got / known[index]:.0%} of what this device gave before"
        if got < SHARE * known[index]:
            yield "note", text, "See whether others use the GPU, or whether its clocks are held."
        else:
            yield "ok", text, ""
    yield "ok", f"bfloat16 product 8192³, ours: {ours:.3g} TFLOP/s, {ours / library:.0%}", ""


def bandwidth(device: torch.device) -> float:
    """TB/s of a copy within the device, bytes read and bytes written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2e-12 * source.nbytes / seconds(lambda: target.copy_(source), device)


def products(device: torch.device) -> tuple[float, float]:
    """TFLOP/s of 8192³, by our kernel and by torch's library."""
    size = 8192
    x, w = (bits.values((size, size), seed, device) for seed in (31, 32))
    y = torch.empty_like(x)
    rates = [
        2e-12 * size**3 / seconds(run, device)
        for run in (lambda: linear.product(x, w, None, y), lambda: torch.mm(x, w.T, out=y))
    ]
    return rates[0], rates[1]


def seconds(run: Callable[[], Tensor | None], device: torch.device) -> float:
    """Median of ten runs after two, by events."""
    found = []
    for _ in range(12):
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return float(statistics.median(found[2:]))
