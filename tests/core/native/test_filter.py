"""filter_top: the same ids as the reference, whatever the row, the filters and the rest."""

from __future__ import annotations

import pytest
import torch
from deepinfer.ops.reference import sample

native_ops = pytest.importorskip("deepinfer.native.ops", exc_type=ImportError)

ROWS = 24


def bits(x: torch.Tensor) -> torch.Tensor:
    """A NaN may stay or go: it counts as −inf."""
    return torch.where(x.isnan(), -torch.inf, x).view(torch.int32)


def pick(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)[torch.randint(0, len(values), (ROWS,))]


def filters(vocab: int) -> tuple[torch.Tensor, ...]:
    return (
        pick([0, 0.01, 0.7, 1, 2.5, 1e5, 1e-30]),
        pick([-1, 0, 0, 1, 3, 40, 256, 300, vocab // 2, vocab, vocab + 7], torch.int64),
        pick([1, 1, 0.95, 0.5, 0.999999, 1e-9, 0.3, 1.5, 0]),
        pick([0, 0, 0.05, 1, 1e-6, 1e-44, 0.3]),
    )


def some_rows(vocab: int, kind: str) -> torch.Tensor:
    z = torch.randn(ROWS, vocab) * pick([0, 0.1, 1, 3, 10, 300])[:, None]
    if kind == "ties":
        z = z.round()
    if kind == "odd":
        z[torch.rand(ROWS, vocab) < 0.3] = -torch.inf
        z[torch.rand(ROWS, vocab) < 0.1] = torch.nan
        z[0], z[1], z[2, ::3], z[3, 0] = -torch.inf, torch.nan, torch.inf, -1e30
    return z


@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 65, 1000, 20001])
@pytest.mark.parametrize("kind", ["plain", "ties", "odd"])
def test_keeps_what_the_reference_keeps(isa: str, vocab: int, kind: str) -> None:
    for _ in range(4 if vocab < 5000 else 1):
        z, how = some_rows(vocab, kind), filters(vocab)
        before = z.clone()
        want = sample.filter_top(z, *how)
        for threads in (1, 2):
            got = native_ops.filter_top(z, *how, num_threads=threads)
            wrong = (bits(got) != bits(want)).any(1).nonzero()[:, 0].tolist()
            assert not wrong, [(r, *(float(x[r]) for x in how)) for r in wrong]
        assert torch.equal(z.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("width", [20, 400, 3000])
def test_every_depth_of_the_search(isa: str, width: int) -> None:
    """The mass lies in few ids, in more than the first candidates, in most of the row."""
    z = torch.randn(4, 20000) - 30
    for row in z:
        row[torch.randperm(20000)[:width]] += 30
    one = torch.ones(4)
    for top_p in (0.1, 0.6, 0.99, 0.9999):
        how = (one, torch.zeros(4, dtype=torch.int64), one * top_p, one * 0)
        got, want = native_ops.filter_top(z, *how), sample.filter_top(z, *how)
        assert torch.equal(bits(got), bits(want))


def test_rows_are_independent_and_may_be_strided(isa: str) -> None:
    wide = torch.randn(ROWS, 3000) * 2
    z, how = wide[:, 100:2600], filters(2500)
    whole = native_ops.filter_top(z, *how)
    assert whole.is_contiguous()
    for r in range(ROWS):
        alone = native_ops.filter_top(z[r : r + 1], *(x[r : r + 1] for x in how))
        assert torch.equal(bits(alone[0]), bits(whole[r]))
    assert native_ops.filter_top(z[:0], *(x[:0] for x in how)).shape == (0, 2500)


def test_avx2_and_avx512_agree() -> None:
    from deepinfer.native import loader

    z, how = torch.randn(ROWS, 20001) * 3, filters(20001)
    results = []
    try:
        for name in ("avx2", "avx512"):
            loader.set_isa(name)
            results.append(native_ops.filter_top(z, *how))
    finally:
        loader.set_isa("avx512")
    assert torch.equal(bits(results[0]), bits(results[1]))


def test_wrong_arguments() -> None:
    z, one = torch.randn(2, 9), torch.ones(2)
    with pytest.raises(TypeError, match="top_k"):
        native_ops.filter_top(z, one, one, one, one)
    with pytest.raises(ValueError, match="min_p"):
        native_ops.filter_top(z, one, one.long(), one, one[:1])
