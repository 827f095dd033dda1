"""Gumbel argmax and logprobs: against the plain torch definitions."""

from __future__ import annotations

import pytest
import torch

native_ops = pytest.importorskip("deepinfer.native.ops", exc_type=ImportError)
philox = pytest.importorskip("deepinfer.sampling.philox")


def i64(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def definition(z, temperature, seed, position) -> torch.Tensor:
    z = torch.where(z.isnan(), -torch.inf, z)
    t = temperature[:, None]
    noise = philox.gumbel(seed, position, z.shape[1])
    return torch.where(t == 0, z, z / t + noise).argmax(1)


def test_published_draws(isa: str) -> None:
    """spec 3.4: seed 0x0123456789ABCDEF, position 5, ids 0 … 3; found out by competing ids."""
    noise = torch.tensor([-1.155228, 0.098492, 0.269773, 0.165779])
    seed, position, one = i64([0x0123456789ABCDEF]), i64([5]), torch.ones(1)
    for a in range(4):
        for b in range(4):
            for gap in (-1e-4, 1e-4):  # raise b to just below and above a's total
                z = torch.full((1, 4), -torch.inf)
                z[0, a], z[0, b] = 0.0, (noise[a] - noise[b] + gap) if a != b else 0.0
                winner = int(native_ops.gumbel_argmax(z, one, seed, position))
                assert winner == (b if gap > 0 else a)


@pytest.mark.parametrize("vocab", [1, 3, 64, 1000, 50001])
def test_gumbel_is_the_definition(isa: str, vocab: int) -> None:
    m = 40 if vocab < 2000 else 6
    for spread in (0.0, 1.0, 8.0, 300.0):
        z = torch.randn(m, vocab) * spread
        temperature = torch.rand(m) * 2 + 0.01
        temperature[::4] = 0
        seed = torch.randint(-(2**63), 2**63 - 1, (m,))
        position = torch.randint(0, 2**40, (m,))
        want = definition(z, temperature, seed, position)
        for threads in (1, 2):
            got = native_ops.gumbel_argmax(z, temperature, seed, position, num_threads=threads)
            assert torch.equal(got, want)
        alone = native_ops.gumbel_argmax(z[3:4], temperature[3:4], seed[3:4], position[3:4])
        assert torch.equal(alone, want[3:4])


def test_many_small_rows(isa: str) -> None:
    z = torch.randn(3000, 37)
    seed, position = torch.randint(0, 2**62, (3000,)), torch.arange(3000)
    got = native_ops.gumbel_argmax(z, torch.full((3000,), 0.7), seed, position)
    assert torch.equal(got, definition(z, torch.full((3000,), 0.7), seed, position))


def test_ties_nan_and_infinities(isa: str) -> None:
    nan, inf = torch.nan, torch.inf
    rows = [
        [1.0, 2.0, 2.0, 0.0],
        [nan, -5.0, nan, -5.0],
        [-inf, -inf, nan, -inf],
        [nan, nan, nan, nan],
        [0.0, inf, inf, 1.0],
        [-inf, -inf, -3e38, -inf],
    ]
    z = torch.tensor(rows).repeat(1, 30)
    for t in (0.0, 1.0, 1e-30):
        temperature, at = torch.full((6,), t), torch.arange(6)
        got = native_ops.gumbel_argmax(z, temperature, at, at)
        assert torch.equal(got, definition(z, temperature, at, at)), t


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_allowed_ids(isa: str, temperature: float) -> None:
    m, vocab = 20, 777
    z, seed = torch.randn(m, vocab), torch.arange(m)
    allowed = torch.randint(-(2**31), 2**31 - 1, (m, 25), dtype=torch.int32)
    bit = (allowed[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
    banned = bit.flatten(1)[:, :vocab] == 0
    t = torch.full((m,), temperature)
    got = native_ops.gumbel_argmax(z, t, seed, seed, allowed)
    assert torch.equal(got, definition(z.masked_fill(banned, -torch.inf), t, seed, seed))
    only = torch.zeros((1, 25), dtype=torch.int32)
    only[0, 7] = 1 << 9
    hopeless = torch.full((1, vocab), -torch.inf)
    assert int(native_ops.gumbel_argmax(hopeless, t[:1], seed[:1], seed[:1], only)) == 7 * 32 + 9


@pytest.mark.parametrize("vocab", [1, 5, 64, 1001, 30001])
def test_logprobs(isa: str, vocab: int) -> None:
    m = 9
    z = torch.randn(m, vocab) * 4
    z[:, ::3] = z[:, ::3].round()  # ties
    chosen = torch.randint(0, vocab, (m,))
    chosen[0] = z[0].argmax()
    for k in {0, 1, min(20, vocab)}:
        ids, values, value, rank = native_ops.logprobs(z, k, chosen)
        want = z.double().log_softmax(1)
        torch.testing.assert_close(
            values.double(), want.gather(1, ids.long()), rtol=1e-6, atol=4e-6
        )
        torch.testing.assert_close(
            value.double(), want.gather(1, chosen[:, None])[:, 0], rtol=1e-6, atol=4e-6
        )
        # the order is that of the float32 values: recompute them all through `chosen`
        for row in range(m if vocab < 100 else 0):
            every = native_ops.logprobs(z[row].repeat(vocab, 1), 0, torch.arange(vocab))[2]
            best, where = every.sort(descending=True, stable=True)
            assert torch.equal(ids[row].long(), where[:k])
            assert torch.equal(values[row], best[:k])
            assert int(rank[row]) == 1 + int((where == chosen[row]).nonzero())
        for row in range(m):
            one = native_ops.logprobs(z[row : row + 1], k, chosen[row : row + 1], num_threads=1)
            for a, b in zip(one, (ids, values, value, rank), strict=True):
                assert torch.equal(a[0], b[row])
    assert int(rank[0]) == 1


def test_logprobs_of_strange_rows(isa: str) -> None:
    z = torch.tensor([[0.0, torch.nan, 1.0, -torch.inf], [-torch.inf] * 4])
    ids, values, value, rank = native_ops.logprobs(z, 4, i64([1, 2]))
    assert ids.tolist() == [[2, 0, 1, 3], [0, 1, 2, 3]]
    assert values[0, 2] == value[0] == -torch.inf
    assert rank.tolist() == [3, 3]
    with pytest.raises(ValueError, match="chosen"):
        native_ops.logprobs(z, 1, i64([0, 4]))
    assert native_ops.logprobs(z[:0], 2, i64([]))[0].shape == (0, 2)
    assert native_ops.gumbel_argmax(z[:0], torch.zeros(0), i64([]), i64([])).shape == (0,)
