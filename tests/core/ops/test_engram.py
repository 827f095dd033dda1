"""Engram's row ids against Python integers, and its gate against float64."""

import pytest
import torch
from deepinfer.ops.reference.engram import EngramHash, EngramParams
from deepinfer.ops.table import OpSet

OPS = OpSet({}, "reference")
N, D = 4, 24


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def constants(size=4, image=9):
    generator = torch.Generator().manual_seed(3)
    primes = torch.tensor([[101, 103], [107, 109], [113, 127], [131, 137], [139, 149], [151, 157]])
    primes = primes[: 2 * (size - 1)].view(2, size - 1, 2)
    flat = primes.flatten(1)
    return EngramHash(
        token_map=torch.randint(0, 30, (40,), generator=generator),
        multipliers=torch.randint(0, 1 << 57, (2, size), generator=generator) | 1,
        primes=primes,
        offsets=flat.cumsum(1) - flat,
        pad=2,
        image=image,
    )


def rows_by_hand(text, p, c, layer):
    """Specification 5.3 for the token at p, in Python's integers."""
    compressed, blocked = [], False
    for s in range(c.multipliers.shape[1]):
        blocked = blocked or p - s < 0 or text[p - s] == c.image
        compressed.append(c.pad if blocked else int(c.token_map[text[p - s]]))
    mixed, rows = compressed[0] * int(c.multipliers[layer, 0]), []
    for i in range(1, len(compressed)):
        mixed ^= compressed[i] * int(c.multipliers[layer, i])
        for h, prime in enumerate(c.primes[layer, i - 1].tolist()):
            column = (i - 1) * c.primes.shape[2] + h
            rows.append(mixed % prime + int(c.offsets[layer, column]))
    return rows


def history(text, size):
    return torch.tensor([[*reversed(text[:p]), *[-1] * size][:size] for p in range(len(text))])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_against_integers(size):
    text = [5, 39, 0, 9, 9, 7, 7, 7, 7, 31, 9, 12]
    c = constants(size)
    for before in (size - 1, size + 1):  # a model may look back further for something else
        got = OPS.engram_rows(torch.tensor(text), history(text, before), c)
        assert got.dtype == torch.int64 and got.shape == (len(text), 2, 2 * (size - 1))
        for p in range(len(text)):
            assert got[p].tolist() == [rows_by_hand(text, p, c, layer) for layer in (0, 1)]


def test_without_images_no_token_blocks():
    text = [9, 9, 3]
    c = constants(image=-1)
    got = OPS.engram_rows(torch.tensor(text), history(text, 3), c)
    assert got[2].tolist() == [rows_by_hand(text, 2, c, layer) for layer in (0, 1)]


def gate_by_hand(x, keys, value, q_weight, k_weight, eps):
    """Specification 5.4 in float64."""
    x, keys, value, q, k = (t.double() for t in (x, keys, value, q_weight, k_weight))
    norms = [(t.square().mean(-1) + eps).rsqrt() for t in (x, keys)]
    delta = (x * q * k * keys).sum(-1) * norms[0] * norms[1] * x.shape[-1] ** -0.5
    gate = torch.sigmoid(torch.copysign(delta.abs().clamp(min=1e-6).sqrt(), delta))
    return x + gate[..., None] * value[:, None]


def test_gate_against_float64():
    x, keys, value = randn(9, N, D), randn(9, N, D, seed=1), randn(9, D, seed=2)
    weights = randn(N, D, seed=3), randn(N, D, seed=4)
    want = gate_by_hand(x, keys, value, *weights, 1e-20)
    got = OPS.engram_gate(x, keys, value, *weights, 1e-20)
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6)
    rounded = OPS.engram_gate(x.bfloat16(), keys, value, *weights, 1e-20)
    assert rounded.dtype == torch.bfloat16


def test_gates_of_nothing_and_of_images(same_bits):
    """δ = +0 opens by sigmoid(+1e−3); a token of an image stays as it is."""
    x, value, ones = torch.zeros(2, N, D), torch.ones(2, D), torch.ones(N, D)
    got = OPS.engram_gate(x, x, value, ones, ones, 1e-20)
    want = torch.sigmoid(torch.tensor(1e-3, dtype=torch.float64))
    torch.testing.assert_close(got.double(), want.expand(2, N, D), rtol=1e-6, atol=0)
    x = randn(2, N, D)
    active = torch.tensor([True, False])
    got = OPS.engram_gate(x, randn(2, N, D, seed=1), value, ones, ones, 1e-20, active)
    same_bits(got[1], x[1])
    assert (got[0] != x[0]).any()


def test_block_is_projection_and_gate(same_bits):
    params = EngramParams(randn((N + 1) * D, 64), randn(N, D, seed=5), randn(N, D, seed=6), 1e-20)
    x, rows = randn(5, N, D), randn(5, 64, seed=1)
    kv = OPS.scaled_linear(rows, params.kv)
    keys, value = kv[:, : N * D].reshape(5, N, D), kv[:, N * D :]
    want = OPS.engram_gate(x, keys, value, params.q_weight, params.k_weight, 1e-20)
    same_bits(OPS.engram_block(x, rows, None, params), want)
