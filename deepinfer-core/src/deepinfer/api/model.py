"""A model, described once in ops. House section 7.2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from deepinfer.api.kv import KVSpec

if TYPE_CHECKING:
    import torch

    from deepinfer.ops.table import OpSet


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch:
    """One step's token rows, on the device. An argument of ``Model.forward``, never a global.

    ``ids``, ``positions``, ``row_of_token``, ``kv_slots``: int64[T]; a KV slot is
    page·page_size + offset, −1 writes nothing. ``attn``: opaque, from ``ops.plan_attention``.
    ``logit_rows`` int64[m]: token rows whose logits are wanted. ``tail`` int64[n] or None: for
    each row the first position that a truncating model must keep.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    row_of_token: torch.Tensor
    kv_slots: torch.Tensor
    attn: Any
    logit_rows: torch.Tensor
    tail: torch.Tensor | None = None


class KVPools(Protocol):
    """The paged pool: ``layer(i)`` gives (k_cache, v_cache), each [pages, page_size, HKV, D]."""

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]: ...


class Taps(Protocol):
    """Takes hidden rows of chosen layers for a drafter."""

    layers: tuple[int, ...]

    def put(self, layer: int, hidden: torch.Tensor) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """How checkpoint tensors become one parameter.

    ``sources`` are checkpoint names with the ``shapes`` they must have; several are joined along
    dimension 0 (``stack`` False: concatenated rows, as fused projections; True: a new leading
    dimension); ``view``: the parameter's shape where it is not the joined one (fused experts).
    ``uses``: the ops that read it, a composite before those it is written in; the first that has a
    ``prepare`` is asked. A bias, which goes beside a weight, has none and stays a tensor. ``route``
    among them says that experts are chosen by what this weight gives: it is never quantised.
    ``shard``: the dimension that tensor parallelism splits, or None. ``optional``: absent in some
    checkpoints (a bias); the parameter is then not loaded.
    """

    parameter: str
    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    uses: tuple[str, ...]
    stack: bool = False
    view: tuple[int, ...] | None = None
    shard: int | None = None
    optional: bool = False


class Model(Protocol):
    """What a step runs."""

    def load(self, parameter: str, value: Any) -> None:
        """Take one prepared parameter, by the name in its rule."""
        ...

    def forward(self, batch: DeviceBatch, kv: KVPools, taps: Taps | None = None) -> torch.Tensor:
        """Hidden rows [T, H] after the last layer, before the final norm."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Chosen hidden rows [m, H], through final norm and head, to logits float32[m, V]."""
        ...


class ModelAdapter(Protocol):
    """Everything core must know of a model family."""

    architectures: tuple[str, ...]

    def config(self, raw: Mapping[str, Any]) -> Any:
        """The checkpoint's config.json into this family's frozen dataclass; refuses by name."""
        ...

    def kv_spec(self, config: Any, dtype_bytes: int) -> KVSpec: ...

    def build(self, config: Any, ops: OpSet, parallel: Any) -> Model: ...

    def weights(self, config: Any) -> Iterable[WeightRule]: ...
