"""Answers on their way to the host, without a GPU."""

import weakref

import pytest
import torch


@pytest.fixture
def device(sources):
    return pytest.importorskip("deepinfer_backend_cuda.device", reason="needs Triton")


class Event:
    """Of a copy that has arrived, or of a lost GPU."""

    def __init__(self, lost):
        self.lost = lost

    def record(self, stream):
        pass

    def query(self):
        if self.lost:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return True

    synchronize = query


@pytest.fixture
def copies(device, monkeypatch):
    """The pinned tensors of a future of two, which is dropped."""

    def dropped(lost):
        made = []

        def copied(tensor):
            made.append(tensor.clone())
            return made[-1]

        monkeypatch.setattr(device, "_copied", copied)
        monkeypatch.setattr(device.cuda, "Event", lambda: Event(lost))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda where: None)
        future = device.CudaFuture((torch.ones(2), torch.zeros(3)), torch.device("cuda", 0))
        alive = [weakref.ref(tensor) for tensor in made]
        if not lost:
            found = future.result()
            assert [t.tolist() for t in found] == [[1, 1], [0, 0, 0]]
            assert all(t is not pinned for t, pinned in zip(found, made, strict=True))
        made.clear()
        del future
        return [ref() is not None for ref in alive]

    return dropped


def test_what_arrived_is_given_back(copies):
    assert copies(lost=False) == [False, False]


def test_pinned_memory_of_a_lost_gpu_is_never_given_back(copies):
    """torch would ask the driver, which ends the process: an engine's death is to be told."""
    assert copies(lost=True) == [True, True]


def test_a_copy_that_cannot_begin_keeps_its_memory(device, monkeypatch):
    kept = []

    class Pinned:
        def copy_(self, tensor, non_blocking):
            raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch, "empty", lambda *shape, **how: Pinned())
    monkeypatch.setattr(device, "keep", kept.append)
    with pytest.raises(RuntimeError, match="device-side"):
        device.CudaFuture((torch.ones(2),), torch.device("cuda", 0))
    assert len(kept) == 1 and isinstance(kept[0], Pinned)
