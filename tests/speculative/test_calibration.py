"""Sequential temperature scaling against rounds drawn with known temperatures. Spec 4.1."""

import numpy as np
import pytest
from deepinfer.errors import ConfigError
from deepinfer_speculative.calibration import GRID, ece, fit_temperatures, sigmoid, survival

TRUE = np.array([1.5, 1.3, 1.8, 1.2, 1.6])


def rounds(seed=0, n=200_000):
    """Logits N(1.5, 1.5) and how many drafts stood, each with probability σ(z / T)."""
    rng = np.random.default_rng(seed)
    z = rng.normal(1.5, 1.5, (n, len(TRUE)))
    stood = rng.random(z.shape) < sigmoid(z / TRUE)
    return z, np.cumprod(stood, axis=1).sum(1), np.full(n, len(TRUE))


def test_the_grid():
    assert len(GRID) == 41 and GRID[0] == pytest.approx(0.1) and GRID[-1] == pytest.approx(10)
    assert GRID[20] == 1.0


def test_known_temperatures_come_back():
    z, accepted, verified = rounds()
    found = fit_temperatures(z, accepted, verified)
    assert np.abs(np.log10(found / TRUE)).max() <= 1 / 20, "within one step of the grid"
    said = [1.585, 1.259, 1.778, 1.259, 1.585]  # the specification's own run
    assert np.abs(np.log10(found / said)).max() <= 1 / 20 + 1e-9
    raw, fitted = survival(z, np.ones(5)), survival(z, found)
    before = [ece(raw[:, k], accepted > k) for k in range(5)]
    after = [ece(fitted[:, k], accepted > k) for k in range(5)]
    assert 0.03 < min(before) and max(after) <= 0.009
    assert max(before) == pytest.approx(0.087, abs=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_no_position_gets_worse_by_its_temperature(seed):
    rng = np.random.default_rng(seed)
    z = rng.normal(rng.normal(), 2, (500, 4))
    accepted = rng.integers(0, 5, 500)
    found = fit_temperatures(z, accepted, np.full(500, 4))
    before = np.ones(500)
    for k in range(4):
        mine = before * sigmoid(z[:, k] / found[k])
        assert ece(mine, accepted > k) <= ece(before * sigmoid(z[:, k]), accepted > k) + 1e-12
        before = mine


def test_trimmed_rounds_are_refused():
    z, accepted, verified = rounds(n=100)
    verified[3] = 2
    with pytest.raises(ConfigError, match="1 of 100 rounds verified fewer than 5"):
        fit_temperatures(z, accepted, verified)
    with pytest.raises(ConfigError, match="needs rounds"):
        fit_temperatures(np.zeros((0, 5)), [], [])


def test_ece_by_hand():
    p = [0.05, 0.05, 0.95, 0.95]
    assert ece(p, [0, 0, 1, 1]) == pytest.approx(0.05)
    assert ece(p, [1, 1, 0, 0]) == pytest.approx(0.95)
    assert ece([1.0], [1]) == 0 and ece([], []) == 0
    # Two of one bin, one of which happened: frequency 1/2 against a mean of 0.5.
    assert ece([0.49, 0.51], [0, 1]) == pytest.approx(0.0)


def test_sigmoid_does_not_overflow():
    assert sigmoid([-1e4, 0, 1e4]).tolist() == [0, 0.5, 1]
