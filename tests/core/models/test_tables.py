"""Mapped tables: rows as the file has them, hints that do not block, nothing left behind."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest
import torch
from deepinfer.errors import ModelLoadError
from deepinfer.models import tables
from deepinfer.models.shards import Extent
from deepinfer.models.tables import MappedTable
from deepinfer.ops.lowbit import e4m3, e8m0

ROWS, WIDTH = 5000, 64


@pytest.fixture
def stored(tmp_path):
    """(path, codes, scales): they begin at odd bytes of a file, the scales behind the codes."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 127, (ROWS, WIDTH), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (ROWS, WIDTH // 32), generator=generator, dtype=torch.uint8)
    path = tmp_path / "table.safetensors"
    path.write_bytes(b"x" * 4099 + codes.numpy().tobytes() + scales.numpy().tobytes())
    return path, codes, scales


def opened(stored):
    path, codes, scales = stored
    behind = 4099 + codes.numel()
    first = Extent(path, 4099, tuple(codes.shape))
    return MappedTable("t.weight", first, Extent(path, behind, tuple(scales.shape)))


def prefetchers():
    return {t for t in threading.enumerate() if t.name == "engram-prefetch"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_dequantised_and_laid_side_by_side(stored, dtype):
    _, codes, scales = stored
    values = e4m3(codes) * e8m0(scales).repeat_interleave(32, -1)
    rows = torch.randint(0, ROWS, (7, 24), generator=torch.Generator().manual_seed(1))
    rows[0, 0], rows[-1, -1] = 0, ROWS - 1
    table = opened(stored)
    found = table.gather(rows, dtype)
    assert found.dtype == dtype and found.shape == (7, 24 * WIDTH)
    assert torch.equal(found, values[rows].flatten(1).to(dtype))
    assert torch.equal(found.float(), values[rows].flatten(1))  # exact in bfloat16 too
    assert table.gather(rows[:0], dtype).shape == (0, 24 * WIDTH)
    table.close()


@pytest.mark.parametrize("row", [-1, ROWS])
def test_a_row_outside_is_an_error(stored, row):
    with pytest.raises(IndexError):
        opened(stored).gather(torch.tensor([[0, row]]), torch.float32)


def test_a_nan_scale_is_named_when_its_row_is_read(stored):
    path, codes, _ = stored
    data = bytearray(path.read_bytes())
    data[4099 + codes.numel() + 2 * 17 + 1] = 255
    path.write_bytes(data)
    table = opened((path, codes, stored[2]))
    table.gather(torch.tensor([[16, 18]]), torch.float32)
    with pytest.raises(ModelLoadError, match=r"'t\.weight' has a NaN scale in row 17\."):
        table.gather(torch.tensor([[16], [17]]), torch.float32)


def test_hints_return_at_once_and_reach_the_system(stored, monkeypatch):
    gate, seen = threading.Event(), []

    def advise(file, begin, count, advice):
        gate.wait(10)
        seen.append((begin, count))

    monkeypatch.setattr(tables.os, "posix_fadvise", advise)
    table = opened(stored)
    began = time.monotonic()
    for _ in range(50):  # more than may wait: the rest is dropped, and nobody blocks
        table.prefetch(torch.tensor([0, 1, 4999]))
    assert time.monotonic() - began < 5
    gate.set()
    table.close()
    page = tables.mmap.PAGESIZE
    wanted = {4099 // page, (4099 + 5000 * WIDTH - 1) // page}
    touched = {p for begin, count in seen for p in range(begin // page, (begin + count) // page)}
    assert wanted <= touched and len(seen) < 50 * 4


def test_neighbouring_pages_are_one_piece_of_advice(stored, monkeypatch):
    seen = []
    monkeypatch.setattr(tables.os, "posix_fadvise", lambda f, begin, count, a: seen.append(count))
    table = opened(stored)
    table.prefetch(torch.arange(1000))
    table.close()
    page = tables.mmap.PAGESIZE
    assert len(seen) == 2 and sum(seen) <= 1000 * (WIDTH + 2) + 4 * page


def test_closing_leaves_nothing(stored):
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    others = prefetchers()  # of models that other tests have not let go of yet
    table = opened(stored)
    table.prefetch(torch.arange(10))
    (mine,) = prefetchers() - others
    table.close()
    table.close()
    assert not mine.is_alive()
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 2  # the mappings' own, until dropped
    with pytest.raises(AssertionError, match="closed"):
        table.gather(torch.zeros(1, 1, dtype=torch.int64), torch.float32)
    del table
    gc.collect()
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_dropped_table_closes_itself(stored):
    others = prefetchers()
    table = opened(stored)
    table.prefetch(torch.arange(10))
    (mine,) = prefetchers() - others
    del table
    gc.collect()
    assert not mine.is_alive()


def test_two_tables_on_one_file_are_independent(stored):
    first, second = opened(stored), opened(stored)
    rows = torch.tensor([[1, 2, 3]])
    expected = first.gather(rows, torch.float32)
    first.prefetch(rows)
    second.prefetch(rows)
    first.close()
    assert torch.equal(second.gather(rows, torch.float32), expected)
    second.close()


def test_opening_reads_nothing_and_the_table_tells_its_size(stored):
    table = opened(stored)
    assert table.mapped_bytes == ROWS * (WIDTH + 2)
    assert not hasattr(table, "nbytes")  # it counts as no memory
    table.close()
