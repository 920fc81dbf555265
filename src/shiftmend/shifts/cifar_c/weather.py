"""Fog, frost and snow of CIFAR-C."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.shifts.base import check_images
from shiftmend.shifts.cifar_c.blur import zoom
from shiftmend.shifts.cifar_c.colour import check_colour, luminance
from shiftmend.shifts.primitives import finish, motion_blur, normal, plasma, to_unit, uniform
from shiftmend.shifts.textures import crop

FROST_TEXTURES = 5


def fog(images: Tensor, *, generator: torch.Generator, strength: float, decay: float) -> Tensor:
    """Add a cloud texture, then darken so that the brightest value of the picture could be reached again."""
    check_images(images)
    count, _, height, width = images.shape
    size = 1 << (max(height, width, 2) - 1).bit_length()
    cloud = plasma(count, size, decay, generator)[:, None, :height, :width]
    unit = to_unit(images)
    brightest = unit.amax(dim=(1, 2, 3), keepdim=True)
    return finish((unit + strength * cloud) * (brightest / (brightest + strength)))


def frost(
    images: Tensor,
    *,
    generator: torch.Generator,
    image_weight: float,
    frost_weight: float,
    textures: Sequence[Tensor],
) -> Tensor:
    """Mix in a random window of one of the first five `textures` (uint8 `[3, h, w]`, larger than the images).

    The published generator has six textures and never reaches the sixth.
    """
    check_colour(images)
    if not textures:
        raise DataError("frost needs at least one texture, got none: pass textures=shifts.textures.frost()")
    count, _, height, width = images.shape
    windows = crop(textures[:FROST_TEXTURES], count, height, width, generator)
    # Float64, since whole results are frequent here and truncation would turn 8.9999999 into 8.
    mixed = images.double().mul_(image_weight).add_(windows.double().mul_(frost_weight))
    return mixed.clamp_(0, 255).to(torch.uint8)


def snow(
    images: Tensor,
    *,
    generator: torch.Generator,
    mean: float,
    deviation: float,
    zoom_factor: float,
    threshold: float,
    radius: int,
    sigma: float,
    keep: float,
) -> Tensor:
    """Whiten the picture and add smeared flakes twice, the second time turned by 180 degrees."""
    check_colour(images)
    count, _, height, width = images.shape
    flakes = zoom(normal((count, 1, height, width), mean, deviation, generator), zoom_factor)
    flakes = flakes.masked_fill_(flakes < threshold, 0)
    angles = uniform((count,), -135, -45, generator)
    streaks = to_unit(motion_blur(finish(flakes), radius, sigma, angles))
    unit = to_unit(images)
    pale = torch.maximum(unit, luminance(unit).mul_(1.5).add_(0.5))
    unit = unit.mul_(keep).add_(pale, alpha=1 - keep)
    return finish(unit + (streaks + streaks.rot90(2, (-2, -1))))
