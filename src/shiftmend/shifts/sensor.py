"""Shifts that a site really sees: the same process through another sensor, lens, stain, amplifier or file format.

Beyond the paper. Each has one `strength`, from 0 (hardly anything) to 1 (severe); severities 1 to 5 are the strengths
0.2 to 1. A shift of images, `sensor/...`, stands for a property of the device and is the same for every image; levels
are rounded, not truncated. A shift of signals `[N, C, L]`, `signal/...`, is measured against the signal itself (its
deviation or its largest swing), so units do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from shiftmend.shifts.base import Shift, check_images
from shiftmend.shifts.cifar_c import check_colour, jpeg_compression
from shiftmend.shifts.primitives import coarsen, correlate, count_photons, sample_linear, stick_pixels, to_unit
from shiftmend.shifts.primitives import motion_blur as smear

# Optical densities of haematoxylin and eosin in red, green and blue, and of what is left over (Ruifrok and
# Johnston, 2001).
STAINS = ((0.65, 0.70, 0.29), (0.07, 0.99, 0.11), (0.27, 0.57, 0.78))


def gain_offset(images: Tensor, *, generator: torch.Generator | None = None, strength: float) -> Tensor:
    """Flatten the response over a brighter black: gain 1 to 0.5, offset 0 to 0.35 of full scale."""
    return _levels(_unit(images) * (1 - 0.5 * strength) + 0.35 * strength)


def gamma(images: Tensor, *, generator: torch.Generator | None = None, strength: float) -> Tensor:
    """Bend the transfer curve: exponent 1 to 2.5, which darkens the middle tones."""
    return _levels(_unit(images) ** (1 + 1.5 * strength))


def white_balance(images: Tensor, *, generator: torch.Generator | None = None, strength: float) -> Tensor:
    """Warm the light: red up to 1.5 times, blue down to 0.5 times."""
    check_colour(images)
    gains = torch.tensor([1 + 0.5 * strength, 1.0, 1 - 0.5 * strength], device=images.device)
    return _levels(to_unit(images) * gains.view(1, 3, 1, 1))


def stain(images: Tensor, *, generator: torch.Generator | None = None, strength: float) -> Tensor:
    """Stain with more haematoxylin (up to 1.6 times) and less eosin (down to 0.4 times), in optical density."""
    check_colour(images)
    vectors = functional.normalize(torch.tensor(STAINS, device=images.device), dim=1)
    change = torch.tensor([1 + 0.6 * strength, 1 - 0.6 * strength, 1.0], device=images.device)
    mixing = torch.linalg.inv(vectors) @ torch.diag(change) @ vectors
    density = -torch.log((images.float() + 1) / 256)
    changed = torch.einsum("nchw,cd->ndhw", density, mixing)
    return (256 * torch.exp(-changed) - 1).round().clamp(0, 255).to(torch.uint8)


def defocus(images: Tensor, *, generator: torch.Generator | None = None, strength: float) -> Tensor:
    """Blur by a disc of radius up to 3 pixels, with a soft rim; edges are mirrored."""
    radius = 3 * strength
    reach = math.ceil(radius + 0.5)
    grid = torch.arange(-reach, reach + 1, device=images.device)
    distance = torch.hypot(grid[:, None].float(), grid[None].float())
    disc = (radius + 0.5 - distance).clamp(0, 1)
    return _levels(correlate(_unit(images), disc / disc.sum(), "mirror"))


def motion_blur(images: Tensor, *, generator: torch.Generator | None = None, strength: float) -> Tensor:
    """Move the stage to the side while the picture is taken: a trail of up to 10 pixels."""
    check_images(images)
    angles = torch.zeros(len(images), device=images.device)
    return smear(images, math.ceil(5 * strength), 0.4 + 4 * strength, angles)


def noise(images: Tensor, *, generator: torch.Generator, strength: float) -> Tensor:
    """Simulate fewer photons (1,000 down to 20 at full scale) and more read noise (up to 5 % of full scale)."""
    return _levels(count_photons(_unit(images), 1000.0 * 0.02**strength, 0.05 * strength, generator))


def dead_pixels(images: Tensor, *, generator: torch.Generator, strength: float) -> Tensor:
    """Stick up to 5 % of the pixels at black or white and darken up to a tenth of the rows, the same in every image."""
    check_images(images)
    # Drawn from the seed alone, so that every portion of a large set meets the same sensor.
    device = torch.Generator(images.device).manual_seed(generator.initial_seed())
    return stick_pixels(images, 0.05 * strength, 0.1 * strength, 255, device)


def jpeg(images: Tensor, *, generator: torch.Generator | None = None, strength: float) -> Tensor:
    """Compress images as JPEG, at quality 90 down to 10."""
    return jpeg_compression(images, quality=round(90 - 80 * strength))


def resolution(images: Tensor, *, generator: torch.Generator | None = None, strength: float) -> Tensor:
    """Lower the resolution, down to a quarter of the pixels a side: average, then enlarge again."""
    return _levels(coarsen(_unit(images), 1 - 0.75 * strength))


def _unit(images: Tensor) -> Tensor:
    check_images(images)
    return to_unit(images)


def _levels(unit: Tensor) -> Tensor:
    return unit.mul(255).round_().clamp_(0, 255).to(torch.uint8)


def gain(signals: Tensor, *, generator: torch.Generator | None = None, strength: float) -> Tensor:
    """Amplify signals like a more sensitive probe, up to twice the amplitude."""
    return signals * (1 + strength)


def drift(signals: Tensor, *, generator: torch.Generator, strength: float) -> Tensor:
    """Let the baseline wander: half a slow wave of random phase, up to one deviation of the channel high."""
    length = signals.shape[-1]
    phase = torch.rand(*signals.shape[:-1], 1, generator=generator, device=signals.device, dtype=_exact(signals))
    time = _places(signals) / max(1, length - 1)
    wave = torch.sin(2 * math.pi * (0.5 * time + phase)).to(signals.dtype)
    return signals + strength * _deviation(signals) * wave


def signal_noise(signals: Tensor, *, generator: torch.Generator, strength: float) -> Tensor:
    """Add white noise of up to half the channel's deviation."""
    drawn = torch.randn(signals.shape, generator=generator, device=signals.device, dtype=_exact(signals))
    return signals + 0.5 * strength * _deviation(signals) * drawn.to(signals.dtype)


