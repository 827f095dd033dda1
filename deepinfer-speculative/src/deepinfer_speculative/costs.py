"""What a step costs: tables measured at start on the device in use, kept on disk. Spec 4.2, 4.3.

A step of M token rows without drafts takes ``plain[M]`` seconds, one whose rows include drafts
``verify[M]``, and drafting for R requests behind it ``draft[R]``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from deepinfer.api.speculative import StepShape
from deepinfer.errors import ConfigError
from numpy.typing import ArrayLike, NDArray

log = logging.getLogger(__name__)

VERSION: Final = 3
MOST_KNOWN: Final = 256
"""Loads whose seconds are kept."""
STEPS: Final = 11
"""Steps that measuring a shape takes, about."""
Floats = NDArray[np.float64]
Measure = Callable[[Sequence[StepShape]], list[float]]


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds by size, from points of ascending size.

    Up to ``tier_limit``, the largest size that runs as a graph, a size costs what the next point at
    or above it costs: graphs are padded. Beyond, cost is linear between points beyond it, and below
    the first of those it is that of the first (leaving graphs is a jump). Behind the last point it
    goes on as steeply as between the last two, or in proportion where there is one. A larger size
    never costs less: where it was measured so, the running maximum stands.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    tier_limit: int = 0

    def __post_init__(self) -> None:
        good = len(self.sizes) == len(self.seconds) > 0
        good = good and all(a < b for a, b in zip(self.sizes, self.sizes[1:], strict=False))
        if not good or self.sizes[0] < 0 or not all(0 <= s < float("inf") for s in self.seconds):
            raise ConfigError(
                "A cost curve needs points of ascending size, each with seconds of 0 or more: "
                f"sizes {list(self.sizes)}, seconds {list(self.seconds)}.",
                setting="speculative",
            )

    def __call__(self, size: ArrayLike) -> Floats:
        """float64 of the same shape."""
        asked = np.asarray(size, np.float64)
        x = np.asarray(self.sizes, np.float64)
        y = np.maximum.accumulate(np.asarray(self.seconds, np.float64))
        tiers = int(np.searchsorted(x, self.tier_limit, "right"))
        found = np.empty_like(asked)
        low = asked <= (x[tiers - 1] if tiers else -np.inf)
        found[low] = y[np.searchsorted(x, asked[low], "left")]
        high = ~low
        if tiers < len(x):
            found[high] = np.interp(asked[high], x[tiers:], y[tiers:])
        else:
            found[high] = y[-1]
        beyond = asked > x[-1]
        if len(x) > 1:
            slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
            found[beyond] = y[-1] + slope * (asked[beyond] - x[-1])
        else:
            found[beyond] = y[-1] * asked[beyond] / max(x[-1], 1.0)
        return found


@dataclass(frozen=True, slots=True)
class CostTable:
    """All three curves. ``graph_rows``: steps of at most so many rows are padded to a multiple of
    their requests, so that cost goes by stairs.
    """

    plain: CostCurve
    verify: CostCurve
    draft: CostCurve
    graph_rows: int = 0
    _looked: list[tuple[Floats, Floats, Floats]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    _known: dict[tuple[int, int, bool], Floats] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def steps(self, tokens: int, drafts: int, requests: int, propose: bool) -> Floats:
        """Seconds of steps with ``tokens`` other rows and 0 … ``drafts`` draft rows; not to be
        written to: asked for at every step, they are kept.
        """
        key = tokens, requests, propose
        found = self._known.get(key)
        if found is None or len(found) <= drafts:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            found = self._known[key] = self._steps(tokens, drafts, requests, propose)
            found.flags.writeable = False
        return found[: drafts + 1]

    def _steps(self, tokens: int, drafts: int, requests: int, propose: bool) -> Floats:
        plain, verify, draft = self._dense(tokens + drafts + requests)
        rows = tokens + np.arange(drafts + 1)
        if requests and tokens + requests <= self.graph_rows:
            padded = tokens + -(-(rows - tokens) // requests) * requests
            rows = np.where(padded <= self.graph_rows, padded, rows)
        seconds = verify[rows]
        seconds[0] = plain[tokens]
        if propose:
            seconds += draft[requests]
        return seconds

    def plain_of(self, rows: int) -> float:
        """Seconds of a step of so many rows without drafts."""
        return float(self._dense(rows)[0][rows])

    def draft_of(self, requests: int) -> float:
        """Seconds that drafting for so many requests takes."""
        return float(self._dense(requests)[2][requests])

    def _dense(self, most: int) -> tuple[Floats, Floats, Floats]:
        """The curves at 0 … ``most`` and some more: asked for every step, they are looked up."""
        if not self._looked or len(self._looked[0][0]) <= most:
            sizes = np.arange(1 << max(9, (2 * most).bit_length()))
            self._looked[:] = [(self.plain(sizes), self.verify(sizes), self.draft(sizes))]
        return self._looked[0]

    def to_json(self) -> dict[str, Any]:
        """Numbers and lists."""
        curves = {name: asdict(getattr(self, name)) for name in ("plain", "verify", "draft")}
        return {"version": VERSION, **curves, "graph_rows": self.graph_rows}

    @classmethod
    def from_json(cls, said: Any) -> CostTable:
        """What ``to_json`` wrote.

        Raises:
            ConfigError: it is something else.
        """
        try:
            curves = {
                name: CostCurve(
                    tuple(map(int, said[name]["sizes"])),
                    tuple(map(float, said[name]["seconds"])),
                    int(said[name].get("tier_limit", 0)),
                )
                for name in ("plain", "verify", "draft")
            }
            version, graph_rows = said["version"], int(said.get("graph_rows", 0))
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as why:
            raise ConfigError(f"This is no cost table: {why!r}.", setting="speculative") from None
        if version != VERSION:
            raise ConfigError(
                f"The cost table has version {version!r}, not {VERSION}.", setting="speculative"
            )
        return cls(**curves, graph_rows=graph_rows)


def load(path: Path) -> CostTable:
    """A table that the user names.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return CostTable.from_json(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError) as why:
        said = why.message.rstrip(".") if isinstance(why, ConfigError) else why
        raise ConfigError(
            f"speculative: costs={str(path)!r} cannot be read: {said}.", setting="speculative"
        ) from None


