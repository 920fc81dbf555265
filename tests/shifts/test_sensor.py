"""The shifts beyond the paper: each against numpy, in the middle and at its ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import ndimage

from shiftmend.errors import DataError
from shiftmend.shifts import SHIFTS, apply

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
    # haematoxylin, eosin and the third of Ruifrok and Johnston (2001)
    stains = [[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]]
    vectors = np.array(stains) / np.linalg.norm(stains, axis=1, keepdims=True)
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


@pytest.mark.parametrize("strength", [0.0, 0.3, 1.0])
def test_motion_trails_along_rows_only(images: torch.Tensor, strength: float) -> None:
    reach = 2 * int(np.ceil(5 * strength))
    weights = np.exp(-(np.arange(reach + 1) ** 2) / (2 * (0.4 + 4 * strength) ** 2))
    columns = np.minimum(np.arange(32)[:, None] + np.arange(reach + 1), 31)  # beyond the edge its pixel is repeated
    expected = images.numpy()[..., columns] @ (weights / weights.sum())
    assert abs(apply("sensor/motion_blur", images, strength=strength).numpy() - expected).max() <= 0.51


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
    monkeypatch.setattr("shiftmend.shifts.MAX_IMAGES", 3)
    grey = torch.full((10, 1, 40, 40), 100, dtype=torch.uint8)
    hit = apply("sensor/dead_pixels", grey, strength=1.0, seed=4)
    assert all(torch.equal(image, hit[0]) for image in hit)
    assert not torch.equal(apply("sensor/dead_pixels", grey, strength=1.0, seed=5), hit)


@pytest.mark.parametrize("strength", [0.4, 1.0])
def test_so_many_pixels_and_rows_are_dead(strength: float) -> None:
    grey = torch.full((1, 1, 500, 400), 100, dtype=torch.uint8)
    hit = apply("sensor/dead_pixels", grey, strength=strength)[0, 0]
    dark = (hit == 0).all(1)
    assert int(dark.sum()) == round(50 * strength)
    for level in (0, 255):  # of 180,000 pixels and more: a tolerance of four deviations
        assert float((hit[~dark] == level).double().mean()) == pytest.approx(0.025 * strength, abs=0.0015)
    assert set(hit.unique().tolist()) == {0, 100, 255}


@pytest.mark.parametrize(("strength", "block"), [(2 / 3, 2), (1.0, 4)])
def test_resolution_against_block_means(strength: float, block: int) -> None:
    picture = torch.randint(0, 256, (1, 1, 16, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = picture[0, 0].numpy().reshape(16 // block, block, 24 // block, block).mean((1, 3))
    for axis, side in ((0, 16), (1, 24)):  # straight lines between the middles of the blocks, level beyond the last
        middles = np.arange(side // block) * block + (block - 1) / 2
        expected = np.apply_along_axis(
            lambda line, at=middles, to=side: np.interp(np.arange(to), at, line), axis, expected
        )
    assert abs(apply("sensor/resolution", picture, strength=strength)[0, 0].numpy() - expected).max() <= 0.501


@pytest.mark.parametrize(("strength", "quality"), [(0.0, 90), (0.5, 50), (1.0, 10)])
def test_jpeg_is_pillows(images: torch.Tensor, strength: float, quality: int) -> None:
    assert torch.equal(
        apply("sensor/jpeg", images, strength=strength), apply("cifar-c/jpeg_compression", images, quality=quality)
    )


def test_severities_are_fifths_and_the_third_is_usual() -> None:
    for name, shift in SHIFTS.items():
        if name.startswith(("sensor/", "signal/")):
            assert [values["strength"] for values in shift.severities] == [0.2, 0.4, 0.6, 0.8, 1.0]
            assert shift.default == 3


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


SIGNAL_NAMES = [name for name in SHIFTS if name.startswith("signal/")]


@pytest.fixture(scope="module")
def signals() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(40, 2, 101, generator=generator).cumsum(-1) + 5


@pytest.mark.parametrize("strength", [0.0, 0.2, 1.0])
def test_gain_resampling_and_saturation(signals: torch.Tensor, strength: float) -> None:
    x = signals.double().numpy()
    np.testing.assert_allclose(apply("signal/gain", signals, strength=strength).numpy(), x * (1 + strength), rtol=1e-5)
    time = np.arange(101) / (1 + strength / 2)
    expected = np.stack([[np.interp(time, np.arange(101), row) for row in channels] for channels in x])
    np.testing.assert_allclose(
        apply("signal/resampling", signals, strength=strength).numpy(), expected, rtol=1e-3, atol=1e-3
    )
    mean = x.mean(-1, keepdims=True)
    limit = (1 - 0.7 * strength) * abs(x - mean).max(-1, keepdims=True)
    expected = mean + np.clip(x - mean, -limit, limit)
    np.testing.assert_allclose(
        apply("signal/saturation", signals, strength=strength).numpy(), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_shift_is_the_same_in_half_precision(dtype: torch.dtype) -> None:
    signals = (torch.arange(5000) % 50 < 25).to(dtype).expand(1, 1, -1)
    for name in ("signal/resampling", "signal/drift", "signal/noise"):
        full, half = apply(name, signals.float()), apply(name, signals)
        assert half.dtype == dtype
        assert (half.float() - full).abs().max() < 0.02


def test_noise_is_measured_against_the_signal(signals: torch.Tensor) -> None:
    deviation = signals.std(-1, unbiased=False, keepdim=True)
    added = (apply("signal/noise", signals, strength=1.0) - signals) / deviation
    assert float(added.std()) == pytest.approx(0.5, rel=0.05)
    assert float(added.mean()) == pytest.approx(0.0, abs=0.03)
    scaled = (apply("signal/noise", signals * 1000, strength=1.0) - signals * 1000) / (deviation * 1000)
    torch.testing.assert_close(scaled, added, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("strength", [0.4, 1.0])
def test_drift_is_half_a_wave_from_a_random_phase(signals: torch.Tensor, strength: float) -> None:
    phase = torch.rand(40, 2, 1, generator=torch.Generator().manual_seed(3)).numpy()
    wave = np.sin(np.pi * np.linspace(0, 1, 101) + 2 * np.pi * phase)
    x = signals.numpy()
    expected = x + strength * x.std(-1, keepdims=True) * wave
    np.testing.assert_allclose(apply("signal/drift", signals, strength=strength, seed=3).numpy(), expected, atol=1e-3)


@pytest.mark.parametrize("name", SIGNAL_NAMES)
def test_seeded_stronger_and_untouched(name: str, signals: torch.Tensor) -> None:
    before = signals.clone()
    shifted = apply(name, signals, seed=1)
    assert shifted.shape == signals.shape
    assert torch.equal(apply(name, signals, seed=1), shifted)
    assert torch.equal(signals, before)
    assert torch.equal(apply(name, signals, seed=2), shifted) is not SHIFTS[name].random
    distance = [float((apply(name, signals, severity=s) - signals).abs().mean()) for s in range(1, 6)]
    assert distance == sorted(distance)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3, 10), torch.zeros(3, 1, 10, dtype=torch.int64), torch.zeros(3, 1, 1), torch.zeros(0, 1, 10)]
)
def test_what_is_no_signal_is_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(DataError, match="signal"):
        apply("signal/gain", wrong)


def test_images_and_signals_are_told_apart(signals: torch.Tensor) -> None:
    with pytest.raises(DataError, match="uint8"):
        apply("sensor/gamma", signals)
    with pytest.raises(DataError, match=r"\[N, C, L\]"):
        apply("signal/gain", torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
