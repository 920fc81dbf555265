"""The blurs against scipy, and against loops written out here."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import Tensor

from shiftmend.shifts import cifar_c as blur
from shiftmend.shifts import primitives
from shiftmend.shifts.cifar_c import SHIFTS


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_images(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=generator(9), dtype=torch.uint8)


def truncated(unit: np.ndarray) -> np.ndarray:
    return (np.clip(unit, 0, 1) * 255).astype(np.uint8)


@pytest.mark.parametrize("sigma", [0.4, 0.6, 0.7, 0.8, 1.0])
def test_gaussian_blur_equals_scipy(sigma: float) -> None:
    images = random_images(4, 3, 32, 32)
    images[3] = 200
    expected = truncated(ndimage.gaussian_filter(images.numpy() / 255, (0, 0, sigma, sigma), mode="nearest"))
    result = blur.gaussian_blur(images, sigma=sigma).numpy()
    # The same to the last bit where numpy and scipy are built alike; elsewhere a flat area may be one level off.
    assert np.abs(result.astype(int) - expected).max() <= 1
    assert (result[:3] != expected[:3]).mean() < 1e-3


def sequential_glass(pixels: np.ndarray, draws: list[np.ndarray]) -> np.ndarray:
    """Pixel by pixel from the lower right, copying from the upper left, as published."""
    pixels = pixels.copy()
    side = pixels.shape[-1]
    for draw in draws:
        for row in range(side - 1, 1, -1):
            for column in range(side - 1, 1, -1):
                choice = int(draw[row - 2, column - 2])
                pixels[:, row, column] = pixels[:, row - choice // 2, column - choice % 2]
    return pixels


def test_glass_blur_equals_the_sequential_copies() -> None:
    images = random_images(2, 3, 10, 10)
    result = blur.glass_blur(images, generator=generator(), sigma=0.05, passes=2)
    draw_from = generator()
    draws = [torch.randint(0, 4, (2, 1, 8, 8), generator=draw_from).numpy() for _ in range(2)]
    for image in range(2):
        expected = sequential_glass(images[image].numpy(), [draw[image, 0] for draw in draws])
        assert np.array_equal(result[image].numpy(), expected)


def test_glass_blur_draws_four_neighbours_equally_and_spares_the_border() -> None:
    # Every pixel has its own value, so that the source of each copy can be told.
    images = torch.arange(15 * 15).view(1, 1, 15, 15).expand(400, 1, 15, 15).to(torch.uint8)
    result = blur.glass_blur(images, generator=generator(), sigma=0.05, passes=1)
    assert torch.equal(result[..., :2, :], images[..., :2, :])
    assert torch.equal(result[..., :, :2], images[..., :, :2])
    shift = (images - result)[..., 2:, 2:].int()
    for distance in (0, 1, 15, 16):
        assert (shift == distance).float().mean().item() == pytest.approx(0.25, abs=0.01)


def test_glass_blur_blurs_before_and_after() -> None:
    images = random_images(2, 3, 32, 32)
    blurred = blur.gaussian_blur(images, sigma=0.4)
    expected = blur.gaussian_blur(blur.glass_blur(blurred, generator=generator(), sigma=0.05, passes=2), sigma=0.4)
    assert torch.equal(blur.glass_blur(images, generator=generator(), sigma=0.4, passes=2), expected)


@pytest.mark.parametrize(
    ("radius", "sigma", "side", "centre"),
    [(0.3, 0.4, 0.0403879, 0.9192242), (0.4, 0.5, 0.1065070, 0.7869860), (0.5, 0.6, 0.1663785, 0.6672430)],
)
def test_small_defocus_kernels_are_three_taps(radius: float, sigma: float, side: float, centre: float) -> None:
    taps = np.array([side, centre, side])
    np.testing.assert_allclose(blur.defocus_kernel(radius, sigma).numpy(), np.outer(taps, taps), atol=1e-6)


def test_large_defocus_kernels_are_a_plus_and_a_square() -> None:
    plus = np.zeros((5, 5))
    plus[1:4, 2] = plus[2, 1:4] = 1 / 5
    np.testing.assert_allclose(blur.defocus_kernel(1, 0.2).numpy(), plus, atol=3e-6)
    square = np.zeros((5, 5))
    square[1:4, 1:4] = 1 / 9
    np.testing.assert_allclose(blur.defocus_kernel(1.5, 0.1).numpy(), square, atol=1e-8)


@pytest.mark.parametrize("severity", range(1, 6))
def test_defocus_blur_equals_a_softened_disk(severity: int) -> None:
    parameters = SHIFTS["cifar-c/defocus_blur"].parameters(severity)
    radius, sigma = parameters["radius"], parameters["sigma"]
    grid = np.arange(-8, 9)
    disk = (grid[:, None] ** 2 + grid[None] ** 2 <= radius**2).astype(np.float64)
    side = math.exp(-1 / (2 * sigma**2))
    taps = np.array([side, 1, side]) / (1 + 2 * side)
    kernel = ndimage.correlate(disk / disk.sum(), np.outer(taps, taps), mode="constant")
    images = random_images(3, 3, 32, 32)
    expected = ndimage.correlate(images.numpy() / 255, kernel[None, None], mode="mirror")
    result = blur.defocus_blur(images, **parameters).numpy()
    # The float32 kernel may tip a truncation, here on noise rarely.
    assert np.abs(result.astype(int) - truncated(expected)).max() <= 1
    assert (result != truncated(expected)).mean() < 0.05


def test_defocus_blur_keeps_flat_areas_where_the_float32_weights_exceed_one() -> None:
    images = torch.arange(256, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 6, 6)
    assert torch.equal(blur.defocus_blur(images, radius=1.5, sigma=0.1), images)


def test_motion_blur_draws_angles_up_to_45_degrees() -> None:
    images = torch.zeros(500, 1, 33, 33, dtype=torch.uint8)
    images[..., 16, 16] = 255
    result = blur.motion_blur(images, generator=generator(), radius=8, sigma=20.0)
    # A wide Gaussian leaves a line to the left of the point; its far end gives the angle away.
    reached = result[:, 0].nonzero()
    assert (reached[:, 2] <= 16).all()
    assert ((reached[:, 1] - 16).abs() <= 16 - reached[:, 2] + 1).all()
    ends = result[:, 0, :, :6].sum(dim=-1).nonzero()[:, 1]
    assert ends.min() <= 6
    assert ends.max() >= 26
    assert ends.float().mean().item() == pytest.approx(16, abs=1)


def test_motion_blur_uses_the_shared_kernel() -> None:
    images = random_images(3, 3, 32, 32)
    angles = primitives.uniform((3,), -45, 45, generator(4))
    expected = primitives.motion_blur(images, 9, 2.5, angles)
    assert torch.equal(blur.motion_blur(images, generator=generator(4), radius=9, sigma=2.5), expected)


# Zoom factor in hundredths: length of the crop, its start, length after the resize.
ZOOM_TABLE = {
    (100, 101): (32, 0, 32),
    (102, 103): (32, 0, 33),
    (104,): (31, 0, 32),
    (105, 106): (31, 0, 33),
    (107, 108): (30, 1, 32),
    (109, 110): (30, 1, 33),
    (111, 112): (29, 1, 32),
    (113, 114): (29, 1, 33),
    (115, 116): (28, 2, 32),
    (117, 118): (28, 2, 33),
    (119, 120): (27, 2, 32),
    (121, 122, 123): (27, 2, 33),
    (124,): (26, 3, 32),
    (125,): (26, 3, 33),
}


def table_entry(hundredths: int) -> tuple[int, int, int]:
    return next(entry for factors, entry in ZOOM_TABLE.items() if hundredths in factors)


@pytest.mark.parametrize("step", range(26))
def test_zoom_geometry_of_the_blur(step: int) -> None:
    crop, start, resized = table_entry(100 + step)
    assert blur.zoom_geometry(32, 1 + step * (1.01 - 1)) == (start, crop, resized)


@pytest.mark.parametrize(
    ("factor", "expected"), [(1.0, (0, 32, 32)), (1.25, (3, 26, 32)), (1.75, (6, 19, 33)), (2.25, (8, 15, 34))]
)
def test_zoom_geometry_of_snow(factor: float, expected: tuple[int, int, int]) -> None:
    assert blur.zoom_geometry(32, factor) == expected


def resized_by_scipy(image: np.ndarray, crop: int, start: int, resized: int) -> np.ndarray:
    window = image[start : start + crop, start : start + crop]
    positions = np.arange(resized) * (crop - 1) / (resized - 1)
    grid = np.meshgrid(positions, positions, indexing="ij")
    enlarged = ndimage.map_coordinates(window, grid, order=1, mode="nearest")
    first = (resized - 32) // 2
    return enlarged[first : first + 32, first : first + 32]


@pytest.mark.parametrize(("factor", "geometry"), [(1.1, (30, 1, 33)), (1.25, (26, 3, 32)), (2.25, (15, 8, 34))])
def test_zoom_equals_crop_and_linear_resize(factor: float, geometry: tuple[int, int, int]) -> None:
    image = random_images(1, 1, 32, 32).double() / 255
    expected = resized_by_scipy(image[0, 0].numpy(), *geometry)
    np.testing.assert_allclose(blur.zoom(image, factor)[0, 0].numpy(), expected, atol=1e-12)


@pytest.mark.parametrize(("severity", "copies"), [(1, 7), (2, 12), (3, 16), (4, 21), (5, 26)])
def test_zoom_blur_is_the_mean_of_the_enlargements(severity: int, copies: int) -> None:
    assert SHIFTS["cifar-c/zoom_blur"].parameters(severity) == {"copies": copies}
    images = random_images(1, 3, 32, 32)
    result = blur.zoom_blur(images, copies=copies)[0].numpy()
    for channel in range(3):
        image = images[0, channel].numpy() / 255
        total = image.copy()
        for step in range(copies):
            total += resized_by_scipy(image, *table_entry(100 + step))
        expected = truncated(total / (copies + 1))
        assert np.abs(result[channel].astype(int) - expected).max() <= 1
        assert (result[channel] != expected).mean() < 0.01
