"""KV tiers and peers, as the cache sees them: :class:`Tiers`.

A store (:class:`~deepinfer.api.kv.KVStore`) can be asked which leading pages of a text it holds,
and moves pages in and out beside the steps. Every transfer holds a lease on its request, so that
no page is given away while it is read or written. A store that raises is logged and asked no more:
what it held is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from deepinfer.api.kv import KVStore, PageKey, Transfer
    from deepinfer.engine.request import RequestState

_T = TypeVar("_T")
_log = logging.getLogger("deepinfer.engine")


class Found(NamedTuple):
    """A store and how many of the pages asked for it holds; ``retry``: it does not know yet."""

    store: KVStore | None = None
    pages: int = 0
    retry: bool = False


class Move(NamedTuple):
    """A transfer of a request's pages; ``end``: leading pages that hold KV once it is in."""

    transfer: Transfer
    owner: RequestState
    end: int


class Tiers:
    """The stores, nearest first, and the transfers under way."""

    def __init__(self, stores: Sequence[KVStore]) -> None:
        self.stores = tuple(stores)
        self._moves: list[Move] = []

    @property
    def busy(self) -> bool:
        """Transfers are under way."""
        return bool(self._moves)

    def find(self, keys: Sequence[PageKey], ticket: Any | None) -> Found:
        """The first store that holds the first of these pages."""
        for store in self.stores if keys else ():
            answer = self._ask(store, lambda s=store: s.lookup(keys, ticket))  # type: ignore[misc]
            if answer is not None and (answer.pages or answer.retry):
                return Found(store, answer.pages, answer.retry)
        return Found()

    def load(self, r: RequestState, store: KVStore, keys: Sequence[PageKey], first: int) -> bool:
        """Start to fill the request's pages from index ``first``; False: the store cannot."""
        end = first + len(keys)
        transfer = self._ask(store, lambda: store.load(keys, r.pages[first:end]))
        return self._track(transfer, r, end)

    def keep(self, r: RequestState, keys: Sequence[PageKey]) -> None:
        """Offer the request's first pages to every store that lacks them."""
        for store in self.stores if keys else ():
            self._ask(store, lambda s=store: self._keep(r, s, keys))  # type: ignore[misc]

    def _keep(self, r: RequestState, store: KVStore, keys: Sequence[PageKey]) -> None:
        have, end = store.lookup(keys, None).pages, len(keys)
        if have < end:
            self._track(store.store(keys[have:], r.pages[have:end], None), r, end)

    def arrived(self) -> list[Move]:
        """Transfers that have ended; their leases are given back."""
        if not self._moves:
            return []
        ended = [move for move in self._moves if move.transfer.done()]
        self._moves = [move for move in self._moves if move not in ended]
        for move in ended:
            move.owner.leases -= 1
        return ended

    def _track(self, transfer: Transfer | None, r: RequestState, end: int) -> bool:
        if transfer is None:
            return False
        r.leases += 1
        self._moves.append(Move(transfer, r, end))
        return True

    def _ask(self, store: KVStore, call: Callable[[], _T]) -> _T | None:
        try:
            return call()
        except Exception:
            _log.exception("KV store %r failed and is used no more.", store.name)
            self.stores = tuple(s for s in self.stores if s is not store)
            return None
