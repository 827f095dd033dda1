"""Which replica gets a request. House section 7.7."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RouteView:
    """What a router may see of a request."""

    token_ids: tuple[int, ...]
    cache_salt: str
    priority: int


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """What a router may see of a replica."""

    index: int
    tokens_in_flight: int
    prefix_tokens: int


class Router(Protocol):
    """Longest prefix match, then fewest tokens in flight, then index, by default."""

    def choose(self, request: RouteView, replicas: Sequence[ReplicaStats]) -> int: ...
