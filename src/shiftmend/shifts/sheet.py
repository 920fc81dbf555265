"""A contact sheet: one row per shift, one column per image, for looking at shifts before measuring anything."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.shifts import apply, find
from shiftmend.shifts.textures import Folder
from shiftmend.utils.files import write_atomically

if TYPE_CHECKING:
    from PIL import Image

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG"}
MARGIN, GAP, TEXT_SIZE = 8, 2, 14
"""Pixels."""


def contact_sheet(
    images: Tensor,
    names: Sequence[str],
    path: str | os.PathLike[str],
    columns: int = 8,
    *,
    scale: int = 2,
    severity: int | None = None,
    seed: int = 0,
    textures: Folder = None,
) -> None:
    """Draw images under several shifts, one row per shift, and write the picture to a PNG or JPEG file.

    Args:
        images: uint8 images `[N, 1 or 3, H, W]`, of which the first `columns` are drawn.
        names: Names of the shifts, from top to bottom. An identity shift as the first one puts the originals on top.
        path: The file, whose name ends in .png, .jpg or .jpeg.
        columns: Number of images in a row.
        scale: Whole number by which the images are enlarged.
        severity: Severity of the shifts that have several; by default that of the published set.
        seed: Seed of the random draws.
        textures: Folder of pictures for shifts that need some; see `shiftmend.shifts.textures`.

    Raises:
        DataError: If an argument is out of range, or a shift cannot be applied to the images.
    """
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise DataError(
            f"Expected a PNG or JPEG file for a contact sheet, got {target.name}. Give it a name ending in .png."
        )
    if not names or columns < 1 or scale < 1:
        raise DataError(
            f"Expected at least one shift, one column and a scale of 1 for a contact sheet, got {len(names)}, "
            f"{columns} and {scale}."
        )
    rows = []
    for name in names:
        level = severity if len(find(name).severities) > 1 else None
        try:
            rows.append(apply(name, images[:columns], severity=level, seed=seed, textures=textures))
        except DataError as error:
            raise DataError(f"{name} cannot be drawn: {error}") from error
    labels = ["original" if name.endswith("/identity") else name for name in names]
    sheet = draw_sheet(rows, labels, scale)
    buffer = io.BytesIO()
    sheet.save(buffer, format=FORMATS[target.suffix.lower()], optimize=True, quality=90)
    write_atomically(target, buffer.getvalue())


def draw_sheet(rows: Sequence[Tensor], labels: Sequence[str], scale: int = 2) -> Image.Image:
    """Draw rows of uint8 images `[N, 1 or 3, H, W]`, each with its label to the left, as one Pillow image."""
    from PIL import Image, ImageDraw, ImageFont

    height, width = (side * scale for side in rows[0].shape[-2:])
    line = max(height, TEXT_SIZE + 4) + GAP
    font = ImageFont.load_default(TEXT_SIZE)
    label_width = max(int(font.getlength(label)) for label in labels) + 2 * MARGIN
    count = max(len(row) for row in rows)
    size = (label_width + count * (width + GAP) + MARGIN, 2 * MARGIN + len(rows) * line)
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    for number, (row, label) in enumerate(zip(rows, labels, strict=True)):
        top = MARGIN + number * line
        pen.text((label_width - MARGIN, top + line // 2), label, fill="black", font=font, anchor="rm")
        for column, image in enumerate(row.cpu().expand(-1, 3, -1, -1)):
            pixels = image.repeat_interleave(scale, 1).repeat_interleave(scale, 2).permute(1, 2, 0)
            picture = Image.fromarray(pixels.contiguous().numpy())
            sheet.paste(picture, (label_width + column * (width + GAP), top))
    return sheet
