"""The 19 corruptions of CIFAR-10-C and CIFAR-100-C at 5 severities, regenerated as batched tensor functions.

They follow the published generator of Hendrycks and Dietterich (2019) in distribution. Its random numbers were never
seeded, so results are "CIFAR-C style" and not the official files. Lengths are in pixels of 32 x 32 images. The order is
noise, blur, weather, colour and geometry, then the table of severities.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.shifts import primitives
from shiftmend.shifts.base import Shift, check_images
from shiftmend.shifts.primitives import (
    chamfer,
    correlate,
    finish,
    hysteresis,
    normal,
    pad,
    plasma,
    sample_bilinear,
    to_unit,
    uniform,
)
from shiftmend.shifts.textures import crop

LIQUIDS = {"water": (175, 238, 238), "mud": (63, 42, 20)}

# Gradients that count as a weak and as a strong edge of a drop; the distance beyond which no edge matters.
WEAK_EDGE, STRONG_EDGE = 50, 150
FARTHEST = 20.0
EMBOSS = ((-2.0, -1.0, 0.0), (-1.0, 1.0, 1.0), (0.0, 1.0, 2.0))
FROST_TEXTURES = 5


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
    """Set a share `amount` of all channel values to black or white, half to each, so that specks are coloured."""
    check_images(images)
    draw = torch.rand(images.shape, generator=generator, device=images.device)
    return images.masked_fill(draw < amount, 255).masked_fill_(draw < amount / 2, 0)


def speckle_noise(images: Tensor, *, generator: torch.Generator, deviation: float) -> Tensor:
    """Add normal noise in proportion to the brightness."""
    check_images(images)
    return finish(normal(tuple(images.shape), 1, deviation, generator).mul_(to_unit(images)))


def gaussian_blur(images: Tensor, *, generator: torch.Generator | None = None, sigma: float) -> Tensor:
    """Blur with a Gaussian. Deterministic."""
    check_images(images)
    # Float64: in flat areas the last bit decides whether truncation loses a grey level.
    return finish(primitives.gaussian_blur(to_unit(images, torch.float64), sigma))


def glass_blur(images: Tensor, *, generator: torch.Generator, sigma: float, passes: int) -> Tensor:
    """Blur, copy to each pixel its own value or that of its left, upper or upper left neighbour, and blur again.

    The published generator means to swap two pixels, but copies one over the other, always from the upper left, and
    never writes to the first two rows and columns. Each copy reads a pixel that the pass has not written yet. So a pass
    is a choice among four shifted pictures for every pixel.
    """
    check_images(images)
    pixels = gaussian_blur(images, sigma=sigma)
    count, _, height, width = pixels.shape
    for _ in range(passes):
        shape = (count, 1, max(height - 2, 0), max(width - 2, 0))
        draw = torch.randint(0, 4, shape, generator=generator, device=images.device)
        from_left, from_above = draw % 2 == 1, draw >= 2
        here, above = pixels[..., 2:, :], pixels[..., 1:-1, :]
        level = torch.where(from_left, here[..., 1:-1], here[..., 2:])
        higher = torch.where(from_left, above[..., 1:-1], above[..., 2:])
        pixels = pixels.clone()
        pixels[..., 2:, 2:] = torch.where(from_above, higher, level)
    return gaussian_blur(pixels, sigma=sigma)


def defocus_blur(images: Tensor, *, generator: torch.Generator | None = None, radius: float, sigma: float) -> Tensor:
    """Blur with a softened disk. Deterministic."""
    check_images(images)
    # The float32 weights do not quite sum to one; in flat areas, this decides what truncation does.
    kernel = defocus_kernel(radius, sigma)
    return finish(correlate(to_unit(images, torch.float64), kernel, "mirror"))


def defocus_kernel(radius: float, sigma: float) -> Tensor:
    """Make a disk whose edge is softened by a 3-tap Gaussian; float32, side `2 * int(radius) + 3`."""
    reach = int(radius)
    steps = torch.arange(-reach - 1, reach + 2)
    disk = (steps[:, None] ** 2 + steps[None, :] ** 2 <= radius**2).float()
    disk /= disk.sum()
    side = math.exp(-1 / (2 * sigma**2))
    taps = torch.tensor((side, 1.0, side), dtype=torch.float64) / (1 + 2 * side)
    outer, centre = taps.float()[0], taps.float()[1]
    for axis in (1, 0):
        padded = torch.nn.functional.pad(disk, (1, 1, 0, 0) if axis == 1 else (0, 0, 1, 1))
        length = disk.shape[axis]
        neighbours = padded.narrow(axis, 0, length) + padded.narrow(axis, 2, length)
        disk = disk * centre + neighbours * outer
    return disk


def motion_blur(images: Tensor, *, generator: torch.Generator, radius: int, sigma: float) -> Tensor:
    """Drag each picture to the left, up to 45 degrees up or down."""
    check_images(images)
    angles = uniform((images.shape[0],), -45, 45, generator)
    return primitives.motion_blur(images, radius, sigma, angles)


def zoom_blur(images: Tensor, *, generator: torch.Generator | None = None, copies: int) -> Tensor:
    """Average the picture with `copies` enlargements of it by 1.00, 1.01, 1.02, ... Deterministic."""
    check_images(images)
    unit = to_unit(images)
    total = torch.zeros_like(unit)
    previous = None
    for step in range(copies):
        # The step as floating-point arithmetic leaves it: the last factor of severity 5 is a little above
        # 1.25 and resizes 26 pixels to 33, where exactly 1.25 would give 32.
        factor = 1 + step * (1.01 - 1)
        geometry = [zoom_geometry(side, factor) for side in images.shape[-2:]]
        if geometry != previous:
            enlarged, previous = zoom(unit, factor), geometry
        total += enlarged
    return finish(total.add_(unit).div_(total.new_tensor(copies + 1)))


def zoom(values: Tensor, factor: float) -> Tensor:
    """Enlarge images about their centre by linear interpolation, and crop them to their old size.

    Args:
        values: Images `[..., H, W]`.
        factor: Factor of at least 1 by which both sides are enlarged.

    Returns:
        The enlarged images, with the shape and dtype of `values`. Intermediate results are float64.

    Example:
        >>> zoom(torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0], [0.0] * 4]), 2)
        tensor([[1., 1., 1., 1.],
                [1., 1., 1., 1.],
                [1., 1., 1., 1.],
                [1., 1., 1., 1.]])
    """
    rows = zoom_matrix(values.shape[-2], factor).to(values.device)
    columns = zoom_matrix(values.shape[-1], factor).to(values.device)
    return (rows @ values.double() @ columns.T).to(values.dtype)


def zoom_matrix(side: int, factor: float) -> Tensor:
    """Make the float64 matrix that enlarges one axis: crop, linear resize with aligned ends, cut back to `side`."""
    start, crop, resized = zoom_geometry(side, factor)
    first = (resized - side) // 2
    positions = torch.arange(first, first + side, dtype=torch.float64) * (crop - 1) / max(resized - 1, 1)
    low = positions.floor().clamp_(max=crop - 1)
    matrix = torch.zeros(side, side, dtype=torch.float64)
    output = torch.arange(side)
    matrix[output, start + low.long()] = 1 - (positions - low)
    matrix[output, start + (low.long() + 1).clamp_(max=crop - 1)] += positions - low
    return matrix


def zoom_geometry(side: int, factor: float) -> tuple[int, int, int]:
    """Compute how a side is enlarged: start and length of the crop, and the length after resizing."""
    crop = math.ceil(side / factor)
    return (side - crop) // 2, crop, round(crop * factor)


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
    streaks = to_unit(primitives.motion_blur(finish(flakes), radius, sigma, angles))
    unit = to_unit(images)
    pale = torch.maximum(unit, luminance(unit).mul_(1.5).add_(0.5))
    unit = unit.mul_(keep).add_(pale, alpha=1 - keep)
    return finish(unit + (streaks + streaks.rot90(2, (-2, -1))))


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
        raise DataError("Expected at least one texture for frost, got none. Pass textures=shifts.textures.frost().")
    count, _, height, width = images.shape
    windows = crop(textures[:FROST_TEXTURES], count, height, width, generator)
    # Float64, since whole results are frequent here and truncation would turn 8.9999999 into 8.
    mixed = images.double().mul_(image_weight).add_(windows.double().mul_(frost_weight))
    return mixed.clamp_(0, 255).to(torch.uint8)


def fog(images: Tensor, *, generator: torch.Generator, strength: float, decay: float) -> Tensor:
    """Add a cloud texture, then darken so that the brightest value of the picture could be reached again."""
    check_images(images)
    count, _, height, width = images.shape
    size = 1 << (max(height, width, 2) - 1).bit_length()
    cloud = plasma(count, size, decay, generator)[:, None, :height, :width]
    unit = to_unit(images)
    brightest = unit.amax(dim=(1, 2, 3), keepdim=True)
    return finish((unit + strength * cloud) * (brightest / (brightest + strength)))


def spatter(
    images: Tensor,
    *,
    generator: torch.Generator,
    liquid: str,
    mean: float,
    deviation: float,
    sigma: float,
    threshold: float,
    strength: float = 0.5,
    edge_sigma: float = 0.6,
) -> Tensor:
    """Put drops of `liquid` (`water` or `mud`) where smoothed noise exceeds the threshold.

    `strength` is how much the brightest point of the water lightens, `edge_sigma` how soft drops of mud end.
    """
    check_colour(images)
    count, _, height, width = images.shape
    drops = primitives.gaussian_blur(normal((count, height, width), mean, deviation, generator), sigma)
    drops = drops.masked_fill_(drops < threshold, 0)
    colour = to_unit(torch.tensor(LIQUIDS[liquid], device=images.device)).view(3, 1, 1)
    if liquid == "mud":
        cover = primitives.gaussian_blur((drops > threshold).float(), edge_sigma)
        cover = cover.masked_fill_(cover < 0.8, 0)[:, None]
        return finish(to_unit(images) * (1 - cover) + cover * colour)
    return finish(to_unit(images) + strength * shine(drops)[:, None] * colour)


def shine(drops: Tensor) -> Tensor:
    """Compute how water drops `[N, H, W]` reflect light: zero to one, most along their lower right rims."""
    # An eight-bit picture of the drops; values above one wrap around, as they do in the published generator.
    levels = (drops * 255).to(torch.int32) & 255
    distance = chamfer(canny(levels)).clamp_(max=FARTHEST)
    shading = equalise(box_mean(distance).to(torch.uint8))
    relief = correlate(shading.float(), torch.tensor(EMBOSS), "mirror").clamp_(0, 255)
    light = levels * box_mean(relief).round_()
    brightest = light.amax(dim=(-2, -1), keepdim=True)
    return light / torch.where(brightest > 0, brightest, 1)


def canny(levels: Tensor) -> Tensor:
    """Find the edges of integer pictures `[N, H, W]` with values 0 to 255 as OpenCV does; return booleans.

    Gradients are whole numbers (3 x 3, edge repeated) of length |x| + |y|. They are thinned across the edge in one of
    four directions. Edges are then traced from strong pixels through weak ones.
    """
    padded = pad(pad(levels.to(torch.int32), 1, -2, "nearest"), 1, -1, "nearest")
    sideways = padded[..., 2:] - padded[..., :-2]
    across = sideways[..., :-2, :] + 2 * sideways[..., 1:-1, :] + sideways[..., 2:, :]
    downwards = padded[..., 2:, :] - padded[..., :-2, :]
    down = downwards[..., :-2] + 2 * downwards[..., 1:-1] + downwards[..., 2:]
    length_across, length_down = across.abs(), down.abs()
    magnitude = length_across + length_down

    outside = torch.nn.functional.pad(magnitude, (1, 1, 1, 1))
    height, width = levels.shape[-2:]

    def neighbour(row: int, column: int) -> Tensor:
        return outside[..., 1 + row : 1 + row + height, 1 + column : 1 + column + width]

    # Tangents of 22.5 and 67.5 degrees in 1/32768, the second one as 2 + the first.
    flat = length_across * 13573
    steep = flat + length_across * 65536
    slope = length_down * 32768
    highest = torch.where(
        slope < flat,
        (magnitude > neighbour(0, -1)) & (magnitude >= neighbour(0, 1)),
        torch.where(
            slope > steep,
            (magnitude > neighbour(-1, 0)) & (magnitude >= neighbour(1, 0)),
            torch.where(
                (across < 0) == (down < 0),
                (magnitude > neighbour(-1, -1)) & (magnitude > neighbour(1, 1)),
                (magnitude > neighbour(-1, 1)) & (magnitude > neighbour(1, -1)),
            ),
        ),
    )
    weak = highest & (magnitude > WEAK_EDGE)
    return hysteresis(weak, magnitude > STRONG_EDGE)


def box_mean(values: Tensor) -> Tensor:
    """Average 3 x 3 pixels of float `[N, H, W]`, mirrored at the border."""
    return correlate(values, torch.ones(3, 3), "mirror").div_(values.new_tensor(9))


def equalise(levels: Tensor) -> Tensor:
    """Spread the grey levels of uint8 pictures `[N, H, W]` evenly; a picture of one level stays as it is."""
    flat = levels.flatten(1).long()
    counts = flat.new_zeros(levels.shape[0], 256).scatter_add_(1, flat, torch.ones_like(flat))
    lowest = counts.gather(1, flat.amin(dim=1, keepdim=True))
    others = flat.shape[1] - lowest
    spread = (counts.cumsum(dim=1) - lowest).clamp_(min=0) * (255 / others)
    levels_after = spread.round_().gather(1, flat)
    return torch.where(others > 0, levels_after, flat.float()).to(torch.uint8).view_as(levels)


def brightness(images: Tensor, *, generator: torch.Generator | None = None, shift: float) -> Tensor:
    """Raise the value of hue, saturation and value. Deterministic."""
    check_colour(images)
    hue, saturation, value = to_hsv(to_unit(images, torch.float64))
    return finish(from_hsv(hue, saturation, (value + shift).clamp_(0, 1)))


def saturate(images: Tensor, *, generator: torch.Generator | None = None, factor: float, shift: float) -> Tensor:
    """Scale and raise the saturation; a raise turns grey reddish, as grey has hue 0. Deterministic."""
    check_colour(images)
    hue, saturation, value = to_hsv(to_unit(images, torch.float64))
    return finish(from_hsv(hue, (saturation * factor + shift).clamp_(0, 1), value))


def contrast(images: Tensor, *, generator: torch.Generator | None = None, factor: float) -> Tensor:
    """Pull every channel towards its own mean over the picture. Deterministic."""
    check_images(images)
    mean = to_unit(images.double().mean(dim=(-2, -1), keepdim=True), torch.float64)
    return finish((to_unit(images, torch.float64) - mean).mul_(factor).add_(mean))


def elastic_transform(
    images: Tensor, *, generator: torch.Generator, alpha: float, sigma: float, jitter: float
) -> Tensor:
    """Apply a random affine map, then displace every pixel at random, each with its own interpolation.

    `jitter` moves three anchor points by up to so many pixels; `alpha` scales a displacement field that was
    smoothed with `sigma`. Severity 1 has the largest jitter, so the change shrinks with severity.
    """
    check_images(images)
    count, _, height, width = images.shape
    columns, rows = affine_positions(count, height, width, jitter, generator)
    bent = sample_bilinear(to_unit(images), rows, columns, "mirror")
    move = uniform((2, count, height, width), -1, 1, generator)
    move = primitives.gaussian_blur(move, sigma, truncate=3.0, mode="reflect").mul_(alpha)
    row_grid = torch.arange(height, device=images.device)[:, None]
    column_grid = torch.arange(width, device=images.device)
    return finish(sample_bilinear(bent, row_grid + move[1], column_grid + move[0], "reflect"))


def affine_positions(
    count: int, height: int, width: int, jitter: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw random affine maps; return the columns and rows `[count, H, W]` that each output pixel reads.

    The map takes three fixed points to jittered ones; an output pixel reads where its inverse takes it.
    """
    device = generator.device
    middle = torch.tensor((width // 2, height // 2), dtype=torch.float64, device=device)
    corners = torch.tensor(((1, 1), (1, -1), (-1, -1)), dtype=torch.float64, device=device)
    source = middle + corners * (min(height, width) // 3)
    target = source + uniform((count, 3, 2), -jitter, jitter, generator).double()
    homogeneous = torch.cat((target, torch.ones_like(target[..., :1])), dim=-1)
    inverse = torch.linalg.solve(homogeneous, source.expand(count, 3, 2))
    grid = torch.stack(
        (
            torch.arange(width, dtype=torch.float64, device=device).expand(height, width),
            torch.arange(height, dtype=torch.float64, device=device)[:, None].expand(height, width),
            torch.ones(height, width, dtype=torch.float64, device=device),
        ),
        dim=-1,
    )
    positions = torch.einsum("hwk,nkd->dnhw", grid, inverse)
    return positions[0], positions[1]


def pixelate(images: Tensor, *, generator: torch.Generator | None = None, factor: float) -> Tensor:
    """Shrink the sides to `int(factor * side)` and enlarge them again into blocks. Deterministic.

    Shrinking averages whole pixels without weights and rounds after each axis, as Pillow's box filter does.
    """
    check_images(images)
    values = images.float()
    for axis in (-1, -2):
        values = _shrink(values.transpose(axis, -1), factor).transpose(axis, -1)
    for axis in (-1, -2):
        small, side = values.shape[axis], images.shape[axis]
        source = (torch.arange(side, device=images.device) * 2 + 1) * small // (2 * side)
        values = values.index_select(axis, source)
    return values.to(torch.uint8).contiguous()


def _shrink(values: Tensor, factor: float) -> Tensor:
    """Average boxes of the last axis and round half up."""
    side = values.shape[-1]
    small = max(int(side * factor), 1)
    edges = [int(position * side / small + 0.5) for position in range(small + 1)]
    boxes = torch.zeros(side, small)
    for box, (start, end) in enumerate(itertools.pairwise(edges)):
        boxes[start:end, box] = 1
    boxes = boxes.to(values.device)
    return (values @ boxes / boxes.sum(dim=0) + 0.5).floor_()


def jpeg_compression(images: Tensor, *, generator: torch.Generator | None = None, quality: int) -> Tensor:
    """Write and read back as JPEG with Pillow's defaults (bits depend on its libjpeg). Deterministic."""
    check_images(images)
    from PIL import Image

    mode = "RGB" if images.shape[1] == 3 else "L"

    def round_trip(picture: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        buffer = io.BytesIO()
        Image.fromarray(picture if mode == "RGB" else picture[..., 0]).save(buffer, "JPEG", quality=quality)
        return np.asarray(Image.open(buffer)).reshape(picture.shape)

    pictures = images.movedim(1, -1).contiguous().cpu().numpy()
    compressed = np.empty_like(pictures)
    # Pillow lets other threads run while it encodes and decodes.
    with ThreadPoolExecutor(max_workers=4) as pool:
        for number, picture in enumerate(pool.map(round_trip, pictures)):
            compressed[number] = picture
    return torch.from_numpy(compressed).movedim(-1, 1).contiguous().to(images.device)


def check_colour(images: Tensor) -> None:
    """Refuse anything but a batch of 8-bit colour images."""
    check_images(images)
    if images.shape[1] != 3:
        raise DataError(
            f"Expected 3 channels for a shift of colours, got {images.shape[1]}. Repeat a grey channel three times "
            "first."
        )


def luminance(unit: Tensor) -> Tensor:
    """Turn colour `[N, 3, H, W]` into grey `[N, 1, H, W]`, with the weights of analogue television."""
    return 0.299 * unit[:, 0:1] + 0.587 * unit[:, 1:2] + 0.114 * unit[:, 2:3]


def to_hsv(unit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert RGB images to hue, saturation and value (HSV).

    Args:
        unit: RGB images `[N, 3, H, W]` with values from 0 to 1.

    Returns:
        Hue in [0, 1), saturation in [0, 1] and value in [0, 1], each `[N, H, W]`. Grey pixels have hue 0 and
        saturation 0.

    Example:
        >>> dark_green = torch.tensor([0.0, 0.5, 0.0]).view(1, 3, 1, 1)
        >>> [round(channel.item(), 2) for channel in to_hsv(dark_green)]
        [0.33, 1.0, 0.5]
    """
    red, green, blue = unit.unbind(1)
    value = unit.amax(dim=1)
    spread = value - unit.amin(dim=1)
    grey = spread == 0
    divisor = torch.where(grey, 1, spread)
    sixths = torch.where(
        value == blue,
        4 + (red - green) / divisor,
        torch.where(value == green, 2 + (blue - red) / divisor, (green - blue) / divisor),
    )
    # A tensor as divisor, for the same bits on every device (see `to_unit`).
    hue = (sixths / sixths.new_tensor(6)).remainder_(1).masked_fill_(grey, 0)
    saturation = (spread / torch.where(grey, 1, value)).masked_fill_(grey, 0)
    return hue, saturation, value


def from_hsv(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """Join hue, saturation and value to `[N, 3, H, W]`: one channel leads in each sixth of the circle, one trails."""
    sextant = torch.floor(hue * 6)
    along = hue * 6 - sextant
    lowest = value * (1 - saturation)
    falling = value * (1 - along * saturation)
    rising = value * (1 - (1 - along) * saturation)
    levels = torch.stack((value, falling, lowest, rising), dim=1)
    # Which of the four levels red takes in each sextant; green runs two sextants behind and blue four.
    red = torch.tensor((0, 1, 2, 2, 3, 0), device=hue.device)
    order = torch.stack((red, red.roll(2), red.roll(4)), dim=1)
    choice = order[sextant.long().remainder_(6)].movedim(-1, 1)
    return levels.gather(1, choice)


def _shift(
    function: Callable[..., Tensor],
    names: str,
    *severities: tuple[float | str, ...],
    summary: str,
    random: bool = True,
    texture: str | None = None,
) -> Shift:
    return Shift(
        name=f"cifar-c/{function.__name__}",
        function=function,
        severities=tuple(dict(zip(names.split(), values, strict=True)) for values in severities),
        default=5,
        summary=summary,
        random=random,
        texture=texture,
    )


# In the order of the benchmark's own tables; the last four are its extra corruptions.
_ALL = (
    _shift(
        gaussian_noise,
        "deviation",
        *[(0.04,), (0.06,), (0.08,), (0.09,), (0.10,)],
        summary="normal noise",
    ),
    _shift(
        shot_noise,
        "photons",
        *[(500,), (250,), (100,), (75,), (50,)],
        summary="Poisson noise of few photons",
    ),
    _shift(
        impulse_noise,
        "amount",
        *[(0.01,), (0.02,), (0.03,), (0.05,), (0.07,)],
        summary="black and white values (salt and pepper)",
    ),
    _shift(
        defocus_blur,
        "radius sigma",
        *[(0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1)],
        summary="blur with a disk",
        random=False,
    ),
    _shift(
        glass_blur,
        "sigma passes",
        *[(0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2)],
        summary="pixels displaced as by frosted glass",
    ),
    _shift(
        motion_blur,
        "radius sigma",
        *[(6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5)],
        summary="one-sided smear in a random direction",
    ),
    _shift(
        zoom_blur,
        "copies",
        *[(7,), (12,), (16,), (21,), (26,)],
        summary="mean of growing enlargements",
        random=False,
    ),
    _shift(
        snow,
        "mean deviation zoom_factor threshold radius sigma keep",
        (0.10, 0.2, 1.00, 0.60, 8, 3.0, 0.95),
        (0.10, 0.2, 1.00, 0.50, 10, 4.0, 0.90),
        (0.15, 0.3, 1.75, 0.55, 10, 4.0, 0.90),
        (0.25, 0.3, 2.25, 0.60, 12, 6.0, 0.85),
        (0.30, 0.3, 1.25, 0.65, 14, 12.0, 0.80),
        summary="streaks of snow over a whitened picture",
    ),
    _shift(
        frost,
        "image_weight frost_weight",
        *[(1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)],
        summary="photographs of frost mixed in",
        texture="frost",
    ),
    _shift(
        fog,
        "strength decay",
        *[(0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75)],
        summary="a cloud texture mixed in",
    ),
    _shift(
        brightness,
        "shift",
        *[(0.05,), (0.1,), (0.15,), (0.2,), (0.3,)],
        summary="brighter in the HSV colour space",
        random=False,
    ),
    _shift(
        contrast,
        "factor",
        *[(0.75,), (0.5,), (0.4,), (0.3,), (0.15,)],
        summary="pulled towards the mean colour",
        random=False,
    ),
    _shift(
        elastic_transform,
        "alpha sigma jitter",
        *[(0.0, 0.0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96)],
        summary="a random affine map and local displacements",
    ),
    _shift(
        pixelate,
        "factor",
        *[(0.95,), (0.9,), (0.85,), (0.75,), (0.65,)],
        summary="shrunk and enlarged into blocks",
        random=False,
    ),
    _shift(
        jpeg_compression,
        "quality",
        *[(80,), (65,), (58,), (50,), (40,)],
        summary="JPEG artefacts",
        random=False,
    ),
    _shift(
        speckle_noise,
        "deviation",
        *[(0.06,), (0.10,), (0.12,), (0.16,), (0.20,)],
        summary="normal noise in proportion to brightness",
    ),
    _shift(
        gaussian_blur,
        "sigma",
        *[(0.4,), (0.6,), (0.7,), (0.8,), (1.0,)],
        summary="Gaussian blur",
        random=False,
    ),
    _shift(
        spatter,
        "liquid mean deviation sigma threshold",
        ("water", 0.62, 0.1, 0.7, 0.70),
        ("water", 0.65, 0.1, 0.8, 0.70),
        ("water", 0.65, 0.3, 1.0, 0.69),
        ("mud", 0.65, 0.1, 0.7, 0.69),
        ("mud", 0.65, 0.1, 0.5, 0.68),
        summary="drops of water or mud on the lens",
    ),
    _shift(
        saturate,
        "factor shift",
        *[(0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2)],
        summary="paler or stronger colours",
        random=False,
    ),
)

SHIFTS: dict[str, Shift] = {shift.name: shift for shift in _ALL}
