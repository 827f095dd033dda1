"""Noise against published vectors and an independent oracle in Python integers."""

import math

import pytest
import torch
from deepinfer.sampling.philox import gumbel, philox, random_words, uniform
from hypothesis import given, settings
from hypothesis import strategies as st

M32 = 0xFFFFFFFF


def oracle(counter, key):
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & M32, (a >> 32) ^ c[3] ^ k[1], a & M32]
        k = [(k[0] + 0x9E3779B9) & M32, (k[1] + 0xBB67AE85) & M32]
    return c


def signed(seed):
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def word(seed, position, v, domain=0):
    counter = (v >> 2, position & M32, position >> 32, domain)
    return oracle(counter, (seed & M32, seed >> 32))[v & 3]


@pytest.mark.parametrize(
    "counter, key, expected",
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((M32,) * 4, (M32,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_published_vectors(counter, key, expected):
    words = philox(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert tuple(int(w) for w in words) == expected
    assert tuple(oracle(counter, key)) == expected


def test_the_specification_vectors():
    seed = torch.tensor([0x0123456789ABCDEF])
    lanes = random_words(seed, torch.tensor([5]), 4)
    assert [int(w) for w in lanes] == [0xF54C4912, 0x988FD316, 0x88B3B59B, 0x9247576D]
    noise = gumbel(seed, torch.tensor([5]), 4)[0].tolist()
    assert noise == pytest.approx([-1.155228, 0.098492, 0.269773, 0.165779], abs=5e-7)
    assert int(random_words(seed, torch.tensor([6]), 1)[0]) == 0xEAD37B87


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, (1 << 64) - 1),
    position=st.integers(0, (1 << 40) - 1),
    count=st.integers(1, 70),
    domain=st.integers(0, 3),
)
def test_against_python_integers(seed, position, count, domain):
    seeds, positions = torch.tensor([signed(seed)]), torch.tensor([position])
    want = [word(seed, position, v, domain) for v in range(count)]
    u = uniform(seeds, positions, count, domain)[0].tolist()
    assert u == [(w + 0.5) * 2.0**-32 for w in want]
    noise = gumbel(seeds, positions, count, domain)[0]
    exact = [-math.log(-math.log1p(-x)) for x in u]
    assert noise.dtype == torch.float32
    assert torch.allclose(noise.double(), torch.tensor(exact, dtype=torch.double), rtol=1.2e-7)


def test_a_row_does_not_see_its_neighbours():
    seeds = torch.arange(40) * 0x9E3779B97F4A7C1 + 3
    positions = torch.arange(40) * 1000
    whole = gumbel(seeds, positions, 1003).view(torch.int32)
    for m in (1, 2, 3, 17):
        part = gumbel(seeds[:m], positions[:m], 1003).view(torch.int32)
        assert torch.equal(part, whole[:m])
    assert torch.equal(gumbel(seeds, positions, 1000).view(torch.int32), whole[:, :1000])


def test_no_rows():
    assert gumbel(torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long), 9).shape == (
        0,
        9,
    )
