"""What the V4.1 benchmarks share: their tiny model, clocks on its ops, a word on the machine."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from deepinfer.models.checkpoint import open_checkpoint
from deepinfer.models.deepseek_v41.adapter import DeepseekV41Adapter
from deepinfer.models.registry import model_config
from deepinfer.models.source import resolve
from deepinfer.testing.tiny_v41 import write_tiny_v41
from deepinfer.testing.v41_config import schedule

LAYERS = 12
"""As released in small: half of them, the last KV source with them, read one token an entry."""


def write_model(folder: Path, longest: int) -> str:
    """Twelve layers, 6 the last KV source, window 16: exact from 76 kept rows on. 16 entries are
    chosen, at layer 8 from 8 blocks of 8 that layer 6 keeps.
    """
    text = {
        **schedule(LAYERS, drafts=0),
        "max_position_embeddings": longest,
        "index_topk": 16,
        "candidate_topk_blocks": 8,
        "candidate_block_size": 8,
    }
    blind = {"num_hidden_layers": 0}
    overrides = {"text_config": text, "vision_config": blind}
    return str(write_tiny_v41(folder, overrides=overrides))


def read_config(model: str):
    """The model's sizes and schedule."""
    return model_config(DeepseekV41Adapter(), open_checkpoint(resolve(model)))


@dataclass
class Clock:
    """CPU seconds of the device's thread in ops, with what they call; ``calls`` keeps each one.

    Wraps the ops of an engine for as long as it is entered.
    """

    ops: object
    names: Iterable[str]
    calls: dict[str, list[float]] = field(default_factory=dict)

    def __enter__(self) -> Clock:
        self._before = {name: getattr(self.ops, name) for name in self.names}
        for name, fn in self._before.items():
            setattr(self.ops, name, self._timed(name, fn))
        return self

    def __exit__(self, *_) -> None:
        for name, fn in self._before.items():
            setattr(self.ops, name, fn)

    def seconds(self, name: str) -> float:
        return sum(self.calls.get(name, ()))

    def _timed(self, name, fn):
        calls = self.calls.setdefault(name, [])

        def timed(*args, **kwargs):
            began = time.thread_time()
            result = fn(*args, **kwargs)
            calls.append(time.thread_time() - began)
            return result

        return timed


def matmul_rate() -> float:
    """Multiply-adds a second of a large float32 product, on the threads that torch has."""
    a, best = torch.randn(1024, 1024), float("inf")
    for _ in range(8):
        began = time.thread_time()
        a @ a
        best = min(best, time.thread_time() - began)
    return 1024**3 / best


def machine() -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.name == "posix" else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
    }