def resampling(signals: Tensor, *, generator: torch.Generator | None = None, strength: float) -> Tensor:
    """Sample with a clock that runs up to a third too fast. The signal is stretched, and its end is cut off."""
    return sample_linear(signals, _places(signals) / (1 + strength / 2))


def saturation(signals: Tensor, *, generator: torch.Generator | None = None, strength: float) -> Tensor:
    """Clip signals as an amplifier does, at 100 % down to 30 % of their largest deviation from the mean."""
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


STRENGTHS = tuple({"strength": level / 5} for level in range(1, 6))


def _shift(name: str, function: Callable[..., Tensor], summary: str, random: bool = False) -> Shift:
    domain: Literal["image", "signal"] = "signal" if name.startswith("signal/") else "image"
    return Shift(name, function, STRENGTHS, 3, summary, random, domain=domain)


_ALL = (
    _shift("sensor/gain_offset", gain_offset, "flatter response over a brighter black"),
    _shift("sensor/gamma", gamma, "another transfer curve"),
    _shift("sensor/white_balance", white_balance, "warmer light"),
    _shift("sensor/stain", stain, "more haematoxylin, less eosin, in optical density"),
    _shift("sensor/defocus", defocus, "out of focus: a disc"),
    _shift("sensor/motion_blur", motion_blur, "moved to the side during exposure"),
    _shift("sensor/noise", noise, "fewer photons and more read noise", random=True),
    _shift("sensor/dead_pixels", dead_pixels, "stuck pixels and dark rows, the same in every image", random=True),
    _shift("sensor/jpeg", jpeg, "stored as JPEG"),
    _shift("sensor/resolution", resolution, "a coarser sensor"),
    _shift("signal/gain", gain, "a more sensitive probe"),
    _shift("signal/drift", drift, "a wandering baseline", random=True),
    _shift("signal/noise", signal_noise, "white noise", random=True),
    _shift("signal/resampling", resampling, "a clock that runs fast"),
    _shift("signal/saturation", saturation, "an amplifier that clips"),
)

SHIFTS: dict[str, Shift] = {shift.name: shift for shift in _ALL}
