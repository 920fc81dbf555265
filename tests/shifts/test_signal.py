"""Shifts of one-dimensional signals, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shiftmend.errors import DataError
from shiftmend.shifts import SHIFTS, apply

NAMES = [name for name in SHIFTS if name.startswith("signal/")]


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


@pytest.mark.parametrize("name", NAMES)
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
