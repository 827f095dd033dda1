"""Fixtures for all tests: the demo model and tiny GGUF files."""

from __future__ import annotations

import gc
import json
import signal
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"


def pytest_addoption(parser):
    parser.addoption(
        "--golden", metavar="PATH", help="folder with more golden configurations of DeepSeek-V4.1"
    )


def pytest_configure(config):
    # A shell without job control starts what runs in the background deaf to Ctrl-C, and the tests
    # that send one would wait for ever.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        # One of several processes (pytest -n): tiny models gain nothing from more threads, and
        # those of all workers would wait for each other. Tests of threads ask for theirs.
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def demo_gguf():
    """The demo model's file; fetched once into the user's cache, skipped where that fails."""
    from deepinfer.errors import DeepInferError
    from deepinfer.models import demo

    try:
        return demo.fetch()
    except DeepInferError as why:
        pytest.skip(f"no demo model: {why}")


@pytest.fixture(scope="session")
def demo_tokenizer(demo_gguf):
    from deepinfer.models.source import resolve
    from deepinfer.tokenizer import load_tokenizer

    return load_tokenizer(resolve(str(demo_gguf)))


@pytest.fixture(scope="session")
def smollm2_golden():
    """Recorded prompts, ids, texts and log-probabilities of the demo model."""
    return json.loads((DATA / "smollm2.json").read_text())


@pytest.fixture
def write_gguf(tmp_path):
    """``write_gguf(arch, metadata, tensors, name=)``: a GGUF file from Python values.

    Metadata keys that begin with a dot get the architecture as prefix. A tensor is an array, or
    a pair of an array of bytes (rows, bytes per row) and the name of its type.
    """
    gguf = pytest.importorskip("gguf")

    def write(arch, metadata=(), tensors=(), name="tiny.gguf"):
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, arch)
        for key, value in dict(metadata).items():
            _add(writer, arch + key if key.startswith(".") else key, value)
        for key, value in dict(tensors).items():
            data, quant = value if isinstance(value, tuple) else (value, None)
            raw_dtype = None if quant is None else gguf.GGMLQuantizationType[quant]
            writer.add_tensor(key, data, raw_dtype=raw_dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _add(writer, key, value):
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    adders[type(value)](key, value)


@pytest.fixture
def recording(monkeypatch):
    """Called, it makes CPU devices that are opened from then on record: a graph is the function
    itself, standing inputs and all. Returns counts; with "full" set, nothing can be recorded.
    ``deep``: two steps are on their way, as where they are short; else one, however short they are.
    """
    import torch
    from deepinfer.engine import in_flight
    from deepinfer.ops.backend import CPUDevice

    def install(deep=False):
        monkeypatch.setattr(in_flight, "_SHORT", 1e9 if deep else 0.0)
        counts = {"recorded": 0, "replays": 0, "full": False}

        def record(device, fn):
            if counts["full"]:
                raise torch.OutOfMemoryError("none left")
            counts["recorded"] += 1

            def replay():
                counts["replays"] += 1
                return fn()

            return replay

        monkeypatch.setattr(CPUDevice, "record", record, raising=False)
        return counts

    return install


@pytest.fixture
def freezing(monkeypatch):
    """Called, it makes CPU devices record as a GPU does: see ``frozen``. Returns counts."""
    from deepinfer.engine import in_flight
    from deepinfer.worker import recorded

    def install():
        monkeypatch.setattr(in_flight, "_SHORT", 0.0)
        monkeypatch.syspath_prepend(str(Path(__file__).parent))
        import frozen

        monkeypatch.setattr(recorded, "WISHED", 3)
        # A recording looks at all tensors that Python knows, but for these: other tests' models.
        gc.freeze()
        return frozen.install(monkeypatch)

    yield install
    gc.unfreeze()
