"""A step's attention over a paged cache, with everything laid out as badly as the rules allow.

Pages are permuted, lines that no request wrote hold NaN, and entries of the block table past a
request's pages point outside the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer.testing.conformance.kit import PAGE_SIZE, Run

NOBODY = 1 << 20


class Paged:
    """Requests with cached text and the query rows of one step.

    Args:
        run: where to compute.
        requests: (query rows, cached tokens with this step's included) for each.
        heads: query heads and cached heads.
        dim: of a head.
        spare: query rows behind the last request's.
        scale: of the queries.
        page_size: tokens of a page.
        options: ``window``, ``softcap``, ``sink`` of the op; a sink of True is drawn.
    """

    def __init__(
        self,
        run: Run,
        requests: list[tuple[int, int]],
        *,
        heads: tuple[int, int] = (4, 2),
        dim: int = 16,
        spare: int = 0,
        scale: float = 1.0,
        page_size: int = PAGE_SIZE,
        **options: Any,
    ) -> None:
        self.run, self.requests, self.options = run, requests, options
        if options.get("sink") is True:
            options["sink"] = run.put(run.draw.wide(heads[0]))
        rows = [rows for rows, _ in requests]
        self.q = run.put(run.draw.normal(sum(rows) + spare, heads[0], dim, scale=scale))
        self.text = [
            (run.draw.normal(kv, heads[1], dim), run.draw.normal(kv, heads[1], dim))
            for _, kv in requests
        ]
        self.scale = dim**-0.5
        self.cu_q = torch.tensor([0, *rows], dtype=torch.int32).cumsum(0).int()
        self.lengths = torch.tensor([kv for _, kv in requests], dtype=torch.int64)
        self.page_size = page_size
        self._line = heads[1], dim
        self.plan: Any = None
        self.move(spare=2)

    def move(self, spare: int) -> None:
        """Deal the pages anew, with ``spare`` that nobody holds; the text stays."""
        self.block_table, total = self._deal(spare)
        self.k_cache, self.v_cache = self._filled((total, self.page_size, *self._line))

    def _deal(self, spare: int) -> tuple[Tensor, int]:
        """Pages in random order; the table is wider than any request."""
        counts = [-(-kv // self.page_size) for _, kv in self.requests]
        order = self.run.draw.order(sum(counts) + spare)
        table = torch.full((len(counts), max([0, *counts]) + 2), NOBODY, dtype=torch.int32)
        begin = 0
        for row, count in enumerate(counts):
            table[row, :count] = order[begin : begin + count].int()
            begin += count
        return table, len(order)

    def _filled(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        caches = [torch.full(shape, torch.nan, dtype=self.run.dtype) for _ in range(2)]
        for request, text in enumerate(self.text):
            slots = self.slots(request, 0, len(text[0]))
            for cache, rows in zip(caches, text, strict=True):
                cache.view(-1, *shape[2:])[slots] = rows
        return self.run.put(caches[0]), self.run.put(caches[1])

    def slots(self, request: int, begin: int, end: int) -> Tensor:
        """int64 slots of a request's positions ``begin … end−1``."""
        positions = torch.arange(begin, end)
        pages = self.block_table[request, positions // self.page_size].long()
        return pages * self.page_size + positions % self.page_size

    def attend(self, plan: Any = None) -> Any:
        """(o, lse) of the step; with another's plan if one is given."""
        run = self.run
        if plan is None:
            plan = run.ops.plan_attention(
                run.put(self.block_table), run.put(self.lengths), run.put(self.cu_q), self.page_size
            )
        self.plan = plan
        return run.ops.attention(
            self.q, self.k_cache, self.v_cache, plan, self.scale, **self.options
        )
