"""Compiled grammars that are kept: in memory, by least recent use, and on disk if wanted."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class MemoryCache:
    """Key → compiled grammar, at most ``most`` bytes of them. Safe for several threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        self._bytes = 0

    def get(self, key: str) -> Any | None:
        """What was put there, which is now the most recently used."""
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
            return found[0]

    def put(self, key: str, grammar: Any, size: int) -> None:
        """Keep it; others go if there is no room. One that is larger than all room is not kept."""
        with self._lock:
            old = self._kept.pop(key, None)
            self._bytes += size - (old[1] if old is not None else 0)
            self._kept[key] = grammar, size
            while self._bytes > self._most:
                self._bytes -= self._kept.popitem(last=False)[1][1]

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Of everything kept."""
        return self._bytes


class DiskCache:
    """Key → text, a file each. A file that cannot be read or written is as good as none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, key: str) -> str | None:
        """The text that was kept."""
        try:
            return (self._folder / f"{key}.json").read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            return None

    def put(self, key: str, text: str) -> None:
        """Keep it, whole or not at all, whoever else does the same."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._folder, suffix=".part")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(text)
                os.replace(name, self._folder / f"{key}.json")
            except OSError:
                os.unlink(name)
                raise


class Recent(Generic[_T]):
    """The last ``most`` entries that were put. Safe for several threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _T] = OrderedDict()

    def get(self, key: str) -> _T | None:
        """What was put there last."""
        with self._lock:
            return self._kept.get(key)

    def put(self, key: str, value: _T) -> None:
        """Keep it; the oldest goes if there are too many."""
        with self._lock:
            self._kept[key] = value
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)


class Locks:
    """A lock for each key while somebody holds it or waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, tuple[threading.Lock, int]] = {}

    @contextlib.contextmanager
    def of(self, key: str) -> Iterator[None]:
        """Hold the key's lock."""
        with self._lock:
            lock, users = self._held.get(key, (threading.Lock(), 0))
            self._held[key] = lock, users + 1
        try:
            with lock:
                yield
        finally:
            with self._lock:
                lock, users = self._held.pop(key)
                if users > 1:
                    self._held[key] = lock, users - 1
