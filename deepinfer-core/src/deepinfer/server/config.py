"""What shapes a server, and nothing of the engine: :class:`ServerConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from deepinfer.errors import ConfigError

_POSITIVE: Final = (
    "max_queue", "max_body_bytes", "max_tokens", "max_n", "requests_per_minute",
    "max_concurrency_per_key", "body_seconds", "stall_seconds",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Limits and manners of one server. None means no limit.

    Args:
        served_names: what requests may call the model; none given: its own name and its path.
        api_keys: each opens every route; without any, all are open. ``/health`` always is.
        max_queue: samples that may wait beside the ``max_num_seqs`` that run; more get 429.
        max_body_bytes: of a request; larger ones get 413 before they are parsed.
        body_seconds: for a request's body to arrive.
        max_tokens: longest output that a request may ask; one that asks none gets at most this.
        max_n: samples of one request (prompts times ``n``).
        requests_per_minute: per key (per address where there are no keys).
        max_concurrency_per_key: requests of one key at once.
        drain_seconds: for running requests after SIGTERM; then they are ended.
        stall_seconds: running requests and no step for so long: ``/ready`` says 503.
        page: serve the page at ``/``.
    """

    served_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_queue: int = 1024
    max_body_bytes: int = 32 << 20
    body_seconds: float = 60.0
    max_tokens: int | None = None
    max_n: int = 128
    requests_per_minute: int | None = None
    max_concurrency_per_key: int | None = None
    drain_seconds: float = 30.0
    stall_seconds: float = 60.0
    page: bool = True

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value}: must be above 0.", setting=name)
        if not self.drain_seconds >= 0:
            raise ConfigError(
                f"drain_seconds={self.drain_seconds}: must not be below 0.",
                setting="drain_seconds",
            )
