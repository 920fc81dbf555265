"""Operations on images and signals that several shifts share, each over a whole batch and on any device.

Border names are those of scipy.ndimage: `nearest` repeats the edge pixel, `reflect` mirrors about the edge
of the picture (the edge pixel appears twice), `mirror` mirrors about the edge pixel (it appears once), `zero`
sees black outside. Randomness comes from an explicit generator only.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

# Cost of one step to a neighbour in 1/65536 pixel: sideways, diagonal, and a knight's move.
CHAMFER_UNIT = 65536
CHAMFER_SIDE, CHAMFER_DIAGONAL, CHAMFER_KNIGHT = 65536, 91750, 143976


def to_unit(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Scale grey levels 0 to 255 to numbers from 0 to 1."""
    # A tensor as divisor: CUDA may multiply by the rounded reciprocal of a Python number, which is not the same.
    return images.to(dtype) / torch.full((), 255, dtype=dtype, device=images.device)


def finish(unit: Tensor) -> Tensor:
    """Turn numbers from 0 to 1 into grey levels: clip, then truncate (not round), as the official files do.

    `finish(to_unit(images))` gives back `images` exactly.
    """
    return unit.clamp(0, 1).mul_(255).to(torch.uint8)


def border_index(index: Tensor, length: int, mode: str) -> Tensor:
    """Map any integer position to the position inside `0..length-1` that the border rule reads."""
    if mode == "nearest":
        return index.clamp(0, length - 1)
    if mode == "reflect":
        wrapped = index.remainder(2 * length)
        return torch.minimum(wrapped, 2 * length - 1 - wrapped)
    assert mode == "mirror"
    period = max(2 * (length - 1), 1)
    wrapped = index.remainder(period)
    return torch.minimum(wrapped, period - wrapped).clamp_(max=length - 1)


def pad(values: Tensor, amount: int, dim: int, mode: str) -> Tensor:
    """Add `amount` positions on both sides of an axis, which may itself be shorter."""
    length = values.shape[dim]
    positions = torch.arange(-amount, length + amount, device=values.device)
    return values.index_select(dim, border_index(positions, length, mode))


def gaussian_kernel(sigma: float, truncate: float = 4.0) -> Tensor:
    """Sample a Gaussian of radius `int(truncate * sigma + 0.5)`, float64, summing to one."""
    radius = int(truncate * sigma + 0.5)
    if radius == 0:
        return torch.ones(1, dtype=torch.float64)
    # numpy rather than torch: the weights then agree with those of scipy to the last bit.
    weights = np.exp(-0.5 / (sigma * sigma) * np.arange(-radius, radius + 1) ** 2)
    return torch.from_numpy(weights / weights.sum())


def gaussian_blur(
    values: Tensor,
    sigma: float,
    *,
    truncate: float = 4.0,
    mode: str = "nearest",
    axes: tuple[int, ...] = (-2, -1),
) -> Tensor:
    """Blur `values` `[..., H, W]` along `axes`, one axis after the other, in their own floating type.

    The two neighbours at equal distance are added before they are weighted, farthest first. Scipy sums in
    this order too, and the order decides whether a truncated grey level comes out as v or as v - 1.
    """
    kernel = gaussian_kernel(sigma, truncate).tolist()
    radius = len(kernel) // 2
    if radius == 0:
        return values.clone()
    for axis in axes:
        length = values.shape[axis]
        padded = pad(values, radius, axis, mode)
        values = values * kernel[radius]
        for distance in range(radius, 0, -1):
            before = padded.narrow(axis, radius - distance, length)
            after = padded.narrow(axis, radius + distance, length)
            values += (before + after).mul_(kernel[radius - distance])
    return values


