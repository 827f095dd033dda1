"""The level that a backend reached, as the last lines of a run and as a badge file.

``failed``
    some promise was broken; the failing tests say which.
``partial``
    everything it does is right, but it declines an optional argument, by an error that names it.
``full``
    every op, every argument, every engine promise.
``full, invariant``
    the same, and bitwise independence of the batch for every op that the engine's invariant mode
    needs, also through the engine.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from deepinfer import __version__
from deepinfer.api.specs import API_VERSION


@dataclass
class Tally:
    """What a run has shown so far."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    declined: list[str] = field(default_factory=list)
    invariant: bool = False
    absent: str = ""
    deselected: bool = False
    selected: bool = False

    def level(self) -> str:
        """The level's name, see above; a run of chosen tests reaches none."""
        if self.failed or not self.passed:
            return "failed"
        if self.absent:
            return f"not judged (it cannot run here: {self.absent})"
        if self.selected:
            return "not judged (only some tests were run)"
        if self.declined:
            return "partial"
        return "full, invariant" if self.invariant else "full"

    def line(self, backend: str) -> str:
        """The badge in one line."""
        api = ".".join(map(str, API_VERSION))
        more = f"; declines {', '.join(sorted(set(self.declined)))}" if self.declined else ""
        more += f"; {len(self.failed)} failed" if self.failed else ""
        return f"conformance: backend {backend}, API {api}, level {self.level()}{more}"

    def write(self, path: str, backend: str, distribution: str) -> None:
        """The badge as a file, for ``--badge``."""
        badge = {
            "backend": backend,
            "distribution": distribution,
            "core": __version__,
            "api": list(API_VERSION),
            "level": self.level(),
            **asdict(self),
        }
        Path(path).write_text(json.dumps(badge, indent=1) + "\n", "utf-8")
