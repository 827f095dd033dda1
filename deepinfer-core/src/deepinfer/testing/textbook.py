"""The textbook path: one request, whole model, no scheduler. What engines are compared with.

It speaks to a model exactly as a worker does (``DeviceBatch``, paged pools), so it also shows, in
one screen, what a step needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer.api.backend import Backend, OpContext
from deepinfer.api.model import DeviceBatch, Taps
from deepinfer.models.checkpoint import Checkpoint, open_checkpoint
from deepinfer.models.registry import adapter_for, architectures_of, model_config
from deepinfer.models.source import resolve
from deepinfer.models.weights import load_weights
from deepinfer.ops.backend import build_ops
from deepinfer.parallel import single


class Pools:
    """Paged KV of every layer, filled with NaN: what nobody wrote may not be read."""

    def __init__(self, config: Any, pages: int, ctx: OpContext) -> None:
        shape = (pages, ctx.page_size, config.kv_heads, config.head_dim)
        self._layers = [
            tuple(torch.full(shape, torch.nan, dtype=ctx.dtype) for _ in range(2))
            for _ in range(config.layers)
        ]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        k_cache, v_cache = self._layers[index]
        return k_cache, v_cache

    def tensor(self, group: str, layer: int) -> Tensor:
        """There is none: this path runs models that keep keys and values."""
        raise KeyError(f"KV group {group!r}, layer {layer}")


class TextbookRunner:
    """A loaded model and the loop that a textbook would write.

    Args:
        source: a checkpoint, or where one lies.
        backend: whose ops.
        ctx: its context; ``head_dim`` is filled in.
        round_to: round weights to this type first.
        max_model_len: longest text.
    """

    def __init__(
        self,
        source: Checkpoint | Path | str,
        backend: Backend,
        ctx: OpContext,
        *,
        round_to: torch.dtype | None = None,
        max_model_len: int = 512,
    ) -> None:
        if isinstance(source, (str, Path)):
            source = open_checkpoint(resolve(str(source)))
        adapter = adapter_for(architectures_of(source.config)[0])
        config = dataclasses.replace(model_config(adapter, source), max_model_len=max_model_len)
        self.config = config
        self.backend = backend
        self.ctx = dataclasses.replace(ctx, head_dim=config.head_dim)
        self.ops = build_ops(backend, self.ctx)
        self.model = adapter.build(config, self.ops, single())
        self.bytes = load_weights(
            self.model, adapter.weights(config), source, self.ops, ctx.dtype, round_to
        )
        self.pages = -(-max_model_len // ctx.page_size)

    def hidden(
        self,
        ids: Sequence[int],
        chunks: Sequence[int] | None = None,
        taps: Taps | None = None,
        first_page: int = 0,
    ) -> Tensor:
        """Hidden rows of a text, run in chunks of these sizes (one chunk by default).

        ``first_page``: where its pages begin; results may not depend on it.
        """
        pools = Pools(self.config, first_page + self.pages, self.ctx)
        out, begin = [], 0
        with torch.inference_mode():
            for size in chunks or [len(ids)]:
                batch = self.batch(ids[begin : begin + size], begin, first_page)
                out.append(self.model.forward(batch, pools, taps))
                begin += size
        return torch.cat(out)

    def logits(self, ids: Sequence[int], chunks: Sequence[int] | None = None) -> Tensor:
        """float32[len(ids), V]."""
        with torch.inference_mode():
            return self.model.logits(self.hidden(ids, chunks))

    def greedy(self, prompt: Sequence[int], count: int) -> tuple[list[int], Tensor]:
        """``count`` ids after a prompt, and the logits that each was taken from."""
        pools = Pools(self.config, self.pages, self.ctx)
        ids, rows, begin = list(prompt), [], 0
        with torch.inference_mode():
            for _ in range(count):
                batch = self.batch(ids[begin:], begin)
                begin = len(ids)
                hidden = self.model.forward(batch, pools, None)
                rows.append(self.model.logits(hidden[-1:])[0])
                ids.append(int(rows[-1].argmax()))
        return ids[len(prompt) :], torch.stack(rows)

    def batch(self, ids: Sequence[int], begin: int, first_page: int = 0) -> DeviceBatch:
        """The step that runs these ids from position ``begin`` on."""
        page_size, count = self.ctx.page_size, len(ids)
        table = torch.arange(first_page, first_page + self.pages, dtype=torch.int32)[None]
        start, counts = torch.tensor([begin]), torch.tensor([count])
        rows, positions = self.ops.expand_rows(start, counts, count)
        cu_q = torch.tensor([0, count], dtype=torch.int32)
        return DeviceBatch(
            ids=torch.tensor(ids),
            positions=positions,
            row_of_token=rows,
            kv_slots=positions + first_page * page_size,
            attn=self.ops.plan_attention(table, start + counts, cu_q, page_size),
            logit_rows=torch.tensor([count - 1]),
        )
