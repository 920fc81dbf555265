"""A contact sheet: the same images under one shift after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional

from shiftmend.errors import DataError
from shiftmend.research.figures import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GAP = 2


def draw(rows: Mapping[str, Tensor], title: str = "") -> Figure:
    """A row for each entry, of uint8 images `[N, 1 or 3, H, W]` side by side, with its name before it."""
    if not rows or any(images.ndim != 4 or len(images) == 0 for images in rows.values()):
        raise DataError("a contact sheet needs rows of images [N, C, H, W], at least one in each")
    most = max(len(images) for images in rows.values())
    figure, axes = style.canvas(len(rows), 1, width=0.55 * most + 1.4, height=0.6)
    for axis, (name, images) in zip(axes[:, 0], rows.items(), strict=True):
        axis.imshow(strip(images).numpy(), interpolation="nearest")
        axis.set_ylabel(style.words(name), rotation=0, ha="right", va="center", fontsize=style.SMALL)
        axis.set_xticks([])
        axis.set_yticks([])
        axis.grid(False)
        axis.spines[:].set_visible(False)
    if title:
        style.title(figure, title)
    return figure


def strip(images: Tensor) -> Tensor:
    """Images side by side with white between them, `[H, W, 3]`; grey ones as grey."""
    colour = images.cpu().expand(-1, 3, -1, -1) if images.shape[1] == 1 else images.cpu()
    apart = functional.pad(colour, (GAP, GAP, GAP, GAP), value=255)
    return apart.permute(2, 0, 3, 1).reshape(apart.shape[2], -1, 3)