def cached(folder: Path, identity: str, measure: Callable[[], CostTable]) -> CostTable:
    """The table kept for this identity, or a new one, which is kept if the disk lets it be."""
    name = hashlib.sha256(f"{VERSION} {identity}".encode()).hexdigest()[:32]
    path = folder / f"costs-{name}.json"
    try:
        return CostTable.from_json(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, ConfigError):
        pass
    log.info("Measuring what steps with drafts and without cost; kept as %s.", path)
    table = measure()
    try:
        _write(path, json.dumps({**table.to_json(), "of": identity}, indent=1))
    except OSError as why:
        log.info("Measured costs are not kept: %s", why)
    return table


def _write(path: Path, text: str) -> None:
    """Whole or not at all, whoever else writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def profile(
    measure: Measure,
    gamma: int,
    max_requests: int,
    max_tokens: int,
    budget: float,
    graph_rows: int = 0,
) -> CostTable:
    """Time steps of 1, 2, 4, … requests without drafts, with all drafts, and drafting again.

    First every second size, so that what is left out lies between two of them. Where steps of all
    drafts would take more than ``budget`` seconds, one of each request has to do, and behind that
    sizes end; compiling comes beside. What the budget has left goes to fewer drafts at these sizes,
    where steps up to ``graph_rows`` token rows are padded and so cost goes by stairs, then to the
    other sizes. Sizes stay within ``max_requests`` and ``max_tokens`` rows.
    """
    plain: dict[int, float] = {}
    verify: dict[int, float] = {}
    draft: dict[int, float] = {}
    sizes = list(_sizes(min(max_requests, 128)))

    def fits(shape: StepShape) -> bool:
        return shape.requests + shape.drafts <= max(max_tokens, 1 + gamma)

    def timed(*shapes: StepShape) -> float:
        shapes = tuple(filter(fits, shapes))
        seconds = dict(zip(shapes, measure(shapes), strict=True)) if shapes else {}
        for shape, took in seconds.items():
            n, k, propose = shape.requests, shape.drafts, shape.propose
            if not k:
                plain[n] = took
            elif not propose:
                verify[n + k] = took
            else:
                without = seconds[StepShape(n, k, False)]
                draft[n] = max(0.0, took - without)
        return STEPS * sum(seconds.values())

    def whole(n: int, each: int = gamma) -> float:
        many = n * each
        return timed(StepShape(n, 0, False), *(StepShape(n, many, p) for p in (False, True)))

    def fewer(n: int) -> float:
        return timed(*(StepShape(n, n * k, False) for k in range(1, gamma)))

    spent = each_row = 0.0
    for n in sizes[::2]:
        for each in (gamma, 1):  # no row takes longer than where there are few
            if n == 1 or spent + each_row * n * (1 + each) <= budget:
                took = whole(n, each)
                spent, each_row = spent + took, took / (n * (1 + each))
                break
    spent += fewer(1)  # few rows: kernels go by tiles, and this is the load most people have
    began = time.monotonic() - spent
    rest = [(fewer, n) for n in sizes[2::2] if n in plain and graph_rows]
    for more, n in (*rest, *((whole, n) for n in sizes[1::2])):
        if time.monotonic() - began <= budget:
            more(n)
    return CostTable(
        _curve(plain, graph_rows), _curve(verify), _curve(draft, graph_rows), graph_rows
    )


def _sizes(most: int) -> Iterable[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2


def _curve(points: dict[int, float], tier_limit: int = 0) -> CostCurve:
    sizes = tuple(sorted(points))
    return CostCurve(sizes, tuple(points[size] for size in sizes), tier_limit)
