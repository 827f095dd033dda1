"""KV in pages: what is written is read, wherever it lies, and nobody else's line moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer.testing.conformance.compare import difference, tolerance
from deepinfer.testing.conformance.kit import PAGE_SIZE, Kit, Run, reference_run, same_bits, tensors
from deepinfer.testing.conformance.pages import Paged

PAGES, HEADS, DIM = 12, 2, 16
SLOTS = {
    "one_page": list(range(3 * PAGE_SIZE, 4 * PAGE_SIZE)),
    "across_a_border": [5 * PAGE_SIZE - 2, 5 * PAGE_SIZE - 1, 5 * PAGE_SIZE, 5 * PAGE_SIZE + 1],
    "scattered": [7 * PAGE_SIZE + 3, 2, 11 * PAGE_SIZE + 15, 0, 4 * PAGE_SIZE],
    "with_skips": [-1, 7 * PAGE_SIZE, -1, -1, 3 * PAGE_SIZE + 1],
    "one_row": [9 * PAGE_SIZE + 8],
    "only_skips": [-1, -1, -1],
    "no_rows": [],
}


def write(run: Run, slots: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor], Any]:
    """Caches before and after ``kv_write``, and the rows that were written."""
    caches = [run.draw.normal(PAGES, PAGE_SIZE, HEADS, DIM) for _ in range(2)]
    rows = [run.draw.normal(len(slots), HEADS, DIM) for _ in range(2)]
    there = [run.place(cache) for cache in caches]
    where = run.put(torch.tensor(slots, dtype=torch.int64))
    with torch.inference_mode():
        assert run.ops.kv_write(*map(run.put, rows), *there, where) is None
    return caches, [cache.cpu() for cache in there], rows


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
def test_kv_write_stores_its_rows(kit: Kit, dtype: str, slots: list[int]) -> None:
    """Every row lies in its slot, bit for bit."""
    _, after, rows = write(kit.run(dtype), slots)
    for cache, row in zip(after, rows, strict=True):
        for i, slot in enumerate(slots):
            if slot >= 0:
                assert same_bits(cache[slot // PAGE_SIZE, slot % PAGE_SIZE], row[i])


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
def test_kv_write_touches_nothing_else(kit: Kit, dtype: str, slots: list[int]) -> None:
    """Lines whose slot was not named, and pages of others, keep every bit; −1 writes nothing."""
    before, after, _ = write(kit.run(dtype), slots)
    named = torch.zeros(PAGES * PAGE_SIZE, dtype=torch.bool)
    named[[slot for slot in slots if slot >= 0]] = True
    for old, new in zip(before, after, strict=True):
        old, new = old.flatten(0, 1)[~named], new.flatten(0, 1)[~named]
        moved = (old != new).flatten(1).any(1).nonzero()[:, 0]
        lines = torch.arange(PAGES * PAGE_SIZE)[~named][moved].tolist()
        assert same_bits(old, new), f"lines {lines} changed; only {slots} were to be written"


def test_attention_reads_what_kv_write_stored(kit: Kit, dtype: str) -> None:
    """Written in permuted pages, in two steps, and read back by attention."""
    got, want = (tensors(_written_then_read(run)) for run in (kit.run(dtype), reference_run(dtype)))
    for one, two in zip(got, want, strict=True):
        wrong = difference(one, two, tolerance("attention", dtype))
        assert not wrong, wrong


def _written_then_read(run: Run) -> Any:
    paged = Paged(run, [(1, 40), (9, 33), (1, 16)])
    caches = [run.place(torch.full_like(c.cpu(), 3.0)) for c in (paged.k_cache, paged.v_cache)]
    with torch.inference_mode():
        for request, (k, v) in enumerate(paged.text):
            for begin, end in ((0, len(k) // 2), (len(k) // 2, len(k))):
                slots = run.put(paged.slots(request, begin, end))
                rows = run.put(k[begin:end]), run.put(v[begin:end])
                run.ops.kv_write(*rows, *caches, slots)
        paged.k_cache, paged.v_cache = caches
        return paged.attend()


def test_pages_of_others_do_not_matter(kit: Kit, dtype: str) -> None:
    """Where pages lie, and what lies in those of nobody, changes nothing within tolerance."""
    run = kit.run(dtype)
    paged = Paged(run, [(1, 40), (9, 33), (1, 16)])
    with torch.inference_mode():
        here = tensors(paged.attend())
        paged.move(spare=9)
        for one, two in zip(here, tensors(paged.attend()), strict=True):
            wrong = difference(two, one, tolerance("attention", dtype))
            assert not wrong, wrong


@pytest.mark.parametrize("page_size", [1, 4, 32, 64, 128])
def test_page_sizes(kit: Kit, dtype: str, page_size: int) -> None:
    """Every page size that the facts name works; others are not asked for."""
    if page_size not in kit.backend.facts().page_sizes:
        pytest.skip(f"page size {page_size} is not among those it names")
    answers = []
    for run in (kit.run(dtype), reference_run(dtype)):
        with torch.inference_mode():
            answers.append(tensors(Paged(run, [(1, 70), (5, 20)], page_size=page_size).attend()))
    for got, want in zip(*answers, strict=True):
        wrong = difference(got, want, tolerance("attention", dtype))
        assert not wrong, wrong
