"""Textures made from noise and geometry, so that the background shifts work where no photographs are at hand.

They are stand-ins: a figure measured on them shows the same kind of shift as one measured on photographs, not the
same number. Each is drawn from its own fixed seed and wraps around at its edges.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIZE = 288
"""Pixels a side."""

Field = NDArray[np.floating[Any]]


def _frequencies() -> tuple[Field, Field]:
    frequency = np.fft.fftfreq(SIZE)
    return frequency[:, None], frequency[None, :]


def _standardise(field: Field) -> Field:
    return np.asarray((field - field.mean()) / field.std())


def _noise(random: np.random.Generator, slope: float, lowest: float = 1.0) -> Field:
    """Draw noise whose amplitude falls as 1 / frequency**slope, mean 0, deviation 1.

    Below `lowest` cycles per picture it stays level, which sets the size of the largest structure.
    """
    rows, columns = _frequencies()
    frequency = np.hypot(rows, columns) * SIZE
    spectrum = np.fft.fft2(random.standard_normal((SIZE, SIZE))) * np.maximum(frequency, lowest) ** -slope
    spectrum[0, 0] = 0
    return _standardise(np.fft.ifft2(spectrum).real)


def _streaks(random: np.random.Generator, angle: float, length: float, breadth: float) -> Field:
    """Draw noise that is stretched along one direction (radians, 0 along a row), mean 0, deviation 1."""
    rows, columns = _frequencies()
    along = columns * np.cos(angle) + rows * np.sin(angle)
    aside = rows * np.cos(angle) - columns * np.sin(angle)
    weight = np.exp(-2 * np.pi**2 * ((along * length) ** 2 + (aside * breadth) ** 2))
    return _standardise(np.fft.ifft2(np.fft.fft2(random.standard_normal((SIZE, SIZE))) * weight).real)


def _nearest(centres: Field) -> tuple[Field, NDArray[np.intp], Field, Field]:
    """Find for every pixel the distance to the nearest centre, its index, the distance to the second, the offset."""
    rows, columns = np.mgrid[:SIZE, :SIZE]
    pixels = np.stack((rows, columns), axis=-1)[:, :, None]
    offset = (pixels - centres + SIZE / 2) % SIZE - SIZE / 2
    distance = np.hypot(offset[..., 0], offset[..., 1])
    order = np.argpartition(distance, (0, 1), axis=-1)[..., :2]
    nearest, second = np.moveaxis(np.take_along_axis(distance, order, axis=-1), -1, 0)
    chosen = order[..., :1, None]
    return nearest, order[..., 0], second, np.take_along_axis(offset, chosen, axis=2)[:, :, 0]


def _grid(random: np.random.Generator, rows: int, columns: int, jitter: float) -> Field:
    """Place centres on a brick-bond grid, each moved by up to `jitter` of its cell."""
    row, column = np.mgrid[:rows, :columns].reshape(2, -1)
    moved = random.uniform(-jitter, jitter, (2, rows * columns))
    return np.stack(
        ((row + 0.5 + moved[0]) * SIZE / rows, (column + 0.25 + row % 2 / 2 + moved[1]) * SIZE / columns), axis=-1
    )


def _colour(value: Field, stops: list[tuple[float, tuple[int, int, int]]]) -> Field:
    """Map a field to colours `[3, H, W]` (0 to 255) by straight lines between stops (value, colour)."""
    positions = [position for position, _ in stops]
    channels = np.array([colour for _, colour in stops], dtype=np.float64).T
    return np.stack([np.interp(value, positions, channel) for channel in channels])


def bricks(random: np.random.Generator) -> Field:
    """Draw rows of reddish bricks, 48 x 24 pixels, in pale mortar."""
    height, width = 24, 48
    rows, columns = np.mgrid[:SIZE, :SIZE]
    course = rows // height
    shifted = (columns + course % 2 * width // 2) % SIZE
    # Rough edges: the distance to the mortar is disturbed by noise.
    depth = np.minimum(rows % height, height - 1 - rows % height).astype(np.float64)
    depth = np.minimum(depth, np.minimum(shifted % width, width - 1 - shifted % width))
    depth += 0.7 * _noise(random, 1.0, 16)
    tone = random.normal(0, 1, (SIZE // height, SIZE // width))[course, shifted // width]
    surface = 0.45 + 0.13 * tone + 0.12 * _noise(random, 0.9, 8)
    brick = _colour(surface, [(0, (84, 44, 36)), (0.5, (158, 88, 66)), (1, (206, 150, 116))])
    mortar = _colour(0.5 + 0.2 * _noise(random, 0.6, 8), [(0, (150, 146, 140)), (1, (206, 200, 190))])
    # Light falls from above: the lower edge of every brick lies in shadow.
    shade = 1 - 0.45 * np.exp(-(height - 3 - rows % height).clip(0) / 1.5)
    return np.where(depth > 1.6, brick * shade, mortar)


def crystals(random: np.random.Generator) -> Field:
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


def grass(random: np.random.Generator) -> Field:
    """Draw blades of grass: streaks in many directions, the lightest on top."""
    angles = np.linspace(0, np.pi, 14, endpoint=False) + random.uniform(0, np.pi / 14, 14)
    layers = [_streaks(random, angle, 10, 1.0) for angle in angles]
    blades = _standardise(np.max(layers, axis=0))
    value = 0.5 + 0.19 * blades + 0.07 * _noise(random, 1.4)
    return _colour(value, [(0, (22, 48, 10)), (0.4, (62, 116, 26)), (0.75, (116, 178, 52)), (1.1, (190, 226, 112))])


def oranges(random: np.random.Generator) -> Field:
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


def sky(random: np.random.Generator) -> Field:
    """Draw blue sky with white clouds."""
    cloud = _noise(random, 1.9, 3) + 0.25 * _noise(random, 1.2, 10)
    cover = 1 / (1 + np.exp(-2.2 * (cloud - 0.55)))
    value = 0.18 + 0.75 * cover + 0.05 * _noise(random, 1.5)
    return _colour(value, [(0, (84, 134, 206)), (0.35, (142, 180, 230)), (0.75, (224, 234, 246)), (1, (255, 255, 255))])


def frost(random: np.random.Generator, darkest: tuple[int, int, int], lightest: tuple[int, int, int]) -> Field:
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
    "bricks": bricks,
    "crystals": crystals,
    "grass": grass,
    "oranges": oranges,
    "sky": sky,
    **{f"frost{i}": functools.partial(frost, darkest=pane[0], lightest=pane[1]) for i, pane in enumerate(_PANES, 1)},
}

NAMES = tuple(_DRAWERS)


@functools.cache
def draw(name: str) -> NDArray[np.uint8]:
    """Draw the texture of this name, uint8 `[3, 288, 288]`, read-only; the same on every call."""
    random = np.random.Generator(np.random.PCG64(NAMES.index(name)))
    picture = _DRAWERS[name](random).clip(0, 255).round().astype(np.uint8)
    picture.flags.writeable = False
    return picture
