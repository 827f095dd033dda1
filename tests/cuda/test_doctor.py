"""The backend's examination on a machine without a GPU: what it would say, from what it is told."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

CPU = torch.device("cpu")


@pytest.fixture
def doctor(sources):
    return pytest.importorskip("deepinfer_backend_cuda.doctor", reason="needs Triton")


def marks(found):
    return [mark for mark, _, _ in found]


class Nvml:
    """A management library of one driver."""

    def nvmlInit_v2(self):
        return 0

    def nvmlShutdown(self):
        return 0

    def nvmlSystemGetDriverVersion(self, text, size):
        text.value = b"580.159.04"
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, number):
        number._obj.value = 12080
        return 0


@pytest.fixture
def versions(doctor, monkeypatch):
    """What is said of versions; torch's CUDA and Triton's number are the test's."""

    def ask(cuda, triton):
        monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml())
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        monkeypatch.setattr(doctor, "triton", SimpleNamespace(__version__=triton))
        return list(doctor.versions())

    return ask


def test_versions_that_fit(versions):
    found = versions("12.8", "3.6.0")
    assert marks(found) == ["ok", "ok"]
    assert "driver 580.159.04 for CUDA 12.8" in found[0][1]


def test_a_driver_older_than_torch_and_another_triton_are_named(versions):
    _, driver, triton = versions("13.0", "3.7.0")
    assert driver[0] == "FAIL" and "13.0" in driver[1] and "12.8" in driver[1]
    assert triton[0] == "FAIL" and "3.7.0" in triton[1] and "3.6" in triton[2]


@pytest.mark.parametrize(
    ("known", "moved", "mark", "text"),
    [
        ({}, [], "note", "capability 10.0"),
        ({"rope": "1"}, [], "ok", "1 ops"),
        ({"rope": "1"}, ["rope 8x128"], "FAIL", "rope 8x128"),
    ],
)
def test_bits_that_moved_are_named(doctor, monkeypatch, known, moved, mark, text):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(doctor.bits, "golden", lambda capability: known)
    monkeypatch.setattr(doctor.bits, "moved", lambda device, golden: moved)
    ((got, said, _),) = doctor.recorded_bits(CPU)
    assert got == mark and text in said


def test_ops_whose_rows_see_their_company_are_named(doctor, monkeypatch):
    leaky = doctor.bits.Probe(
        "leaky", "none", 7, lambda device: lambda begin, end: (x(begin, end),)
    )

    def x(begin, end):
        return torch.arange(begin, end).float() + (end - begin)

    monkeypatch.setattr(doctor.bits, "probes", lambda: iter([leaky]))
    ((mark, said, _),) = doctor.company(CPU)
    assert mark == "FAIL" and "leaky (rows 0…0)" in said


@pytest.mark.parametrize(
    ("device", "copied", "expected"),
    [
        ("NVIDIA H200", 4.2, ["ok", "ok", "ok"]),
        ("NVIDIA H200", 2.0, ["note", "ok", "ok"]),
        ("NVIDIA X", 2.0, ["ok", "ok", "ok"]),
    ],
)
def test_a_device_below_its_kind_is_worth_a_note(doctor, monkeypatch, device, copied, expected):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda at: device)
    monkeypatch.setattr(doctor, "bandwidth", lambda at: copied)
    monkeypatch.setattr(doctor, "products", lambda at: (700.0, 780.0))
    found = list(doctor.ceilings(CPU))
    assert marks(found) == expected
    assert "700 TFLOP/s, 90%" in found[-1][1]
