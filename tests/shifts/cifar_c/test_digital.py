"""Contrast, colours, JPEG, pixels and elastic maps against colorsys, Pillow, scipy and written-out formulas."""

from __future__ import annotations

import colorsys
import io
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import ndimage
from torch import Tensor

from shiftmend.shifts import cifar_c as digital
from shiftmend.shifts import primitives
from shiftmend.shifts.cifar_c import from_hsv, to_hsv


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_images(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=generator(9), dtype=torch.uint8)


def to_pillow(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


def from_pillow(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@pytest.mark.parametrize("factor", [0.75, 0.15])
def test_contrast_pulls_each_channel_towards_its_mean(factor: float) -> None:
    images = random_images(3, 3, 32, 32)
    unit = images.numpy() / 255
    mean = unit.mean(axis=(2, 3), keepdims=True)
    expected = (np.clip((unit - mean) * factor + mean, 0, 1) * 255).astype(np.uint8)
    assert np.array_equal(digital.contrast(images, factor=factor).numpy(), expected)


def test_contrast_by_hand() -> None:
    images = torch.tensor([0, 0, 0, 200], dtype=torch.uint8).view(1, 1, 2, 2)
    # The mean is 50; half the contrast puts black at 25 and 200 at 125.
    assert digital.contrast(images, factor=0.5).flatten().tolist() == pytest.approx([25, 25, 25, 125], abs=1)


@pytest.mark.parametrize("factor", [0.75, 0.5, 0.4, 0.3, 0.15])
def test_contrast_keeps_flat_pictures(factor: float) -> None:
    images = torch.arange(256, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 7, 5)
    assert torch.equal(digital.contrast(images, factor=factor), images)


def all_kinds_of_colours() -> Tensor:
    """Random colours, greys, ties between channels, black and white as one picture."""
    random = random_images(3, 600)
    greys = torch.arange(256, dtype=torch.uint8).expand(3, -1)
    ties = random[:, :100].clone()
    ties[1] = ties[0]
    other_ties = random[:, 100:200].clone()
    other_ties[2] = other_ties[1]
    third_ties = random[:, 200:300].clone()
    third_ties[2] = third_ties[0]
    colours = torch.cat((random, greys, ties, other_ties, third_ties), dim=1)
    return colours[:, : colours.shape[1] // 4 * 4].reshape(1, 3, 4, -1)


def test_hsv_equals_colorsys() -> None:
    unit = primitives.to_unit(all_kinds_of_colours(), torch.float64)
    ours = torch.stack(to_hsv(unit), dim=-1).view(-1, 3)
    expected = [colorsys.rgb_to_hsv(*colour) for colour in unit[0].flatten(1).T.tolist()]
    np.testing.assert_allclose(ours.numpy(), np.array(expected), atol=1e-12)
    assert ours[:, 0].max() < 1


def test_hsv_goes_there_and_back() -> None:
    unit = primitives.to_unit(all_kinds_of_colours(), torch.float64)
    torch.testing.assert_close(from_hsv(*to_hsv(unit)), unit, atol=1e-12, rtol=0)


@given(hue=st.floats(0, 1, exclude_max=True), saturation=st.floats(0, 1), value=st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_from_hsv_equals_colorsys(hue: float, saturation: float, value: float) -> None:
    cell = [torch.tensor([[[number]]], dtype=torch.float64) for number in (hue, saturation, value)]
    expected = colorsys.hsv_to_rgb(hue, saturation, value)
    assert from_hsv(*cell).flatten().tolist() == pytest.approx(expected, abs=1e-12)


def recoloured(images: Tensor, *, value_shift: float = 0, factor: float = 1, shift: float = 0) -> np.ndarray:
    colours = []
    for colour in (images.double() / 255)[0].flatten(1).T.tolist():
        hue, saturation, value = colorsys.rgb_to_hsv(*colour)
        saturation = min(max(saturation * factor + shift, 0), 1)
        colours.append(colorsys.hsv_to_rgb(hue, saturation, min(value + value_shift, 1)))
    return (np.clip(np.array(colours), 0, 1) * 255).astype(np.uint8).T.reshape(images.shape)


def assert_nearly_equal(result: Tensor, expected: np.ndarray) -> None:
    """A whole grey level may be truncated either way by the last bit."""
    difference = result.numpy().astype(int) - expected
    assert np.abs(difference).max() <= 1
    assert (difference != 0).mean() < 0.02


@pytest.mark.parametrize("shift", [0.05, 0.1, 0.15, 0.2, 0.3])
def test_brightness_equals_colorsys(shift: float) -> None:
    images = all_kinds_of_colours()
    assert_nearly_equal(digital.brightness(images, shift=shift), recoloured(images, value_shift=shift))


@pytest.mark.parametrize(("factor", "shift"), [(0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)])
def test_saturate_equals_colorsys(factor: float, shift: float) -> None:
    images = all_kinds_of_colours()
    result = digital.saturate(images, factor=factor, shift=shift)
    assert_nearly_equal(result, recoloured(images, factor=factor, shift=shift))


def test_a_raised_saturation_turns_grey_red() -> None:
    images = torch.full((1, 3, 1, 1), 100, dtype=torch.uint8)
    red, green, blue = digital.saturate(images, factor=2, shift=0.1).flatten().tolist()
    assert (red, green, blue) == (100, 90, 90)


@pytest.mark.parametrize("quality", [80, 40])
def test_jpeg_is_what_pillow_does(quality: int) -> None:
    images = random_images(5, 3, 32, 32)
    result = digital.jpeg_compression(images, quality=quality)
    for image, compressed in zip(images, result, strict=True):
        buffer = io.BytesIO()
        to_pillow(image).save(buffer, format="JPEG", quality=quality)
        assert torch.equal(compressed, from_pillow(Image.open(buffer)))


@pytest.mark.parametrize(("factor", "small"), [(0.95, 30), (0.9, 28), (0.85, 27), (0.75, 24), (0.65, 20)])
def test_pixelate_is_what_pillow_does(factor: float, small: int) -> None:
    images = random_images(4, 3, 32, 32)
    result = digital.pixelate(images, factor=factor)
    for image, blocks in zip(images, result, strict=True):
        shrunk = to_pillow(image).resize((small, small), Image.Resampling.BOX)
        assert torch.equal(blocks, from_pillow(shrunk.resize((32, 32), Image.Resampling.BOX)))


def test_the_mildest_pixelate_merges_two_pairs_per_axis() -> None:
    images = random_images(1, 1, 32, 32)
    result = digital.pixelate(images, factor=0.95)
    untouched = [i for i in range(32) if i not in (7, 8, 23, 24)]
    for column in (7, 23):
        assert torch.equal(result[..., column], result[..., column + 1])
    # Everything else is moved by at most one pixel, not averaged.
    assert set(result[0, 0][untouched][:, untouched].flatten().tolist()) <= set(images.flatten().tolist())


@pytest.mark.parametrize(
    ("height", "width", "points"),
    [(32, 32, ((26, 26), (26, 6), (6, 6))), (21, 41, ((27, 17), (27, 3), (13, 3)))],  # (column, row)
)
def test_affine_positions_take_jittered_points_back(height: int, width: int, points: Sequence[Sequence[int]]) -> None:
    columns, rows = digital.affine_positions(3, height, width, 2.56, generator(3))
    jitter = primitives.uniform((3, 3, 2), -2.56, 2.56, generator(3)).double().numpy()
    for image in range(3):
        # Solve for the forward map and invert it, where the code solves for the inverse.
        homogeneous = np.hstack((points, np.ones((3, 1))))
        forward = np.vstack((np.linalg.solve(homogeneous, np.array(points) + jitter[image]).T, [0, 0, 1]))
        backward = np.linalg.inv(forward)
        for row, column in ((0, 0), (5, 17), (height - 1, width - 1)):
            expected = backward @ np.array([column, row, 1])
            assert columns[image, row, column].item() == pytest.approx(expected[0], abs=1e-9)
            assert rows[image, row, column].item() == pytest.approx(expected[1], abs=1e-9)


def test_elastic_without_jitter_or_displacement_is_the_identity() -> None:
    images = random_images(2, 3, 32, 32)
    result = digital.elastic_transform(images, generator=generator(), alpha=0.0, sigma=0.0, jitter=0.0)
    assert (result.int() - images.int()).abs().max() <= 1


@pytest.mark.parametrize(
    ("alpha", "sigma", "jitter"), [(0.0, 0.0, 2.56), (1.6, 6.4, 2.24), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96)]
)
@pytest.mark.parametrize(("height", "width"), [(32, 32), (21, 41)])
def test_elastic_samples_twice(alpha: float, sigma: float, jitter: float, height: int, width: int) -> None:
    images = random_images(2, 3, height, width)
    result = digital.elastic_transform(images, generator=generator(), alpha=alpha, sigma=sigma, jitter=jitter)
    draws = generator()
    columns, rows = digital.affine_positions(2, height, width, jitter, draws)
    fields = primitives.uniform((2, 2, height, width), -1, 1, draws).double().numpy()
    moves = ndimage.gaussian_filter(fields, (0, 0, sigma, sigma), truncate=3.0, mode="reflect") * alpha
    grid_rows, grid_columns = np.mgrid[:height, :width]
    for image in range(2):
        for channel in range(3):
            bent = ndimage.map_coordinates(
                images[image, channel].numpy() / 255,
                [rows[image].numpy(), columns[image].numpy()],
                order=1,
                mode="mirror",
            )
            expected = ndimage.map_coordinates(
                bent,
                [grid_rows + moves[1, image], grid_columns + moves[0, image]],
                order=1,
                mode="reflect",
            )
            difference = result[image, channel].numpy().astype(int) - (expected * 255).astype(int)
            assert np.abs(difference).max() <= 1
            assert (difference != 0).mean() < 0.01
