"""The KV memory of one rank: pages that texts share, and blocks of state that each request owns."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deepinfer.errors import UnsupportedError

if TYPE_CHECKING:
    from deepinfer.api.kv import Entry, KVGroup, KVSpec


class KVPool:
    """The pages and state blocks of every layer; a :class:`api.model.KVPools`.

    ``layer(i)`` gives (k, v), each [pages, page_size, HKV, D]. ``tensor(group, i)`` gives the one
    tensor of a layer in a group with an entry: [pages, page_size / ratio, width] where the group
    grows, [blocks, rows, width] where it is state. Memory starts as zeros; on a CPU a pool costs
    what is used of it.

    Args:
        spec: the model's groups.
        num_pages: pages of every layer; a page id means the same page in all of them.
        page_size: tokens of a page, whole entries in every group.
        dtype: of keys and values in groups without an entry.
        device: where the pool lies.
        state_blocks: blocks of every state group: one for each slot, then the snapshots.

    Attributes:
        nbytes: what all of it takes, exactly.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        state_blocks: int = 0,
    ) -> None:
        self.num_pages = num_pages
        self.state_blocks = state_blocks
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._tensors: dict[tuple[str, int], Tensor] = {}
        self._state: list[Tensor] = []
        pairs = [g for g in spec.groups if g.entry is None]
        for group in pairs:
            if group.kind == "state":
                raise UnsupportedError(
                    f"KV group {group.name!r} is a state group and says no entry: what it would "
                    "store is unknown.",
                    setting="model",
                )
        shapes = {
            layer: (num_pages, page_size, group.kv_heads, group.head_dim)
            for group in pairs
            for layer in group.layers
        }
        total = 2 * sum(prod(shape) for shape in shapes.values())
        self.nbytes = total * dtype.itemsize
        memory, at = lazy_zeros(total, dtype, device), 0
        for layer, shape in sorted(shapes.items()):
            size = prod(shape)
            pair = memory[at : at + 2 * size].view(2, *shape)
            self._layers[layer] = pair[0], pair[1]
            at += 2 * size
        for group in spec.groups:
            if group.entry is not None:
                self._pool_entries(group, group.entry, page_size, device)

    def _pool_entries(
        self, group: KVGroup, entry: Entry, page_size: int, device: torch.device
    ) -> None:
        if group.kind == "state":
            shape = (self.state_blocks, group.rows, entry.width)
        else:
            shape = (self.num_pages, page_size // group.ratio, entry.width)
        for layer in group.layers:
            tensor = lazy_zeros(prod(shape), getattr(torch, entry.dtype), device).view(shape)
            self._tensors[group.name, layer] = tensor
            self.nbytes += tensor.nbytes
            if group.kind == "state":
                self._state.append(tensor)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(k_cache, v_cache) of one layer."""
        return self._layers[index]

    def tensor(self, group: str, layer: int) -> Tensor:
        """The one tensor of a layer in a group with an entry."""
        return self._tensors[group, layer]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy state blocks, (from, to) each, in all state groups; as if all at once."""
        if not pairs:
            return
        source, target = zip(*pairs, strict=True)
        for tensor in self._state:
            tensor[list(target)] = tensor[list(source)]

    def close(self) -> None:
        """Drop the memory."""
        self._layers.clear()
        self._tensors.clear()
        self._state.clear()


def lazy_zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that cost memory when they are touched, on a CPU; ``torch.zeros`` touches all."""
    if device.type == "cpu":
        size = max(count, 1) * dtype.itemsize  # an empty array cannot be viewed as another type
        return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype)[:count]
    return torch.zeros(count, dtype=dtype, device=device)
