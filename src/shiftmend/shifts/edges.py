"""Canny edges the way scikit-image finds them with its default settings, for a whole batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from shiftmend.shifts.primitives import gaussian_blur, hysteresis, pad

SIGMA = 1.0
RADIUS = 4
LOW, HIGH = 0.1, 0.2


def canny(unit: Tensor) -> Tensor:
    """The edge pixels of float64 images `[N, H, W]` in [0, 1], boolean.

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
    return hysteresis(peaks & (magnitude >= LOW), peaks & (magnitude >= HIGH))


def _blur_inside(values: Tensor) -> Tensor:
    height, width = values.shape[-2:]

    def blur(field: Tensor) -> Tensor:
        padded = functional.pad(field, (RADIUS,) * 4)
        return gaussian_blur(padded, SIGMA)[..., RADIUS : RADIUS + height, RADIUS : RADIUS + width]

    return blur(values) / blur(torch.ones_like(values[:1]))


def _sobel(values: Tensor, axis: int) -> Tensor:
    """Difference of the neighbours along `axis`, smoothed by 1 2 1 along the other one."""
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
    falling = down * right >= 0  # the gradient points to the lower right or to the upper left
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
