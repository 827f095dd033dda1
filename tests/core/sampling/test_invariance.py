"""Rows do not see each other: equal bits for every number of rows, place and thread count."""

import pytest
import torch
from deepinfer.ops.reference import sample

VOCAB = 3001


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def bits(tensors):
    return [t.view(torch.int32) if t.dtype == torch.float32 else t for t in tensors]


def ops(z, rows):
    """Every op on some of the rows."""
    m = len(rows)
    temperature = 0.3 + 0.05 * rows.float()
    top_p = 1 - 0.01 * rows.float()
    text = (rows[:, None] * 7 + torch.arange(90)) % VOCAB
    ones = torch.ones(m)
    penalised = sample.penalties(
        z[rows].clone(), text, rows, 0.1 * ones, 0.3 * ones, 1.0 + 0.01 * rows
    )
    filtered = sample.filter_top(z[rows], temperature, rows * 30, top_p, 1e-4 * rows.float())
    drawn = sample.gumbel_argmax(z[rows], temperature * (rows % 3 > 0), rows * 977, rows + 5)
    return bits((penalised, filtered, drawn, *sample.logprobs(z[rows], 5, rows)))


def test_every_batch_size(threads):
    z = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(0)) * 4
    whole = ops(z, torch.arange(40))
    for m in range(1, 40) if threads == 1 else (1, 2, 11, 22, 39):  # few: a busy machine is slow
        part = ops(z, torch.arange(m))
        assert all(torch.equal(a, b[:m]) for a, b in zip(part, whole, strict=True)), m
    mixed = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    moved = ops(z, mixed)
    assert all(torch.equal(a, b[mixed]) for a, b in zip(moved, whole, strict=True))


def test_threads_make_no_difference():
    """One long row is what torch would split among threads."""
    z = torch.randn(2, 70_001, generator=torch.Generator().manual_seed(0)) * 4
    rows, before, seen = torch.arange(2), torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            one = torch.ones(2)
            seen.append(
                bits(
                    (
                        *sample.logprobs(z, 3, rows),
                        sample.filter_top(z, one, rows * 0, 0.9 * one, 0 * one),
                        sample.gumbel_argmax(z, one, rows, rows),
                    )
                )
            )
    finally:
        torch.set_num_threads(before)
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


def test_blocks_make_no_difference(monkeypatch):
    z = torch.randn(9, 500, generator=torch.Generator().manual_seed(0)) * 4
    whole = ops_of(z)
    monkeypatch.setattr(sample, "_BLOCK_ELEMENTS", 700)
    assert all(torch.equal(a, b) for a, b in zip(ops_of(z), whole, strict=True))


def ops_of(z):
    rows = torch.arange(len(z))
    one = torch.ones(len(z))
    mask = torch.full((3, 16), 0x55555555, dtype=torch.int32)
    text = rows[:, None] + torch.arange(40)
    return bits(
        (
            sample.apply_bitmask(z.clone(), mask, torch.tensor([8, -1, 0])),
            sample.penalties(z.clone(), text, rows, one, one, one * 2),
            sample.filter_top(z, one, rows, 0.9 * one, 0 * one),
            sample.gumbel_argmax(z, one, rows, rows),
            *sample.logprobs(z, 3, rows),
        )
    )
