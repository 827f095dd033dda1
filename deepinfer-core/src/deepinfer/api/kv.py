"""KV layout as the model states it, and the interface of KV tiers. House sections 7.2 and 7.4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, Literal, NamedTuple, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a group stores in one tensor a layer: rows of ``width`` values of a dtype.

    ``dtype`` is torch's name; ``uint8`` is a packed record whose meaning ``KVSpec.layout`` names.
    """

    width: int
    dtype: Literal["uint8", "bfloat16", "float32"]

    @property
    def nbytes(self) -> int:
        return self.width * {"uint8": 1, "bfloat16": 2, "float32": 4}[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that share one lifetime. ``bytes_per_token`` covers all its layers.

    ``full`` grows with the text; ``window`` is only needed for the last ``window`` tokens and is
    stored like ``full``; ``state`` has a fixed size per request. ``replay``: tokens to run again
    after a prefix hit.

    A group with ``entry`` has one tensor a layer (``KVPools.tensor``) in place of the pair of k and
    v: a growing group one entry for every ``ratio`` tokens, [pages, page_size / ratio, width]; a
    state group ``rows`` entries for each request, [blocks, rows, width].
    """

    name: str
    kind: Literal["full", "window", "state"]
    layers: tuple[int, ...]
    kv_heads: int = 1
    head_dim: int = 0
    bytes_per_token: int = 0
    window: int | None = None
    replay: int = 0
    entry: Entry | None = None
    ratio: int = 1
    rows: int = 0

    @property
    def bytes_per_request(self) -> int:
        """Bytes of a state group that one request takes, whatever its length."""
        if self.kind != "state" or self.entry is None:
            return 0
        return self.rows * self.entry.nbytes * len(self.layers)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page of a growing group, of whole entries."""
        if self.entry is None:
            return self.bytes_per_token * page_size
        return self.entry.nbytes * len(self.layers) * (page_size // self.ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Late layers that need not run on every row of a prompt.

    They run from position ``floor = max(0, prompt_len − keep)`` on; ``first_layer`` is the first
    whose window does not reach below the floor. ``reach``: that many rows after the floor, all that
    later rows read is what it would be without truncation. ``compact``: the other rows are taken
    out; else they run and are masked.
    """

    keep: int
    reach: int
    first_layer: int
    compact: bool = True

    def floor(self, prompt_len: int) -> int:
        """The first position that late layers run."""
        return max(0, prompt_len - self.keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVOptions:
    """What of an engine shapes a model's KV. ``cache_dtype``: ``auto`` or what the user asked for;
    a family refuses by name what it does not store. ``truncation``: the mode asked for. ``asked``:
    engine arguments among these that the user gave, and did not leave to environment and defaults.
    """

    dtype_bytes: int
    page_size: int = 16
    draft_len: int = 0
    cache_dtype: str = "auto"
    truncation: Literal["compact", "mask", "off", "exact"] = "off"
    keep_tokens: int = 140
    asked: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class KVSpec:
    """All groups of a model. ``layout`` names what the bytes mean and enters every page key.

    State groups keep this promise, on which the prefix cache rests: a block saved while no
    position at or above b + page_size + draft_len + 2 was written serves a text that goes on at
    page boundary b. A text that begins at position 0 reads nothing of its block.

    ``lookback``: ids before a token that ``forward`` reads (n-grams); they lie in the slot table.
    """

    groups: tuple[KVGroup, ...]
    layout: str
    lookback: int = 0
    truncation: Truncation | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token costs in growing groups."""
        return sum(g.bytes_per_token for g in self.groups if g.kind != "state")

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page in all growing groups: exact, where a token's are rounded up."""
        return sum(g.page_bytes(page_size) for g in self.groups if g.kind != "state")

    @property
    def bytes_per_request(self) -> int:
        """Bytes that a request costs whatever its length: its state block."""
        return sum(g.bytes_per_request for g in self.groups)

    @property
    def page_multiple(self) -> int:
        """Tokens of a page must be a multiple of this: whole entries in every group."""
        return lcm(*(g.ratio for g in self.groups))

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
