"""Colour spaces, for the corruptions that only make sense for three channels."""

from __future__ import annotations

import torch
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.shifts.base import check_images


def check_colour(images: Tensor) -> None:
    """Refuse what is no batch of 8-bit colour images."""
    check_images(images)
    if images.shape[1] != 3:
        raise DataError(
            f"this shift changes colours and takes 3 channels, got {images.shape[1]}; "
            "repeat a grey channel three times first"
        )


def luminance(unit: Tensor) -> Tensor:
    """The grey value `[N, 1, H, W]` of `[N, 3, H, W]`, with the weights of analogue television."""
    return 0.299 * unit[:, 0:1] + 0.587 * unit[:, 1:2] + 0.114 * unit[:, 2:3]


def to_hsv(unit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hue in [0, 1), saturation and value, each `[N, H, W]`. Grey has hue 0 and saturation 0."""
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
    """Back to `[N, 3, H, W]`: in each sixth of the hue circle one channel leads, one trails."""
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
