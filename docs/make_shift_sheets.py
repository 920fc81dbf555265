"""Draw the pictures of the shifts that the documentation shows: `python docs/make_shift_sheets.py`.

Everything on them is drawn by this script or by the package (letters in Pillow's own typeface, textures from noise), so
they contain no data set. To see your own images instead:

    from shiftmend.shifts.sheet import contact_sheet
    contact_sheet(images, ["emnist-da/identity", "emnist-da/fog"], "sheet.png", textures="folder/with/photographs")
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from shiftmend.shifts import SHIFTS, textures
from shiftmend.shifts.sheet import contact_sheet

FOLDER = Path(__file__).parent / "images"
SEED = 3


def drawn_glyphs(characters: str, side: int = 28) -> Tensor:
    """White characters on black, with the soft edges of the letters of EMNIST, uint8 `[N, 1, side, side]`."""
    font = ImageFont.load_default(side * 3.2)
    glyphs = []
    for index, character in enumerate(characters):
        large = Image.new("L", (4 * side, 4 * side))
        pen = ImageDraw.Draw(large)
        pen.text((2 * side, 2 * side), character, fill=255, font=font, anchor="mm", stroke_width=3, stroke_fill=255)
        turned = large.rotate((index * 37) % 25 - 12, Image.Resampling.BILINEAR)
        glyphs.append(np.array(turned.resize((side, side), Image.Resampling.BOX)))
    return torch.from_numpy(np.stack(glyphs))[:, None]


def drawn_scenes(count: int, side: int = 32) -> Tensor:
    """A ball, a wall or a crystal between a meadow and the sky, uint8 `[count, 3, side, side]`."""
    large = 8 * side
    pictures = {
        name: Image.fromarray(textures.texture(name)[:, :large, :large].permute(1, 2, 0).contiguous().numpy())
        for name in textures.NAMES
    }
    scenes = []
    for index in range(count):
        scene = pictures["sky"].copy()
        horizon = large // 2 + 16 * (index % 3)
        scene.paste(pictures["grass"].crop((0, horizon, large, large)), (0, horizon))
        mask = Image.new("L", (large, large))
        pen = ImageDraw.Draw(mask)
        middle, reach = large // 2 + 12 * (index % 5 - 2), 70 + 8 * (index % 4)
        box = (middle - reach, horizon - reach, middle + reach, horizon + reach // 2)
        thing = ("oranges", "bricks", "crystals")[index % 3]
        if thing == "oranges":
            pen.ellipse(box, fill=255)
        elif thing == "bricks":
            pen.rectangle(box, fill=255)
        else:
            pen.polygon([(middle, box[1]), (box[2], horizon), (middle, box[3]), (box[0], horizon)], fill=255)
        scene.paste(pictures[thing], (0, 0), mask)
        scenes.append(np.array(scene.resize((side, side), Image.Resampling.BOX)))
    return torch.from_numpy(np.stack(scenes)).permute(0, 3, 1, 2).contiguous()


def names(group: str, first: list[str]) -> list[str]:
    return first + [name for name in SHIFTS if name.startswith(f"{group}/") and name not in first]


def main() -> None:
    letters, numbers = drawn_glyphs("AR5gkQ7e"), drawn_glyphs("01234578")
    contact_sheet(letters, names("emnist-da", ["emnist-da/identity"]), FOLDER / "shifts-emnist-da.png", seed=SEED)
    mnist = [*names("mnist-c", ["mnist-c/identity"]), "mnist-m"]
    contact_sheet(numbers, mnist, FOLDER / "shifts-mnist-c.png", seed=SEED)
    # CIFAR-C has no identity; the originals are shown under MNIST's, which takes colour too.
    cifar = names("cifar-c", ["mnist-c/identity"])
    contact_sheet(drawn_scenes(3), cifar, FOLDER / "shifts-cifar-c.png", seed=SEED)
    contact_sheet(drawn_scenes(5), names("sensor", ["mnist-c/identity"]), FOLDER / "shifts-sensor.png", seed=SEED)


if __name__ == "__main__":
    main()
