"""Shifts that a site really sees: the same scene through another sensor, lens, stain or file format.

Beyond the paper. Each has one `strength`, from 0 (hardly anything) to 1 (severe), and stands for a property of the
device, so it is the same for every image: two images that differ by nothing but the device differ by this. Levels are
rounded, not truncated. Severities 1 to 5 are the strengths 0.2 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from shiftmend.shifts.base import Shift, check_images
from shiftmend.shifts.cifar_c import check_colour, jpeg_compression
from shiftmend.shifts.primitives import correlate, normal, to_unit
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
    """Count fewer photons (1,000 down to 20 at full scale) and more read noise (up to 5 % of full scale)."""
    unit = _unit(images)
    photons = 1000.0 * 0.02**strength
    counted = torch.poisson(unit * photons, generator=generator) / photons
    return _levels(counted + normal(tuple(unit.shape), 0.0, 0.05 * strength, generator))


def dead_pixels(images: Tensor, *, generator: torch.Generator, strength: float) -> Tensor:
    """Stick up to 5 % of the pixels at black or white and darken up to a tenth of the rows, the same in every image."""
    check_images(images)
    height, width = images.shape[-2:]
    # Drawn from the seed alone, so that every portion of a large set meets the same sensor.
    device = torch.Generator(images.device).manual_seed(generator.initial_seed())
    draws = torch.rand(height, width, generator=device, device=images.device)
    rows = torch.rand(height, generator=device, device=images.device).argsort()[: round(0.1 * strength * height)]
    share = 0.05 * strength
    result = images.masked_fill(draws < share / 2, 0).masked_fill(draws > 1 - share / 2, 255)
    result[..., rows, :] = 0
    return result


def jpeg(images: Tensor, *, generator: torch.Generator | None = None, strength: float) -> Tensor:
    """Store as JPEG: quality 90 down to 10."""
    return jpeg_compression(images, quality=round(90 - 80 * strength))


def resolution(images: Tensor, *, generator: torch.Generator | None = None, strength: float) -> Tensor:
    """Coarsen the sensor: down to a quarter of the pixels a side, averaged, then enlarged again."""
    unit = _unit(images)
    height, width = unit.shape[-2:]
    scale = 1 - 0.75 * strength
    small = (max(1, round(height * scale)), max(1, round(width * scale)))
    coarse = functional.interpolate(unit, size=small, mode="area")
    return _levels(functional.interpolate(coarse, size=(height, width), mode="bilinear", align_corners=False))


def _unit(images: Tensor) -> Tensor:
    check_images(images)
    return to_unit(images)


def _levels(unit: Tensor) -> Tensor:
    return unit.mul(255).round_().clamp_(0, 255).to(torch.uint8)


STRENGTHS = tuple({"strength": level / 5} for level in range(1, 6))


def _shift(function: Callable[..., Tensor], summary: str, random: bool = False) -> Shift:
    return Shift(f"sensor/{function.__name__}", function, STRENGTHS, 3, summary, random)


SHIFTS: dict[str, Shift] = {
    shift.name: shift
    for shift in (
        _shift(gain_offset, "flatter response over a brighter black"),
        _shift(gamma, "another transfer curve"),
        _shift(white_balance, "warmer light"),
        _shift(stain, "more haematoxylin, less eosin, in optical density"),
        _shift(defocus, "out of focus: a disc"),
        _shift(motion_blur, "moved to the side during exposure"),
        _shift(noise, "fewer photons and more read noise", random=True),
        _shift(dead_pixels, "stuck pixels and dark rows, the same in every image", random=True),
        _shift(jpeg, "stored as JPEG"),
        _shift(resolution, "a coarser sensor"),
    )
}
