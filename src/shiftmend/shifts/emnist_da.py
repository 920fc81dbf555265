"""The thirteen shifts of EMNIST-DA, the character set released with the BUFR paper.

Five lay the glyph over a texture ("background shifts"), eight change the grey image alone. The photographs behind the
published five are not distributed, so those can be rebuilt in kind but not in number: see `shiftmend.shifts.textures`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shiftmend.shifts import glyphs as digits
from shiftmend.shifts.base import Shift
from shiftmend.shifts.glyphs import on_grey, to_levels
from shiftmend.shifts.primitives import gaussian_blur as blur
from shiftmend.shifts.primitives import to_unit
from shiftmend.shifts.textures import crop

BACKGROUNDS = ("bricks", "crystals", "grass", "oranges", "sky")


@on_grey
def background(images: Tensor, *, generator: torch.Generator, textures: Sequence[Tensor]) -> Tensor:
    """Show a random window of the texture, with its colours inverted where the glyph is; one channel becomes three.

    Every pixel above 0 belongs to the glyph, also the faintest of its soft edge, so strokes become fat.
    """
    patches = crop(textures, len(images), images.shape[-2], images.shape[-1], generator)
    return torch.where(images > 0, 255 - patches, patches)


@on_grey
def inverse(images: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Black becomes white and white black."""
    return 255 - images


@on_grey
def gaussian_blur(
    images: Tensor, *, generator: torch.Generator | None = None, sigma: float, isotropic: bool = False
) -> Tensor:
    """Blur along the columns of the image only; `isotropic=True` blurs in both directions.

    The generator of the published set declared the last axis of a grey image to be its colour channels, and its
    library does not blur across channels. The blur is therefore vertical: glyphs are dragged up and down, and keep
    their sharp sides. That is what the published figures were measured on, hence the default.
    """
    axes = (-2, -1) if isotropic else (-2,)
    return to_levels(blur(to_unit(images, torch.float64), sigma, axes=axes))


_ONCE: tuple[dict[str, float], ...] = ({},)


_BACKGROUNDS = [
    Shift(f"emnist-da/{name}", background, _ONCE, 1, f"the glyph inverted out of a texture: {name}", texture=name)
    for name in BACKGROUNDS
]


_GREY = [
    Shift("emnist-da/dotted_line", digits.dotted_line, _ONCE, 1, "a dotted line across the image"),
    Shift("emnist-da/fog", digits.fog, digits.FOG, 5, "a cloud over the image, little contrast left"),
    Shift(
        "emnist-da/gaussian_blur",
        gaussian_blur,
        tuple({"sigma": sigma} for sigma in (1.0, 2.0, 3.0, 4.0, 6.0)),
        3,
        "blurred up and down, not sideways",
        random=False,
    ),
    Shift("emnist-da/identity", digits.identity, _ONCE, 1, "nothing changes", random=False),
    Shift("emnist-da/impulse_noise", digits.impulse_noise, digits.IMPULSE_NOISE, 4, "white and black specks"),
    Shift("emnist-da/inverse", inverse, _ONCE, 1, "black on white", random=False),
    Shift("emnist-da/shot_noise", digits.shot_noise, digits.SHOT_NOISE, 5, "grain from few photons"),
    Shift("emnist-da/stripe", digits.stripe, _ONCE, 1, "the left and right quarter inverted", random=False),
    Shift("emnist-da/zigzag", digits.zigzag, _ONCE, 1, "a zigzag across the image"),
]


SHIFTS: dict[str, Shift] = {shift.name: shift for shift in sorted(_BACKGROUNDS + _GREY, key=lambda shift: shift.name)}
