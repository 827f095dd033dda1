"""CUDA graphs: capture what a function launches, replay it as one launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

cuda: Any = torch.cuda  # parts of it are untyped


class Graphs:
    """Captures that share one pool of memory, so that they may not overlap: replays follow each
    other on one stream, and what one returns is read before another is replayed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first: Any = None  # a pool lasts as long as one graph of it
        self._failed: list[Any] = []  # torch's allocator may go on pointing to these

    def capture(self, fn: Callable[[], Any]) -> Callable[..., Any]:
        """Run ``fn`` once, so that kernels are compiled, then record it. Returns the replay."""
        fn()
        return self.record(fn)

    def forget(self) -> None:
        """Let go of the pool; its memory is free once the replays are gone, too."""
        self._first = None

    def record(self, fn: Callable[[], Any]) -> Callable[..., Any]:
        """Record without running; everything that ``fn`` launches must be compiled already.

        The capture is relaxed: other threads may go on allocating, and a graph of an engine that is
        gone may be destroyed meanwhile, by Python's collector on this very thread.
        """
        here = torch.cuda.current_stream(self._device)
        side = cuda.Stream(self._device)
        graph = torch.cuda.CUDAGraph()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            pool = None if self._first is None else self._first.pool()
            graph.capture_begin(pool=pool, capture_error_mode="relaxed")
            try:
                out = fn()
            except BaseException:  # out of memory, say; what the end says then hides nothing
                self._failed.append(graph)
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        self._first = self._first or graph
        here.wait_stream(side)

        def replay(*_: Any) -> Any:
            graph.replay()
            return out

        return replay
