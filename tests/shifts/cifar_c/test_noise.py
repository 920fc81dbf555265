"""The noises: rates, means and variances of what they add."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from shiftmend.shifts.cifar_c import gaussian_noise, impulse_noise, shot_noise, speckle_noise


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def flat(level: int) -> Tensor:
    return torch.full((20, 3, 32, 32), level, dtype=torch.uint8)


@pytest.mark.parametrize("deviation", [0.04, 0.1])
def test_gaussian_noise_has_its_deviation_and_truncates(deviation: float) -> None:
    added = gaussian_noise(flat(128), generator=generator(), deviation=deviation).float() - 128
    assert added.mean().item() == pytest.approx(-0.5, abs=0.25)
    assert added.std().item() == pytest.approx(255 * deviation, rel=0.02)


def test_gaussian_noise_is_the_drawn_field() -> None:
    images = torch.randint(0, 256, (2, 3, 32, 32), generator=generator(1), dtype=torch.uint8)
    field = torch.randn(2, 3, 32, 32, generator=generator()).double() * 0.06
    expected = ((images.double() / 255 + field).clamp(0, 1) * 255).floor()
    result = gaussian_noise(images, generator=generator(), deviation=0.06)
    assert (result.double() - expected).abs().max() <= 1
    assert (result != expected).float().mean() < 1e-3


@pytest.mark.parametrize(("photons", "level"), [(500, 51), (50, 51), (50, 153)])
def test_shot_noise_counts_photons(photons: int, level: int) -> None:
    noisy = shot_noise(flat(level), generator=generator(), photons=photons).double()
    possible = {int(count / photons * 255) for count in range(photons + 1)}
    assert set(noisy.flatten().int().tolist()) <= possible
    counts = np.arange(photons + 1)
    levels = np.floor(counts / photons * 255 + 1e-9)
    chances = stats.poisson.pmf(counts, level / 255 * photons)
    mean = (chances * levels).sum()
    assert noisy.mean().item() == pytest.approx(mean, abs=0.2)
    assert noisy.std().item() == pytest.approx((chances * (levels - mean) ** 2).sum() ** 0.5, rel=0.015)


def test_shot_noise_leaves_black_alone() -> None:
    assert shot_noise(flat(0), generator=generator(), photons=50).sum() == 0


@pytest.mark.parametrize("amount", [0.01, 0.07])
def test_impulse_noise_hits_single_values(amount: float) -> None:
    images = flat(100)
    noisy = impulse_noise(images, generator=generator(), amount=amount)
    black, white = (noisy == 0), (noisy == 255)
    assert torch.equal(noisy[~(black | white)], images[~(black | white)])
    total = images.numel()
    for hits in (black, white):
        spread = (total * amount / 2) ** 0.5
        assert hits.sum().item() == pytest.approx(total * amount / 2, abs=5 * spread)
    # Independent channels: a hit in one says nothing about the others.
    hit = (black | white).float()
    both = (hit[:, 0] * hit[:, 1]).sum().item()
    pixels = hit[:, 0].numel()
    assert both == pytest.approx(pixels * amount**2, abs=5 * (pixels * amount**2) ** 0.5 + 1)


@pytest.mark.parametrize("level", [50, 100])
def test_speckle_noise_grows_with_brightness(level: int) -> None:
    noisy = speckle_noise(flat(level), generator=generator(), deviation=0.2).float()
    assert noisy.std().item() == pytest.approx(0.2 * level, rel=0.02)
    assert noisy.mean().item() == pytest.approx(level - 0.5, abs=0.5)
    assert speckle_noise(flat(0), generator=generator(), deviation=0.2).sum() == 0
