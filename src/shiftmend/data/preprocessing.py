"""From stored 8-bit images to what the paper's networks take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor


def signed(images: Tensor) -> Tensor:
    """8-bit images, grey or in colour, to three channels in [-1, 1]: the digits and characters."""
    scaled = images.float().div_(127.5).sub_(1)
    return scaled.expand(-1, 3, -1, -1) if images.shape[1] == 1 else scaled


def standardised(mean: Sequence[float], deviation: Sequence[float]) -> Callable[[Tensor], Tensor]:
    """8-bit images in colour, scaled to [0, 1], less a mean and divided by a deviation for each channel."""

    def preprocess(images: Tensor) -> Tensor:
        centre = images.new_tensor(mean, dtype=images.float().dtype).view(1, -1, 1, 1)
        spread = images.new_tensor(deviation, dtype=centre.dtype).view(1, -1, 1, 1)
        return images.float().div_(255).sub_(centre).div_(spread)

    return preprocess
