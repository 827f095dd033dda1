"""Bitwise comparison, and the number of torch's threads, put back after each test."""

from pathlib import Path

import pytest
import torch

GOLDEN = Path(__file__).parents[2] / "data/deepseek-v41/ops/ops.safetensors"


@pytest.fixture(scope="session")
def golden_ops():
    """``golden_ops(prefix)``: DeepSeek-V4.1's recorded tensors, by what follows in their names."""
    from safetensors.torch import load_file

    arrays = load_file(GOLDEN)

    def of(prefix):
        return {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}

    return of


@pytest.fixture
def threads():
    """``threads(n)`` sets torch's thread count for the rest of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def rows_apart(same_bits, threads):
    """``rows_apart(rows, fn, counts, stride)``: a row's result has the same bits alone, among the
    first and the last ``counts`` rows, in another order, and with one thread as with two.
    """

    def check(rows, fn, counts, stride):
        most = len(rows)
        threads(2)
        whole = fn(rows)
        some = range(0, most, stride)
        same_bits(torch.cat([fn(rows[i : i + 1]) for i in some]), whole[some])
        for count in counts:
            same_bits(fn(rows[:count]), whole[:count])
            same_bits(fn(rows[most - count :]), whole[most - count :])
        order = torch.randperm(most, generator=torch.Generator().manual_seed(9))
        same_bits(fn(rows[order]), whole[order])
        threads(1)
        same_bits(fn(rows), whole)

    return check


@pytest.fixture
def same_bits():
    """``same_bits(a, b)``: equal shapes, dtypes and bits; NaN and the sign of zero count."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

    def bits(x):
        return x.contiguous().view(kinds[x.element_size()])

    def check(a, b):
        assert a.dtype == b.dtype and a.shape == b.shape
        differ = int((bits(a) != bits(b)).sum())
        assert differ == 0, f"{differ} of {a.numel()} elements differ"

    return check
