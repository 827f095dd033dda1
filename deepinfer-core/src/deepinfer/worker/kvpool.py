"""The paged KV memory of one rank: every layer's k and v in one allocation."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deepinfer.errors import UnsupportedError

if TYPE_CHECKING:
    from deepinfer.api.kv import KVSpec


class KVPool:
    """``layer(i)`` gives (k, v), each [pages, page_size, HKV, D]; a :class:`api.model.KVPools`.

    Memory starts as zeros; on a CPU a pool costs what is used of it.

    Args:
        spec: the model's groups; those that grow are pooled, a state group is refused.
        num_pages: pages of every layer; a page id means the same page in all of them.
        page_size: tokens of a page.
        dtype: of keys and values.
        device: where the pool lies.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shapes = {}
        for group in spec.groups:
            if group.kind == "state":
                raise UnsupportedError(
                    f"KV group {group.name!r} is a state group, which this version cannot keep.",
                    setting="model",
                )
            shape = (num_pages, page_size, group.kv_heads, group.head_dim)
            shapes.update(dict.fromkeys(group.layers, shape))
        total = 2 * sum(prod(shape) for shape in shapes.values())
        self.nbytes = total * dtype.itemsize
        self.num_pages = num_pages
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        memory, at = lazy_zeros(total, dtype, device), 0
        for layer, shape in sorted(shapes.items()):
            size = prod(shape)
            pair = memory[at : at + 2 * size].view(2, *shape)
            self._layers[layer] = pair[0], pair[1]
            at += 2 * size

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(k_cache, v_cache) of one layer."""
        return self._layers[index]

    def close(self) -> None:
        """Drop the memory."""
        self._layers.clear()


def lazy_zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that cost memory when they are touched, on a CPU; ``torch.zeros`` touches all."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8)).view(dtype)
    return torch.zeros(count, dtype=dtype, device=device)
