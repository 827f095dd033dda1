"""Rows of images laid into steps: any chunks, slots used again, what is kept and for how long."""

from __future__ import annotations

import numpy as np
import torch
from deepinfer.api.plan import DECODE, Admit, Image, RowParams
from deepinfer.worker.images import SlotImages
from hypothesis import given
from hypothesis import strategies as st

CPU = torch.device("cpu")


def image(name, start, tokens):
    """Its row j is (name, j)."""
    pixels = np.full((1, 1, 3), name, np.uint8)
    return Image(pixels=pixels, tokens=tokens, digest=bytes([name]) * 16, start=start)


class Seer:
    """Counts what was looked at."""

    def __init__(self, tokens):
        self.tokens, self.seen = tokens, []

    def __call__(self, pixels):
        name = int(pixels[0, 0, 0])
        self.seen.append(name)
        rows = torch.arange(self.tokens[name])
        return torch.stack((torch.full_like(rows, name), rows), 1)


def admit(slot, *images):
    return Admit(slot, np.zeros(1, np.int32), 9, 0, RowParams(1), images=images)


def step(images, *rows):
    """{token row: (image, row of it)} of a step of (slot, start, count) rows."""
    array = np.array([(*row, 1, 0) for row in rows], np.int32)
    cu_q = torch.tensor([0, *np.cumsum([row[2] for row in rows])], dtype=torch.int32)
    found = images.of_step(array, cu_q)
    if found is None:
        return {}
    index, parts = found
    assert index.dtype == torch.int64
    return dict(zip(index.tolist(), map(tuple, parts.tolist()), strict=True))


SPANS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 12)), min_size=1, max_size=4)


@given(SPANS, st.lists(st.integers(1, 9), min_size=1), st.integers(0, 30))
def test_chunks_cut_spans_anywhere(spans, sizes, hit):
    """From any start, each position gets its own row once, and each image is seen once."""
    placed, end = [], 0
    for name, (gap, tokens) in enumerate(spans):
        placed.append(image(name, end + gap, tokens))
        end += gap + tokens
    want = {i.start + j: (n, j) for n, i in enumerate(placed) for j in range(i.tokens)}
    seer = Seer({n: i.tokens for n, i in enumerate(placed)})
    images = SlotImages(seer, CPU)
    images.admit([admit(3, *(i for i in placed if i.stop > hit))])
    found, at, turn = {}, hit, 0
    while at < end + 2:
        count = sizes[turn % len(sizes)]
        # Another slot's decode row comes first.
        for place, row in step(images, (0, DECODE, 1), (3, at, count)).items():
            assert at + place - 1 not in found
            found[at + place - 1] = row
        at, turn = at + count, turn + 1
    assert found == {p: row for p, row in want.items() if p >= hit}
    assert seer.seen == [n for n, i in enumerate(placed) if i.stop > hit]
    assert not images._open and not images._rows


def test_two_slots_in_one_step():
    images = SlotImages(Seer({1: 4, 2: 4}), CPU)
    images.admit([admit(0, image(1, 2, 4)), admit(1, image(2, 0, 4))])
    found = step(images, (1, 0, 3), (0, 0, 4))
    assert found == {0: (2, 0), 1: (2, 1), 2: (2, 2), 5: (1, 0), 6: (1, 1)}
    assert step(images, (0, 4, 1), (1, 3, 9)) == {0: (1, 2), 1: (2, 3)}
    assert step(images, (0, 5, 1)) == {0: (1, 3)}
    assert step(images, (0, 6, 1)) == {}


def test_a_slot_is_entered_again():
    """What its last request left half done is forgotten; one admitted again is seen again."""
    seer = Seer({1: 4, 2: 4})
    images = SlotImages(seer, CPU)
    images.admit([admit(0, image(1, 2, 4))])
    assert step(images, (0, 0, 4)) == {2: (1, 0), 3: (1, 1)}
    images.admit([admit(0, image(2, 2, 4))])
    assert step(images, (0, 0, 4)) == {2: (2, 0), 3: (2, 1)}
    images.admit([admit(0)])
    assert step(images, (0, 0, 8)) == {}
    images.admit([admit(0, image(1, 2, 4))])
    assert step(images, (0, 3, 1)) == {0: (1, 1)}
    assert seer.seen == [1, 2, 1]
