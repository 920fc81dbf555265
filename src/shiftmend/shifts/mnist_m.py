"""MNIST-M: digits blended into photographs (Ganin et al., 2016)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shiftmend.shifts.base import Shift
from shiftmend.shifts.glyphs import on_grey
from shiftmend.shifts.textures import crop


@on_grey
def mnist_m(images: Tensor, *, generator: torch.Generator, textures: Sequence[Tensor]) -> Tensor:
    """The absolute difference between a random window of a random photograph and the digit; one channel becomes three.

    The digit keeps its own grey levels, as in the usual construction: soft edges stay soft. (The background shifts
    of EMNIST-DA make every pixel above 0 white first.) The published set took its photographs from BSDS500.
    """
    windows = crop(textures, len(images), images.shape[-2], images.shape[-1], generator)
    return torch.maximum(windows, images) - torch.minimum(windows, images)


SHIFTS: dict[str, Shift] = {
    "mnist-m": Shift("mnist-m", mnist_m, ({},), 1, "the digit inverted out of a photograph", texture="photographs")
}
