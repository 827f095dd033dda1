"""``@op``, the table, and :class:`OpSet`: the implementations that one engine runs.

An op is declared by its reference, plain torch, which is its definition, its test oracle and its
fallback. A composite's first parameter is named ``ops``: it is written in other ops. The table is
filled at import of ``deepinfer.ops.reference`` and only read afterwards; what an engine chooses
lives in its own ``OpSet``, so two engines in a process may differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from deepinfer.api.backend import Impl, OpContext
from deepinfer.errors import PluginError
from deepinfer.ops.lowbit import BlockScaled

DENSE_READERS = frozenset({"linear", "grouped_linear", "embedding", "route"})
"""Ops whose weights are tensors, or what a backend made of one."""
EXACT_WEIGHTS = frozenset({"route", "hyper_mix", "compress"})
"""Ops that decide, mix or pool by a projection: a weight with one of them among its uses is never
quantised, whatever else reads it."""

_F = TypeVar("_F", bound=Callable[..., Any])
_TABLE: dict[str, OpSpec] = {}


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One op: its reference, and whether that is written in other ops."""

    name: str
    reference: Callable[..., Any]
    composite: bool


def op(fn: _F) -> _F:
    """Declare an op by its reference. A second declaration of a name is a bug."""
    name = fn.__name__
    assert name not in _TABLE, f"op {name} is declared twice"
    first = next(iter(inspect.signature(fn).parameters), None)
    _TABLE[name] = OpSpec(name, fn, composite=first == "ops")
    return fn


def table() -> Mapping[str, OpSpec]:
    """Every op, by name."""
    import deepinfer.ops.reference  # noqa: F401  (declares the ops)

    return MappingProxyType(_TABLE)


class OpSet:
    """The ops of one engine as attributes: ``ops.linear(x, w)``. A call costs one look-up.

    Args:
        overrides: what the backend provides.
        origin: the backend's name, shown for each override.
        context: what the overrides were chosen for; None where nobody chose.

    Attributes:
        origin: op name → "reference" or the backend's name: who serves it.
        of_parts: composites that are the references, or that say so (:class:`Impl`).
    """

    def __init__(
        self, overrides: Mapping[str, Impl], origin: str, context: OpContext | None = None
    ) -> None:
        specs = table()
        unknown = sorted(set(overrides) - set(specs))
        if unknown:
            raise PluginError(
                f"Backend {origin!r} provides ops that the table does not have: "
                f"{', '.join(unknown)}.",
                setting="backend",
                next_step=f"Known ops: {', '.join(sorted(specs))}.",
            )
        self.context = context
        self.origin = {name: origin if name in overrides else "reference" for name in specs}
        self.of_parts = frozenset(
            name
            for name, spec in specs.items()
            if spec.composite and (name not in overrides or overrides[name].of_parts)
        )
        self._prepare = {n: i.prepare for n, i in overrides.items() if i.prepare is not None}
        for name, spec in specs.items():
            if name in overrides:
                setattr(self, name, overrides[name].fn)
            else:
                fn = spec.reference
                setattr(self, name, partial(fn, self) if spec.composite else fn)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"the op table has no op {name!r}")

    def prepare(self, weight: Any, uses: tuple[str, ...]) -> Any:
        """A loaded weight into what the ops that read it take.

        The first use that has a ``prepare`` decides: a composite before the ops it is written in.
        Without uses (a bias, which goes beside a weight) it stays a tensor. A ``BlockScaled``
        weight is shown only to ops that take one, so not to ``linear``.
        """
        hidden = DENSE_READERS if isinstance(weight, BlockScaled) else frozenset()
        asked = (self._prepare.get(name) for name in uses if name not in hidden)
        prepare = next(filter(None, asked), None)
        return weight if prepare is None else prepare(weight, frozenset(uses))
