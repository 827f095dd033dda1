"""What Prometheus scrapes: an observer of the engine with a registry of its own.

Where you are: ``on_step`` and ``on_finish`` run on the engine's thread and only add to numbers;
names, labels and text are made when somebody asks. Two servers of a process share nothing.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from deepinfer import __version__

if TYPE_CHECKING:
    from deepinfer.api.plan import Delta, StepStats
    from deepinfer.entrypoints.assemble import Assembly

_SECONDS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
_TOKENS: Final = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class Spread:
    """A histogram whose observations have a weight. One thread adds, any thread reads."""

    def __init__(self, bounds: Sequence[float] = _SECONDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, weight: int = 1) -> None:
        """Count ``value`` ``weight`` times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += weight
        self._sum += value * weight

    def family(self, name: str, about: str) -> HistogramMetricFamily:
        """As Prometheus wants it: counts up to each bound."""
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), tuple(self._counts), strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
        found = HistogramMetricFamily(name, about)
        found.add_metric([], buckets, self._sum)
        return found


# Spreads by their public name; ``_seconds`` ones have _SECONDS bounds.
_SPREADS: Final[Mapping[str, str]] = {
    "time_to_first_token_seconds": "From a request's arrival to its first token.",
    "inter_token_latency_seconds": "Between steps, counted once for each request that decoded.",
    "queue_seconds": "From a request's arrival to the first step that ran a row of it.",
    "prefill_seconds": "From a request's first step to its first token.",
    "decode_seconds": "From a request's first token to its end.",
    "request_seconds": "From a request's arrival to its end.",
    "request_prompt_tokens": "Prompt lengths.",
    "request_output_tokens": "Output lengths.",
}
_COUNTED: Final[Mapping[str, str]] = {
    "prompt_tokens": "Prompt tokens of ended requests.",
    "output_tokens": "Output tokens of ended requests.",
    "cached_prompt_tokens": "Prompt tokens of ended requests that the prefix cache held.",
    "draft_tokens": "Tokens that a drafter proposed.",
    "verified_draft_tokens": "Drafts that were looked at.",
    "accepted_draft_tokens": "Drafts that were right.",
}
_METHODS: Final = frozenset("GET HEAD POST PUT PATCH DELETE OPTIONS TRACE CONNECT".split())
# Counters of the engine that are no numbers, or that are shown under another name.
_LEFT_OUT: Final = ("finished", "output_tokens", "prompt_tokens")


class Metrics:
    """An :class:`deepinfer.api.observer.Observer`, and what the server itself counts.

    Args:
        clock: the engine's clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.last_step: float | None = None
        self._clock = clock
        self._decoding = False
        self._assembly: Assembly | None = None
        self._gauges: Mapping[str, Callable[[], float]] = {}
        self._spreads = {
            name: Spread(_SECONDS if name.endswith("_seconds") else _TOKENS) for name in _SPREADS
        }
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._finished: dict[str, int] = {}
        self._requests: dict[tuple[str, str, str], int] = {}
        self._http_seconds = Spread()

    def watch(self, assembly: Assembly, gauges: Mapping[str, Callable[[], float]]) -> None:
        """Show this engine's counters and pages too, and gauges of the server by name."""
        self._assembly = assembly
        self._gauges = gauges

    # The engine's thread.

    def on_step(self, stats: StepStats) -> None:
        """A step ended."""
        now, before = self._clock(), self.last_step
        if stats.decode_rows and self._decoding and before is not None:
            self._spreads["inter_token_latency_seconds"].add(now - before, stats.decode_rows)
        self._decoding = stats.step > 0 and stats.running > 0
        self.last_step = now

    def on_finish(self, delta: Delta) -> None:
        """A request ended."""
        reason = str(delta.finish)
        self._finished[reason] = self._finished.get(reason, 0) + 1
        m = delta.metrics
        if m is None:
            return
        seconds = {
            "queue_seconds": m.queue_seconds,
            "prefill_seconds": m.prefill_seconds,
            "decode_seconds": m.decode_seconds,
            "time_to_first_token_seconds": _between(m.arrival, m.first_token),
            "request_seconds": _between(m.arrival, m.finished),
            "request_prompt_tokens": m.prompt_tokens,
            "request_output_tokens": m.output_tokens,
        }
        for name, value in seconds.items():
            if value is not None:
                self._spreads[name].add(value)
        counted = (m.prompt_tokens, m.output_tokens, m.cached_tokens)
        drafted = (m.drafted, m.verified, m.accepted)
        for name, count in zip(_COUNTED, (*counted, *drafted), strict=True):
            self._counts[name] += count

    # The event loop's thread.

    def http(self, route: str, method: str, status: int, seconds: float) -> None:
        """An HTTP request ended. ``route`` is a template, never a client's own path.

        A method of a client's own is ``other``: each would be a series that stays.
        """
        key = (route, method if method in _METHODS else "other", str(status))
        self._requests[key] = self._requests.get(key, 0) + 1
        self._http_seconds.add(seconds)

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """For the registry."""
        version = GaugeMetricFamily("deepinfer_version", "Always 1.", labels=["version"])
        version.add_metric([__version__], 1)
        yield version
        for name, about in _SPREADS.items():
            yield self._spreads[name].family(f"deepinfer_{name}", about)
        for name, about in _COUNTED.items():
            yield CounterMetricFamily(f"deepinfer_{name}", about, value=self._counts[name])
        ended = CounterMetricFamily(
            "deepinfer_requests_finished", "Samples by how they ended.", labels=["reason"]
        )
        for reason, count in tuple(self._finished.items()):
            ended.add_metric([reason], count)
        yield ended
        yield from self._of_http()
        yield from self._of_engine()

    def _of_http(self) -> Iterable[Metric]:
        found = CounterMetricFamily(
            "deepinfer_http_requests", "HTTP requests.", labels=["route", "method", "status"]
        )
        for key, count in tuple(self._requests.items()):
            found.add_metric(key, count)
        yield found
        yield self._http_seconds.family("deepinfer_http_request_seconds", "HTTP requests' length.")
        for name, read in self._gauges.items():
            yield GaugeMetricFamily(f"deepinfer_{name}", f"{name.replace('_', ' ')}.", value=read())

    def _of_engine(self) -> Iterable[Metric]:
        if self._assembly is None:
            return
        engine, facts = self._assembly.engine, self._assembly.facts
        now: dict[str, float] = {
            "requests_running": len(engine.scheduler.running),
            "requests_waiting": len(engine.scheduler.waiting),
            "kv_pages": facts.num_pages,
            "kv_pages_free": engine.cache.pool.free,
            "kv_slots_free": len(engine.cache.slots),
        }
        for name, value in now.items():
            yield GaugeMetricFamily(f"deepinfer_{name}", f"{name.replace('_', ' ')}.", value=value)
        yield from _counters(engine.counters)


def _counters(counters: Any) -> Iterable[Metric]:
    """The engine's totals under their own names: ``deepinfer_engine_steps_total`` …"""
    for field in fields(counters):
        value = getattr(counters, field.name)
        if field.name not in _LEFT_OUT and isinstance(value, int | float):
            name = f"deepinfer_engine_{field.name}"
            yield CounterMetricFamily(name, f"{field.name.replace('_', ' ')}.", value=value)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
