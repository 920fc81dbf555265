"""Contrast, colour, compression and geometry: the digital corruptions of CIFAR-C."""

from __future__ import annotations

import io
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shiftmend.shifts.base import check_images
from shiftmend.shifts.cifar_c.colour import check_colour, from_hsv, to_hsv
from shiftmend.shifts.primitives import finish, gaussian_blur, sample_bilinear, to_unit, uniform


def contrast(images: Tensor, *, generator: torch.Generator | None = None, factor: float) -> Tensor:
    """Pull every channel towards its own mean over the picture. Draws nothing."""
    check_images(images)
    mean = to_unit(images.double().mean(dim=(-2, -1), keepdim=True), torch.float64)
    return finish((to_unit(images, torch.float64) - mean).mul_(factor).add_(mean))


def brightness(images: Tensor, *, generator: torch.Generator | None = None, shift: float) -> Tensor:
    """Raise the value of hue, saturation and value. Draws nothing."""
    check_colour(images)
    hue, saturation, value = to_hsv(to_unit(images, torch.float64))
    return finish(from_hsv(hue, saturation, (value + shift).clamp_(0, 1)))


def saturate(images: Tensor, *, generator: torch.Generator | None = None, factor: float, shift: float) -> Tensor:
    """Scale and raise the saturation; a raise turns grey reddish, as grey has hue 0. Draws nothing."""
    check_colour(images)
    hue, saturation, value = to_hsv(to_unit(images, torch.float64))
    return finish(from_hsv(hue, (saturation * factor + shift).clamp_(0, 1), value))


def jpeg_compression(images: Tensor, *, generator: torch.Generator | None = None, quality: int) -> Tensor:
    """Write and read back as JPEG with Pillow's defaults (bits depend on its libjpeg). Draws nothing."""
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


def pixelate(images: Tensor, *, generator: torch.Generator | None = None, factor: float) -> Tensor:
    """Shrink the sides to `int(factor * side)` and enlarge them again into blocks. Draws nothing.

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


def elastic_transform(
    images: Tensor, *, generator: torch.Generator, alpha: float, sigma: float, jitter: float
) -> Tensor:
    """A random affine map, then a random displacement of every pixel, each with its own interpolation.

    `jitter` moves three anchor points by up to so many pixels; `alpha` scales a displacement field that was
    smoothed with `sigma`. Severity 1 has the largest jitter, so the change shrinks with severity.
    """
    check_images(images)
    count, _, height, width = images.shape
    columns, rows = affine_positions(count, height, width, jitter, generator)
    bent = sample_bilinear(to_unit(images), rows, columns, "mirror")
    move = uniform((2, count, height, width), -1, 1, generator)
    move = gaussian_blur(move, sigma, truncate=3.0, mode="reflect").mul_(alpha)
    row_grid = torch.arange(height, device=images.device)[:, None]
    column_grid = torch.arange(width, device=images.device)
    return finish(sample_bilinear(bent, row_grid + move[1], column_grid + move[0], "reflect"))


def affine_positions(
    count: int, height: int, width: int, jitter: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Columns and rows `[count, H, W]` that each output pixel reads under a random affine map.

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
