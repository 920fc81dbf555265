"""MNIST-C's shifts against numpy and scipy references, and their distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import ndimage

from shiftmend.shifts import SHIFTS, apply, mnist

CENTRE = 13.5


def grey(count: int, seed: int = 0) -> torch.Tensor:
    random = np.random.default_rng(seed)
    fields = ndimage.gaussian_filter(random.normal(size=(count, 28, 28)), (0, 2, 2))
    return torch.from_numpy((np.clip(fields * 8, 0, 1) * 255).astype(np.uint8))[:, None]


def warp_by_loop(image: np.ndarray, matrix: np.ndarray, offset: tuple[float, float] = (0, 0)) -> np.ndarray:
    """Output pixel (column, row) reads the input at matrix (p - centre) + centre + offset; bilinear, zero outside."""
    unit = image / 255.0
    result = np.zeros((28, 28))
    for row in range(28):
        for column in range(28):
            x, y = matrix @ np.array([column - CENTRE, row - CENTRE]) + CENTRE + np.array(offset)
            left, top = math.floor(x), math.floor(y)
            for r, c, weight in (
                (top, left, (1 - (y - top)) * (1 - (x - left))),
                (top, left + 1, (1 - (y - top)) * (x - left)),
                (top + 1, left, (y - top) * (1 - (x - left))),
                (top + 1, left + 1, (y - top) * (x - left)),
            ):
                if 0 <= r < 28 and 0 <= c < 28:
                    result[row, column] += weight * unit[r, c]
    return (np.clip(result, 0, 1) * 255).astype(np.float32).astype(np.uint8)


def assert_either(shifted: torch.Tensor, candidates: list[list[np.ndarray]]) -> None:
    """Each image equals one of its candidates, and over the images every candidate occurs."""
    seen = set()
    for image, options in zip(shifted[:, 0].numpy(), candidates, strict=True):
        # One level of difference: a value that is a whole level but for rounding may be truncated either way.
        near = [i for i, option in enumerate(options) if np.abs(image.astype(int) - option).max() <= 1]
        exact = [i for i in near if (image != options[i]).mean() < 0.005]
        assert len(exact) == 1
        seen.add(exact[0])
    assert seen == set(range(len(candidates[0])))


def test_names_and_default_severities():
    defaults = {
        name.removeprefix("mnist-c/"): shift.default for name, shift in SHIFTS.items() if name.startswith("mnist-c/")
    }
    assert defaults == {
        "brightness": 5,
        "canny_edges": 1,
        "dotted_line": 1,
        "fog": 5,
        "glass_blur": 1,
        "identity": 1,
        "impulse_noise": 4,
        "motion_blur": 1,
        "rotate": 2,
        "scale": 3,
        "shear": 2,
        "shot_noise": 5,
        "spatter": 4,
        "stripe": 1,
        "translate": 3,
        "zigzag": 1,
    }


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("brightness", [0.1, 0.2, 0.3, 0.4, 0.5]),
        ("fog", [(1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)]),
        ("glass_blur", [(0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)]),
        ("impulse_noise", [0.03, 0.06, 0.09, 0.17, 0.27]),
        ("motion_blur", [(10, 3), (15, 5), (15, 8), (15, 12), (20, 15)]),
        ("rotate", [0.2, 0.4, 0.6, 0.8, 1]),
        ("scale", [0.9, 0.8, 0.7, 0.6, 0.5]),
        ("shear", [0.2, 0.4, 0.6, 0.8, 1]),
        ("shot_noise", [60, 25, 12, 5, 3]),
        (
            "spatter",
            [
                (0.65, 0.3, 4, 0.69, 0.6),
                (0.65, 0.3, 3, 0.68, 0.6),
                (0.65, 0.3, 2, 0.68, 0.5),
                (0.65, 0.3, 1, 0.65, 1.5),
                (0.67, 0.4, 1, 0.65, 1.5),
            ],
        ),
        ("translate", [1, 2, 3, 4, 5]),
    ],
)
def test_constants_are_the_published_ones(name, published):
    """In the order in which the generator of MNIST-C names them; EMNIST-DA shares those that it has as well."""
    rows = [row if isinstance(row, tuple) else (row,) for row in published]
    for family in ("mnist-c", "emnist-da"):
        if f"{family}/{name}" in SHIFTS:
            assert [tuple(values.values()) for values in SHIFTS[f"{family}/{name}"].severities] == rows


@pytest.mark.slow
@pytest.mark.parametrize(("severity", "angle"), [(None, 0.4), (5, 1.0)])
def test_rotate(severity, angle):
    images = grey(8)

    def turn(a: float) -> np.ndarray:
        return np.array([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]])

    expected = [[warp_by_loop(image, turn(a)) for a in (angle, -angle)] for image in images[:, 0].numpy()]
    assert_either(apply("mnist-c/rotate", images, severity=severity), expected)


def test_shear():
    images = grey(8)

    def slant(a: float) -> np.ndarray:
        return np.array([[1, -math.sin(a)], [0, math.cos(a)]])

    expected = [[warp_by_loop(image, slant(a)) for a in (0.4, -0.4)] for image in images[:, 0].numpy()]
    assert_either(apply("mnist-c/shear", images), expected)


@pytest.mark.parametrize(("severity", "factor"), [(None, 0.7), (5, 0.5)])
def test_scale(severity, factor):
    images = grey(4)
    expected = [[warp_by_loop(image, np.eye(2) / factor)] for image in images[:, 0].numpy()]
    assert_either(apply("mnist-c/scale", images, severity=severity), expected)


def test_translate_moves_whole_pixels_in_all_four_directions():
    images = grey(64)
    shifted = apply("mnist-c/translate", images)[:, 0]
    padded = torch.nn.functional.pad(images[:, 0], (3, 3, 3, 3))
    seen = set()
    for image, wide in zip(shifted, padded, strict=True):
        matches = [
            (right, down)
            for right in (0, 6)
            for down in (0, 6)
            if torch.equal(image, wide[down : down + 28, right : right + 28])
        ]
        assert len(matches) == 1
        seen.add(matches[0])
    assert len(seen) == 4


@pytest.mark.parametrize("severity", range(1, 6))
def test_brightness_adds_to_the_value(severity):
    images = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    expected = np.clip(images.numpy() / 255.0 + severity / 10, 0, 1) * 255
    expected = expected.astype(np.float32).astype(np.uint8)
    assert np.array_equal(apply("mnist-c/brightness", images, severity=severity).numpy(), expected)


def glass_by_loop(image: np.ndarray, sigma: float, reach: int, draws: list[np.ndarray]) -> np.ndarray:
    blurred = ndimage.gaussian_filter1d(image / 255.0, sigma, axis=0, mode="nearest")
    pixels = (blurred * 255).astype(np.uint8)
    for moves in draws:
        visit = 0
        for row in range(28 - reach, reach, -1):
            for column in range(28 - reach, reach, -1):
                swap, down, right = moves[visit]
                visit += 1
                if swap:
                    there = (row + down, column + right)
                    pixels[row, column], pixels[there] = pixels[there], pixels[row, column]
    blurred = ndimage.gaussian_filter1d(pixels / 255.0, sigma, axis=0, mode="nearest")
    return (np.clip(blurred, 0, 1) * 255).astype(np.float32).astype(np.uint8)


@pytest.mark.parametrize(("severity", "sigma", "reach", "passes"), [(1, 0.7, 1, 2), (3, 1.0, 2, 3)])
def test_glass_blur_exchanges_pixels_one_after_the_other(severity, sigma, reach, passes):
    images = grey(3)
    generator = torch.Generator().manual_seed(11)
    visits = (28 - 2 * reach) ** 2
    draws = []
    for _ in range(passes):
        offsets = torch.randint(-reach, reach, (2, visits, 3), generator=generator)
        swaps = torch.randint(0, 2, (visits, 3), generator=generator)
        draws.append(torch.stack((swaps, offsets[0], offsets[1]), dim=-1).numpy())
    expected = [
        glass_by_loop(image, sigma, reach, [moves[:, index] for moves in draws])
        for index, image in enumerate(images[:, 0].numpy())
    ]
    shifted = apply("mnist-c/glass_blur", images, severity=severity, seed=11)
    assert np.array_equal(shifted[:, 0].numpy(), np.stack(expected))


def test_glass_blur_on_request_in_both_directions():
    images = grey(3)
    unit = images.numpy() / 255.0
    for _ in range(2):  # before the pixels change places, of which there is nothing here, and afterwards
        unit = (ndimage.gaussian_filter(unit, (0, 0, 1, 1), mode="nearest") * 255).astype(np.float32) // 1 / 255.0
    shifted = apply("mnist-c/glass_blur", images, sigma=1.0, passes=0, isotropic=True)
    assert np.abs(shifted.numpy() - unit * 255).max() < 1.01  # a whole level may be truncated either way
    assert (np.abs(shifted.numpy() - unit * 255) > 0.5).mean() < 0.005


def test_glass_blur_without_blur_is_a_permutation():
    images = grey(5)
    shifted = apply("mnist-c/glass_blur", images, sigma=0.01, isotropic=True)
    assert not torch.equal(shifted, images)
    assert torch.equal(shifted.flatten(1).sort(dim=1).values, images.flatten(1).sort(dim=1).values)
    assert torch.equal(shifted[..., 0, :], images[..., 0, :])


@pytest.mark.parametrize(("severity", "radius", "sigma"), [(None, 10, 3), (5, 20, 15)])
def test_motion_blur_smears_sideways_within_45_degrees(severity, radius, sigma):
    images = grey(30)
    shifted = apply("mnist-c/motion_blur", images, severity=severity, seed=4)[:, 0].numpy()
    angles = np.radians(torch.rand(30, generator=torch.Generator().manual_seed(4)).double().numpy() * 90 - 45)
    weights = np.exp(-(np.arange(2 * radius + 1) ** 2) / (2 * sigma**2))
    for image, found, angle in zip(images[:, 0].numpy(), shifted, angles, strict=True):
        expected = np.zeros((28, 28))
        for step, weight in enumerate(weights / weights.sum()):
            # An output pixel mixes in what lies to its right, so that the digit is dragged to the left.
            rows = np.clip(np.arange(28) + math.ceil(step * math.sin(angle) - 0.5), 0, 27)
            columns = np.clip(np.arange(28) + math.ceil(step * math.cos(angle) - 0.5), 0, 27)
            expected += weight * image[rows[:, None], columns]
        assert np.abs(found - expected).max() <= 0.51


def test_canny_edges_are_white_on_black():
    images = grey(4)
    shifted = apply("mnist-c/canny_edges", images)
    expected = mnist.canny(images[:, 0].double() / 255)
    assert torch.equal(shifted[:, 0] == 255, expected)
    assert set(shifted.unique().tolist()) == {0, 255}


@pytest.mark.parametrize("severity", range(1, 6))
def test_spatter_pulls_towards_mud_or_leaves_alone(severity):
    images = grey(30)
    shifted = apply("mnist-c/spatter", images, severity=severity)
    unchanged = shifted == images
    assert 0.2 < unchanged.float().mean() < 0.999
    # Where the cover is at least 0.8, at most a fifth of the picture shows through.
    mud = shifted[~unchanged].float()
    assert mud.min() >= 0.8 * 63 - 1
    assert mud.max() <= 0.8 * 63 + 0.2 * 255


def test_spatter_covers_where_its_noise_says():
    images = grey(30)
    noise = 0.65 + 0.3 * torch.randn(30, 1, 28, 28, generator=torch.Generator().manual_seed(6)).double().numpy()
    splashes = ndimage.gaussian_filter(noise, (0, 0, 1, 1), mode="nearest") > 0.65
    cover = ndimage.gaussian_filter(splashes.astype(float), (0, 0, 1.5, 1.5), mode="nearest")
    cover[cover < 0.8] = 0
    expected = images.numpy() * (1 - cover) + 63 * cover
    difference = expected - apply("mnist-c/spatter", images, seed=6).numpy()
    assert ((difference > -0.01) & (difference < 1.01)).mean() > 0.999  # truncated, and float32 at a threshold


def test_warp_leaves_images_alone_where_it_maps_nothing():
    images = grey(3)
    assert torch.equal(mnist.warp(images, torch.eye(2, dtype=torch.float64).expand(3, 2, 2)), images)


# Canny edges against a slow reference that follows scikit-image's description, pixel by pixel.


def canny_by_loop(image: np.ndarray) -> np.ndarray:
    """float64 `[H, W]` in [0, 1]: blur with border compensation, Sobel, interpolated suppression, hysteresis."""
    inside = ndimage.gaussian_filter(np.ones_like(image), 1.0, mode="constant")
    smooth = ndimage.gaussian_filter(image, 1.0, mode="constant") / inside
    right, down = ndimage.sobel(smooth, axis=1), ndimage.sobel(smooth, axis=0)
    size = np.hypot(right, down)
    height, width = image.shape
    peak = np.zeros(image.shape, bool)
    for i in range(1, height - 1):
        for j in range(1, width - 1):
            if size[i, j] == 0:
                continue
            # A step of one pixel along the longer component of the gradient, and its fraction along the other.
            longer = max(abs(right[i, j]), abs(down[i, j]))
            step_right, step_down = right[i, j] / longer, down[i, j] / longer
            values = []
            for sign in (1, -1):
                x, y = sign * step_right, sign * step_down
                if abs(y) >= abs(x):
                    row, side = i + round(y), int(np.sign(x))
                    values.append((1 - abs(x)) * size[row, j] + abs(x) * size[row, j + side])
                else:
                    column, side = j + round(x), int(np.sign(y))
                    values.append((1 - abs(y)) * size[i, column] + abs(y) * size[i + side, column])
            peak[i, j] = all(value <= size[i, j] for value in values)
    weak, strong = peak & (size >= 0.1), peak & (size >= 0.2)
    labels, _ = ndimage.label(weak, np.ones((3, 3)))
    kept = np.unique(labels[strong])
    return np.isin(labels, kept[kept > 0])


def blobs(count: int, seed: int, contrast: float = 1.0) -> np.ndarray:
    random = np.random.default_rng(seed)
    fields = ndimage.gaussian_filter(random.normal(size=(count, 28, 28)), (0, 2, 2))
    return contrast * np.clip(fields * 8, 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("contrast", [1.0, 0.3, 0.1])
def test_canny_matches_reference(contrast):
    images = blobs(12, seed=3, contrast=contrast)
    found = mnist.canny(torch.from_numpy(images)).numpy()
    expected = np.stack([canny_by_loop(image) for image in images])
    # Magnitudes that are equal by symmetry may fall to either side of a comparison.
    assert (found != expected).mean() < 5e-4
    assert expected.any()


def test_weak_edges_stay_only_where_joined_to_strong_ones():
    # Two steps apart, one faint and one clear; the faint one alone is no edge.
    image = torch.zeros(1, 28, 28, dtype=torch.float64)
    image[:, :, 20:] += 0.5
    image[:, :, 6:] += 0.04
    columns = mnist.canny(image)[0].any(dim=0).nonzero().squeeze(1)
    assert columns.tolist() in ([19], [20], [19, 20])


def test_faint_edges_alone_give_nothing():
    image = torch.zeros(1, 28, 28, dtype=torch.float64)
    image[:, 10:20, 10:20] = 0.04
    assert not mnist.canny(image).any()


def test_flat_images_have_no_edges():
    assert not mnist.canny(torch.full((2, 28, 28), 0.7, dtype=torch.float64)).any()
