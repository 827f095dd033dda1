"""Communication between ranks. House section 7.7. Sizes other than 1 are refused until built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Communicator(Protocol):
    """One group of ranks."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor: ...

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor: ...

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor: ...

    def broadcast(self, x: torch.Tensor, src: int) -> torch.Tensor: ...

    def dispatch(self, x: torch.Tensor, experts: torch.Tensor) -> Any: ...

    def combine(self, routed: Any, y: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelContext:
    """The groups that a layer may use."""

    tp: Communicator
    ep: Communicator
    cp: Communicator
    dp: Communicator
    world: Communicator
