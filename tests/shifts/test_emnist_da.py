"""EMNIST-DA's shifts: golden cases, definitions written out in numpy, and distributions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import ndimage

from shiftmend.errors import DataError
from shiftmend.shifts import SHIFTS, apply, lines, textures
from shiftmend.shifts import glyphs as digits
from shiftmend.shifts.primitives import plasma

SHAPES = [(28, 28), (20, 33)]


def grey(count: int, seed: int = 0, shape: tuple[int, int] = (28, 28)) -> torch.Tensor:
    """Glyph-like images: black ground, soft bright blobs, some flat white."""
    random = np.random.default_rng(seed)
    fields = ndimage.gaussian_filter(random.normal(size=(count, *shape)), (0, 2, 2))
    return torch.from_numpy((np.clip(fields * 8, 0, 1) * 255).astype(np.uint8))[:, None]


def test_names_are_the_thirteen_and_identity():
    expected = (
        "bricks crystals dotted_line fog gaussian_blur grass identity impulse_noise inverse oranges shot_noise "
        "sky stripe zigzag"
    )
    assert [name.removeprefix("emnist-da/") for name in SHIFTS if name.startswith("emnist-da/")] == expected.split()


def test_inverse_and_identity_are_exact():
    images = grey(3)
    assert torch.equal(apply("emnist-da/inverse", images), 255 - images)
    same = apply("emnist-da/identity", images)
    assert torch.equal(same, images)
    assert same.data_ptr() != images.data_ptr()


def test_stripe_inverts_seven_columns_on_each_side():
    images = grey(2)
    expected = images.clone()
    expected[..., :7] = 255 - expected[..., :7]
    expected[..., 21:] = 255 - expected[..., 21:]
    assert torch.equal(apply("emnist-da/stripe", images), expected)


def test_stripe_inverts_a_quarter_of_the_columns_whatever_the_height():
    images = grey(2, shape=(20, 33))
    expected = torch.cat((255 - images[..., :8], images[..., 8:25], 255 - images[..., 25:]), dim=-1)
    assert torch.equal(apply("emnist-da/stripe", images), expected)


@pytest.mark.parametrize(("severity", "sigma"), [(None, 3), (1, 1), (2, 2), (3, 3), (4, 4), (5, 6)])
def test_blur_is_vertical_only(severity, sigma):
    images = grey(6)
    unit = images.numpy() / 255.0
    expected = ndimage.gaussian_filter1d(unit, sigma, axis=-2, mode="nearest", truncate=4.0)
    expected = (np.clip(expected, 0, 1) * 255).astype(np.float32).astype(np.uint8)
    assert np.array_equal(apply("emnist-da/gaussian_blur", images, severity=severity).numpy(), expected)


def test_isotropic_blur_on_request():
    images = grey(4)
    expected = ndimage.gaussian_filter(images.numpy() / 255.0, (0, 0, 3, 3), mode="nearest", truncate=4.0)
    expected = (np.clip(expected, 0, 1) * 255).astype(np.float32).astype(np.uint8)
    assert np.array_equal(apply("emnist-da/gaussian_blur", images, isotropic=True).numpy(), expected)


def test_blur_keeps_flat_areas():
    flat = torch.full((1, 1, 28, 28), 255, dtype=torch.uint8)
    for severity in range(1, 6):
        assert torch.equal(apply("emnist-da/gaussian_blur", flat, severity=severity), flat)


@pytest.mark.parametrize(("severity", "amount"), [(None, 0.17), (1, 0.03), (5, 0.27)])
def test_impulse_noise_rate(severity, amount):
    images = torch.full((400, 1, 28, 28), 100, dtype=torch.uint8)
    shifted = apply("emnist-da/impulse_noise", images, severity=severity)
    tolerance = 4 * (amount / 2 / images.numel()) ** 0.5
    assert (shifted == 255).float().mean().item() == pytest.approx(amount / 2, abs=tolerance)
    assert (shifted == 0).float().mean().item() == pytest.approx(amount / 2, abs=tolerance)
    assert set(shifted.unique().tolist()) == {0, 100, 255}


@pytest.mark.parametrize(("severity", "photons"), [(None, 3), (4, 5), (1, 60)])
def test_shot_noise_is_poisson(severity, photons):
    level = 51
    images = torch.full((300, 1, 28, 28), level, dtype=torch.uint8)
    shifted = apply("emnist-da/shot_noise", images, severity=severity)
    allowed = (np.arange(photons + 1) / photons * 255).astype(np.float32).astype(np.uint8)
    assert set(shifted.unique().tolist()) <= set(allowed.tolist())
    rate = level / 255 * photons
    dark = (shifted == 0).double().mean().item()
    assert dark == pytest.approx(np.exp(-rate), abs=4 * (np.exp(-rate) / images.numel()) ** 0.5 + 1e-5)
    counts = np.arange(200)
    logs = counts * np.log(rate) - rate - np.cumsum(np.log(np.maximum(counts, 1)))
    levels = (np.clip(counts / photons, 0, 1) * 255).astype(np.float32).astype(np.uint8)
    mean = (np.exp(logs) * levels).sum()
    assert shifted.double().mean().item() == pytest.approx(mean, abs=4 * 255 * (rate / images.numel()) ** 0.5 / photons)


def test_black_stays_black_under_shot_noise():
    black = torch.zeros(2, 1, 28, 28, dtype=torch.uint8)
    assert torch.equal(apply("emnist-da/shot_noise", black), black)


@pytest.mark.parametrize(("severity", "strength", "decay"), [(None, 3.0, 1.4), (1, 1.5, 2.0)])
def test_fog_formula(severity, strength, decay):
    images = grey(5)
    images[1] = images[1] // 2
    images[2] = 0
    cloud = plasma(5, 256, decay, torch.Generator().manual_seed(7), window=28).numpy()
    unit = images[:, 0].numpy() / np.float32(255)
    white = unit.max(axis=(1, 2), keepdims=True)
    expected = np.floor(np.clip((unit + strength * cloud) * white / (white + strength), 0, 1) * 255)
    shifted = apply("emnist-da/fog", images, severity=severity, seed=7)[:, 0].numpy()
    assert np.abs(shifted - expected).max() <= 1
    assert (shifted != expected).mean() < 0.01
    assert not shifted[2].any()


@pytest.mark.slow
def test_fog_shows_a_corner_of_a_map_that_spans_everything():
    images = torch.zeros(200, 1, 28, 28, dtype=torch.uint8)
    images[:, :, 0, 0] = 255
    shifted = apply("emnist-da/fog", images)[..., 1:, 1:].float()
    spans = shifted.amax(dim=(1, 2, 3)) - shifted.amin(dim=(1, 2, 3))
    # Of 256 x 256 pixels a 28 x 28 corner sees a small part of the range, 0.75 x 255 in all.
    assert spans.max() < 191
    assert spans.mean() < 110
    assert shifted.mean(dim=(1, 2, 3)).std() > 15


@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_dotted_line_equals_its_drawing(height, width):
    images = grey(200, shape=(height, width))
    shifted = apply("emnist-da/dotted_line", images, seed=5)[:, 0].numpy()
    ends = torch.randint(0, height - 1, (2, 200), generator=torch.Generator().manual_seed(5)).double()
    drawn = lines.dotted(ends[0], ends[1], height, width).numpy()
    expected = np.clip(images[:, 0].numpy() / 255.0 + drawn, 0, 1) * 255
    assert np.array_equal(shifted, expected.astype(np.float32).astype(np.uint8))


@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_zigzag_equals_its_drawing(height, width):
    images = grey(40, shape=(height, width))
    shifted = apply("emnist-da/zigzag", images, seed=5)[:, 0].numpy()
    generator = torch.Generator().manual_seed(5)
    start = torch.randint(0, height - 1, (40,), generator=generator).double()
    rise = torch.randint(-5, 5, (40,), generator=generator).double()
    drawn = lines.zigzag(start, start + rise, height, width).numpy()
    expected = np.clip(images[:, 0].numpy() / 255.0 + drawn, 0, 1) * 255
    assert np.array_equal(shifted, expected.astype(np.float32).astype(np.uint8))


def test_background_inverts_the_texture_where_the_glyph_is():
    images = torch.zeros(50, 1, 28, 28, dtype=torch.uint8)
    images[:, :, 5:9, 5:9] = 1
    shifted = apply("emnist-da/grass", images, seed=2)
    generator = torch.Generator().manual_seed(2)
    patches = textures.crop([textures.texture("grass")], 50, 28, 28, generator).int()
    mask = (images > 0).int() * 255
    assert shifted.shape == (50, 3, 28, 28)
    assert torch.equal(shifted.int(), (patches - mask).abs())


@pytest.mark.slow
def test_three_equal_channels_are_as_good_as_one():
    images = grey(4)
    for name in SHIFTS:
        if name.startswith("emnist-da/"):
            one, three = apply(name, images), apply(name, images.repeat(1, 3, 1, 1))
            assert three.shape[1] == 3
            assert torch.equal(three, one.expand_as(three)), name


def test_colour_images_are_refused():
    colour = torch.zeros(2, 3, 28, 28, dtype=torch.uint8)
    colour[0, 1] = 9
    with pytest.raises(DataError, match="three that differ"):
        apply("emnist-da/stripe", colour)
    with pytest.raises(DataError, match="uint8"):
        SHIFTS["emnist-da/stripe"].function(torch.zeros(2, 1, 28, 28))


def test_too_small_and_too_large_images_are_refused():
    with pytest.raises(DataError, match="at least 8 x 8"):
        apply("emnist-da/zigzag", torch.zeros(1, 1, 7, 28, dtype=torch.uint8))
    with pytest.raises(DataError, match="at most 256"):
        apply("emnist-da/fog", torch.zeros(1, 1, 257, 28, dtype=torch.uint8))
    for height, width in ((8, 28), (256, 28)):
        assert apply("emnist-da/fog", torch.zeros(1, 1, height, width, dtype=torch.uint8)).shape[-2:] == (height, width)


def test_to_levels_absorbs_rounding_errors_only():
    values = torch.tensor([1 - 1e-15, 100 / 255 - 1e-16, 0.5, -1, 2], dtype=torch.float64)
    assert digits.to_levels(values).tolist() == [255, 100, 127, 0, 255]
