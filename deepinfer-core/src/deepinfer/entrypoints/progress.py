"""A progress bar on standard error that leaves nothing behind.

tqdm, without its monitor thread and its multiprocessing lock: neither belongs in a guest.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any


class Bar:
    """``with Bar(total, "generating", "seq") as bar: bar.show(done)``."""

    def __init__(self, total: int | None, label: str, unit: str, disable: bool = False) -> None:
        import tqdm

        parts = {"monitor_interval": 0, "_lock": threading.RLock()}
        quiet: Any = type("QuietBar", (tqdm.tqdm,), parts)
        self._bar = quiet(total=total, desc=label, unit=unit, disable=disable, leave=False)

    def show(self, done: int) -> None:
        """Set how much is done."""
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
