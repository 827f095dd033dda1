"""A step over latent caches, with everything laid out as badly as the rules allow.

Pages and state blocks are permuted, what no text wrote holds NaN (or codes of it), the block table
points outside the cache past a text's pages, rows without an owner stand at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deepinfer.api.model import DeviceBatch, StepRequests
from deepinfer.ops.reference.scaled import pack_rows, quantize
from deepinfer.testing.conformance.kit import Run

NOBODY = 1 << 20
GARBAGE = 0x7F  # NaN as an FP8 value or scale, 6 or 1 elsewhere


@dataclass(frozen=True)
class Text:
    """``rows`` of this step from position ``start`` on; ``floor`` of late layers; ``dead``: its
    rows write nothing.
    """

    rows: int
    start: int
    floor: int = 0
    dead: bool = False


class Latents:
    """Texts in the middle of a step.

    Args:
        run: where to compute.
        texts: who takes part.
        page: tokens of a page.
        spare: rows behind the last text's.
    """

    def __init__(self, run: Run, texts: list[Text], page: int = 8, spare: int = 0) -> None:
        self.run, self.texts, self.page = run, texts, page
        pages = [-(-(t.start + t.rows) // page) for t in texts]
        self.pages = sum(pages) + 2
        order = torch.randperm(self.pages, generator=torch.Generator().manual_seed(3)).tolist()
        table = torch.full((len(texts), max(pages, default=0) + 1), NOBODY, dtype=torch.int32)
        for row, count in zip(table, pages, strict=True):
            row[:count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        self.blocks = torch.arange(len(texts)).flip(0) + 1
        self.table = table
        self.batch = self._batch(spare)

    def _batch(self, spare: int) -> DeviceBatch:
        run, texts = self.run, self.texts
        rows = torch.tensor([t.rows for t in texts])
        row = torch.arange(len(texts)).repeat_interleave(rows)
        starts = torch.tensor([t.start for t in texts])
        cu_q = torch.cat((torch.zeros(1, dtype=torch.int64), rows.cumsum(0)))
        position = torch.arange(len(row)) - cu_q[row] + starts[row]
        slots = self.table[row, position // self.page].long() * self.page + position % self.page
        slots = torch.where(torch.tensor([t.dead for t in texts])[row], -1, slots)
        none = torch.full((spare,), -1)
        position = torch.cat((position, torch.zeros(spare, dtype=torch.int64)))
        return DeviceBatch(
            ids=run.put(torch.zeros_like(position)),
            positions=run.put(position),
            row_of_token=run.put(torch.cat((row, none))),
            kv_slots=run.put(torch.cat((slots, none))),
            attn=None,
            logit_rows=run.put(torch.arange(len(row))),
            requests=StepRequests(
                cu_q=run.put(cu_q.int()),
                starts=run.put(starts),
                block_table=run.put(self.table),
                blocks=run.put(self.blocks),
                floors=run.put(torch.tensor([t.floor for t in texts])),
            ),
        )

    @property
    def rows(self) -> int:
        """Of the step, those without an owner too."""
        return len(self.batch.ids)

    def part(self, text: int, begin: int, end: int) -> DeviceBatch:
        """A step of some of this one's rows of one text, as if those before had run."""
        requests = self.batch.requests
        assert requests is not None
        first = int(requests.cu_q[text])
        rows, one = slice(first + begin, first + end), slice(text, text + 1)
        count = torch.tensor([0, end - begin], dtype=torch.int32, device=requests.cu_q.device)
        return replace(
            self.batch,
            ids=self.batch.ids[rows],
            positions=self.batch.positions[rows],
            row_of_token=torch.zeros_like(self.batch.row_of_token[rows]),
            kv_slots=self.batch.kv_slots[rows],
            logit_rows=torch.arange(end - begin, device=count.device),
            requests=StepRequests(
                cu_q=count,
                starts=requests.starts[one] + begin,
                block_table=requests.block_table[one],
                blocks=requests.blocks[one],
                floors=requests.floors[one],
            ),
        )

    def late(self) -> tuple[DeviceBatch, Tensor]:
        """The step without rows below their text's floor, and where its rows stand in it."""
        requests, position = self.batch.requests, self.batch.positions
        assert requests is not None
        row = self.batch.row_of_token
        kept = ((row < 0) | (position >= requests.floors[row.clamp(min=0)])).nonzero()[:, 0]
        mine = row[kept]
        owners = torch.arange(len(self.texts), device=row.device)
        ends = (mine[:, None] == owners).sum(0).cumsum(0)
        cu_q = torch.cat((ends.new_zeros(1), ends)).int()
        starts = torch.maximum(requests.starts, requests.floors)
        late = replace(
            self.batch,
            ids=self.batch.ids[kept],
            positions=position[kept],
            row_of_token=mine,
            kv_slots=self.batch.kv_slots[kept],
            logit_rows=torch.arange(len(kept), device=row.device),
            requests=replace(requests, cu_q=cu_q, starts=starts),
        )
        return late, kept

    def growing(self, width: int, ratio: int, kind: str, packed: bool, new: bool = True) -> Tensor:
        """A cache [pages, page / ratio, n] with every text's entries up to this step's end, or (not
        ``new``) its begin.
        """
        per_page = self.page // ratio
        cache = self._empty((self.pages, per_page), width, kind, packed)
        for text, table in zip(self.texts, self.table, strict=True):
            count = (text.start + text.rows * new) // ratio
            j = torch.arange(count)
            rows = self.entries(count, width, kind, packed)
            cache[table[j // per_page].long(), j % per_page] = rows
        return self.run.place(cache)

    def ring(self, width: int, rows: int, packed: bool) -> Tensor:
        """A window [blocks, rows, n] as earlier steps left it."""
        cache = self._empty((len(self.texts) + 2, rows), width, "fp8", packed)
        for text, block in zip(self.texts, self.blocks, strict=True):
            at = torch.arange(max(0, text.start - rows), text.start)
            cache[block, at % rows] = self.entries(len(at), width, "fp8", packed)
        return self.run.place(cache)

    def open(self, width: int, rows: int) -> Tensor:
        """Open groups float32[blocks, rows, 2·width]."""
        state = torch.full((len(self.texts) + 2, rows, 2 * width), torch.nan)
        for text, block in zip(self.texts, self.blocks, strict=True):
            at = torch.arange(max(0, text.start - rows), text.start)
            state[block, at % rows] = self.run.draw.wide(len(at), 2 * width)
        return self.run.place(state)

    def entries(self, count: int, width: int, kind: Any, packed: bool) -> Tensor:
        """Drawn rows as a cache holds them."""
        x = self.run.draw.wide(count, width)
        return pack_rows(x, kind) if packed else quantize(x, kind).bfloat16()

    def _empty(self, shape: tuple[int, int], width: int, kind: Any, packed: bool) -> Tensor:
        if not packed:
            return torch.full((*shape, width), torch.nan, dtype=torch.bfloat16)
        record = pack_rows(torch.zeros(1, width), kind).shape[1]
        return torch.full((*shape, record), GARBAGE, dtype=torch.uint8)
