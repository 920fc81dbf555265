"""The fifteen corruptions of MNIST-C (Mu and Gilmer, 2019), and MNIST-M: digits blended into photographs.

MNIST-C shares its lines, fog and noise with EMNIST-DA.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from shiftmend.shifts import emnist_da, primitives
from shiftmend.shifts.base import Shift
from shiftmend.shifts.emnist_da import on_grey, to_levels
from shiftmend.shifts.primitives import (
    finish,
    gaussian_blur,
    hysteresis,
    normal,
    pad,
    sample_bilinear,
    to_unit,
    uniform,
)
from shiftmend.shifts.textures import crop

MUD = 63 / 255
"""Grey of the splashes."""

CANNY_SIGMA = 1.0
CANNY_RADIUS = 4
WEAK_EDGE, STRONG_EDGE = 0.1, 0.2


@on_grey
def brightness(images: Tensor, *, generator: torch.Generator | None = None, shift: float) -> Tensor:
    """Add a constant to the brightness. The generator of MNIST-C gets the same result through HSV."""
    return to_levels(to_unit(images, torch.float64) + shift)


@on_grey
def canny_edges(images: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Keep only the edges of the digit, white, one pixel wide; see `canny`."""
    return canny(to_unit(images[:, 0], torch.float64))[:, None].to(torch.uint8) * 255


def canny(unit: Tensor) -> Tensor:
    """Find the edge pixels of float64 images `[N, H, W]` in [0, 1] as scikit-image does by default, boolean.

    1. Blur (sigma 1); near the border, divide by the share of the Gaussian that lies inside the image.
    2. Sobel gradients with weights 1 2 1, not normalised; magnitude is their Euclidean length.
    3. Keep a pixel if its magnitude is at least that of both neighbours along the gradient, where a neighbour is
       interpolated linearly between the two pixels that the gradient points between. Border pixels never qualify.
    4. Keep what is at least 0.2, and what is at least 0.1 and joined to such a pixel, also diagonally.

    Float64 because step 3 compares magnitudes that symmetry makes equal.
    """
    smooth = _blur_inside(unit)
    down, right = _sobel(smooth, -2), _sobel(smooth, -1)
    magnitude = torch.hypot(down, right)
    peaks = _local_maxima(magnitude, down, right)
    return hysteresis(peaks & (magnitude >= WEAK_EDGE), peaks & (magnitude >= STRONG_EDGE))


def _blur_inside(values: Tensor) -> Tensor:
    """Blur, and divide by the share of the Gaussian that lies inside the image."""

    def blur(field: Tensor) -> Tensor:
        inside = slice(CANNY_RADIUS, -CANNY_RADIUS)
        return gaussian_blur(functional.pad(field, (CANNY_RADIUS,) * 4), CANNY_SIGMA)[..., inside, inside]

    return blur(values) / blur(torch.ones_like(values[:1]))


def _sobel(values: Tensor, axis: int) -> Tensor:
    """Subtract the neighbours along `axis`, smoothed by 1 2 1 along the other axis."""
    other = -1 if axis == -2 else -2
    length = values.shape[axis]
    padded = pad(values, 1, axis, "reflect")
    slope = padded.narrow(axis, 2, length) - padded.narrow(axis, 0, length)
    length = values.shape[other]
    padded = pad(slope, 1, other, "reflect")
    return padded.narrow(other, 0, length) + 2 * slope + padded.narrow(other, 2, length)


def _local_maxima(magnitude: Tensor, down: Tensor, right: Tensor) -> Tensor:
    height, width = magnitude.shape[-2:]
    padded = functional.pad(magnitude, (1, 1, 1, 1))

    def neighbour(row: int, column: int) -> Tensor:
        return padded[..., 1 + row : 1 + row + height, 1 + column : 1 + column + width]

    steep = down.abs() >= right.abs()
    # The gradient points to the lower right or to the upper left.
    falling = down * right >= 0
    larger = torch.where(steep, down.abs(), right.abs())
    share = torch.where(steep, right.abs(), down.abs()) / torch.where(larger > 0, larger, 1)

    def ahead(sign: int) -> Tensor:
        straight = torch.where(steep, neighbour(sign, 0), neighbour(0, sign))
        rising = torch.where(steep, neighbour(sign, -sign), neighbour(-sign, sign))
        diagonal = torch.where(falling, neighbour(sign, sign), rising)
        return diagonal * share + straight * (1 - share)

    peaks = (ahead(1) <= magnitude) & (ahead(-1) <= magnitude)
    peaks[..., 0, :] = peaks[..., -1, :] = False
    peaks[..., :, 0] = peaks[..., :, -1] = False
    return peaks


