"""The picture of the demo: what each device recorded, and the predictions before and after adapting."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from shiftmend.utils.files import said_where, write_atomically

# Colours that are distinguishable with colour blindness and in greyscale print.
RIGHT, WRONG = "#0072b2", "#d55e00"
TITLE = "What four devices recorded, and what the model reads: bold blue is right, thin orange is wrong"
SCALE = 3
"""Number of picture pixels per image pixel."""

GAP, MARGIN, LABELS_WIDTH, LINE_HEIGHT, TITLE_HEIGHT = 6, 14, 400, 27, 44
"""Sizes in pixels."""


@dataclass(frozen=True, eq=False)
class Strip:
    """Images of one device with their predictions.

    Attributes:
        device: Name of the device.
        images: uint8 `[N, 1 or 3, H, W]`.
        readings: Predicted classes `[N]`, by the caption of their line.
    """

    device: str
    images: Tensor
    readings: Mapping[str, Tensor]


def draw(strips: Sequence[Strip], labels: Tensor, path: Path) -> None:
    """Draw the images of each device with the predictions below them.

    Args:
        strips: One for each device.
        labels: True classes `[N]`.
        path: The PNG file to write.
    """
    from PIL import Image, ImageDraw, ImageFont

    small, middle, large = (ImageFont.load_default(size) for size in (17, 19, 21))
    side = SCALE * strips[0].images.shape[-1]
    heights = [side + len(strip.readings) * LINE_HEIGHT + 2 * MARGIN for strip in strips]
    width = LABELS_WIDTH + len(labels) * (side + GAP) + MARGIN
    picture = Image.new("RGB", (width, TITLE_HEIGHT + sum(heights)), "white")
    pen = ImageDraw.Draw(picture)
    pen.text((width / 2, TITLE_HEIGHT / 2), TITLE, "black", middle, anchor="mm")
    top = TITLE_HEIGHT
    for strip, height in zip(strips, heights, strict=True):
        pen.text((LABELS_WIDTH - MARGIN, top + side / 2), strip.device, "black", large, anchor="rm", stroke_width=0.6)
        for column, image in enumerate(strip.images.expand(-1, 3, -1, -1)):
            tile = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
            left = LABELS_WIDTH + column * (side + GAP)
            picture.paste(tile.resize((side, side), Image.Resampling.NEAREST), (left, top))
        for line, (caption, read) in enumerate(strip.readings.items()):
            middle_of_line = top + side + MARGIN / 2 + (line + 0.5) * LINE_HEIGHT
            pen.text((LABELS_WIDTH - MARGIN, middle_of_line), caption, "black", small, anchor="rm")
            for column, (guess, label) in enumerate(zip(read.tolist(), labels.tolist(), strict=True)):
                at = (LABELS_WIDTH + column * (side + GAP) + side / 2, middle_of_line)
                right = guess == label
                pen.text(at, str(guess), RIGHT if right else WRONG, middle, "mm", stroke_width=0.7 if right else 0)
        top += height
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    with said_where(path):
        write_atomically(path, buffer.getvalue())
