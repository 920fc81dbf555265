"""The shifts beyond the paper: each against numpy, in the middle and at its ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import ndimage

from shiftmend.errors import DataError
from shiftmend.shifts import SHIFTS, apply
from shiftmend.shifts.sensor import STAINS

NAMES = [name for name in SHIFTS if name.startswith("sensor/")]


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(4, 3, 8, 8, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=32, mode="bilinear")
    return (smooth * 255).to(torch.uint8)


def rounded(unit: np.ndarray) -> np.ndarray:
    return np.clip(np.round(unit * 255), 0, 255)


@pytest.mark.parametrize("strength", [0.2, 0.6, 1.0])
def test_point_operations_against_numpy(images: torch.Tensor, strength: float) -> None:
    x = images.numpy().astype(np.float64) / 255
    gains = np.array([1 + 0.5 * strength, 1, 1 - 0.5 * strength]).reshape(1, 3, 1, 1)
    expected = {
        "sensor/gain_offset": x * (1 - 0.5 * strength) + 0.35 * strength,
        "sensor/gamma": x ** (1 + 1.5 * strength),
        "sensor/white_balance": x * gains,
    }
    for name, unit in expected.items():
        got = apply(name, images, strength=strength).numpy().astype(np.float64)
        assert abs(got - np.clip(unit * 255, 0, 255)).max() <= 0.5 + 1e-3, name  # halves may go either way


@pytest.mark.parametrize("strength", [0.2, 0.6, 1.0])
def test_stain_against_numpy(images: torch.Tensor, strength: float) -> None:
    vectors = np.array(STAINS) / np.linalg.norm(STAINS, axis=1, keepdims=True)
    density = -np.log((images.numpy().astype(np.float64) + 1) / 256).transpose(0, 2, 3, 1)
    amounts = np.linalg.solve(vectors.T, density.reshape(-1, 3).T)  # how much of each stain
    amounts[0] *= 1 + 0.6 * strength
    amounts[1] *= 1 - 0.6 * strength
    changed = (vectors.T @ amounts).T.reshape(density.shape).transpose(0, 3, 1, 2)
    expected = np.clip(np.round(256 * np.exp(-changed) - 1), 0, 255)
    assert abs(apply("sensor/stain", images, strength=strength).numpy() - expected).max() <= 1


def test_a_white_slide_stays_white_under_another_stain() -> None:
    white = torch.full((1, 3, 4, 4), 255, dtype=torch.uint8)
    assert torch.equal(apply("sensor/stain", white, strength=1.0), white)


@pytest.mark.parametrize("strength", [0.2, 0.5, 1.0])
def test_defocus_against_scipy(images: torch.Tensor, strength: float) -> None:
    radius = 3 * strength
    reach = int(np.ceil(radius + 0.5))
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    disc = np.clip(radius + 0.5 - np.hypot(x, y), 0, 1)
    plane = images[1, 2].numpy() / 255.0
    expected = rounded(ndimage.correlate(plane, disc / disc.sum(), mode="mirror"))
    assert abs(apply("sensor/defocus", images, strength=strength)[1, 2].numpy() - expected).max() <= 1


def test_motion_smears_along_rows_only(images: torch.Tensor) -> None:
    upright = torch.zeros(1, 1, 20, 20, dtype=torch.uint8)
    upright[..., 10] = 200
    lying = upright.transpose(-1, -2).contiguous()
    assert torch.equal(apply("sensor/motion_blur", lying, strength=1.0), lying)
    assert apply("sensor/motion_blur", upright, strength=1.0).max() < 100


def test_noise_has_the_stated_size() -> None:
    flat = torch.full((200, 1, 16, 16), 128, dtype=torch.uint8)
    for strength in (0.2, 1.0):
        noisy = apply("sensor/noise", flat, strength=strength).double() / 255
        photons = 1000 * 0.02**strength
        expected = np.sqrt(128 / 255 / photons + (0.05 * strength) ** 2)
        assert noisy.mean() == pytest.approx(128 / 255, abs=0.003)
        assert noisy.std() == pytest.approx(expected, rel=0.05)


def test_dead_pixels_are_dead_in_every_image_and_every_portion(
    images: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shiftmend.shifts.CHUNK", 3)
    grey = torch.full((10, 1, 40, 40), 100, dtype=torch.uint8)
    hit = apply("sensor/dead_pixels", grey, strength=1.0, seed=4)
    assert all(torch.equal(image, hit[0]) for image in hit)
    assert int((hit[0, 0] == 0).all(1).sum()) == 4
    assert 0.01 < float((hit[0] == 255).float().mean()) < 0.04
    assert not torch.equal(apply("sensor/dead_pixels", grey, strength=1.0, seed=5), hit)


def test_resolution_against_block_means() -> None:
    picture = torch.randint(0, 256, (1, 1, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    halved = apply("sensor/resolution", picture, strength=2 / 3)
    means = picture[0, 0].numpy().reshape(8, 2, 8, 2).mean((1, 3))
    inner = halved[0, 0, 1:-1, 1:-1].numpy()
    # an enlarged pixel is 9/16, 3/16, 3/16 and 1/16 of the four nearest coarse ones
    expected = (9 * means[0, 0] + 3 * means[0, 1] + 3 * means[1, 0] + means[1, 1]) / 16
    assert inner[0, 0] == pytest.approx(expected, abs=0.6)


def test_jpeg_is_pillows(images: torch.Tensor) -> None:
    assert torch.equal(
        apply("sensor/jpeg", images, strength=0.5), apply("cifar-c/jpeg_compression", images, quality=50)
    )


@pytest.mark.parametrize("name", NAMES)
def test_stronger_is_further_away(name: str, images: torch.Tensor) -> None:
    distance = [
        float((apply(name, images, severity=severity).float() - images.float()).abs().mean())
        for severity in range(1, 6)
    ]
    if name != "sensor/resolution":  # sizes that do not divide the side cost more than a little coarser ones that do
        assert distance == sorted(distance)
    assert distance[0] < distance[-1]


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("sensor/white_balance", "sensor/stain")])
def test_grey_images_and_odd_sizes(name: str) -> None:
    wide = torch.zeros(2, 1, 17, 33, dtype=torch.uint8)
    assert apply(name, wide).shape == wide.shape


@pytest.mark.parametrize("name", ["sensor/white_balance", "sensor/stain"])
def test_colour_shifts_refuse_grey(name: str) -> None:
    with pytest.raises(DataError, match="3 channels"):
        apply(name, torch.zeros(2, 1, 8, 8, dtype=torch.uint8))
