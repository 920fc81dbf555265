"""Spatter step by step: every stage against a loop over pixels, then both liquids as a whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import Tensor

from shiftmend.shifts import primitives
from shiftmend.shifts.cifar_c import SHIFTS, box_mean, canny, equalise, shine, spatter


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_images(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=generator(9), dtype=torch.uint8)


def drops_of(severity: int, count: int, seed: int = 0) -> np.ndarray:
    """The smoothed and thresholded field of a severity, float64."""
    parameters = SHIFTS["cifar-c/spatter"].parameters(severity)
    field = primitives.normal((count, 32, 32), parameters["mean"], parameters["deviation"], generator(seed))
    sigma = parameters["sigma"]
    smooth = ndimage.gaussian_filter(field.double().numpy(), (0, sigma, sigma), mode="nearest")
    return np.where(smooth < parameters["threshold"], 0, smooth)


def canny_by_loops(levels: np.ndarray) -> np.ndarray:
    height, width = levels.shape
    padded = np.pad(levels.astype(int), 1, mode="edge")
    across, down = np.zeros((height, width), int), np.zeros((height, width), int)
    for row in range(height):
        for column in range(width):
            window = padded[row : row + 3, column : column + 3]
            across[row, column] = (window[:, 2] - window[:, 0]) @ np.array([1, 2, 1])
            down[row, column] = (window[2] - window[0]) @ np.array([1, 2, 1])
    magnitude = np.pad(np.abs(across) + np.abs(down), 1)
    weak = np.zeros((height, width), bool)
    for row in range(height):
        for column in range(width):
            here, i, j = magnitude[row + 1, column + 1], row + 1, column + 1
            x, y = across[row, column], down[row, column]
            if here <= 50:
                continue
            if abs(y) * 2**15 < 13573 * abs(x):
                weak[row, column] = here > magnitude[i, j - 1] and here >= magnitude[i, j + 1]
            elif abs(y) * 2**15 > 13573 * abs(x) + abs(x) * 2**16:
                weak[row, column] = here > magnitude[i - 1, j] and here >= magnitude[i + 1, j]
            else:
                side = -1 if (x < 0) != (y < 0) else 1
                weak[row, column] = here > magnitude[i - 1, j - side] and here > magnitude[i + 1, j + side]
    groups, _ = ndimage.label(weak, structure=np.ones((3, 3)))
    strong = np.unique(groups[weak & (magnitude[1:-1, 1:-1] > 150)])
    return np.isin(groups, strong[strong > 0])


@pytest.mark.parametrize("severity", [1, 3])
def test_canny_equals_a_loop_over_pixels(severity: int) -> None:
    levels = (drops_of(severity, 4) * 255).astype(int) & 255
    edges = canny(torch.from_numpy(levels)).numpy()
    assert edges.any()
    for image in range(4):
        assert np.array_equal(edges[image], canny_by_loops(levels[image]))


def test_canny_of_noise_equals_a_loop_over_pixels() -> None:
    # Smoothed, weak and strong edges mixed.
    noise = ndimage.gaussian_filter(random_images(3, 20, 24).numpy().astype(float), (0, 1.5, 1.5))
    levels = noise.astype(np.uint8)
    edges = canny(torch.from_numpy(levels)).numpy()
    for image in range(3):
        assert np.array_equal(edges[image], canny_by_loops(levels[image]))


def equalised_by_loops(levels: np.ndarray) -> np.ndarray:
    counts = np.bincount(levels.ravel(), minlength=256)
    first = int(np.flatnonzero(counts)[0])
    rest = levels.size - counts[first]
    if rest == 0:
        return levels.copy()
    table = [0] * 256
    running = 0
    for level in range(first + 1, 256):
        running += int(counts[level])
        table[level] = round(running * 255 / rest)
    return np.array(table)[levels]


def test_equalise_spreads_levels() -> None:
    levels = random_images(4, 16, 16) % 21
    levels[1] = levels[1].clamp(min=7, max=9)
    levels[2] = 20
    result = equalise(levels)
    for image in range(4):
        difference = result[image].numpy().astype(int) - equalised_by_loops(levels[image].numpy())
        # Halves are rounded from float32 products.
        assert np.abs(difference).max() <= 1
        assert (difference != 0).mean() < 0.1
    assert torch.equal(result[2], levels[2])
    assert result[0].min() == 0
    assert result[0].max() == 255


def test_equalise_by_hand() -> None:
    levels = torch.tensor([[[3, 3], [5, 9]]], dtype=torch.uint8)
    assert equalise(levels).flatten().tolist() == [0, 0, 128, 255]


def test_box_mean_mirrors_the_border_and_keeps_whole_numbers() -> None:
    values = random_images(2, 7, 6).float()
    expected = ndimage.uniform_filter(values.double().numpy(), (0, 3, 3), mode="mirror")
    np.testing.assert_allclose(box_mean(values).numpy(), expected, rtol=1e-6, atol=1e-4)
    assert torch.equal(box_mean(torch.full((1, 5, 5), 20.0)), torch.full((1, 5, 5), 20.0))


def shine_by_loops(drops: np.ndarray) -> np.ndarray:
    """The whole chain for one picture, in float64 and without the code under test."""
    levels = (drops * 255).astype(int) & 255
    edges = np.argwhere(canny_by_loops(levels))
    distance = np.full(levels.shape, 20.0)
    for row in range(levels.shape[0]):
        for column in range(levels.shape[1]):
            for r, c in edges:
                long, short = sorted((abs(row - r), abs(column - c)), reverse=True)
                length = (
                    (long - 2 * short) + short * 143976 / 65536
                    if long >= 2 * short
                    else (2 * short - long) * 91750 / 65536 + (long - short) * 143976 / 65536
                )
                distance[row, column] = min(distance[row, column], length)
    shading = equalised_by_loops(np.floor(smoothed(distance) + 1e-6).astype(np.uint8))
    kernel = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])
    relief = np.clip(ndimage.correlate(shading.astype(int), kernel, mode="mirror"), 0, 255)
    light = levels * np.rint(smoothed(relief.astype(float)))
    return light / light.max() if light.max() > 0 else light


def smoothed(values: np.ndarray) -> np.ndarray:
    return ndimage.uniform_filter(values, 3, mode="mirror")


@pytest.mark.slow
@pytest.mark.parametrize("severity", [1, 2, 3])
def test_shine_equals_the_chain_written_out(severity: int) -> None:
    drops = drops_of(severity, 3, seed=severity)
    result = shine(torch.from_numpy(drops)).numpy()
    for image in range(3):
        expected = shine_by_loops(drops[image])
        assert expected.max() == 1
        # A histogram step that is rounded the other way moves a value by a two-hundredth at most.
        assert np.abs(result[image] - expected).max() < 0.02
        assert np.abs(result[image] - expected).mean() < 0.001


def test_shine_without_drops_is_nothing() -> None:
    assert shine(torch.zeros(2, 32, 32)).sum() == 0


def test_shine_wraps_what_is_brighter_than_white() -> None:
    drops = torch.zeros(1, 32, 32)
    drops[0, 10:20, 10:20] = 257.5 / 255
    wrapped = torch.zeros(1, 32, 32)
    wrapped[0, 10:20, 10:20] = 1.5 / 255
    assert torch.equal(shine(drops), shine(wrapped))


def test_water_lightens_in_its_colour() -> None:
    parameters = SHIFTS["cifar-c/spatter"].parameters(2)
    images = torch.full((3, 3, 32, 32), 40, dtype=torch.uint8)
    result = spatter(images, generator=generator(), **parameters)
    light = shine(torch.from_numpy(drops_of(2, 3))).numpy()
    colour = np.array([175, 238, 238]) / 255
    expected = 40 / 255 + 0.5 * light[:, None] * colour[None, :, None, None]
    difference = result.numpy().astype(int) - (np.clip(expected, 0, 1) * 255).astype(int)
    assert (difference != 0).mean() < 0.01
    assert (result >= 40).all()
    assert result.amax(dim=(0, 2, 3)).tolist() == [40 + 175 // 2, 40 + 238 // 2, 40 + 238 // 2]


@pytest.mark.parametrize("severity", [4, 5])
def test_mud_covers_in_its_colour(severity: int) -> None:
    parameters = SHIFTS["cifar-c/spatter"].parameters(severity)
    images = random_images(4, 3, 32, 32)
    result = spatter(images, generator=generator(), **parameters).numpy()
    cover = ndimage.gaussian_filter(
        (drops_of(severity, 4) > parameters["threshold"]).astype(float), (0, 0.6, 0.6), mode="nearest"
    )
    cover = np.where(cover < 0.8, 0, cover)[:, None]
    colour = (np.array([63, 42, 20]) / 255)[None, :, None, None]
    expected = (np.clip(images.numpy() / 255 * (1 - cover) + cover * colour, 0, 1) * 255).astype(np.uint8)
    difference = np.abs(result.astype(int) - expected)
    assert difference.max() <= 1
    bare = np.broadcast_to(cover == 0, result.shape)
    assert (difference[~bare] != 0).mean() < 0.05
    assert np.array_equal(result[bare], images.numpy()[bare])