@on_grey
def glass_blur(
    images: Tensor,
    *,
    generator: torch.Generator,
    sigma: float,
    reach: int,
    passes: int,
    isotropic: bool = False,
) -> Tensor:
    """Blur, let pixels change places with near ones, and blur again; `isotropic=True` blurs in both directions.

    The blur is vertical by default, because the published set has it so: its generator declared the last axis of a
    grey image to be colour channels, which its library does not blur across.

    Pixels are visited from the lower right to the upper left. Each changes places, with probability one half, with the
    pixel at an offset of `-reach` to `reach - 1` rows and columns. The exchange is a real one, unlike in CIFAR-C, and a
    later visit sees what an earlier one moved; so the visits stay a loop, each of them over the whole batch.
    """
    axes = (-2, -1) if isotropic else (-2,)
    count, _, height, width = images.shape
    soft = finish(primitives.gaussian_blur(to_unit(images, torch.float64), sigma, axes=axes))
    pixels = soft.reshape(count, -1).T.contiguous()
    places = [
        row * width + column for row in range(height - reach, reach, -1) for column in range(width - reach, reach, -1)
    ]
    for _ in range(passes):
        offsets = torch.randint(-reach, reach, (2, len(places), count), generator=generator, device=images.device)
        moves = torch.randint(0, 2, (len(places), count), generator=generator, device=images.device)
        steps = (offsets[0] * width + offsets[1]) * moves
        for place, step in zip(places, steps, strict=True):
            other = (step + place)[None]
            here = pixels[place].clone()
            pixels[place] = pixels.gather(0, other)[0]
            pixels.scatter_(0, other, here[None])
    mixed = pixels.T.reshape(images.shape)
    return to_levels(primitives.gaussian_blur(to_unit(mixed, torch.float64), sigma, axes=axes))


@on_grey
def motion_blur(images: Tensor, *, generator: torch.Generator, radius: int, sigma: float) -> Tensor:
    """Smear each image along its own direction, within 45 degrees of the horizontal."""
    angles = uniform((len(images),), -45, 45, generator)
    return primitives.motion_blur(images, radius, sigma, angles)


@on_grey
def rotate(images: Tensor, *, generator: torch.Generator, angle: float) -> Tensor:
    """Turn by `angle` radians, to the left or to the right."""
    angles = _random_signs((len(images),), generator) * angle
    cosine, sine = torch.cos(angles), torch.sin(angles)
    return warp(images, _matrices(cosine, -sine, sine, cosine))


@on_grey
def scale(images: Tensor, *, generator: torch.Generator | None = None, factor: float) -> Tensor:
    """Shrink to `factor` of the size, about the centre."""
    stretch = torch.eye(2, dtype=torch.float64, device=images.device) / factor
    return warp(images, stretch.expand(len(images), 2, 2))


@on_grey
def shear(images: Tensor, *, generator: torch.Generator, angle: float) -> Tensor:
    """Slant by `angle` radians, to the left or to the right.

    As scikit-image defined it when the set was made (before 0.19): the vertical axis is turned and the horizontal one
    is not, so the digit also becomes taller, by 1 / cos(angle).
    """
    angles = _random_signs((len(images),), generator) * angle
    one, zero = torch.ones_like(angles), torch.zeros_like(angles)
    return warp(images, _matrices(one, -torch.sin(angles), zero, torch.cos(angles)))


@on_grey
def translate(images: Tensor, *, generator: torch.Generator, pixels: int) -> Tensor:
    """Move by `pixels` left or right and by `pixels` up or down."""
    offset = _random_signs((len(images), 2), generator) * pixels
    unchanged = torch.eye(2, dtype=torch.float64, device=images.device)
    return warp(images, unchanged.expand(len(images), 2, 2), offset)


def warp(images: Tensor, matrices: Tensor, offset: Tensor | None = None) -> Tensor:
    """Resample uint8 images by an affine map about their centre, bilinear, black outside.

    `matrices` `[N, 2, 2]` map an output position (column, row), relative to the centre, to the input position to read;
    `offset` `[N, 2]` is added. The centre of 28 x 28 images is (13.5, 13.5).
    """
    height, width = images.shape[-2:]
    centre = torch.tensor([(width - 1) / 2, (height - 1) / 2], dtype=torch.float64, device=images.device)
    columns = torch.arange(width, dtype=torch.float64, device=images.device) - centre[0]
    rows = torch.arange(height, dtype=torch.float64, device=images.device) - centre[1]
    grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), dim=-1)
    read = torch.einsum("nij,hwj->nhwi", matrices, grid) + centre
    if offset is not None:
        read = read + offset[:, None, None]
    return to_levels(sample_bilinear(to_unit(images, torch.float64), read[..., 1], read[..., 0], "zero"))


