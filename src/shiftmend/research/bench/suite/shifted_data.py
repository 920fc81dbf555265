"""Shifted images for the benchmarks: published files if available, regenerated otherwise."""

from __future__ import annotations

from pathlib import Path

from shiftmend import shifts
from shiftmend.errors import DataError
from shiftmend.inputs.images import Split
from shiftmend.research.bench.benchmark import Origin, Root
from shiftmend.research.datasets.files import data_root
from shiftmend.research.datasets.made_sets import SEED, find_origin

__all__ = ["SEED", "exists", "find_textures", "make_again", "origin_of"]


def exists(root: Root, *parts: str) -> bool:
    """Tell whether a file or folder of a published set exists."""
    try:
        return data_root(root).joinpath(*parts).exists()
    except DataError:
        return False


def find_textures(root: Root, *parts: str) -> Path | None:
    """Find a folder of pictures under the data root; without it, the package draws substitutes."""
    return data_root(root).joinpath(*parts) if exists(root, *parts) else None


def make_again(name: str, clean: Split, *, pictures: Path | None = None, severity: int | None = None) -> Split:
    """Apply a shift to a clean set, in the same order."""
    needed = shifts.find(name).texture is not None
    images = shifts.apply(name, clean.images, severity=severity, seed=SEED, textures=pictures)
    using = "" if not needed else f" with {'stand-ins' if pictures is None else 'the pictures in ' + pictures.name}"
    return Split(images, clean.labels, f"{name} of {clean.name}, made again{using}", clean.classes)


def origin_of(name: str, there: bool, root: Root, made: tuple[str, str]) -> Origin:
    """Return the origin of images. A shift with pictures of its own, such as textures, can only be rebuilt.

    Args:
        name: The shift.
        there: Whether there are files of the shift.
        root: The data root.
        made: Set and part by which `shiftmend data make` would know these files.
    """
    if there:
        return find_origin(root, *made) or "published"
    return "regenerated" if shifts.find(name).texture is None else "rebuilt"
