"""Shifts of one-dimensional signals `[N, C, L]`: the same process through another amplifier, clock or probe.

Beyond the paper. Each has one `strength` from 0 to 1; severities 1 to 5 are the strengths 0.2 to 1. What is added or
cut is measured against the signal itself (its deviation or its largest swing), so units do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from shiftmend.shifts.base import Shift
from shiftmend.shifts.sensor import STRENGTHS


def gain(signals: Tensor, *, generator: torch.Generator | None = None, strength: float) -> Tensor:
    """Amplify as a more sensitive probe: up to twice the amplitude."""
    return signals * (1 + strength)


def drift(signals: Tensor, *, generator: torch.Generator, strength: float) -> Tensor:
    """Let the baseline wander: half a slow wave of random phase, up to one deviation of the channel high."""
    length = signals.shape[-1]
    phase = torch.rand(*signals.shape[:-1], 1, generator=generator, device=signals.device, dtype=_exact(signals))
    time = _places(signals) / max(1, length - 1)
    wave = torch.sin(2 * math.pi * (0.5 * time + phase)).to(signals.dtype)
    return signals + strength * _deviation(signals) * wave


def noise(signals: Tensor, *, generator: torch.Generator, strength: float) -> Tensor:
    """Add white noise of up to half the channel's deviation."""
    drawn = torch.randn(signals.shape, generator=generator, device=signals.device, dtype=_exact(signals))
    return signals + 0.5 * strength * _deviation(signals) * drawn.to(signals.dtype)


def resampling(signals: Tensor, *, generator: torch.Generator | None = None, strength: float) -> Tensor:
    """Sample with a clock up to a third fast: the signal is stretched, interpolated, and its end is not seen."""
    length = signals.shape[-1]
    position = _places(signals) / (1 + strength / 2)
    left = position.floor().long().clamp(max=length - 1)
    right = (left + 1).clamp(max=length - 1)
    share = (position - left).to(signals.dtype)
    return signals[..., left] * (1 - share) + signals[..., right] * share


def saturation(signals: Tensor, *, generator: torch.Generator | None = None, strength: float) -> Tensor:
    """Clip as an amplifier does: what swings beyond 100 % down to 30 % of the largest swing from the mean is cut."""
    mean = signals.mean(-1, keepdim=True)
    limit = (1 - 0.7 * strength) * (signals - mean).abs().amax(-1, keepdim=True)
    return mean + (signals - mean).clamp(-limit, limit)


def _places(signals: Tensor) -> Tensor:
    """Count 0, 1, 2, ... along a signal."""
    return torch.arange(signals.shape[-1], device=signals.device, dtype=_exact(signals))


def _exact(signals: Tensor) -> torch.dtype:
    """Return at least float32: half precision has no whole numbers above 2,048 (or 256), and other random draws."""
    return torch.promote_types(signals.dtype, torch.float32)


def _deviation(signals: Tensor) -> Tensor:
    return signals.std(-1, keepdim=True, unbiased=False)


def _shift(function: Callable[..., Tensor], summary: str, random: bool = False) -> Shift:
    return Shift(f"signal/{function.__name__}", function, STRENGTHS, 3, summary, random, domain="signal")


SHIFTS: dict[str, Shift] = {
    shift.name: shift
    for shift in (
        _shift(gain, "a more sensitive probe"),
        _shift(drift, "a wandering baseline", random=True),
        _shift(noise, "white noise", random=True),
        _shift(resampling, "a clock that runs fast"),
        _shift(saturation, "an amplifier that clips"),
    )
}
