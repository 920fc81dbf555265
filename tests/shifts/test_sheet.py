"""Contact sheets: size, content, file formats."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from shiftmend.errors import DataError
from shiftmend.shifts.sheet import contact_sheet, draw_sheet


@pytest.fixture
def images() -> torch.Tensor:
    return torch.arange(5 * 28 * 28).remainder(251).to(torch.uint8).reshape(5, 1, 28, 28)


@pytest.mark.parametrize(("name", "kind"), [("sheet.png", "PNG"), ("deep/sheet.JPG", "JPEG")])
def test_writes_a_picture(tmp_path, images, name, kind):
    path = tmp_path / name
    contact_sheet(images, ["emnist-da/identity", "emnist-da/grass"], path, columns=3)
    with Image.open(path) as sheet:
        assert sheet.format == kind
        assert sheet.height > 2 * 56
        assert sheet.width > 3 * 56


def test_shows_the_shifted_images(tmp_path, images):
    sheet = np.array(draw_sheet([images[:2], 255 - images[:2]], ["a", "b"], scale=1))
    shown = [row.numpy() for row in (images[0, 0], images[1, 0], 255 - images[0, 0])]
    for picture in shown:
        places = [
            (top, left)
            for top in range(sheet.shape[0] - 27)
            for left in range(sheet.shape[1] - 27)
            if np.array_equal(sheet[top : top + 28, left : left + 28, 1], picture)
        ]
        assert len(places) == 1
    # Labels are dark on white, left of the pictures.
    assert (sheet[:, :10] < 128).any()


def test_refuses_what_it_cannot_draw(tmp_path, images):
    with pytest.raises(DataError, match="PNG or JPEG"):
        contact_sheet(images, ["emnist-da/fog"], tmp_path / "sheet.txt")
    with pytest.raises(DataError, match="at least one shift"):
        contact_sheet(images, [], tmp_path / "sheet.png")
    with pytest.raises(DataError, match="name of a shift"):
        contact_sheet(images, ["mist"], tmp_path / "sheet.png")
    assert not list(tmp_path.iterdir())
