"""Latent attention and its sparse index against their definitions, written out by position.

The oracle knows whole texts: it keeps every latent, entry and key a text has had, and asks for each
query what the specification says it sees (3.3 to 3.10). The ops see pages, rings and steps.
"""

from __future__ import annotations

import math

import pytest
import torch
from deepinfer.api.model import DeviceBatch, StepRequests
from deepinfer.ops.invariant import invariant_ops
from deepinfer.ops.reference.latent import Window, last_rows, ring_slots
from deepinfer.ops.reference.sparse import Blocks, best, places
from deepinfer.ops.table import OpSet
from hypothesis import given, settings
from hypothesis import strategies as st

OPS = OpSet(invariant_ops(), "test")
WIDTH, HEADS, SIZE, PAGE = 32, 2, 5, 4
RING = SIZE + PAGE + 1


class Texts:
    """Whole texts, and caches that steps write as a model would."""

    def __init__(self, lengths, ratio, dtype=torch.float32, seed=0, packed=True):
        self.generator = torch.Generator().manual_seed(seed)
        self.ratio, self.dtype = ratio, dtype
        self.kv = [OPS.quantize(self.draw(n, WIDTH), "fp8") for n in lengths]
        self.q = [self.draw(n, HEADS, WIDTH) for n in lengths]
        self.entries = [OPS.quantize(self.draw(n, WIDTH), "nvfp4") for n in lengths]
        self.keys = [OPS.quantize(self.draw(n, WIDTH), "mxfp4") for n in lengths]
        self.index_q = [OPS.quantize(self.draw(n, 2, WIDTH), "mxfp4") for n in lengths]
        self.w = [(self.draw(n, 2) * 8).round().float() / 8 for n in lengths]
        wide = -(-max(lengths) // PAGE)
        order = torch.randperm(wide * len(lengths), generator=self.generator)
        self.table = order.view(len(lengths), wide).int()
        self.blocks = torch.randperm(len(lengths), generator=self.generator)
        self.done = [0] * len(lengths)
        kind = torch.uint8 if packed else torch.bfloat16
        growing = (len(order), PAGE // ratio)

        def empty(shape, width):
            return torch.full((*shape, width), 0x7F if packed else math.nan, dtype=kind)

        self.ring = empty((len(lengths), RING), 33 if packed else WIDTH)
        self.cache = empty(growing, 18 if packed else WIDTH)
        self.index = empty(growing, 17 if packed else WIDTH)

    def draw(self, *shape):
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def batch(self, rows, floors=None):
        text = torch.tensor([t for t, _ in rows])
        count = torch.tensor([c for _, c in rows])
        start = torch.tensor([self.done[t] for t, _ in rows])
        row = torch.arange(len(rows)).repeat_interleave(count)
        cu_q = torch.cat((torch.zeros(1, dtype=torch.long), count.cumsum(0)))
        position = torch.arange(len(row)) - cu_q[row] + start[row]
        page = self.table[text[row], position // PAGE].long()
        return DeviceBatch(
            ids=position,
            positions=position,
            row_of_token=row,
            kv_slots=page * PAGE + position % PAGE,
            attn=None,
            logit_rows=position,
            requests=StepRequests(
                cu_q=cu_q.int(),
                starts=start,
                block_table=self.table[text],
                blocks=self.blocks[text],
                floors=torch.tensor(floors or [0] * len(self.done))[text],
            ),
        )

    def now(self, of, rows):
        """This step's rows of something that texts have."""
        return torch.cat([of[t][self.done[t] : self.done[t] + c] for t, c in rows])

    def write_entries(self, rows, batch):
        closes = batch.positions % self.ratio == self.ratio - 1
        slots = torch.where(closes, batch.kv_slots // self.ratio, -1)
        group = [
            (t, p // self.ratio) for t, c in rows for p in range(self.done[t], self.done[t] + c)
        ]
        for cache, of, kind in (
            (self.cache, self.entries, "nvfp4"),
            (self.index, self.keys, "mxfp4"),
        ):
            values = torch.stack([of[t][j] for t, j in group])
            OPS.latent_write(values, cache, slots, kind)

    def step(self, rows, k, sink, floors=None, publish=None):
        """(attention, picks) of a step, its caches written."""
        batch = self.batch(rows, floors)
        self.write_entries(rows, batch)
        q, w = self.now(self.index_q, rows), self.now(self.w, rows)
        picks = OPS.select_sparse(q, w, self.index, batch, self.ratio, k, publish)
        own = self.now(self.kv, rows)
        window = Window(own, self.ring, batch, SIZE, floors is not None)
        o = OPS.latent_attention(
            self.now(self.q, rows), window, batch, sink, 0.3, self.cache, picks.entries
        )
        OPS.latent_write(own, self.ring, ring_slots(batch, RING), "fp8")
        for text, count in rows:
            self.done[text] += count
        return o, picks

    def scores(self, text, p):
        """float64 of each visible entry."""
        visible = (p + 1) // self.ratio
        dots = self.index_q[text][p].double() @ self.keys[text][:visible].double().T
        return (self.w[text][p].double()[:, None] * dots.clamp(min=0)).sum(0)

    def chosen(self, text, p, k, among=None):
        """Entries by score, then by place; ``among``: those allowed."""
        scores = self.scores(text, p).tolist()
        allowed = range(len(scores)) if among is None else [j for j in among if j < len(scores)]
        return sorted(sorted(allowed, key=lambda j: (-scores[j], j))[:k])

    def kept_blocks(self, text, p, publish):
        scores = self.scores(text, p).tolist()
        if not scores:
            return []
        size = publish.size
        tops = [max(scores[i : i + size]) for i in range(0, len(scores), size)]
        tops[(len(scores) - 1) // size] = math.inf
        order = sorted(range(len(tops)), key=lambda b: (-tops[b], b))
        return sorted(order[: publish.kept])

    def attention(self, text, p, entries, sink, floor=0):
        seen = list(self.kv[text][max(floor, p - SIZE + 1) : p + 1].double())
        seen += [self.entries[text][j].double() for j in entries]
        if not seen:
            return torch.zeros(HEADS, WIDTH, dtype=torch.float64)
        kv = torch.stack(seen)
        logits = 0.3 * self.q[text][p].double() @ kv.T
        both = torch.cat((logits, sink.double()[:, None]), 1).softmax(1)[:, :-1]
        return both @ kv


def steps_of(lengths, sizes, generator):
    """Random steps until every text is through."""
    done = [0] * len(lengths)
    while done != lengths:
        order = torch.randperm(len(lengths), generator=generator).tolist()
        rows = []
        for text in order:
            most = lengths[text] - done[text]
            count = min(most, sizes[int(torch.randint(len(sizes), (1,), generator=generator))])
            if count:
                rows.append((text, count))
                done[text] += count
        if rows:
            yield rows


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 45), min_size=1, max_size=3),
    st.sampled_from([1, 2]),
    st.lists(st.sampled_from([0, 1, 2, 7, 30]), min_size=1, max_size=3).filter(any),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_steps_give_what_the_text_says(lengths, ratio, sizes, packed, seed):
    texts = Texts(lengths, ratio, seed=seed, packed=packed)
    sink, k, publish = texts.draw(HEADS), 4, Blocks(2, 3)
    floors = [max(0, n - 9) for n in lengths] if seed % 2 else None
    for rows in steps_of(lengths, sizes, texts.generator):
        start = list(texts.done)
        o, picks = texts.step(rows, k, sink, floors, publish)
        row = 0
        for text, count in rows:
            for p in range(start[text], start[text] + count):
                found = [j for j in picks.entries[row].tolist() if j >= 0]
                assert found == texts.chosen(text, p, k)
                kept = [b for b in picks.blocks[row].tolist() if b >= 0]
                assert kept == texts.kept_blocks(text, p, publish)
                floor = floors[text] if floors else 0
                want = texts.attention(text, p, found, sink, floor)
                assert (o[row].double() - want).abs().max() < 2e-5
                row += 1


@pytest.mark.parametrize("kept, size", [(2, 3), (40, 1), (3, 20)])
def test_candidates_limit_the_choice(kept, size):
    """Whether few blocks are gathered or all keys are scored and masked."""
    texts = Texts([60], 1, seed=4)
    batch = texts.batch([(0, 60)])
    texts.write_entries([(0, 60)], batch)
    publish = Blocks(kept, size)
    first = OPS.select_sparse(texts.index_q[0], texts.w[0], texts.index, batch, 1, 5, publish)
    q, w = texts.index_q[0].flip(0), texts.w[0].flip(0)
    found = OPS.select_sparse(q, w, texts.index, batch, 1, 5, None, first, size)
    blocks = [texts.kept_blocks(0, p, publish) for p in range(60)]
    texts.index_q[0], texts.w[0] = q, w
    for p in range(60):
        among = [j for b in blocks[p] for j in range(b * size, (b + 1) * size)]
        got = [j for j in found.entries[p].tolist() if j >= 0]
        assert got == texts.chosen(0, p, 5, among), p


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rows_have_the_same_bits_in_any_step(dtype, same_bits):
    """Whole, one by one, and in company: equal bits."""
    sink = torch.tensor([0.3, -1.0])
    found = []
    for plan in ([[(0, 40)]], [[(0, 1)]] * 40, [[(1, 9), (0, 17)], [(0, 5), (1, 2)], [(0, 18)]]):
        texts = Texts([40, 11], 2, dtype, seed=9)
        parts = []
        for rows in plan:
            o, picks = texts.step(rows, 6, sink)
            counts = [c for _, c in rows]
            at = [t for t, _ in rows].index(0)
            parts.append((o.split(counts)[at], picks.entries.split(counts)[at]))
        found.append([torch.cat(column) for column in zip(*parts, strict=True)])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            same_bits(one, two)


def test_threads_change_no_bit(threads, same_bits):
    found = []
    for count in (1, 2):
        threads(count)
        texts = Texts([90], 1, seed=2)
        found.append(texts.step([(0, 90)], 12, torch.zeros(HEADS))[0])
    same_bits(*found)


def test_pairs_are_pooled_whatever_step_they_lie_in(same_bits):
    generator = torch.Generator().manual_seed(5)
    u, s = torch.randn(2, 21, WIDTH, generator=generator)
    pairs = s.view(-1)[: 20 * WIDTH].view(10, 2, WIDTH).double().softmax(1)
    want = (pairs * u[:20].view(10, 2, WIDTH).double()).sum(1)
    found = []
    for sizes in ([21], [1] * 21, [3, 5, 2, 11]):
        texts = Texts([21, 21], 2)
        state = torch.full((2, 4, 2 * WIDTH), torch.nan)
        parts = []
        for size in sizes:
            batch = texts.batch([(1, size)])
            rows = slice(texts.done[1], texts.done[1] + size)
            parts.append(OPS.compress(u[rows], s[rows], state, batch))
            texts.done[1] += size
        found.append(torch.cat(parts))
        assert state[texts.blocks[0]].isnan().all()
    same_bits(found[0], found[1])
    same_bits(found[0], found[2])
    assert not found[0][0::2].any()
    assert (found[0][1::2].double() - want).abs().max() < 1e-6


def test_a_ring_takes_the_last_rows_once():
    """Of more rows than it holds only the last enter; rows that write nothing never do."""
    texts = Texts([30, 9], 1)
    batch = texts.batch([(0, 30), (1, 9)])
    slots = ring_slots(batch, RING)
    assert slots[:20].eq(-1).all()
    written = slots[slots >= 0]
    assert len(written.unique()) == len(written) == RING + 9
    batch.kv_slots[35:] = -1
    batch.row_of_token[30] = -1
    assert last_rows(batch, RING)[30:].tolist() == [False] + [True] * 4 + [False] * 4


def test_best_takes_the_lowest_of_ties_and_never_infinity():
    scores = torch.tensor(
        [[1.0, 2.0, 2.0, 2.0, 0.0], [-torch.inf, 3.0, -torch.inf, 1.0, -torch.inf]]
    )
    assert places(best(scores, 3), 3).tolist() == [[1, 2, 3], [1, 3, -1]]
    assert places(best(scores, 2), 2).tolist() == [[1, 2], [1, 3]]
    assert places(best(torch.zeros(1, 9), 4), 4).tolist() == [[0, 1, 2, 3]]
    assert places(best(scores, 9), 9)[1].tolist() == [1, 3] + [-1] * 7