def correlate(values: Tensor, kernel: Tensor, mode: str) -> Tensor:
    """Compute the cross-correlation of images with a small kernel of odd size, without flipping the kernel.

    Weighted copies of the image are added one by one, in the image's dtype. Unlike this sum, a convolution may round
    to a lower precision, or may lack the dtype on some devices.

    Args:
        values: Floating-point images `[..., H, W]`.
        kernel: Weights `[rows, columns]`, both odd.
        mode: Rule for positions outside of the image: "nearest", "reflect" or "mirror".

    Returns:
        Weighted sums of the neighbourhood of every pixel, `[..., H, W]`.
    """
    height, width = values.shape[-2:]
    rows, columns = kernel.shape
    padded = pad(pad(values, rows // 2, -2, mode), columns // 2, -1, mode)
    total = torch.zeros_like(values)
    for row, weights in enumerate(kernel.tolist()):
        for column, weight in enumerate(weights):
            if weight != 0:
                total.add_(padded[..., row : row + height, column : column + width], alpha=weight)
    return total


def plasma(count: int, size: int, decay: float, generator: torch.Generator, *, window: int | None = None) -> Tensor:
    """Draw `count` cloud textures in [0, 1] by diamond-square on a torus, float32 `[count, size, size]`.

    `size` is a power of two. With `window` only the top left `[count, window, window]` is kept of maps that
    were rescaled as a whole, and the work is done in portions, so that many large maps fit into memory.
    """
    if window is None:
        return _plasma(count, size, decay, generator)
    portion = max(1, 2**23 // size**2)
    parts = [
        _plasma(min(portion, count - start), size, decay, generator)[:, :window, :window].clone()
        for start in range(0, count, portion)
    ]
    return torch.cat(parts) if parts else torch.empty(0, window, window, device=generator.device)


def _plasma(count: int, size: int, decay: float, generator: torch.Generator) -> Tensor:
    corners = torch.zeros(count, 1, 1, device=generator.device)
    amplitude = 100.0
    while corners.shape[-1] < size:
        # The published generator multiplies a uniform number from -amplitude to amplitude by the amplitude.
        noise = torch.rand(3, *corners.shape, generator=generator, device=generator.device)
        noise = noise.mul_(2).sub_(1).mul_(amplitude**2)
        below = corners.roll(-1, -2)
        sideways = corners + corners.roll(-1, -1)
        centres = (sideways + sideways.roll(-1, -2)) / 4 + noise[0]
        on_rows = (sideways + centres.roll(1, -2) + centres) / 4 + noise[1]
        on_columns = (corners + below + centres.roll(1, -1) + centres) / 4 + noise[2]
        upper = torch.stack((corners, on_rows), dim=-1).flatten(-2)
        lower = torch.stack((on_columns, centres), dim=-1).flatten(-2)
        corners = torch.stack((upper, lower), dim=-2).flatten(-3, -2)
        amplitude /= decay
    corners -= corners.amin(dim=(-2, -1), keepdim=True)
    return corners.div_(corners.amax(dim=(-2, -1), keepdim=True))


def motion_blur(images: Tensor, radius: int, sigma: float, angles_in_degrees: Tensor) -> Tensor:
    """Smear each uint8 image `[N, C, H, W]` along its own angle `[N]`; rounds instead of truncating.

    The kernel is one-sided: a pixel mixes in the `2 * radius` whole pixels along the ray that starts at it
    (0 degrees: to the right, 90 degrees: down), weighted by half a Gaussian. Beyond the edge, the edge pixel
    is repeated.
    """
    taps = 2 * radius + 1
    weights = torch.exp(-(torch.arange(taps, dtype=torch.float64) ** 2) / (2 * sigma * sigma))
    weights /= weights.sum()
    height, width = images.shape[-2:]
    angles = torch.deg2rad(angles_in_degrees.to(images.device, torch.float64))[:, None]
    row_grid = torch.arange(height, device=images.device)
    column_grid = torch.arange(width, device=images.device)
    flat = images.flatten(-2).float()
    total = torch.zeros_like(flat)
    for step, weight in enumerate(weights.tolist()):
        down = torch.ceil(step * torch.sin(angles) - 0.5).long()
        right = torch.ceil(step * torch.cos(angles) - 0.5).long()
        rows = border_index(row_grid + down, height, "nearest")
        columns = border_index(column_grid + right, width, "nearest")
        index = (rows[:, :, None] * width + columns[:, None, :]).flatten(1)
        total.add_(flat.gather(-1, index[:, None].expand_as(flat)), alpha=weight)
    # Sixteen-bit grey levels (257 per 8-bit level) are rounded first, then brought back to eight bits.
    # The extra 0.5 keeps whole quotients clear of a division that is rounded down.
    sixteen = total.mul_(257).add_(0.5).floor_()
    return sixteen.add_(128.5).div_(257).to(torch.uint8).reshape(images.shape)


def sample_bilinear(images: Tensor, rows: Tensor, columns: Tensor, mode: str) -> Tensor:
    """Read float `images` `[N, C, H, W]` at real-valued positions `[N, h, w]`, giving `[N, C, h, w]`.

    With `zero`, a neighbour outside the picture counts as 0, so values fade out over one pixel.
    """
    height, width = images.shape[-2:]
    top, left = rows.floor(), columns.floor()
    down, right = (rows - top).to(images.dtype), (columns - left).to(images.dtype)
    flat = images.flatten(-2)
    result = images.new_zeros(*images.shape[:2], *rows.shape[1:])
    for row_step in (0, 1):
        row_weight = down if row_step else 1 - down
        row_index = top.long() + row_step
        for column_step in (0, 1):
            weight = row_weight * (right if column_step else 1 - right)
            column_index = left.long() + column_step
            if mode == "zero":
                inside = (row_index >= 0) & (row_index < height)
                inside &= (column_index >= 0) & (column_index < width)
                weight = weight * inside
            border = "nearest" if mode == "zero" else mode
            index = border_index(row_index, height, border) * width
            index = (index + border_index(column_index, width, border)).flatten(1)[:, None]
            values = flat.gather(-1, index.expand(-1, images.shape[1], -1))
            result.addcmul_(values.view_as(result), weight[:, None])
    return result


def sample_linear(values: Tensor, positions: Tensor) -> Tensor:
    """Read `values` `[..., L]` at positions `[l]` from 0 on, giving `[..., l]`; beyond the last, it is repeated."""
    last = values.shape[-1] - 1
    left = positions.floor().long().clamp(max=last)
    right = (left + 1).clamp(max=last)
    share = (positions - left).to(values.dtype)
    return values[..., left] * (1 - share) + values[..., right] * share


def count_photons(unit: Tensor, photons: float, read_noise: float, generator: torch.Generator) -> Tensor:
    """Count `photons` at full scale, and add normal read noise of that deviation; both relative to full scale."""
    counted = torch.poisson(unit * photons, generator=generator) / photons
    return counted + normal(tuple(unit.shape), 0.0, read_noise, generator)


def stick_pixels(
    images: Tensor, share_of_pixels: float, share_of_rows: float, white: float, generator: torch.Generator
) -> Tensor:
    """Set random pixels of images `[..., H, W]` to 0 or `white`, half of them each, and random rows to 0.

    The pixels and rows are the same in every image.
    """
    height, width = images.shape[-2:]
    draws = torch.rand(height, width, generator=generator, device=generator.device).to(images.device)
    order = torch.rand(height, generator=generator, device=generator.device).argsort().to(images.device)
    half = share_of_pixels / 2
    result = images.masked_fill(draws < half, 0).masked_fill(draws > 1 - half, white)
    result[..., order[: round(share_of_rows * height)], :] = 0
    return result


def coarsen(unit: Tensor, scale: float) -> Tensor:
    """Average `[N, C, H, W]` to `scale` times the pixels a side, then enlarge by interpolation."""
    height, width = unit.shape[-2:]
    small = (max(1, round(height * scale)), max(1, round(width * scale)))
    coarse = functional.interpolate(unit, size=small, mode="area")
    return functional.interpolate(coarse, size=(height, width), mode="bilinear", align_corners=False)


def dilate(mask: Tensor) -> Tensor:
    """Grow a boolean mask `[..., H, W]` by one pixel in all eight directions."""
    tall = mask.clone()
    tall[..., 1:, :] |= mask[..., :-1, :]
    tall[..., :-1, :] |= mask[..., 1:, :]
    wide = tall.clone()
    wide[..., 1:] |= tall[..., :-1]
    wide[..., :-1] |= tall[..., 1:]
    return wide


def hysteresis(weak: Tensor, strong: Tensor) -> Tensor:
    """Keep the 8-connected groups of `weak` pixels that touch a `strong` one; boolean `[N, H, W]`.

    A pixel that is strong but not weak counts as neither.
    """
    kept = weak & strong
    while True:
        grown = dilate(kept) & weak
        if torch.equal(grown, kept):
            return kept
        kept = grown


def chamfer(seeds: Tensor) -> Tensor:
    """Compute the approximate distance in pixels from each pixel to the nearest True pixel of `seeds`.

    Steps to the sides, to the diagonals and of a knight's move have fixed lengths (a 5 x 5 chamfer mask).

    Args:
        seeds: Boolean images `[N, H, W]`.

    Returns:
        Distances `[N, H, W]`, float32. An image without a True pixel is filled with 8192.
    """
    height, width = seeds.shape[-2:]
    far = 2**29
    distance = torch.where(seeds, 0, far).to(torch.int32)
    ramp = torch.arange(width, dtype=torch.int32, device=seeds.device) * CHAMFER_SIDE
    # One sweep down and one up relax every step of a shortest path; a row itself is a running minimum.
    for _ in range(2):
        for row in range(height):
            best = distance[:, row].clone()
            for above, aside, cost in (
                (1, 0, CHAMFER_SIDE),
                (1, 1, CHAMFER_DIAGONAL),
                (1, 2, CHAMFER_KNIGHT),
                (2, 1, CHAMFER_KNIGHT),
            ):
                if above > row or aside >= width:
                    continue
                source = distance[:, row - above] + cost
                kept = width - aside
                best[:, :kept] = torch.minimum(best[:, :kept], source[:, aside:])
                best[:, aside:] = torch.minimum(best[:, aside:], source[:, :kept])
            distance[:, row] = torch.cummin(best - ramp, dim=-1).values + ramp
        # Turned by 180 degrees, the sweep up is the same code; the second turn brings the picture back.
        distance = distance.flip(-2, -1)
    return distance.float() / CHAMFER_UNIT


def uniform(shape: tuple[int, ...], low: float, high: float, generator: torch.Generator) -> Tensor:
    """Draw float32 numbers evenly from `[low, high)`, on the device of the generator."""
    return torch.rand(shape, generator=generator, device=generator.device).mul_(high - low).add_(low)


def normal(shape: tuple[int, ...], mean: float, deviation: float, generator: torch.Generator) -> Tensor:
    """Draw float32 normal numbers on the device of the generator."""
    return torch.randn(shape, generator=generator, device=generator.device).mul_(deviation).add_(mean)
