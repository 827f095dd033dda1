"""The sample backend with one planted fault each. The conformance kit must name every one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepinfer.api import Impl, OpContext
from deepinfer.errors import UnsupportedError
from deepinfer.ops.table import table
from torch import Tensor

from deepinfer_backend_sample import ops
from deepinfer_backend_sample.backend import SampleBackend


class FaultyBackend(SampleBackend):
    """Everything as in the sample, but for one op."""

    op = ""

    def wrong(self) -> Callable[..., Any]:
        """The faulty implementation."""
        raise NotImplementedError

    def provide(self, ctx: OpContext) -> Mapping[str, Impl]:
        """The sample's ops with the wrong one among them; invariant ops only where asked for."""
        provided = super().provide(ctx)
        if ctx.invariant and self.op not in provided:
            return provided
        return {**provided, self.op: Impl(self.wrong())}


class WrongTieBackend(FaultyBackend):
    """The highest of equal logits wins."""

    name, op = "sample-wrong-tie", "gumbel_argmax"

    def wrong(self) -> Callable[..., Any]:
        def gumbel_argmax(
            logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor
        ) -> Tensor:
            z = torch.where(logits.isnan(), -torch.inf, logits)
            last = z.shape[1] - 1 - z.flip(1).argmax(1)
            drawn = ops.gumbel_argmax(logits, temperature, seed, position)
            return torch.where((temperature == 0) & ~z.isneginf().all(1), last, drawn)

        return gumbel_argmax


class NeighbourBackend(FaultyBackend):
    """A thousandth of the row above is in each row; alone, a row is right."""

    name, op = "sample-neighbour", "rms_norm"

    def wrong(self) -> Callable[..., Any]:
        def rms_norm(x: Tensor, w: Tensor | None, eps: float) -> Tensor:
            mixed = x.clone()
            mixed[1:] += 1e-3 * x[:-1]
            return ops.rms_norm(mixed, w, eps)

        return rms_norm


class SpillBackend(FaultyBackend):
    """The line behind the last one that is written is cleared."""

    name, op = "sample-spill", "kv_write"

    def wrong(self) -> Callable[..., Any]:
        def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
            table()["kv_write"].reference(k, v, k_cache, v_cache, slots)
            last = int(slots.max()) if len(slots) else -1
            for cache in (k_cache, v_cache):
                if 0 <= last < cache.shape[0] * cache.shape[1] - 1:
                    page, line = divmod(last + 1, cache.shape[1])
                    cache[page, line] = 0

        return kv_write


class LeakBackend(FaultyBackend):
    """Every pool that was ever written to is kept, so its pages outlive the engine."""

    name, op = "sample-leak", "kv_write"
    kept: dict[int, Tensor] = {}  # noqa: RUF012  (shared by all engines: that is the fault)

    def wrong(self) -> Callable[..., Any]:
        def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
            table()["kv_write"].reference(k, v, k_cache, v_cache, slots)
            self.kept[k_cache.data_ptr()] = k_cache

        return kv_write


class DeafBackend(FaultyBackend):
    """The window is accepted and ignored."""

    name, op = "sample-deaf", "attention"

    def wrong(self) -> Callable[..., Any]:
        def attention(
            q: Tensor,
            k_cache: Tensor,
            v_cache: Tensor,
            plan: Any,
            scale: float,
            window: int | None = None,
            sink: Tensor | None = None,
            softcap: float | None = None,
        ) -> tuple[Tensor, Tensor]:
            reference = table()["attention"].reference
            return reference(q, k_cache, v_cache, plan, scale, None, sink, softcap)

        return attention


class ModestBackend(FaultyBackend):
    """No fault: an argument that it cannot serve is declined, by an error that names it."""

    name, op = "sample-modest", "silu_mul"

    def wrong(self) -> Callable[..., Any]:
        def silu_mul(x: Tensor, limit: float | None = None) -> Tensor:
            if limit is not None:
                raise UnsupportedError("silu_mul has no limit on this backend.", setting="limit")
            return table()["silu_mul"].reference(x)

        return silu_mul
