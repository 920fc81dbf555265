"""Drops of water or mud on the lens, after CIFAR-C."""

from __future__ import annotations

import torch
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.shifts.cifar_c.colour import check_colour
from shiftmend.shifts.primitives import chamfer, correlate, finish, gaussian_blur, hysteresis, normal, pad, to_unit

LIQUIDS = {"water": (175, 238, 238), "mud": (63, 42, 20)}

# Gradients that count as a weak and as a strong edge of a drop; the distance beyond which no edge matters.
WEAK_EDGE, STRONG_EDGE = 50, 150
FARTHEST = 20.0
EMBOSS = ((-2.0, -1.0, 0.0), (-1.0, 1.0, 1.0), (0.0, 1.0, 2.0))


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
    if liquid not in LIQUIDS:
        raise DataError(f"spatter knows water and mud, got {liquid!r}")
    count, _, height, width = images.shape
    drops = gaussian_blur(normal((count, height, width), mean, deviation, generator), sigma)
    drops = drops.masked_fill_(drops < threshold, 0)
    colour = to_unit(torch.tensor(LIQUIDS[liquid], device=images.device)).view(3, 1, 1)
    if liquid == "mud":
        cover = gaussian_blur((drops > threshold).float(), edge_sigma)
        cover = cover.masked_fill_(cover < 0.8, 0)[:, None]
        return finish(to_unit(images) * (1 - cover) + cover * colour)
    return finish(to_unit(images) + strength * shine(drops)[:, None] * colour)


def shine(drops: Tensor) -> Tensor:
    """Where water drops `[N, H, W]` reflect light: zero to one, most along their lower right rims."""
    # An eight-bit picture of the drops; values above one wrap around, as they do in the published generator.
    levels = (drops * 255).to(torch.int32) & 255
    distance = chamfer(canny(levels)).clamp_(max=FARTHEST)
    shading = equalise(box_mean(distance).to(torch.uint8))
    relief = correlate(shading.float(), torch.tensor(EMBOSS), "mirror").clamp_(0, 255)
    light = levels * box_mean(relief).round_()
    brightest = light.amax(dim=(-2, -1), keepdim=True)
    return light / torch.where(brightest > 0, brightest, 1)


def canny(levels: Tensor) -> Tensor:
    """Edges of integer pictures `[N, H, W]` with values 0 to 255, boolean.

    Whole-number gradients (3 x 3, edge repeated), their length as |x| + |y|, thinned across the edge in one
    of four directions, then traced from strong pixels through weak ones.
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
    """Mean over 3 x 3 pixels of float `[N, H, W]`, mirrored at the border."""
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
