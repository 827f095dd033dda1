"""KV layout as the model states it, and the interface of KV tiers. House sections 7.2 and 7.4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that share one lifetime. ``bytes_per_token`` covers all its layers.

    ``full`` grows with the text; ``window`` is only needed for the last ``window`` tokens;
    ``state`` has a fixed size per request. ``replay``: tokens to run again after a prefix hit.
    """

    name: str
    kind: Literal["full", "window", "state"]
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    bytes_per_token: int
    window: int | None = None
    replay: int = 0


@dataclass(frozen=True, slots=True)
class KVSpec:
    """All groups of a model. ``layout`` names what the bytes mean and enters every page key."""

    groups: tuple[KVGroup, ...]
    layout: str

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token costs in growing groups."""
        return sum(g.bytes_per_token for g in self.groups if g.kind != "state")

    @property
    def replay(self) -> int:
        """Tokens that a prefix hit must run again."""
        return max((g.replay for g in self.groups), default=0)


class PageKey(NamedTuple):
    """Chained hash over (model, weights, layout, salt, tokens up to the end of the page)."""

    digest: bytes
    tokens: int


@dataclass(frozen=True, slots=True)
class Lookup:
    """Leading pages that a store holds; ``retry``: the answer is not known yet, ask again."""

    pages: int
    retry: bool = False


class Transfer(Protocol):
    """Pages on their way. While it is open it holds a lease on its request."""

    def done(self) -> bool: ...

    def failed(self) -> str | None: ...


class KVStore(Protocol):
    """A tier or a peer, brain half."""

    name: str

    def lookup(self, keys: Sequence[PageKey], ticket: Any | None) -> Lookup: ...

    def load(self, keys: Sequence[PageKey], pages: Sequence[int]) -> Transfer: ...

    def store(
        self, keys: Sequence[PageKey], pages: Sequence[int], keep_seconds: float | None
    ) -> Transfer: ...

    def forget(self, keys: Sequence[PageKey]) -> None: ...
