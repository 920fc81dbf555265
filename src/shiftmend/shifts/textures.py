"""Pictures that some shifts lay over or under an image, from a folder of yours or drawn by the package.

A folder holds `bricks.png`, `crystals.png`, `grass.png`, `oranges.png`, `sky.png`, the frost pictures `frost1.png` to
`frost5.png` in it or in its sub-folder `frost`, and photographs of any name in its sub-folder `photographs` (or, where
there is none, in the folder itself). Only what a shift needs has to be there; `.jpg` and `.jpeg` will do as well.

Without a folder, stand-ins are drawn from noise and geometry, each from its own fixed seed. A figure measured on them
shows the same kind of shift as one measured on photographs, not the same number.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.utils.files import as_path

NAMES = ("bricks", "crystals", "grass", "oranges", "sky")
SUFFIXES = (".png", ".jpg", ".jpeg")
FROST_COUNT = 5

# CIFAR-C's frost photographs are at least 315 pixels high and used at a fifth of that, at most 120.
FROST_UNREDUCED = 200
DRAWN_SIZE = 288
"""Pixels a side of the stand-ins, which wrap around at their edges."""

Folder = str | os.PathLike[str] | None
Field = NDArray[np.floating[Any]]


def texture(name: str, folder: Folder = None) -> Tensor:
    """Load one texture, uint8 `[3, H, W]`: bricks, crystals, grass, oranges or sky. Without a folder, draw it."""
    _, picture = _texture(name, folder)
    return picture


def frost(folder: Folder = None) -> list[Tensor]:
    """Load or draw the five frost pictures at the scale of CIFAR-C.

    Original photographs, which are at least 200 pixels high and wide, are reduced as for CIFAR-C: to every fifth pixel,
    beginning with the third. Smaller pictures count as reduced.

    Args:
        folder: Folder with `frost1.png` to `frost5.png`, in it or in its sub-folder `frost`. By default, stand-ins are
            drawn.

    Returns:
        Five pictures, uint8 `[3, H, W]` each.

    Raises:
        DataError: If a picture is missing or cannot be read.
    """
    return [picture for _, picture in _frost(folder)]


def photographs(folder: Folder = None) -> list[Tensor]:
    """Load all photographs of the folder in the order of their names, uint8 `[3, H, W]` each.

    Without a folder, the five built-in textures are returned instead, in all six orders of their colour channels.
    """
    return [picture for _, picture in _photographs(folder)]


def photograph_files(folder: str | os.PathLike[str]) -> list[Path]:
    """List the files that `photographs` reads; hidden files are ignored."""
    place = _photograph_folder(_resolve_folder(folder))
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
        origin = "procedural" if folder is None else str(_photograph_folder(_resolve_folder(folder)))
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
        raise DataError("Expected at least one texture to cut windows from, got none.")
    for picture in pictures:
        if picture.shape[1] <= height or picture.shape[2] <= width:
            raise DataError(
                f"Expected a texture larger than the images, {height} x {width}, got {picture.shape[1]} x "
                f"{picture.shape[2]}. Use a larger picture."
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
        raise DataError(f"Expected the texture to be one of {', '.join(NAMES)}, got {name!r}.")
    if folder is None:
        return "procedural", _draw_procedural(name)
    path = _find(name, [_resolve_folder(folder)])
    return str(path), _read(path)


def _frost(folder: Folder) -> list[tuple[str, Tensor]]:
    names = [f"frost{i}" for i in range(1, FROST_COUNT + 1)]
    if folder is None:
        return [("procedural", _draw_procedural(name)) for name in names]
    pictures = []
    for name in names:
        path = _find(name, [_resolve_folder(folder) / "frost", _resolve_folder(folder)])
        picture = _read(path)
        if min(picture.shape[1:]) >= FROST_UNREDUCED:
            picture = picture[:, 2::5, 2::5].contiguous()
        pictures.append((str(path), picture))
    return pictures


def _photographs(folder: Folder) -> list[tuple[str, Tensor]]:
    if folder is None:
        orders = list(itertools.permutations(range(3)))
        return [("procedural", _draw_procedural(name)[list(order)]) for name in NAMES for order in orders]
    paths = photograph_files(folder)
    if not paths:
        place = _photograph_folder(_resolve_folder(folder))
        raise DataError(f"Expected photographs ending in {', '.join(SUFFIXES)} in {place}, got none. Put some there.")
    return [(str(path), _read(path)) for path in paths]


def _resolve_folder(folder: str | os.PathLike[str]) -> Path:
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
        f"Expected the texture {name} at {expected} (or .jpg), got none. Put one there, or leave the folder out."
    )


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise DataError(f"Expected a folder with textures, got {folder}, which does not exist. Name another.")


def _read(path: Path) -> Tensor:
    """Read an image file as uint8 `[3, H, W]`; a transparent picture loses its alpha channel and is not blended."""
    from shiftmend.inputs.folders import decode_image

    return torch.from_numpy(decode_image(path, None, 3).copy())


def _draw_procedural(name: str) -> Tensor:
    return torch.from_numpy(draw_texture(name).copy())


def _sha256(pictures: Sequence[Tensor]) -> str:
    state = hashlib.sha256()
    for picture in pictures:
        state.update("x".join(map(str, picture.shape)).encode())
        state.update(picture.contiguous().numpy().tobytes())
    return state.hexdigest()


def _frequencies() -> tuple[Field, Field]:
    frequency = np.fft.fftfreq(DRAWN_SIZE)
    return frequency[:, None], frequency[None, :]


def _standardise(field: Field) -> Field:
    return np.asarray((field - field.mean()) / field.std())


def _noise(random: np.random.Generator, slope: float, lowest: float = 1.0) -> Field:
    """Draw noise whose amplitude falls as 1 / frequency**slope, mean 0, deviation 1.

    Below `lowest` cycles per picture it stays level, which sets the size of the largest structure.
    """
    rows, columns = _frequencies()
    frequency = np.hypot(rows, columns) * DRAWN_SIZE
    white = np.fft.fft2(random.standard_normal((DRAWN_SIZE, DRAWN_SIZE)))
    spectrum = white * np.maximum(frequency, lowest) ** -slope
    spectrum[0, 0] = 0
    return _standardise(np.fft.ifft2(spectrum).real)


def _streaks(random: np.random.Generator, angle: float, length: float, breadth: float) -> Field:
    """Draw noise that is stretched along one direction (radians, 0 along a row), mean 0, deviation 1."""
    rows, columns = _frequencies()
    along = columns * np.cos(angle) + rows * np.sin(angle)
    aside = rows * np.cos(angle) - columns * np.sin(angle)
    weight = np.exp(-2 * np.pi**2 * ((along * length) ** 2 + (aside * breadth) ** 2))
    return _standardise(np.fft.ifft2(np.fft.fft2(random.standard_normal((DRAWN_SIZE, DRAWN_SIZE))) * weight).real)


def _nearest(centres: Field) -> tuple[Field, NDArray[np.intp], Field, Field]:
    """Find for every pixel the distance to the nearest centre, its index, the distance to the second, the offset."""
    rows, columns = np.mgrid[:DRAWN_SIZE, :DRAWN_SIZE]
    pixels = np.stack((rows, columns), axis=-1)[:, :, None]
    offset = (pixels - centres + DRAWN_SIZE / 2) % DRAWN_SIZE - DRAWN_SIZE / 2
    distance = np.hypot(offset[..., 0], offset[..., 1])
    order = np.argpartition(distance, (0, 1), axis=-1)[..., :2]
    nearest, second = np.moveaxis(np.take_along_axis(distance, order, axis=-1), -1, 0)
    chosen = order[..., :1, None]
    return nearest, order[..., 0], second, np.take_along_axis(offset, chosen, axis=2)[:, :, 0]


def _grid(random: np.random.Generator, rows: int, columns: int, jitter: float) -> Field:
    """Place centres on a brick-bond grid, each moved by up to `jitter` of its cell."""
    row, column = np.mgrid[:rows, :columns].reshape(2, -1)
    moved = random.uniform(-jitter, jitter, (2, rows * columns))
    down = (row + 0.5 + moved[0]) * DRAWN_SIZE / rows
    right = (column + 0.25 + row % 2 / 2 + moved[1]) * DRAWN_SIZE / columns
    return np.stack((down, right), axis=-1)


def _colour(value: Field, stops: list[tuple[float, tuple[int, int, int]]]) -> Field:
    """Map a field to colours `[3, H, W]` (0 to 255) by straight lines between stops (value, colour)."""
    positions = [position for position, _ in stops]
    channels = np.array([colour for _, colour in stops], dtype=np.float64).T
    return np.stack([np.interp(value, positions, channel) for channel in channels])


def _draw_bricks(random: np.random.Generator) -> Field:
    """Draw rows of reddish bricks, 48 x 24 pixels, in pale mortar."""
    height, width = 24, 48
    rows, columns = np.mgrid[:DRAWN_SIZE, :DRAWN_SIZE]
    course = rows // height
    shifted = (columns + course % 2 * width // 2) % DRAWN_SIZE
    # Rough edges: the distance to the mortar is disturbed by noise.
    depth = np.minimum(rows % height, height - 1 - rows % height).astype(np.float64)
    depth = np.minimum(depth, np.minimum(shifted % width, width - 1 - shifted % width))
    depth += 0.7 * _noise(random, 1.0, 16)
    tone = random.normal(0, 1, (DRAWN_SIZE // height, DRAWN_SIZE // width))[course, shifted // width]
    surface = 0.45 + 0.13 * tone + 0.12 * _noise(random, 0.9, 8)
    brick = _colour(surface, [(0, (84, 44, 36)), (0.5, (158, 88, 66)), (1, (206, 150, 116))])
    mortar = _colour(0.5 + 0.2 * _noise(random, 0.6, 8), [(0, (150, 146, 140)), (1, (206, 200, 190))])
    # Light falls from above: the lower edge of every brick lies in shadow.
    shade = 1 - 0.45 * np.exp(-(height - 3 - rows % height).clip(0) / 1.5)
    return np.where(depth > 1.6, brick * shade, mortar)


def _draw_crystals(random: np.random.Generator) -> Field:
    """Draw violet facets, each with its own slope, bright along some edges, with a few glints."""
    nearest, facet, second, offset = _nearest(_grid(random, 8, 7, 0.48))
    count = 8 * 7
    slope = random.normal(0, 1, (count, 2))[facet]
    value = 0.34 + 0.17 * random.normal(0, 1, count)[facet] + 0.007 * (slope * offset).sum(axis=-1)
    value += 0.05 * _noise(random, 1.1, 6) + 0.06 * _noise(random, 1.6)
    edge = np.exp(-(second - nearest) / 2.0)
    value += edge * random.uniform(-0.15, 0.4, count)[facet]
    glints = _noise(random, 0.7, 24)
    value += 0.25 * (glints - 2.6).clip(0)
    return _colour(value, [(0, (14, 10, 30)), (0.4, (74, 62, 122)), (0.8, (170, 160, 212)), (1.1, (248, 244, 255))])


def _draw_grass(random: np.random.Generator) -> Field:
    """Draw blades of grass: streaks in many directions, the lightest on top."""
    angles = np.linspace(0, np.pi, 14, endpoint=False) + random.uniform(0, np.pi / 14, 14)
    layers = [_streaks(random, angle, 10, 1.0) for angle in angles]
    blades = _standardise(np.max(layers, axis=0))
    value = 0.5 + 0.19 * blades + 0.07 * _noise(random, 1.4)
    return _colour(value, [(0, (22, 48, 10)), (0.4, (62, 116, 26)), (0.75, (116, 178, 52)), (1.1, (190, 226, 112))])


def _draw_oranges(random: np.random.Generator) -> Field:
    """Draw a pile of oranges of about 70 pixels, lit from the upper left, with pitted peel."""
    nearest, fruit, _, offset = _nearest(_grid(random, 5, 4, 0.12))
    radius = 40.0
    height = np.sqrt((1 - (nearest / radius) ** 2).clip(0))
    light = height * 0.75 - 0.42 * offset[..., 0] / radius - 0.36 * offset[..., 1] / radius
    value = 0.42 + 0.42 * light + 0.05 * random.normal(0, 1, 20)[fruit]
    value += height * (0.035 * _noise(random, 0.4, 40) + 0.02 * _noise(random, 1.2))
    value -= 0.25 * (nearest > radius)
    highlight = np.exp(-((offset[..., 0] + 14) ** 2 + (offset[..., 1] + 12) ** 2) / 60)
    value += 0.22 * highlight
    return _colour(
        value,
        [
            (0, (52, 20, 4)),
            (0.35, (188, 86, 8)),
            (0.65, (242, 140, 18)),
            (0.9, (255, 190, 62)),
            (1.15, (255, 244, 214)),
        ],
    )


def _draw_sky(random: np.random.Generator) -> Field:
    """Draw blue sky with white clouds."""
    cloud = _noise(random, 1.9, 3) + 0.25 * _noise(random, 1.2, 10)
    cover = 1 / (1 + np.exp(-2.2 * (cloud - 0.55)))
    value = 0.18 + 0.75 * cover + 0.05 * _noise(random, 1.5)
    return _colour(value, [(0, (84, 134, 206)), (0.35, (142, 180, 230)), (0.75, (224, 234, 246)), (1, (255, 255, 255))])


def _draw_frost(random: np.random.Generator, darkest: tuple[int, int, int], lightest: tuple[int, int, int]) -> Field:
    """Draw ice needles on a pane, between two colours."""
    warp = _noise(random, 2.0)
    needles = [_streaks(random, angle, 14, 0.8) for angle in random.uniform(0, np.pi, 9)]
    # Each needle direction rules where its own slow noise is highest, so that they grow in patches.
    rule = np.argmax([_noise(random, 2.0, 3) for _ in needles], axis=0)
    ice = np.take_along_axis(np.array(needles), rule[None], axis=0)[0]
    value = 0.5 + 0.2 * np.abs(ice) - 0.12 + 0.16 * warp + 0.08 * _noise(random, 0.8, 8)
    return _colour(value, [(0.05, darkest), (0.95, lightest)])


# The five panes have about the mean colours of the photographs CIFAR-C uses.
_PANES = (
    ((10, 70, 84), (150, 232, 250)),
    ((146, 152, 164), (255, 255, 255)),
    ((150, 154, 168), (255, 255, 255)),
    ((50, 66, 80), (226, 242, 252)),
    ((30, 40, 50), (196, 206, 220)),
)

_DRAWERS: dict[str, Callable[[np.random.Generator], Field]] = {
    "bricks": _draw_bricks,
    "crystals": _draw_crystals,
    "grass": _draw_grass,
    "oranges": _draw_oranges,
    "sky": _draw_sky,
    **{
        f"frost{i}": functools.partial(_draw_frost, darkest=pane[0], lightest=pane[1])
        for i, pane in enumerate(_PANES, 1)
    },
}


@functools.cache
def draw_texture(name: str) -> NDArray[np.uint8]:
    """Draw a texture by name as a read-only uint8 array `[3, 288, 288]`, which is the same on every call."""
    random = np.random.Generator(np.random.PCG64(list(_DRAWERS).index(name)))
    picture = _DRAWERS[name](random).clip(0, 255).round().astype(np.uint8)
    picture.flags.writeable = False
    return picture
