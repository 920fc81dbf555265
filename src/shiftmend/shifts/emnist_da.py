"""The thirteen shifts of EMNIST-DA, the character set released with the BUFR paper.

Five lay the glyph over a texture ("background shifts"), eight change the grey image alone; MNIST-C shares most of the
eight. The photographs behind the published five are not distributed, so results agree in kind but not in number: see
`shiftmend.shifts.textures`.

The published sets were made one image at a time from 28 x 28 glyphs, white on black. Here whole batches go through at
once, other sizes follow the same rules, and images of three equal channels come back with three equal channels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.shifts import cifar_c
from shiftmend.shifts.base import Shift, check_images
from shiftmend.shifts.primitives import finish, plasma, to_unit
from shiftmend.shifts.primitives import gaussian_blur as blur
from shiftmend.shifts.textures import crop

BACKGROUNDS = ("bricks", "crystals", "grass", "oranges", "sky")
SMALLEST_SIDE = 8
FOG_SIZE = 256
"""Pixels a side of the clouds of `fog`."""

LINE_REACH = 2.3
"""Pixels from the middle of a line to where it ends."""


def on_grey(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let a function over `[N, 1, H, W]` take three equal channels too, and give back three.

    The glyph sets were shifted as grey images and turned into colour afterwards, so noise must not differ between
    channels. A function that makes colour out of grey keeps its three channels.
    """

    @functools.wraps(function)
    def wrapper(images: Tensor, *, generator: torch.Generator | None = None, **parameters: Any) -> Tensor:
        check_images(images)
        if min(images.shape[-2:]) < SMALLEST_SIDE:
            raise DataError(
                f"Expected images of at least {SMALLEST_SIDE} pixels a side for a glyph shift, got "
                f"{list(images.shape)}."
            )
        grey = images[:, :1]
        if not torch.equal(images, grey.expand_as(images)):
            raise DataError(
                "Expected grey images for a glyph shift, one channel or three equal ones, got three that differ. "
                "Convert them to grey first."
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


@on_grey
def background(images: Tensor, *, generator: torch.Generator, textures: Sequence[Tensor]) -> Tensor:
    """Put each glyph `[N, 1, H, W]` on a random crop of a random texture, and return colour images `[N, 3, H, W]`.

    The colours of the texture are inverted under the glyph. Every pixel above 0 counts as glyph, including soft edges,
    so strokes get thicker.
    """
    patches = crop(textures, len(images), images.shape[-2], images.shape[-1], generator)
    return torch.where(images > 0, 255 - patches, patches)


@on_grey
def dotted_line(images: Tensor, *, generator: torch.Generator) -> Tensor:
    """Add a dotted line from a random row at the left edge to a random row at the right edge."""
    count, _, height, width = images.shape
    ends = torch.randint(0, height - 1, (2, count), generator=generator, device=images.device).double()
    return to_levels(to_unit(images, torch.float64) + draw_dotted_line(ends[0], ends[1], height, width)[:, None])


@on_grey
def fog(images: Tensor, *, generator: torch.Generator, strength: float, decay: float) -> Tensor:
    """Lay the top left corner of a 256 x 256 cloud over each image and scale its white back to where it was.

    With x in [0, 1], its maximum m and the cloud p: (x + strength p) m / (m + strength). The cloud spans [0, 1] over
    the *whole* map, so what the corner shows is smooth, and often only bright or only dark.
    """
    count, _, height, width = images.shape
    if max(height, width) > FOG_SIZE:
        raise DataError(f"Expected images of at most {FOG_SIZE} x {FOG_SIZE} pixels for fog, got {height} x {width}.")
    unit = to_unit(images)
    cloud = plasma(count, FOG_SIZE, decay, generator, window=max(height, width))[:, None, :height, :width]
    white = unit.amax(dim=(1, 2, 3), keepdim=True)
    return finish((unit + strength * cloud) * (white / (white + strength)))


@on_grey
def gaussian_blur(
    images: Tensor, *, generator: torch.Generator | None = None, sigma: float, isotropic: bool = False
) -> Tensor:
    """Blur along the columns of the image only; `isotropic=True` blurs in both directions.

    The generator of the published set declared the last axis of a grey image to be its colour channels, and its
    library does not blur across channels. The blur is therefore vertical: glyphs are dragged up and down, and keep
    their sharp sides. The published figures were measured on such images, hence the default.
    """
    axes = (-2, -1) if isotropic else (-2,)
    return to_levels(blur(to_unit(images, torch.float64), sigma, axes=axes))


def identity(images: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Change nothing."""
    return images.clone()


@on_grey
def impulse_noise(images: Tensor, *, generator: torch.Generator, amount: float) -> Tensor:
    """Turn a pixel white or black, each with probability `amount / 2`."""
    return cifar_c.impulse_noise(images, generator=generator, amount=amount)


@on_grey
def inverse(images: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Turn black into white and white into black."""
    return 255 - images


@on_grey
def shot_noise(images: Tensor, *, generator: torch.Generator, photons: float) -> Tensor:
    """Count photons: Poisson with mean `photons` at white, divided by `photons` again."""
    return cifar_c.shot_noise(images, generator=generator, photons=photons)


@on_grey
def stripe(images: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Invert the left and the right quarter of the columns."""
    columns = torch.arange(images.shape[-1], device=images.device)
    quarter = images.shape[-1] // 4
    outside = (columns < quarter) | (columns >= images.shape[-1] - quarter)
    return torch.where(outside, 255 - images, images)


@on_grey
def zigzag(images: Tensor, *, generator: torch.Generator) -> Tensor:
    """Add a zigzag that crosses the image from left to right, at most five rows up or four down."""
    count, _, height, width = images.shape
    start = torch.randint(0, height - 1, (count,), generator=generator, device=images.device)
    rise = torch.randint(-5, 5, (count,), generator=generator, device=images.device)
    # Only ten zigzags differ by more than their height: they are drawn once, on a canvas twice as high, and cut out.
    rises = torch.arange(-5, 5, dtype=torch.float64, device=images.device)
    middle = torch.full_like(rises, height - 2)
    canvas = draw_zigzag(middle, middle + rises, 2 * height - 2, width)
    rows = (height - 2 - start)[:, None] + torch.arange(height, device=images.device)
    return to_levels(to_unit(images, torch.float64) + canvas[rise[:, None] + 5, rows][:, None])


def draw_line(start: Tensor, end: Tensor, height: int, width: int) -> Tensor:
    """Draw one line per pair of points `[N, 2]` (column, row), as intensities in [0, 1], `[N, height, width]`.

    The intensity falls with the *vertical* distance d to the line, as 1 + log(1 - d / 2.3), so steep lines are
    thin. A line covers the columns from floor(start) up to but excluding ceil(end): none if it runs to the left by a
    pixel or more. A vertical line is not drawn at all.
    """
    columns = torch.arange(width, dtype=start.dtype, device=start.device)
    rows = torch.arange(height, dtype=start.dtype, device=start.device)
    start_column, start_row = start[:, :1], start[:, 1:]
    end_column, end_row = end[:, :1], end[:, 1:]
    vertical = end_column == start_column
    run = torch.where(vertical, 1, end_column - start_column)
    level = (end_row - start_row) / run * (columns - start_column) + start_row
    drawn = (columns >= start_column.floor()) & (columns < end_column.ceil()) & ~vertical
    # Far off the picture, a column that is not drawn has distance LINE_REACH everywhere and hence intensity 0.
    level = torch.where(drawn, level, -LINE_REACH)
    distance = (rows[None, :, None] - level[:, None, :]).abs_().clamp_(max=LINE_REACH - 1e-10)
    return distance.div_(-LINE_REACH).log1p_().add_(1).clamp_(min=0)


def draw_dotted_line(start_row: Tensor, end_row: Tensor, height: int, width: int) -> Tensor:
    """Draw a line from the left to the right edge, seen through a comb of two columns off, two columns on."""
    left = torch.stack((torch.zeros_like(start_row), start_row), dim=1)
    right = torch.stack((torch.full_like(end_row, width - 1), end_row), dim=1)
    comb = torch.arange(width, device=start_row.device) % 4 >= 2
    return draw_line(left, right, height, width) * comb


def draw_zigzag(start_row: Tensor, end_row: Tensor, height: int, width: int) -> Tensor:
    """Draw a zigzag around the line between two rows, from the third column to the third last."""
    corners = zigzag_corners(start_row, end_row, width)
    drawing = start_row.new_zeros(len(start_row), height, width)
    for start, end in zip(corners.unbind(1)[:-1], corners.unbind(1)[1:], strict=True):
        drawing += draw_line(start, end, height, width)
    return drawing.clamp_(max=1)


def zigzag_corners(start_row: Tensor, end_row: Tensor, width: int) -> Tensor:
    """Compute the corners (column, row) of each zigzag, `[N, V, 2]`: peaks two pixels high, four pixels apart.

    Zigzags of fewer corners than the longest repeat their last corner; `draw_line` draws nothing between equal points.
    The height of the last corner is the published generator's, which divides by what is left of a period.
    """
    first, last = 2, width - 3
    angle = torch.atan((end_row - start_row) / (last - first))
    length = (last - first) / torch.cos(angle)
    peaks = ((length - 2) / 4).floor()
    rest = length - 4 * (length / 4).floor()
    final_peak = 2 * (1 - 2 * peaks.remainder(2))
    whole = rest == 0
    end_along = torch.where(whole, 4 * peaks + 2, length)
    end_aside = torch.where(whole, final_peak, final_peak / (2 * torch.where(whole, 1, rest)))

    index = torch.arange(int(peaks.max()) + 1, dtype=start_row.dtype, device=start_row.device)
    exists = index <= peaks[:, None]
    along = torch.where(exists, 4 * index + 2, end_along[:, None])
    aside = torch.where(exists, 2 * (1 - 2 * index.remainder(2)), end_aside[:, None])
    origin = torch.zeros_like(start_row)[:, None]
    along = torch.cat((origin, along, end_along[:, None]), dim=1)
    aside = torch.cat((origin, aside, end_aside[:, None]), dim=1)

    cosine, sine = torch.cos(angle)[:, None], torch.sin(angle)[:, None]
    columns = along * cosine - aside * sine + first
    rows = along * sine + aside * cosine + start_row[:, None]
    return torch.stack((columns, rows), dim=2)


FOG = (
    {"strength": 1.5, "decay": 2.0},
    {"strength": 2.0, "decay": 2.0},
    {"strength": 2.5, "decay": 1.7},
    {"strength": 2.5, "decay": 1.5},
    {"strength": 3.0, "decay": 1.4},
)
IMPULSE_NOISE = tuple({"amount": amount} for amount in (0.03, 0.06, 0.09, 0.17, 0.27))
SHOT_NOISE = tuple({"photons": photons} for photons in (60, 25, 12, 5, 3))
_ONCE: tuple[dict[str, float], ...] = ({},)
_BACKGROUNDS = [
    Shift(f"emnist-da/{name}", background, _ONCE, 1, f"the glyph inverted out of a texture: {name}", texture=name)
    for name in BACKGROUNDS
]

_GREY = [
    Shift("emnist-da/dotted_line", dotted_line, _ONCE, 1, "a dotted line across the image"),
    Shift("emnist-da/fog", fog, FOG, 5, "a cloud over the image, little contrast left"),
    Shift(
        "emnist-da/gaussian_blur",
        gaussian_blur,
        tuple({"sigma": sigma} for sigma in (1.0, 2.0, 3.0, 4.0, 6.0)),
        3,
        "blurred up and down, not sideways",
        random=False,
    ),
    Shift("emnist-da/identity", identity, _ONCE, 1, "nothing changes", random=False),
    Shift("emnist-da/impulse_noise", impulse_noise, IMPULSE_NOISE, 4, "white and black specks"),
    Shift("emnist-da/inverse", inverse, _ONCE, 1, "black on white", random=False),
    Shift("emnist-da/shot_noise", shot_noise, SHOT_NOISE, 5, "grain from few photons"),
    Shift("emnist-da/stripe", stripe, _ONCE, 1, "the left and right quarter inverted", random=False),
    Shift("emnist-da/zigzag", zigzag, _ONCE, 1, "a zigzag across the image"),
]

SHIFTS: dict[str, Shift] = {shift.name: shift for shift in sorted(_BACKGROUNDS + _GREY, key=lambda shift: shift.name)}