def _matrices(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return torch.stack((torch.stack((a, b), dim=-1), torch.stack((c, d), dim=-1)), dim=-2)


def _random_signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw -1 or 1 with equal probability, float64."""
    return torch.randint(0, 2, shape, generator=generator, device=generator.device).double().mul_(2).sub_(1)


@on_grey
def spatter(
    images: Tensor,
    *,
    generator: torch.Generator,
    mean: float,
    deviation: float,
    sigma: float,
    threshold: float,
    mask_sigma: float,
) -> Tensor:
    """Splash dark grey mud over the pixels where smoothed Gaussian noise exceeds a threshold.

    The edges of the splashes are blurred, and an opacity below 0.8 becomes 0. The generator of MNIST-C splashes mud at
    all five severities, although its table of parameters marks the first three as water.

    Args:
        images: uint8 images `[N, 1, H, W]`, or `[N, 3, H, W]` with equal channels.
        generator: Generator of the noise.
        mean: Mean of the noise.
        deviation: Standard deviation of the noise before smoothing.
        sigma: Standard deviation of the Gaussian that smooths the noise, in pixels.
        threshold: Level of the smoothed noise above which a pixel is splashed.
        mask_sigma: Standard deviation of the Gaussian that blurs the edges of the splashes, in pixels.

    Returns:
        The splashed images, uint8, in the shape of `images`.

    Raises:
        DataError: If the images are not uint8, not grey, or too small.
    """
    noise = primitives.gaussian_blur(normal(images.shape, mean, deviation, generator), sigma)
    mud = primitives.gaussian_blur((noise > threshold).float(), mask_sigma)
    mud = mud.masked_fill(mud < 0.8, 0)
    return finish(to_unit(images) * (1 - mud) + MUD * mud)


@on_grey
def mnist_m(images: Tensor, *, generator: torch.Generator, textures: Sequence[Tensor]) -> Tensor:
    """Subtract the digit from a random window of a random photograph, without sign; one channel becomes three.

    The digit keeps its own grey levels, as in the usual construction: soft edges stay soft. (The background shifts
    of EMNIST-DA make every pixel above 0 white first.) The published set took its photographs from BSDS500.
    """
    windows = crop(textures, len(images), images.shape[-2], images.shape[-1], generator)
    return torch.maximum(windows, images) - torch.minimum(windows, images)


def _levels(name: str, *values: float) -> tuple[dict[str, float], ...]:
    return tuple({name: value} for value in values)


_ONCE: tuple[dict[str, float], ...] = ({},)
_GLASS_BLUR = tuple(
    {"sigma": sigma, "reach": reach, "passes": passes}
    for sigma, reach, passes in ((0.7, 1, 2), (0.9, 2, 1), (1.0, 2, 3), (1.1, 3, 2), (1.5, 4, 2))
)
_MOTION_BLUR = tuple(
    {"radius": radius, "sigma": sigma} for radius, sigma in ((10, 3.0), (15, 5.0), (15, 8.0), (15, 12.0), (20, 15.0))
)

_SPATTER = tuple(
    {"mean": mean, "deviation": deviation, "sigma": sigma, "threshold": threshold, "mask_sigma": mask_sigma}
    for mean, deviation, sigma, threshold, mask_sigma in (
        (0.65, 0.3, 4.0, 0.69, 0.6),
        (0.65, 0.3, 3.0, 0.68, 0.6),
        (0.65, 0.3, 2.0, 0.68, 0.5),
        (0.65, 0.3, 1.0, 0.65, 1.5),
        (0.67, 0.4, 1.0, 0.65, 1.5),
    )
)

_RADIANS = (0.2, 0.4, 0.6, 0.8, 1.0)

_ALL = (
    Shift(
        "mnist-c/brightness",
        brightness,
        _levels("shift", 0.1, 0.2, 0.3, 0.4, 0.5),
        5,
        "everything brighter",
        random=False,
    ),
    Shift("mnist-c/canny_edges", canny_edges, _ONCE, 1, "the outline only", random=False),
    Shift("mnist-c/dotted_line", emnist_da.dotted_line, _ONCE, 1, "a dotted line across the image"),
    Shift("mnist-c/fog", emnist_da.fog, emnist_da.FOG, 5, "a cloud over the image, little contrast left"),
    Shift("mnist-c/glass_blur", glass_blur, _GLASS_BLUR, 1, "near pixels exchanged, blurred up and down"),
    Shift("mnist-c/identity", emnist_da.identity, _ONCE, 1, "nothing changes", random=False),
    Shift("mnist-c/impulse_noise", emnist_da.impulse_noise, emnist_da.IMPULSE_NOISE, 4, "white and black specks"),
    Shift("mnist-c/motion_blur", motion_blur, _MOTION_BLUR, 1, "smeared along one direction"),
    Shift("mnist-c/rotate", rotate, _levels("angle", *_RADIANS), 2, "turned to one side"),
    Shift("mnist-c/scale", scale, _levels("factor", 0.9, 0.8, 0.7, 0.6, 0.5), 3, "made smaller", random=False),
    Shift("mnist-c/shear", shear, _levels("angle", *_RADIANS), 2, "slanted to one side"),
    Shift("mnist-c/shot_noise", emnist_da.shot_noise, emnist_da.SHOT_NOISE, 5, "grain from few photons"),
    Shift("mnist-c/spatter", spatter, _SPATTER, 4, "splashes of mud"),
    Shift("mnist-c/stripe", emnist_da.stripe, _ONCE, 1, "the left and right quarter inverted", random=False),
    Shift("mnist-c/translate", translate, _levels("pixels", 1, 2, 3, 4, 5), 3, "moved towards a corner"),
    Shift("mnist-c/zigzag", emnist_da.zigzag, _ONCE, 1, "a zigzag across the image"),
    Shift("mnist-m", mnist_m, _ONCE, 1, "the digit inverted out of a photograph", texture="photographs"),
)

SHIFTS: dict[str, Shift] = {shift.name: shift for shift in _ALL}
