"""Pictures that some shifts lay over or under an image, from a folder of yours or drawn by the package.

A folder holds `bricks.png`, `crystals.png`, `grass.png`, `oranges.png`, `sky.png`, the frost pictures `frost1.png` to
`frost5.png` in it or in its sub-folder `frost`, and photographs of any name in its sub-folder `photographs` (or, where
there is none, in the folder itself). Only what a shift needs has to be there; `.jpg` and `.jpeg` will do as well.
Without a folder, the stand-ins of `shiftmend.shifts.procedural` are used.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.shifts import procedural
from shiftmend.utils.files import as_path

NAMES = ("bricks", "crystals", "grass", "oranges", "sky")
SUFFIXES = (".png", ".jpg", ".jpeg")
FROST_COUNT = 5

# CIFAR-C's frost photographs are at least 315 pixels high and used at a fifth of that, at most 120.
FROST_UNREDUCED = 200
Folder = str | os.PathLike[str] | None


def texture(name: str, folder: Folder = None) -> Tensor:
    """Load one texture, uint8 `[3, H, W]`: bricks, crystals, grass, oranges or sky."""
    _, picture = _texture(name, folder)
    return picture


def frost(folder: Folder = None) -> list[Tensor]:
    """Load the five frost pictures at the scale of CIFAR-C, uint8 `[3, H, W]` each.

    The original photographs are recognised by their size and reduced as they were for CIFAR-C: every fifth pixel,
    beginning with the third. Smaller pictures are taken to be reduced already.
    """
    return [picture for _, picture in _frost(folder)]


def photographs(folder: Folder = None) -> list[Tensor]:
    """Load all photographs of the folder in the order of their names, uint8 `[3, H, W]` each.

    The stand-ins are the five textures in all six orders of their colour channels: many colours, little variety.
    """
    return [picture for _, picture in _photographs(folder)]


def photograph_files(folder: str | os.PathLike[str]) -> list[Path]:
    """List the files that `photographs` reads; hidden files are passed over."""
    place = _photograph_folder(_named(folder))
    return sorted(path for path in place.iterdir() if path.suffix.lower() in SUFFIXES and not path.name.startswith("."))


def load(name: str, folder: Folder = None) -> list[Tensor]:
    """Load the pictures behind `Shift.texture`: one texture by name, all of `frost` or all `photographs`."""
    return [picture for _, picture in _load(name, folder)]


def digest(name: str, folder: Folder = None) -> dict[str, dict[str, str]]:
    """Describe the pictures behind `Shift.texture` for a manifest: where each came from, and its SHA-256.

    The hash is over shape and pixels, not over the file, so that a picture saved anew is still the same picture.
    Photographs, which can be hundreds, are hashed together in the order of their names.
    """
    pictures = _load(name, folder)
    if name == "photographs":
        origin = "procedural" if folder is None else str(_photograph_folder(_named(folder)))
        return {name: {"sha256": _sha256([picture for _, picture in pictures]), "origin": origin}}
    keys = [f"frost{i}" for i in range(1, FROST_COUNT + 1)] if name == "frost" else [name]
    return {
        key: {"sha256": _sha256([picture]), "origin": origin}
        for key, (origin, picture) in zip(keys, pictures, strict=True)
    }


def crop(pictures: Sequence[Tensor], count: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Cut `count` random windows, uint8 `[count, 3, height, width]`: a random picture each, then a random place in it.

    The last place of each axis is never drawn, as in the generators of the published sets.
    """
    if not pictures:
        raise DataError("there is no texture to cut windows from, expected at least one")
    for picture in pictures:
        if picture.shape[1] <= height or picture.shape[2] <= width:
            raise DataError(
                f"a texture must be larger than the images it is laid under, {height} x {width}, "
                f"got one of {picture.shape[1]} x {picture.shape[2]}"
            )
    # float64, because in float32 a number just below 1 can reach the size itself when multiplied by it.
    draws = torch.rand(3, count, generator=generator, device=generator.device, dtype=torch.float64)
    which = (draws[0] * len(pictures)).long()
    windows = torch.empty(count, 3, height, width, dtype=torch.uint8, device=generator.device)
    for index, picture in enumerate(pictures):
        chosen = (which == index).nonzero().squeeze(1)
        top = (draws[1, chosen] * (picture.shape[1] - height)).long()
        left = (draws[2, chosen] * (picture.shape[2] - width)).long()
        rows = top[:, None] + torch.arange(height, device=top.device)
        columns = left[:, None] + torch.arange(width, device=left.device)
        found = picture.to(generator.device)[:, rows[:, :, None], columns[:, None, :]]
        windows[chosen] = found.transpose(0, 1)
    return windows


def _load(name: str, folder: Folder) -> list[tuple[str, Tensor]]:
    if name == "frost":
        return _frost(folder)
    if name == "photographs":
        return _photographs(folder)
    return [_texture(name, folder)]


def _texture(name: str, folder: Folder) -> tuple[str, Tensor]:
    if name not in NAMES:
        raise DataError(f"unknown texture {name!r}, expected one of {', '.join(NAMES)}")
    if folder is None:
        return "procedural", _drawn(name)
    path = _find(name, [_named(folder)])
    return str(path), _read(path)


def _frost(folder: Folder) -> list[tuple[str, Tensor]]:
    names = [f"frost{i}" for i in range(1, FROST_COUNT + 1)]
    if folder is None:
        return [("procedural", _drawn(name)) for name in names]
    pictures = []
    for name in names:
        path = _find(name, [_named(folder) / "frost", _named(folder)])
        picture = _read(path)
        if min(picture.shape[1:]) >= FROST_UNREDUCED:
            picture = picture[:, 2::5, 2::5].contiguous()
        pictures.append((str(path), picture))
    return pictures


def _photographs(folder: Folder) -> list[tuple[str, Tensor]]:
    if folder is None:
        orders = list(itertools.permutations(range(3)))
        return [("procedural", _drawn(name)[list(order)]) for name in NAMES for order in orders]
    paths = photograph_files(folder)
    if not paths:
        place = _photograph_folder(_named(folder))
        raise DataError(f"no photographs in {place}, expected files ending in {', '.join(SUFFIXES)} there")
    return [(str(path), _read(path)) for path in paths]


def _named(folder: str | os.PathLike[str]) -> Path:
    return as_path(folder, "the folder of textures", DataError)


def _photograph_folder(folder: Path) -> Path:
    _check_folder(folder)
    return folder / "photographs" if (folder / "photographs").is_dir() else folder


def _find(name: str, folders: list[Path]) -> Path:
    _check_folder(folders[-1])
    for folder in folders:
        for suffix in SUFFIXES:
            if (path := folder / f"{name}{suffix}").is_file():
                return path
    expected = " or ".join(str(folder / f"{name}.png") for folder in folders)
    raise DataError(
        f"the texture {name} is missing, expected {expected} (or .jpg): put one there, "
        "or leave the folder out to use the stand-ins of the package"
    )


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder} with textures, expected one that exists")


def _read(path: Path) -> Tensor:
    """Read an image file as uint8 `[3, H, W]`; a transparent picture loses its alpha channel and is not blended."""
    from shiftmend.inputs.folders import decode_image

    return torch.from_numpy(decode_image(path, None, 3).copy())


def _drawn(name: str) -> Tensor:
    return torch.from_numpy(procedural.draw(name).copy())


def _sha256(pictures: Sequence[Tensor]) -> str:
    state = hashlib.sha256()
    for picture in pictures:
        state.update("x".join(map(str, picture.shape)).encode())
        state.update(picture.contiguous().numpy().tobytes())
    return state.hexdigest()
