"""The five blurs of CIFAR-C."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shiftmend.shifts import primitives
from shiftmend.shifts.base import check_images
from shiftmend.shifts.primitives import correlate, finish, to_unit, uniform


def gaussian_blur(images: Tensor, *, generator: torch.Generator | None = None, sigma: float) -> Tensor:
    """Blur with a Gaussian. Draws nothing."""
    check_images(images)
    # Float64: in flat areas the last bit decides whether truncation loses a grey level.
    return finish(primitives.gaussian_blur(to_unit(images, torch.float64), sigma))


def glass_blur(images: Tensor, *, generator: torch.Generator, sigma: float, passes: int) -> Tensor:
    """Blur, let every pixel take the value of itself or its left, upper or upper left neighbour, blur again.

    The published generator means to swap two pixels but copies one over the other, only ever from the upper
    left, and never writes to the first two rows and columns. Each copy reads what its pass has not written
    yet, so a pass is one choice per pixel among four shifted pictures.
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


def defocus_kernel(radius: float, sigma: float) -> Tensor:
    """A disk whose edge is softened by a 3-tap Gaussian; float32, side `2 * int(radius) + 3`."""
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


def defocus_blur(images: Tensor, *, generator: torch.Generator | None = None, radius: float, sigma: float) -> Tensor:
    """Blur with a softened disk. Draws nothing."""
    check_images(images)
    # The float32 weights do not quite sum to one; in flat areas, this decides what truncation does.
    kernel = defocus_kernel(radius, sigma)
    return finish(correlate(to_unit(images, torch.float64), kernel, "mirror"))


def motion_blur(images: Tensor, *, generator: torch.Generator, radius: int, sigma: float) -> Tensor:
    """Drag each picture to the left, up to 45 degrees up or down."""
    check_images(images)
    angles = uniform((images.shape[0],), -45, 45, generator)
    return primitives.motion_blur(images, radius, sigma, angles)


def zoom_geometry(side: int, factor: float) -> tuple[int, int, int]:
    """How a side is enlarged: start and length of the crop, and the length it is resized to."""
    crop = math.ceil(side / factor)
    return (side - crop) // 2, crop, round(crop * factor)


def zoom_matrix(side: int, factor: float) -> Tensor:
    """Enlarging one axis as a float64 matrix: crop, linear resize with aligned ends, cut back to `side`."""
    start, crop, resized = zoom_geometry(side, factor)
    first = (resized - side) // 2
    positions = torch.arange(first, first + side, dtype=torch.float64) * (crop - 1) / max(resized - 1, 1)
    low = positions.floor().clamp_(max=crop - 1)
    matrix = torch.zeros(side, side, dtype=torch.float64)
    output = torch.arange(side)
    matrix[output, start + low.long()] = 1 - (positions - low)
    matrix[output, start + (low.long() + 1).clamp_(max=crop - 1)] += positions - low
    return matrix


def zoom(values: Tensor, factor: float) -> Tensor:
    """Enlarge `[..., H, W]` about its middle by `factor`, keeping the size; float64 inside."""
    rows = zoom_matrix(values.shape[-2], factor).to(values.device)
    columns = zoom_matrix(values.shape[-1], factor).to(values.device)
    return (rows @ values.double() @ columns.T).to(values.dtype)


def zoom_blur(images: Tensor, *, generator: torch.Generator | None = None, copies: int) -> Tensor:
    """Average the picture with `copies` enlargements of it by 1.00, 1.01, 1.02, ... Draws nothing."""
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
