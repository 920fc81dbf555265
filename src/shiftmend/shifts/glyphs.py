"""What EMNIST-DA and MNIST-C share: shifts of grey glyphs, white on black.

The published sets were made one image at a time from 28 x 28 glyphs. Here whole batches go through at once, other
sizes follow the same rules, and images of three equal channels come back with three equal channels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.shifts import cifar_c as noise
from shiftmend.shifts import lines
from shiftmend.shifts.base import check_images
from shiftmend.shifts.primitives import finish, plasma, to_unit

SMALLEST = 8


FOG_MAP = 256


def on_grey(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let a function over `[N, 1, H, W]` take three equal channels too, and give back three.

    The glyph sets were shifted as grey images and turned into colour afterwards, so noise must not differ between
    channels. A function that makes colour out of grey keeps its three channels.
    """

    @functools.wraps(function)
    def wrapper(images: Tensor, *, generator: torch.Generator | None = None, **parameters: Any) -> Tensor:
        check_images(images)
        if min(images.shape[-2:]) < SMALLEST:
            raise DataError(
                f"a glyph shift takes images of at least {SMALLEST} x {SMALLEST} pixels, got {list(images.shape)}"
            )
        grey = images[:, :1]
        if not torch.equal(images, grey.expand_as(images)):
            raise DataError(
                "a glyph shift takes grey images, one channel or three equal ones, got three that differ: "
                "convert them to grey first"
            )
        shifted = function(grey, generator=generator, **parameters)
        return shifted.repeat(1, 3, 1, 1) if images.shape[1] > shifted.shape[1] else shifted

    return wrapper


def to_levels(unit: Tensor) -> Tensor:
    """Clip to [0, 1] and truncate to grey levels by way of float32, as the published sets were.

    In float64, a flat area that was blurred or turned can fall short of its grey level by a rounding error; the
    stop at float32 absorbs that, where `finish` alone would give the level below.
    """
    return unit.clamp(0, 1).mul_(255).to(torch.float32).to(torch.uint8)


def random_signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """-1 or 1 with equal probability, float64."""
    return torch.randint(0, 2, shape, generator=generator, device=generator.device).double().mul_(2).sub_(1)


def identity(images: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """The images as they are."""
    return images.clone()


@on_grey
def stripe(images: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Invert the left and the right quarter of the columns."""
    columns = torch.arange(images.shape[-1], device=images.device)
    quarter = images.shape[-1] // 4
    outside = (columns < quarter) | (columns >= images.shape[-1] - quarter)
    return torch.where(outside, 255 - images, images)


@on_grey
def dotted_line(images: Tensor, *, generator: torch.Generator) -> Tensor:
    """Add a dotted line from a random row at the left edge to a random row at the right edge."""
    count, _, height, width = images.shape
    ends = torch.randint(0, height - 1, (2, count), generator=generator, device=images.device).double()
    return to_levels(to_unit(images, torch.float64) + lines.dotted(ends[0], ends[1], height, width)[:, None])


@on_grey
def zigzag(images: Tensor, *, generator: torch.Generator) -> Tensor:
    """Add a zigzag that crosses the image from left to right, at most five rows up or four down."""
    count, _, height, width = images.shape
    start = torch.randint(0, height - 1, (count,), generator=generator, device=images.device)
    rise = torch.randint(-5, 5, (count,), generator=generator, device=images.device)
    # Only ten zigzags differ by more than their height: they are drawn once, on a canvas twice as high, and cut out.
    rises = torch.arange(-5, 5, dtype=torch.float64, device=images.device)
    middle = torch.full_like(rises, height - 2)
    canvas = lines.zigzag(middle, middle + rises, 2 * height - 2, width)
    rows = (height - 2 - start)[:, None] + torch.arange(height, device=images.device)
    return to_levels(to_unit(images, torch.float64) + canvas[rise[:, None] + 5, rows][:, None])


@on_grey
def impulse_noise(images: Tensor, *, generator: torch.Generator, amount: float) -> Tensor:
    """Turn a pixel white or black, each with probability `amount / 2`."""
    return noise.impulse_noise(images, generator=generator, amount=amount)


@on_grey
def shot_noise(images: Tensor, *, generator: torch.Generator, photons: float) -> Tensor:
    """Count photons: Poisson with mean `photons` at white, divided by `photons` again."""
    return noise.shot_noise(images, generator=generator, photons=photons)


@on_grey
def fog(images: Tensor, *, generator: torch.Generator, strength: float, decay: float) -> Tensor:
    """Lay the top left corner of a 256 x 256 cloud over each image and scale its white back to where it was.

    With x in [0, 1], its maximum m and the cloud p: (x + strength p) m / (m + strength). The cloud spans [0, 1] over
    the *whole* map, so what the corner shows is smooth, and often only bright or only dark.
    """
    count, _, height, width = images.shape
    if max(height, width) > FOG_MAP:
        raise DataError(f"fog takes images of at most {FOG_MAP} x {FOG_MAP} pixels, got {height} x {width}")
    unit = to_unit(images)
    cloud = plasma(count, FOG_MAP, decay, generator, window=max(height, width))[:, None, :height, :width]
    white = unit.amax(dim=(1, 2, 3), keepdim=True)
    return finish((unit + strength * cloud) * (white / (white + strength)))


FOG = (
    {"strength": 1.5, "decay": 2.0},
    {"strength": 2.0, "decay": 2.0},
    {"strength": 2.5, "decay": 1.7},
    {"strength": 2.5, "decay": 1.5},
    {"strength": 3.0, "decay": 1.4},
)


IMPULSE_NOISE = tuple({"amount": amount} for amount in (0.03, 0.06, 0.09, 0.17, 0.27))


SHOT_NOISE = tuple({"photons": photons} for photons in (60, 25, 12, 5, 3))
