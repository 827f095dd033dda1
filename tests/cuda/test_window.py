"""The plugin's window and probe on a machine that has no GPU: light, and with a reason."""

import ctypes

import pytest

pytestmark = pytest.mark.usefixtures("sources")


def test_the_window_loads_neither_torch_nor_triton(script):
    assert script("window_alone.py").strip() == "[]"


def test_it_sells_one_backend_above_the_cpu():
    from deepinfer_backend_cuda.plugin import deepinfer_provide

    (spec,) = deepinfer_provide()
    assert (spec.name, spec.device_type, spec.offers) == ("cuda", "cuda", {"invariant", "fp8"})
    assert spec.priority > 10


def test_missing_packages_are_named(monkeypatch):
    from deepinfer_backend_cuda import probe

    monkeypatch.setattr(probe, "find_spec", lambda name: None)
    assert probe.why_not() == "torch and triton is not installed"


def test_a_cpu_build_of_torch_is_named(monkeypatch, tmp_path):
    from deepinfer_backend_cuda import probe

    class Spec:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(probe, "find_spec", lambda name: Spec)
    assert probe.why_not() == "the installed torch is not a CUDA build"


def test_a_missing_driver_is_named(monkeypatch):
    from deepinfer_backend_cuda import probe

    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert "no NVIDIA driver" in probe._devices()


class Library:
    """An NVML with these GPUs."""

    def __init__(self, *capabilities, start=0):
        self.capabilities, self.start, self.closed = capabilities, start, False

    def nvmlInit_v2(self):
        return self.start

    def nvmlShutdown(self):
        self.closed = True

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.capabilities)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = index + 1
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        major._obj.value, minor._obj.value = self.capabilities[handle.value - 1]
        return 0


@pytest.mark.parametrize(
    ("library", "said"),
    [
        (Library((9, 0)), None),
        (Library((7, 5), (10, 0)), None),
        (Library((8, 0)), "the GPU has compute capability 8.0; the kernels need 9.0 or newer"),
        (Library(), "the NVIDIA driver shows no GPU"),
        (Library(start=9), "the NVIDIA driver does not answer (NVML error 9)"),
    ],
    ids=["hopper", "the_best_counts", "ampere", "none", "no_answer"],
)
def test_gpus_are_judged(monkeypatch, library, said):
    from deepinfer_backend_cuda import probe

    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert probe._devices() == said
    assert library.closed == (library.start == 0)
