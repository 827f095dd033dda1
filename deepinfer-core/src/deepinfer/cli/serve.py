"""``deepinfer serve``: the HTTP server."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import click

from deepinfer.cli.options import engine_config, engine_options, fetch_demo
from deepinfer.errors import ConfigError

_NEEDS = ("fastapi", "uvicorn", "prometheus_client")


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="0.0.0.0: every interface.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True)
@click.option("--served-model-name", "served_names", multiple=True, help="What clients call it.")
@click.option(
    "--api-key-file",
    type=click.Path(dir_okay=False),
    help="A key a line; all routes but /health need one.",
)
@click.option("--api-key-env", metavar="NAME", help="The variable that holds keys, by commas.")
@click.option("--max-queue", type=int, help="Samples that may wait.  [1024]")
@click.option("--max-body-bytes", type=int, help="Of a request.  [32 MiB]")
@click.option("--max-output-tokens", "max_tokens", type=int, help="Longest output; none: context.")
@click.option("--max-samples", "max_n", type=int, help="Prompts times n of a request.  [128]")
@click.option("--requests-per-minute", type=int, help="Per key, or per address.")
@click.option("--max-concurrency-per-key", type=int)
@click.option("--body-seconds", type=float, help="For a body to arrive.  [60]")
@click.option("--drain-seconds", type=float, help="For what runs, after SIGTERM.  [30]")
@click.option("--stall-seconds", type=float, help="Without a step: not ready.  [60]")
@click.option("--page/--no-page", default=None, help="The page at /.")
@click.option("--access-log/--no-access-log", default=True, show_default=True)
@click.option("--otlp-endpoint", help="Send OpenTelemetry spans there (extra: otel).")
@engine_options
def serve(
    host: str,
    port: int,
    api_key_file: str | None,
    api_key_env: str | None,
    access_log: bool,
    otlp_endpoint: str | None,
    engine: dict[str, Any],
    **limits: Any,
) -> int:
    """Serve a model over HTTP: /v1/generate, OpenAI's and Anthropic's dialects.

    SIGTERM and Ctrl-C drain: what runs may end, new requests get 503.
    """
    _check_installed()
    from deepinfer.server.lifecycle import Server, run
    from deepinfer.server.metrics import Metrics
    from deepinfer.server.service import Service
    from deepinfer.server.tracing import NO_TRACER, OtelTracer, otlp_provider

    config = engine_config(engine)
    keys = _keys(api_key_file, api_key_env)
    given = {k: v for k, v in limits.items() if v not in (None, ())}
    settings = _server_config(api_keys=keys, **given)
    fetch_demo(config.model)
    provider = None if otlp_endpoint is None else otlp_provider(otlp_endpoint)
    metrics = Metrics()
    tracer = NO_TRACER if provider is None else OtelTracer(provider)
    server = Server(Service(settings, metrics, tracer), host, port)
    try:
        with _logged() if access_log else nullcontext():
            run(server, lambda: _load(config, metrics), lambda *_: _tell(server.url, config.model))
    finally:
        if provider is not None:
            provider.shutdown()
    return 0


def _check_installed() -> None:
    from importlib.util import find_spec

    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"The server needs {', '.join(missing)}, which is not installed.",
            next_step="pip install 'deepinfer-core[server]'.",
        )


def _server_config(**given: Any) -> Any:
    from deepinfer.server.config import ServerConfig

    return ServerConfig(**given)


def _keys(file: str | None, variable: str | None) -> tuple[str, ...]:
    from deepinfer import settings
    from deepinfer.server.auth import keys_of, read_keys

    found = () if file is None else read_keys(file)
    return found if variable is None else (*found, *keys_of(settings.named_by_user(variable)))


def _load(config: Any, metrics: Any) -> Any:
    from deepinfer.entrypoints.assemble import assemble
    from deepinfer.entrypoints.async_llm import AsyncLLM

    return AsyncLLM.from_assembly(assemble(config, [metrics]))


@contextmanager
def _logged() -> Iterator[None]:
    """While it serves: one line of JSON a request, on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger("deepinfer.server.access")
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


def _tell(url: str, model: str) -> None:
    click.echo(f"{model} is served at {url}", err=True)
