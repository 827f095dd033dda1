"""A step of nobody, run to see what it takes; and what KV then leaves."""

from types import SimpleNamespace

import pytest
import torch
from deepinfer.api.kv import KVGroup
from deepinfer.config import EngineConfig
from deepinfer.testing.tiny import VOCAB
from deepinfer.worker.dry_run import Largest, scratch_bytes
from deepinfer.worker.host import kv_memory
from rig import CPU, load

LARGEST = Largest(rows=21, lines=5, vocab=VOCAB, page_size=4, dtype=torch.float32)


@pytest.fixture(scope="module")
def naive(tmp_path_factory):
    return load(tmp_path_factory.mktemp("tiny"))


class Measuring:
    """A device whose memory holds a step of ``most`` rows; ``rows`` are those of each try."""

    torch_device = CPU

    def __init__(self, naive, monkeypatch, most=10**9):
        self.rows, self.lines, self.finite = [], [], True
        forward, logits = naive.model.forward, naive.model.logits

        def watched(batch, kv, taps=None):
            self.rows.append(len(batch.ids))
            if len(batch.ids) > most:
                raise torch.OutOfMemoryError("the device is full")
            hidden = forward(batch, kv, taps)
            assert not any(t.any() for i in range(3) for t in kv.layer(i)), "a dry run writes"
            return hidden

        def lines(hidden):
            self.lines.append(len(hidden))
            found = logits(hidden)
            self.finite &= bool(found.isfinite().all())
            return found

        monkeypatch.setattr(naive.model, "forward", watched)
        monkeypatch.setattr(naive.model, "logits", lines)

    def measure(self, work):
        with torch.inference_mode():
            work()
        return 100 * self.rows[-1]


def test_it_is_a_whole_step_and_writes_nothing(naive, monkeypatch):
    device = Measuring(naive, monkeypatch)
    assert scratch_bytes(naive.model, naive.ops, naive.spec, device, LARGEST) == 2100
    assert (device.rows, device.lines, device.finite) == ([21], [5], True)


def test_a_step_that_does_not_fit_is_measured_in_parts(naive, monkeypatch, caplog):
    device = Measuring(naive, monkeypatch, most=6)
    assert scratch_bytes(naive.model, naive.ops, naive.spec, device, LARGEST) == 500
    assert device.rows == [21, 10, 5]
    assert "21 rows does not fit" in caplog.text


def test_a_token_that_does_not_fit_is_an_error(naive, monkeypatch):
    with pytest.raises(torch.OutOfMemoryError):
        scratch_bytes(naive.model, naive.ops, naive.spec, Measuring(naive, monkeypatch, 0), LARGEST)


def test_devices_that_do_not_measure_and_models_with_state_are_left_out(naive, monkeypatch):
    plain = SimpleNamespace(torch_device=CPU)
    assert scratch_bytes(naive.model, naive.ops, naive.spec, plain, LARGEST) == 0
    state = KVGroup(name="state", kind="state", layers=(0,), entry=SimpleNamespace(nbytes=4))
    device = Measuring(naive, monkeypatch)
    spec = SimpleNamespace(groups=(state,))
    assert scratch_bytes(naive.model, naive.ops, spec, device, LARGEST) == 0


@pytest.mark.parametrize(
    ("scratch", "left"), [(0, 900_000), (50_000, 900_000), (400_000, 600_000), (2_000_000, 0)]
)
def test_kv_leaves_what_a_step_takes(naive, scratch, left):
    device = SimpleNamespace(torch_device=torch.device("cuda"), free_bytes=lambda: 1_000_000)
    config = EngineConfig(model="m", max_num_seqs=256, gpu_memory_utilization=0.9, page_size=4)
    assert kv_memory(config, naive.spec, 10**6, device, scratch) == left
