"""Directions against splitmix64 and Box-Muller with whole numbers of Python, and as what they are for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shiftmend.stats.slices import random_directions
from shiftmend.utils.devices import VALUES_PER_PART


def splitmix(place: int, seed: int) -> float:
    """Vigna's splitmix64 with whole numbers of Python, as a number between 0 and 1."""
    mask = (1 << 64) - 1
    z = (place + 1 + seed * 0xD1342543DE82EF95) * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    z ^= z >> 31
    return ((z >> 11) + 0.5) / 2**53


@pytest.mark.parametrize("seed", [0, 1, 20220425, 20220426, (1 << 64) - 1])
@pytest.mark.parametrize(("count", "units"), [(1, 1), (3, 4), (7, 2)])
def test_directions_against_whole_numbers_of_python(count: int, units: int, seed: int) -> None:
    rows = []
    for row in range(count):
        normal = [
            math.sqrt(-2 * math.log(splitmix(place, seed)))
            * math.cos(2 * math.pi * splitmix(count * units + place, seed))
            for place in range(row * units, (row + 1) * units)
        ]
        rows.append([value / math.hypot(*normal) for value in normal])
    np.testing.assert_allclose(random_directions(count, units, seed).numpy(), rows, atol=1e-6)


def test_directions_never_change() -> None:
    """A profile stores only their seed: were they to change, every profile that exists would be wrong."""
    expected = [
        [0.36349046, 0.53867429, 0.44417536, 0.61677623],
        [-0.12209819, 0.49599174, -0.46323916, -0.72421940],
        [-0.72378355, -0.09723045, -0.63997000, 0.23900212],
    ]
    np.testing.assert_allclose(random_directions(3, 4, 20220425).numpy(), expected, atol=1e-6)
    larger = random_directions(128, 512, 20220425)
    np.testing.assert_allclose(larger[0, :3].numpy(), [0.02165515, -0.04248067, 0.03275132], atol=1e-7)
    np.testing.assert_allclose(larger[-1, -3:].numpy(), [0.05905210, 0.01036188, 0.05261929], atol=1e-7)


def test_directions_do_not_depend_on_how_many_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = random_directions(50, 7, 11)
    for at_once in (1, 7, 20, 350):
        monkeypatch.setitem(VALUES_PER_PART, "cpu", at_once)
        assert torch.equal(random_directions(50, 7, 11), whole)


@pytest.mark.usefixtures("other_default_dtype")
def test_directions_do_not_depend_on_the_precision_that_is_usual_elsewhere() -> None:
    assert random_directions(3, 4, 20220425).dtype == torch.float32
    expected = np.array([0.36349046, 0.53867429, 0.44417536, 0.61677623], dtype=np.float32)
    np.testing.assert_allclose(random_directions(3, 4, 20220425)[0].numpy(), expected, atol=1e-7)


def test_directions_are_of_length_one_and_point_everywhere() -> None:
    directions = random_directions(4096, 32, 20220425).double()
    torch.testing.assert_close(directions.norm(dim=1), torch.ones(4096, dtype=torch.float64), atol=1e-6, rtol=0)
    # for isotropic directions the second moment is I / 32, up to the noise of 4096 samples: (1 +- sqrt(32 / 4096))^2
    eigenvalues = torch.linalg.eigvalsh(32 * directions.T @ directions / 4096)
    assert 0.80 < float(eigenvalues.min()) < float(eigenvalues.max()) < 1.22
    assert float(directions.mean(0).norm()) < 3 / math.sqrt(4096)
    # a projection on a fixed direction has fourth moment 3 / (d (d + 2))
    np.testing.assert_allclose((directions[:, 0] ** 4).mean(), 3 / (32 * 34), rtol=0.15)


def test_sets_of_other_seeds_have_nothing_in_common() -> None:
    a, b = random_directions(128, 64, 20220425), random_directions(512, 64, 20220426)
    assert float((a @ b.T).abs().max()) < 0.7
    near, far = random_directions(100, 64, 1), random_directions(100, 64, 2)
    assert float((near * far).sum(1).abs().mean()) < 0.2
