"""The demo's picture: what each device recorded, and what each method read in it."""

from __future__ import annotations

import io
from pathlib import Path

from torch import Tensor

from shiftmend.utils.files import said_where, write_atomically

# Colours that every eye tells apart, and that differ in lightness in print.
RIGHT, WRONG = "#0072b2", "#d55e00"
TITLE = "What four devices recorded, and what each method reads: bold blue is right, thin orange is wrong"
SCALE = 3
"""Pixels in the picture for one of an image."""

GAP, MARGIN, LABELS_WIDTH, LINE_HEIGHT, TITLE_HEIGHT = 6, 14, 190, 27, 44
"""Pixels."""


def draw(
    rows: list[tuple[str, Tensor, dict[str, Tensor]]],
    labels: Tensor,
    accuracies: dict[tuple[str, str], float],
    path: Path,
) -> None:
    """Draw a strip of images for each device and, under it, what each method read.

    Args:
        rows: For each device its name, uint8 images `[N, 1 or 3, H, W]` and the classes read by each method, `[N]`.
        labels: The right classes `[N]`.
        accuracies: Share of all images read rightly, by device and method.
        path: The PNG file to write.
    """
    from PIL import Image, ImageDraw, ImageFont

    small, middle, large = (ImageFont.load_default(size) for size in (17, 19, 21))
    side = SCALE * rows[0][1].shape[-1]
    lines = len(rows[0][2])
    height = side + lines * LINE_HEIGHT + 2 * MARGIN
    width = LABELS_WIDTH + len(labels) * (side + GAP) + MARGIN
    picture = Image.new("RGB", (width, TITLE_HEIGHT + len(rows) * height), "white")
    pen = ImageDraw.Draw(picture)
    pen.text((width / 2, TITLE_HEIGHT / 2), TITLE, "black", middle, anchor="mm")
    for number, (device, images, guesses) in enumerate(rows):
        top = TITLE_HEIGHT + number * height
        pen.text((LABELS_WIDTH - MARGIN, top + side / 2), device, "black", large, anchor="rm", stroke_width=0.6)
        for column, image in enumerate(images.expand(-1, 3, -1, -1)):
            tile = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
            left = LABELS_WIDTH + column * (side + GAP)
            picture.paste(tile.resize((side, side), Image.Resampling.NEAREST), (left, top))
        for line, (method, read) in enumerate(guesses.items()):
            middle_of_line = top + side + MARGIN / 2 + (line + 0.5) * LINE_HEIGHT
            said = f"{method}   {100 * accuracies[device, method]:.0f} %"
            pen.text((LABELS_WIDTH - MARGIN, middle_of_line), said, "black", small, anchor="rm")
            for column, (guess, label) in enumerate(zip(read.tolist(), labels.tolist(), strict=True)):
                at = (LABELS_WIDTH + column * (side + GAP) + side / 2, middle_of_line)
                right = guess == label
                pen.text(at, str(guess), RIGHT if right else WRONG, middle, "mm", stroke_width=0.7 if right else 0)
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    with said_where(path):
        write_atomically(path, buffer.getvalue())
