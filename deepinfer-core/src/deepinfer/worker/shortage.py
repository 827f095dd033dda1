"""When a device fails in the middle of a step: memory that runs out, and a device that is lost.

The KV pool has its memory from the start, so what can run out is scratch. Then what can be made
again is given back (the device's graphs and caches) and the step runs once more; if it still does
not fit, in halves, down to single tokens. Nothing of this shows in results: rows are computed from
what the cache holds, and a chunk's halves follow each other as two chunks would.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from deepinfer.api.plan import DECODE, BatchPlan, RowBlock
from deepinfer.errors import PluginError

if TYPE_CHECKING:
    from deepinfer.api.backend import Device
    from deepinfer.api.kv import KVSpec

log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Shortage:
    """What a runner does about a device's failures.

    Args:
        device: has ``release()``, which gives back what can be made again, and ``explain(error)``,
            a clearer error for one of its own, if it knows what these are.
        spec: the model's KV. Where layers keep state, a step that was begun cannot be run again.
        release: gives back what else can be made again.

    Attributes:
        times: steps that memory ran out in, so far.
    """

    def __init__(self, device: Device, spec: KVSpec, release: Callable[[], None]) -> None:
        self._releases = release, getattr(device, "release", lambda: None)
        self._explain: Callable[[Exception], Exception] = getattr(device, "explain", lambda e: e)
        self._stateless = all(group.entry is None for group in spec.groups)
        self.times = 0

    @contextmanager
    def told(self) -> Iterator[None]:
        """What the device raises inside, in the device's own words."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, PluginError) as why:
            cause = why.__cause__ if isinstance(why, PluginError) else why
            if not isinstance(cause, RuntimeError):
                raise
            clearer = self._explain(cause)
            if clearer is cause:
                raise
            raise clearer from cause

    def again(self, work: Callable[[], _T]) -> _T:
        """``work``, which changes nothing, or what it may change again; once more if need be."""
        try:
            return work()
        except torch.OutOfMemoryError as why:
            self.note(why)
        self.release()  # outside: the error held the frames, and they what is to be freed
        return work()

    def release(self) -> None:
        """Give back what can be made again."""
        for release in self._releases:
            release()

    def hidden(
        self,
        plan: BatchPlan,
        whole: Callable[[], Tensor],
        part: Callable[[BatchPlan], Tensor] | None,
    ) -> Tensor:
        """Hidden rows [T, H] of a plan, whole or in halves.

        Args:
            whole: computes them at once.
            part: computes those of a plan with some of the rows; None where a step cannot be cut.
        """
        if not self._stateless:
            return whole()
        try:
            return self.again(whole)
        except torch.OutOfMemoryError:
            pair = None if part is None or plan.draft_rows else halves(plan)
            if pair is None:
                raise
        assert part is not None
        return torch.cat([part(half) for half in pair])

    def note(self, why: Exception) -> None:
        """Count and say that memory ran out."""
        self.times += 1
        said = (str(why).splitlines() or [""])[0]
        log.warning("Memory ran out within a step; graphs are given back. %s", said)


def halves(plan: BatchPlan) -> tuple[BatchPlan, BatchPlan] | None:
    """A plan's rows as two plans, one after the other; None if there is a single token.

    Only what a batch is built from is in them: their requests have entered already.
    """
    rows = plan.rows.array
    if len(rows) > 1:
        middle = len(rows) // 2
        first, second = rows[:middle], rows[middle:]
    else:
        (slot, start, count, emits, replay), *_ = rows.tolist()
        if start == DECODE or count < 2:
            return None
        half = count // 2
        first, second = rows.copy(), rows.copy()
        first[0] = slot, start, half, 0, min(replay, half)
        second[0] = slot, start + half, count - half, emits, max(replay - half, 0)
    bare = replace(plan, admits=(), pages=plan.pages[:0], saves=(), restores=())
    return replace(bare, rows=RowBlock(first)), replace(bare, rows=RowBlock(second))
