"""Fog, frost and snow against formulas written out here with the same random fields."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.shifts import primitives
from shiftmend.shifts.cifar_c import fog, frost, snow, zoom


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_images(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=generator(9), dtype=torch.uint8)


def assert_nearly_equal(result: Tensor, expected: np.ndarray, share: float = 1e-3) -> None:
    """Float32 against float64: a truncation may tip now and then."""
    difference = result.numpy().astype(int) - expected.astype(int)
    assert np.abs(difference).max() <= 1
    assert (difference != 0).mean() < share


@pytest.mark.parametrize(("strength", "decay"), [(0.2, 3.0), (1.5, 1.75)])
@pytest.mark.parametrize(("height", "width", "side"), [(32, 32, 32), (33, 20, 64), (20, 31, 32)])
def test_fog_follows_its_formula(strength: float, decay: float, height: int, width: int, side: int) -> None:
    images = random_images(5, 3, height, width) // torch.arange(2, 7, dtype=torch.uint8).view(5, 1, 1, 1)
    result = fog(images, generator=generator(), strength=strength, decay=decay)
    cloud = primitives.plasma(5, side, decay, generator()).double().numpy()[:, :height, :width]
    for image in range(5):
        unit = images[image].numpy() / 255
        brightest = unit.max()
        expected = (unit + strength * cloud[image]) * brightest / (brightest + strength)
        assert_nearly_equal(result[image], (np.clip(expected, 0, 1) * 255).astype(np.uint8))


def test_fog_never_exceeds_the_brightest_value() -> None:
    images = torch.full((4, 3, 32, 32), 90, dtype=torch.uint8)
    result = fog(images, generator=generator(), strength=1.0, decay=2.0)
    assert result.max() <= 90
    assert torch.equal(result[:, 0], result[:, 2])


def test_a_black_picture_stays_black_in_fog() -> None:
    images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    assert fog(images, generator=generator(), strength=1.5, decay=1.75).sum() == 0


def coded_textures(count: int) -> list[Tensor]:
    """Red tells the texture, green the row and blue the column, so that a window can be located."""
    textures = []
    for number in range(count):
        height, width = 40 + 5 * number, 60 - 3 * number
        texture = torch.empty(3, height, width, dtype=torch.uint8)
        texture[0] = 10 * number
        texture[1] = torch.arange(height)[:, None]
        texture[2] = torch.arange(width)
        textures.append(texture)
    return textures


@pytest.mark.slow
def test_frost_cuts_windows_from_the_first_five_textures() -> None:
    textures = coded_textures(6)
    images = torch.zeros(4000, 3, 32, 32, dtype=torch.uint8)
    result = frost(images, generator=generator(), image_weight=1.0, frost_weight=1.0, textures=textures)
    which, row, column = (result[:, 0, 0, 0] // 10, result[:, 1, 0, 0], result[:, 2, 0, 0])
    for image in range(0, 4000, 97):
        top, left = int(row[image]), int(column[image])
        window = textures[int(which[image])][:, top : top + 32, left : left + 32]
        assert torch.equal(result[image], window)
    for number in range(5):
        assert (which == number).float().mean().item() == pytest.approx(0.2, abs=0.03)
        # The last possible position is never drawn, every other is.
        height, width = textures[number].shape[1:]
        assert set(row[which == number].tolist()) == set(range(height - 32))
        assert set(column[which == number].tolist()) == set(range(width - 32))
    assert which.max() == 4


def test_frost_weighs_clips_and_truncates() -> None:
    images = torch.tensor([0, 1, 4, 60, 255], dtype=torch.uint8).view(5, 1, 1, 1).expand(5, 3, 2, 2)
    textures = [torch.full((3, 4, 4), 200, dtype=torch.uint8)]
    result = frost(images, generator=generator(), image_weight=0.75, frost_weight=0.45, textures=textures)
    # 90 from the frost, and 0, 0.75, 3, 45 and 191.25 from the image.
    assert result[:, 0, 0, 0].tolist() == [90, 90, 93, 135, 255]


def test_frost_refuses_missing_and_small_textures() -> None:
    images = random_images(1, 3, 32, 32)
    with pytest.raises(DataError, match="at least one texture"):
        frost(images, generator=generator(), image_weight=1.0, frost_weight=0.2, textures=[])
    for height, width in ((32, 50), (50, 32)):
        small = [torch.zeros(3, height, width, dtype=torch.uint8)]
        with pytest.raises(DataError, match="larger"):
            frost(images, generator=generator(), image_weight=1.0, frost_weight=0.2, textures=small)


@pytest.mark.parametrize("zoom_factor", [1.0, 1.75])
def test_snow_follows_its_recipe(zoom_factor: float) -> None:
    images = random_images(4, 3, 32, 32)
    result = snow(
        images,
        generator=generator(),
        mean=0.15,
        deviation=0.3,
        zoom_factor=zoom_factor,
        threshold=0.55,
        radius=10,
        sigma=4.0,
        keep=0.9,
    )
    draws = generator()
    field = zoom(primitives.normal((4, 1, 32, 32), 0.15, 0.3, draws).double(), zoom_factor)[:, 0].numpy()
    flakes = (np.clip(np.where(field < 0.55, 0, field), 0, 1) * 255).astype(np.uint8)
    angles = primitives.uniform((4,), -135, -45, draws)
    streaks = primitives.motion_blur(torch.from_numpy(flakes)[:, None], 10, 4.0, angles)[:, 0].numpy() / 255
    for image in range(4):
        unit = images[image].numpy() / 255
        grey = 0.299 * unit[0] + 0.587 * unit[1] + 0.114 * unit[2]
        pale = 0.9 * unit + (1 - 0.9) * np.maximum(unit, 1.5 * grey + 0.5)
        expected = pale + streaks[image] + streaks[image][::-1, ::-1]
        assert_nearly_equal(result[image], (np.clip(expected, 0, 1) * 255).astype(np.uint8), share=0.01)


def test_snow_only_brightens() -> None:
    images = random_images(4, 3, 32, 32)
    result = snow(
        images,
        generator=generator(),
        mean=0.3,
        deviation=0.3,
        zoom_factor=1.25,
        threshold=0.65,
        radius=14,
        sigma=12.0,
        keep=0.8,
    )
    assert (result.int() >= images.int() - 1).all()
