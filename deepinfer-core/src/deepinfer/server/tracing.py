"""OpenTelemetry spans of requests, where a tracer is given. The package is an extra: ``otel``.

Where you are: beside the service, which says when a request begins and ends. Queue, prefill and
decode become child spans at the end, with the engine's own times.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, Protocol

from deepinfer.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer.entrypoints.inputs import Prepared
    from deepinfer.entrypoints.outputs import RequestOutput


class Span(Protocol):
    """One prompt on its way."""

    def end(self, output: RequestOutput) -> None:
        """It finished."""
        ...

    def leave(self) -> None:
        """Nobody listens any more; nothing happens if it has ended."""
        ...


class Tracer(Protocol):
    """Begins spans."""

    def begin(self, request_id: str, prepared: Prepared) -> Span: ...


class _Nothing:
    def begin(self, request_id: str, prepared: Prepared) -> Span:
        return self

    def end(self, output: RequestOutput) -> None: ...

    def leave(self) -> None: ...


NO_TRACER: Final[Tracer] = _Nothing()


class OtelTracer:
    """Spans by OpenTelemetry.

    Args:
        provider: an ``opentelemetry.trace.TracerProvider``; the global one is not touched.
    """

    def __init__(self, provider: Any) -> None:
        self._tracer = provider.get_tracer("deepinfer.server")
        # Of the engine's monotonic clock on the wall clock's scale.
        self._shift = time.time_ns() - int(time.monotonic() * 1e9)

    def begin(self, request_id: str, prepared: Prepared) -> Span:
        about = {
            "gen_ai.response.id": request_id,
            "gen_ai.usage.input_tokens": len(prepared.token_ids),
            "gen_ai.request.temperature": prepared.params.temperature,
            "gen_ai.request.top_p": prepared.params.top_p,
            "deepinfer.samples": len(prepared.requests),
        }
        return _OtelSpan(self._tracer, self._shift, about)


class _OtelSpan:
    def __init__(self, tracer: Any, shift: int, about: dict[str, Any]) -> None:
        self._tracer = tracer
        self._shift = shift
        self._span = tracer.start_span("deepinfer.request", attributes=about)
        self._open = True

    def end(self, output: RequestOutput) -> None:
        metrics, span = output.metrics, self._span
        reasons = [out.finish_reason for out in output.outputs if out.finish_reason]
        span.set_attribute("gen_ai.response.finish_reasons", reasons)
        if metrics is not None:
            span.set_attribute("gen_ai.usage.output_tokens", metrics.output_tokens)
            span.set_attribute("deepinfer.cached_tokens", metrics.cached_tokens)
            span.set_attribute("deepinfer.preemptions", metrics.preemptions)
            self._part("deepinfer.queue", metrics.arrival, metrics.first_scheduled)
            self._part("deepinfer.prefill", metrics.first_scheduled, metrics.first_token)
            self._part("deepinfer.decode", metrics.first_token, metrics.finished)
        self._close()

    def leave(self) -> None:
        if self._open:
            self._span.set_attribute("deepinfer.left_early", True)
            self._close()

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._span.end()

    def _part(self, name: str, start: float | None, end: float | None) -> None:
        if start is None or end is None:
            return
        from opentelemetry.trace import set_span_in_context

        inside = set_span_in_context(self._span)
        part = self._tracer.start_span(name, context=inside, start_time=self._ns(start))
        part.end(self._ns(end))

    def _ns(self, seconds: float) -> int:
        return int(seconds * 1e9) + self._shift


def otlp_provider(endpoint: str) -> Any:
    """A provider that sends spans to an OTLP collector over HTTP; ``shutdown()`` sends the rest.

    Raises:
        ConfigError: the extra ``otel`` is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as why:
        raise ConfigError(
            "Spans need OpenTelemetry, which is not installed.",
            setting="otlp_endpoint",
            next_step="pip install 'deepinfer-core[otel]'.",
        ) from why
    provider = TracerProvider(
        resource=Resource({"service.name": "deepinfer"}), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider
