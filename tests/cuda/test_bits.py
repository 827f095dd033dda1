"""Bits without a GPU: inputs of the probes, the model of a tensor core, what was recorded."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensor_core import product

SOURCES = Path(__file__).parents[2] / "deepinfer-backend-cuda" / "src" / "deepinfer_backend_cuda"
GOLDEN = json.loads((SOURCES / "golden_bits.json").read_text("utf-8"))["fingerprints"]


@pytest.fixture
def bits(sources):
    return pytest.importorskip("deepinfer_backend_cuda.bits", reason="needs Triton")


def floor_to(x, step):
    """Toward zero, to a multiple of ``step``."""
    whole = abs(x) // step * step
    return whole if x >= 0 else -whole


def power(x):
    """e of 1.m · 2^e; −126 for 0 and what is smaller."""
    e = -126
    while x and abs(x) >= Fraction(2) ** (e + 1):
        e += 1
    return e


def chain(a, b):
    """The definition in exact numbers, one element."""
    total = Fraction(0)
    for at in range(0, len(a), 16):
        pairs = [(Fraction(x), Fraction(y)) for x, y in zip(a, b, strict=True)][at : at + 16]
        terms = [x * y for x, y in pairs]
        top = max(power(total), *(power(x) + power(y) for x, y in pairs))
        unit = Fraction(2) ** (top - 25)
        total = sum((floor_to(term, unit) for term in [*terms, total]), Fraction(0))
        total = floor_to(total, Fraction(2) ** (power(total) - 23))
    return float(total)


numbers = st.builds(
    lambda sign, m, e: sign * (1 + m / 128) * 2.0**e,
    st.sampled_from([0.0, 1.0, -1.0]),
    st.integers(0, 127),
    st.integers(-12, 12),
)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=40))
def test_the_model_is_its_definition(pairs):
    a, b = (torch.tensor([column], dtype=torch.bfloat16) for column in zip(*pairs, strict=True))
    assert product(a, b).item() == chain(a[0].tolist(), b[0].tolist())


def test_the_model_cuts_where_float32_would_round():
    one, x = torch.ones(1, 16, dtype=torch.bfloat16), torch.zeros(1, 16, dtype=torch.bfloat16)
    x[0, :3] = torch.tensor([2.0**24, 2.0, 1.0])
    assert product(x, one).item() == 2.0**24 + 2
    assert torch.tensor(2.0**24 + 3, dtype=torch.float64).float().item() == 2.0**24 + 4


def test_values_are_exact_stay_and_reach_every_binade(bits):
    for dtype in (torch.bfloat16, torch.float32):
        x = bits.values((64, 100), 3, torch.device("cpu"), dtype)
        assert torch.equal(x, bits.values((64, 100), 3, torch.device("cpu"), dtype))
        e = torch.frexp(x.float()).exponent - 1
        assert sorted(e.unique().tolist()) == list(range(-6, 2))
        assert 0.4 < (x > 0).float().mean() < 0.6
    assert x[0, :3].tolist() != x[1, :3].tolist()
    few = bits.values((4,), 1, torch.device("cpu"))
    assert few.tolist() == FEW


FEW = [-0.047119140625, 0.06884765625, -0.609375, -2.53125]


def test_an_order_shows_in_the_bits(bits):
    """So that a fingerprint notices when K is walked in another order."""
    cpu = torch.device("cpu")
    x, w = bits.values((8, 576), 1, cpu), bits.values((64, 576), 2, cpu, least=-11)
    forward = product(x, w)
    backward = product(x.flip(1), w.flip(1))
    split = product(x[:, :288], w[:, :288]) + product(x[:, 288:], w[:, 288:])
    for other in (backward, split):
        assert (forward != other).float().mean() > 0.3
    assert (forward.bfloat16() != backward.bfloat16()).any()


def test_a_fingerprint_is_of_words_and_bits(bits):
    probe = next(iter(bits.probes()))
    x = torch.arange(6.0)
    digest = probe.digest((x,))
    assert digest == probe.digest((x.clone(),)) and len(digest) == 16
    changed = x.clone()
    changed[3] = torch.nextafter(x[3], torch.tensor(9.0))
    assert digest != probe.digest((changed,))
    assert digest != bits.Probe("other", "in another order", 1, probe.make).digest((x,))


def test_every_probe_is_recorded(bits):
    names = [probe.name for probe in bits.probes()]
    assert len(set(names)) == len(names)
    for capability, known in GOLDEN.items():
        assert sorted(known) == sorted(names), capability
    assert "9.0" in GOLDEN


@pytest.mark.parametrize("capability", sorted(GOLDEN))
def test_recorded_products_are_the_models(bits, capability):
    """What the GPU gave for a whole product is what the model gives here."""
    cpu = torch.device("cpu")
    (probe,) = (p for p in bits.probes() if p.name == "linear bfloat16 576x576")
    x, w = bits.values((300, 576), 1, cpu), bits.values((576, 576), 2, cpu, least=-11)
    assert probe.digest((product(x, w).bfloat16(),)) == GOLDEN[capability][probe.name]
