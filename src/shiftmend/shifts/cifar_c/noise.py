"""The four noises of CIFAR-C. Noise is independent per pixel and per channel."""

from __future__ import annotations

import torch
from torch import Tensor

from shiftmend.shifts.base import check_images
from shiftmend.shifts.primitives import finish, normal, to_unit


def gaussian_noise(images: Tensor, *, generator: torch.Generator, deviation: float) -> Tensor:
    """Add normal noise."""
    check_images(images)
    return finish(normal(tuple(images.shape), 0, deviation, generator).add_(to_unit(images)))


def shot_noise(images: Tensor, *, generator: torch.Generator, photons: float) -> Tensor:
    """Count photons: white is `photons` of them on average, and counts are Poisson distributed."""
    check_images(images)
    counts = torch.poisson(to_unit(images).mul_(photons), generator=generator)
    # A tensor as divisor, for the same bits on every device (see `to_unit`).
    return finish(counts.div_(counts.new_tensor(photons)))


def impulse_noise(images: Tensor, *, generator: torch.Generator, amount: float) -> Tensor:
    """Turn single values black or white, half of each, so that specks are coloured."""
    check_images(images)
    draw = torch.rand(images.shape, generator=generator, device=images.device)
    return images.masked_fill(draw < amount, 255).masked_fill_(draw < amount / 2, 0)


def speckle_noise(images: Tensor, *, generator: torch.Generator, deviation: float) -> Tensor:
    """Add normal noise in proportion to the brightness."""
    check_images(images)
    return finish(normal(tuple(images.shape), 1, deviation, generator).mul_(to_unit(images)))
