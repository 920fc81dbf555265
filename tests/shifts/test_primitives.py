"""The shared image operations against scipy and against loops written out here."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from shiftmend.shifts import primitives

BORDERS = ("nearest", "reflect", "mirror")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_images(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=generator(seed), dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_grey_level_survives_the_round_trip(dtype: torch.dtype) -> None:
    levels = torch.arange(256, dtype=torch.uint8)
    unit = primitives.to_unit(levels, dtype)
    assert unit.dtype == dtype
    assert unit.min() == 0
    assert unit.max() == 1
    assert torch.equal(primitives.finish(unit), levels)


def test_finish_clips_and_truncates() -> None:
    unit = torch.tensor([-0.5, 0.0, 1.9 / 255, 2.1 / 255, 254.99 / 255, 1.0, 7.0])
    before = unit.clone()
    assert primitives.finish(unit).tolist() == [0, 0, 1, 2, 254, 255, 255]
    assert torch.equal(unit, before)


@pytest.mark.parametrize("mode", BORDERS)
@given(length=st.integers(1, 7), amount=st.integers(0, 20))
@settings(max_examples=30, deadline=None)
def test_pad_follows_the_border_rules(mode: str, length: int, amount: int) -> None:
    # numpy names the same rules differently.
    names = {"nearest": "edge", "reflect": "symmetric", "mirror": "reflect"}
    values = np.arange(length) + 1
    expected = np.pad(values, amount, mode=names[mode])
    assert primitives.pad(torch.from_numpy(values), amount, 0, mode).tolist() == expected.tolist()


def test_gaussian_kernel_by_hand() -> None:
    side = math.exp(-1 / (2 * 0.25**2))
    expected = [side / (1 + 2 * side), 1 / (1 + 2 * side), side / (1 + 2 * side)]
    assert primitives.gaussian_kernel(0.25).tolist() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("sigma", "truncate", "radius"), [(0, 4, 0), (0.05, 4, 0), (0.4, 4, 2), (1, 4, 4), (0.96, 3, 3)]
)
def test_gaussian_kernel_radius(sigma: float, truncate: float, radius: int) -> None:
    kernel = primitives.gaussian_kernel(sigma, truncate)
    assert len(kernel) == 2 * radius + 1
    assert kernel.sum().item() == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize("mode", BORDERS)
@pytest.mark.parametrize("sigma", [0.25, 0.7, 1.0, 3.0])
def test_gaussian_blur_equals_scipy(sigma: float, mode: str) -> None:
    values = torch.rand(2, 3, 9, 12, generator=generator(), dtype=torch.float64)
    before = values.clone()
    blurred = primitives.gaussian_blur(values, sigma, mode=mode)
    expected = ndimage.gaussian_filter(values.numpy(), (0, 0, sigma, sigma), mode=mode)
    np.testing.assert_allclose(blurred.numpy(), expected, rtol=0, atol=1e-15)
    assert torch.equal(values, before)
    assert blurred.dtype == torch.float64


def test_gaussian_blur_along_one_axis_and_with_another_truncation() -> None:
    values = torch.rand(2, 9, 9, generator=generator(), dtype=torch.float64)
    blurred = primitives.gaussian_blur(values, 1.3, truncate=3.0, axes=(-2,))
    expected = ndimage.gaussian_filter1d(values.numpy(), 1.3, axis=1, truncate=3.0, mode="nearest")
    np.testing.assert_allclose(blurred.numpy(), expected, rtol=0, atol=1e-15)


def test_gaussian_blur_without_width_is_a_copy() -> None:
    values = torch.rand(1, 4, 4, generator=generator())
    blurred = primitives.gaussian_blur(values, 0.0)
    assert torch.equal(blurred, values)
    assert blurred.data_ptr() != values.data_ptr()


@pytest.mark.parametrize("mode", BORDERS)
def test_correlate_equals_scipy(mode: str) -> None:
    values = torch.rand(2, 6, 7, generator=generator(), dtype=torch.float64)
    kernel = torch.rand(3, 5, generator=generator(1), dtype=torch.float64)
    expected = ndimage.correlate(values.numpy(), kernel.numpy()[None], mode=mode)
    np.testing.assert_allclose(primitives.correlate(values, kernel, mode).numpy(), expected, atol=1e-14)


def plasma_by_loops(size: int, decay: float, noise: list[np.ndarray]) -> np.ndarray:
    """Diamond-square on a torus, point by point; `noise[level]` is `[3, n, n]` in [-1, 1]."""
    field = np.zeros((size, size))
    step, amplitude = size, 100.0
    for level in noise:
        half = step // 2

        def at(row: int, column: int) -> float:
            return float(field[row % size, column % size])

        width = amplitude * amplitude
        corners = [(row, column) for row in range(0, size, step) for column in range(0, size, step)]
        for row, column in corners:
            around = at(row, column) + at(row + step, column)
            around += at(row, column + step) + at(row + step, column + step)
            field[row + half, column + half] = around / 4 + width * level[0, row // step, column // step]
        for row, column in corners:
            around = at(row, column) + at(row, column + step)
            around += at(row - half, column + half) + at(row + half, column + half)
            field[row, column + half] = around / 4 + width * level[1, row // step, column // step]
        for row, column in corners:
            around = at(row, column) + at(row + step, column)
            around += at(row + half, column - half) + at(row + half, column + half)
            field[row + half, column] = around / 4 + width * level[2, row // step, column // step]
        step, amplitude = half, amplitude / decay
    field -= field.min()
    return field / field.max()


@pytest.mark.parametrize(("size", "decay"), [(2, 3.0), (8, 1.4), (32, 1.75)])
def test_plasma_equals_a_loop_over_points(size: int, decay: float) -> None:
    fields = primitives.plasma(2, size, decay, generator(5))
    draws = generator(5)
    noise = []
    for level in range(int(math.log2(size))):
        noise.append(2 * torch.rand(3, 2, 2**level, 2**level, generator=draws).double().numpy() - 1)
    for image in range(2):
        expected = plasma_by_loops(size, decay, [level[:, image] for level in noise])
        np.testing.assert_allclose(fields[image].numpy(), expected, atol=2e-6)


def test_plasma_fills_the_unit_interval() -> None:
    fields = primitives.plasma(5, 16, 2.0, generator())
    assert torch.equal(fields.amin(dim=(1, 2)), torch.zeros(5))
    assert torch.equal(fields.amax(dim=(1, 2)), torch.ones(5))
    assert not torch.equal(fields[0], fields[1])


def test_a_plasma_window_is_the_corner_of_the_whole_map() -> None:
    whole = primitives.plasma(3, 64, 1.4, generator(2))
    assert torch.equal(primitives.plasma(3, 64, 1.4, generator(2), window=28), whole[:, :28, :28])
    assert primitives.plasma(0, 64, 1.4, generator(), window=28).shape == (0, 28, 28)


@pytest.mark.slow
def test_a_long_plasma_batch_is_cut_into_portions() -> None:
    # Maps of 2048 pixels are made two at a time.
    fields = primitives.plasma(3, 2048, 2.0, generator(3), window=4)
    draws = generator(3)
    expected = [primitives.plasma(count, 2048, 2.0, draws)[:, :4, :4] for count in (2, 1)]
    assert torch.equal(fields, torch.cat(expected))


def motion_blur_by_loops(image: np.ndarray, radius: int, sigma: float, degrees: float) -> np.ndarray:
    channels, height, width = image.shape
    weights = np.array([math.exp(-(i**2) / (2 * sigma**2)) for i in range(2 * radius + 1)])
    weights /= weights.sum()
    result = np.zeros_like(image)
    angle = math.radians(degrees)
    for channel in range(channels):
        for row in range(height):
            for column in range(width):
                total = 0.0
                for i, weight in enumerate(weights):
                    source_row = min(max(row + math.ceil(i * math.sin(angle) - 0.5), 0), height - 1)
                    source_column = min(max(column + math.ceil(i * math.cos(angle) - 0.5), 0), width - 1)
                    total += weight * 257 * int(image[channel, source_row, source_column])
                result[channel, row, column] = (math.floor(total + 0.5) + 128) // 257
    return result


def test_motion_blur_equals_a_loop_over_pixels() -> None:
    images = random_images(6, 3, 8, 9)
    angles = torch.tensor([-120.0, -45.0, -10.0, 0.0, 33.0, 90.0])
    blurred = primitives.motion_blur(images, 3, 1.5, angles)
    for image, degrees, result in zip(images, angles.tolist(), blurred, strict=True):
        expected = motion_blur_by_loops(image.numpy(), 3, 1.5, degrees)
        assert np.array_equal(result.numpy(), expected)


def test_motion_blur_is_one_sided() -> None:
    images = torch.zeros(1, 1, 5, 16, dtype=torch.uint8)
    images[0, 0, 2, 8] = 255
    row = primitives.motion_blur(images, 3, 1.5, torch.zeros(1))[0, 0, 2]
    # Half a Gaussian to the left of the point: exp(-i^2 / 4.5) sums to 2.380 over i = 0..6.
    assert row.tolist() == [0, 0, 0, 0, 3, 15, 44, 86, 107, 0, 0, 0, 0, 0, 0, 0]


@given(level=st.integers(0, 255), radius=st.integers(1, 14), degrees=st.floats(-180, 180))
@settings(max_examples=25, deadline=None)
def test_motion_blur_keeps_a_flat_picture(level: int, radius: int, degrees: float) -> None:
    images = torch.full((1, 1, 6, 6), level, dtype=torch.uint8)
    assert torch.equal(primitives.motion_blur(images, radius, 2.5, torch.tensor([degrees])), images)


@pytest.mark.parametrize("mode", BORDERS)
def test_sample_bilinear_equals_scipy(mode: str) -> None:
    images = torch.rand(2, 3, 6, 7, generator=generator(), dtype=torch.float64)
    rows = primitives.uniform((2, 4, 5), -9, 15, generator(1)).double()
    columns = primitives.uniform((2, 4, 5), -9, 15, generator(2)).double()
    result = primitives.sample_bilinear(images, rows, columns, mode)
    assert result.shape == (2, 3, 4, 5)
    for image in range(2):
        for channel in range(3):
            expected = ndimage.map_coordinates(
                images[image, channel].numpy(),
                [rows[image].numpy(), columns[image].numpy()],
                order=1,
                mode=mode,
            )
            np.testing.assert_allclose(result[image, channel].numpy(), expected, atol=1e-12)


def test_sample_bilinear_fades_to_zero_outside() -> None:
    images = torch.full((1, 1, 3, 3), 8.0)
    rows = torch.tensor([[[1.0, -0.25, -1.0, -5.0, 2.5, 3.0]]])
    columns = torch.ones_like(rows)
    values = primitives.sample_bilinear(images, rows, columns, "zero")
    assert values.flatten().tolist() == [8, 6, 0, 0, 4, 0]


def test_sample_bilinear_at_the_pixels_is_the_identity() -> None:
    images = primitives.to_unit(random_images(2, 3, 5, 5))
    rows = torch.arange(5.0)[:, None].expand(2, 5, 5)
    columns = torch.arange(5.0).expand(2, 5, 5)
    assert torch.equal(primitives.sample_bilinear(images, rows, columns, "reflect"), images)


@given(seed=st.integers(0, 10_000), density=st.floats(0.1, 0.7))
@settings(max_examples=25, deadline=None)
def test_hysteresis_keeps_the_labelled_groups(seed: int, density: float) -> None:
    numbers = torch.rand(2, 3, 13, 11, generator=generator(seed))
    weak, strong = numbers[0] < density, numbers[1] < 0.05
    kept = primitives.hysteresis(weak, strong).numpy()
    for image in range(3):
        groups, _ = ndimage.label(weak[image].numpy(), structure=np.ones((3, 3)))
        seeds = np.unique(groups[weak[image].numpy() & strong[image].numpy()])
        assert np.array_equal(kept[image], np.isin(groups, seeds[seeds > 0]))


def test_dilate_reaches_eight_neighbours() -> None:
    mask = torch.zeros(1, 5, 5, dtype=torch.bool)
    mask[0, 0, 0] = mask[0, 3, 3] = True
    expected = ndimage.binary_dilation(mask[0].numpy(), structure=np.ones((3, 3)))
    assert np.array_equal(primitives.dilate(mask)[0].numpy(), expected)


@pytest.mark.parametrize("shape", [(12, 9), (1, 6), (5, 1), (2, 2)])
def test_chamfer_equals_the_closed_form(shape: tuple[int, int]) -> None:
    seeds = torch.rand(4, *shape, generator=generator(3)) < 0.08
    seeds[:, -1, 0] = True
    distances = primitives.chamfer(seeds)
    for image in range(4):
        for row in range(shape[0]):
            for column in range(shape[1]):
                best = min(chamfer_length(abs(row - r), abs(column - c)) for r, c in seeds[image].nonzero().tolist())
                assert distances[image, row, column].item() == pytest.approx(best / 65536, abs=1e-6)


def chamfer_length(first: int, second: int) -> int:
    long, short = max(first, second), min(first, second)
    if long >= 2 * short:
        return (long - 2 * short) * 65536 + short * 143976
    return (2 * short - long) * 91750 + (long - short) * 143976


def test_chamfer_without_seeds_is_very_far() -> None:
    assert (primitives.chamfer(torch.zeros(1, 4, 4, dtype=torch.bool)) == 8192).all()


def test_random_numbers_have_the_asked_distribution() -> None:
    even = primitives.uniform((20_000,), -45, 45, generator())
    assert even.min() >= -45
    assert even.max() < 45
    assert even.mean().item() == pytest.approx(0, abs=4 * 26 / math.sqrt(20_000))
    bell = primitives.normal((20_000,), 0.65, 0.1, generator())
    assert bell.mean().item() == pytest.approx(0.65, abs=0.004)
    assert bell.std().item() == pytest.approx(0.1, abs=0.003)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_graphics_card_agrees() -> None:
    images = random_images(4, 3, 32, 32)
    levels = torch.arange(256, dtype=torch.uint8, device="cuda")
    assert torch.equal(primitives.finish(primitives.to_unit(levels)), levels)
    angles = torch.tensor([-100.0, -30.0, 0.0, 44.0])
    blurred = primitives.motion_blur(images, 9, 2.5, angles)
    difference = primitives.motion_blur(images.cuda(), 9, 2.5, angles.cuda()).cpu().int() - blurred.int()
    assert difference.abs().max() <= 1
    seeds = images[:, 0] > 250
    assert torch.equal(primitives.chamfer(seeds.cuda()).cpu(), primitives.chamfer(seeds))
    weak = images[:, 1] > 120
    assert torch.equal(primitives.hysteresis(weak.cuda(), seeds.cuda()).cpu(), primitives.hysteresis(weak, seeds))
    unit = primitives.to_unit(images)
    torch.testing.assert_close(primitives.gaussian_blur(unit.cuda(), 1.0).cpu(), primitives.gaussian_blur(unit, 1.0))
