"""What every op gave to every token: the microscope of ``verify determinism``.

Where you are: a :class:`Tracer` is a runner's ``Recorder`` and wraps the ops of one ``OpSet``. For
each call whose result has a row per token (or per line of logits) it keeps a hash of each row
under (request, position, op, how many-th call). Two traces of one request must agree wherever they
meet, whatever ran beside it; :func:`first_difference` names the first op at which they do not.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from deepinfer.api.plan import BatchPlan
    from deepinfer.ops.table import OpSet
    from deepinfer.worker.batch import StepBatch


class Place(NamedTuple):
    """One token of one request; requests are known by their seeds."""

    request: int
    position: int


class Call(NamedTuple):
    """The ``nth`` call of an op within a step."""

    op: str
    nth: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two traces part: the first op, in the order of calls, at the first such position."""

    op: str
    nth: int
    place: Place

    def __str__(self) -> str:
        return f"{self.op} (call {self.nth} of a step, position {self.place.position})"


class Tracer:
    """Records row hashes; a ``Recorder`` for ``executor.call("trace", tracer)``.

    Args:
        only: the requests to record, None for all.

    Attributes:
        rows: place → call → the hashes seen there (one, if all is well).
        order: call → when it came in its step, for saying which is first.
    """

    def __init__(self, only: frozenset[int] | None = None) -> None:
        self._only = only
        self.rows: dict[Place, dict[Call, set[bytes]]] = {}
        self.order: dict[Call, int] = {}
        self._seed_of: dict[int, int] = {}
        self._tokens: list[Place] = []
        self._lines: list[Place] = []
        self._calls: Counter[str] = Counter()
        self._clock = 0
        self._active = False

    def begin_step(self, plan: BatchPlan, step: StepBatch) -> None:
        """Learn whose rows these are."""
        self._seed_of.update((admit.slot, admit.seed) for admit in plan.admits)
        slots, positions = step.layout.slot.tolist(), step.batch.positions.tolist()
        self._tokens = [
            Place(self._seed_of[slot], position)
            for slot, position in zip(slots, positions, strict=True)
        ]
        self._lines = [self._tokens[row] for row in step.batch.logit_rows.tolist()]
        self._calls.clear()
        self._clock = 0
        self._active = True

    def end_step(self) -> None:
        self._active = False

    def saw(self, op: str, result: Any) -> None:
        """A call has returned."""
        if not self._active:
            return
        self._clock += 1
        call = Call(op, self._calls[op])
        self._calls[op] += 1
        tensors = [t for t in _tensors(result) if t.dim() > 0]
        for places in (self._tokens, self._lines):
            mine = [t for t in tensors if len(t) == len(places)]
            if mine:
                self.order.setdefault(call, self._clock)
                self._keep(call, places, mine)
                return

    def _keep(self, call: Call, places: Sequence[Place], tensors: Sequence[torch.Tensor]) -> None:
        mine = [i for i, p in enumerate(places) if self._only is None or p.request in self._only]
        for i, digest in zip(mine, _row_hashes(tensors, mine), strict=True):
            self.rows.setdefault(places[i], {}).setdefault(call, set()).add(digest)


def watch(ops: OpSet, tracer: Tracer) -> Callable[[], None]:
    """Wrap every op of a set; returns the call that takes the wrappers off again."""

    def watched(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = fn(*args, **kwargs)
            tracer.saw(name, result)
            return result

        return call

    return rewrap(ops, {name: watched for name in ops.origin})


def rewrap(
    ops: OpSet, wrappers: dict[str, Callable[[str, Callable[..., Any]], Callable[..., Any]]]
) -> Callable[[], None]:
    """Put ``wrappers[name](name, op)`` in the place of some ops; returns the way back."""
    before = {name: getattr(ops, name) for name in wrappers}
    for name, wrapper in wrappers.items():
        setattr(ops, name, wrapper(name, before[name]))

    def undo() -> None:
        for name, fn in before.items():
            setattr(ops, name, fn)

    return undo


def unfuse(ops: OpSet) -> Callable[[], None]:
    """Put every composite's reference in its place, so that the ops it is written in are called.

    Returns the way back. For faults that are planted in an op: a fused kernel does not call it.
    """
    from deepinfer.ops.table import table

    plain = {spec.name: partial(spec.reference, ops) for spec in table().values() if spec.composite}
    return rewrap(ops, {name: lambda name, _: plain[name] for name in plain})


def first_difference(one: Tracer, two: Tracer) -> Difference | None:
    """The first op whose rows differ at a place that both traces know; None if all agree."""
    parted = [
        (place.position, two.order[call], call, place)
        for place, calls in two.rows.items()
        for call, seen in calls.items()
        if call in one.rows.get(place, {}) and len(seen | one.rows[place][call]) > 1
    ]
    if not parted:
        return None
    _, _, call, place = min(parted)
    return Difference(call.op, call.nth, place)


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    import torch

    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for part in result:
            yield from _tensors(part)


def _row_hashes(tensors: Sequence[torch.Tensor], rows: Sequence[int]) -> list[bytes]:
    import torch

    if not rows:
        return []
    parts = [
        t.detach()[list(rows)].cpu().contiguous().reshape(len(rows), -1).view(torch.uint8).numpy()
        for t in tensors
        if t.numel()
    ]
    return [
        hashlib.blake2b(b"".join(part[i].tobytes() for part in parts), digest_size=8).digest()
        for i in range(len(rows))
    ]
