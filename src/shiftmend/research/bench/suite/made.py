"""Shifted data for the benchmarks: the published files where they are, made again where they are not."""

from __future__ import annotations

from pathlib import Path

from shiftmend import shifts
from shiftmend.errors import DataError
from shiftmend.inputs.images import Split
from shiftmend.research.bench.benchmark import Origin, Root
from shiftmend.research.datasets.files import data_root

SEED = 2022
"""A published set is one fixed draw of its noise, whatever the seed of a run; so is what is made again."""


def exists(root: Root, *parts: str) -> bool:
    """Whether a file or folder of a published set is there."""
    try:
        return data_root(root).joinpath(*parts).exists()
    except DataError:
        return False


def textures(root: Root, *parts: str) -> Path | None:
    """A folder of pictures under the data root, if there is one; without it the package draws stand-ins."""
    return data_root(root).joinpath(*parts) if exists(root, *parts) else None


def apply(name: str, clean: Split, *, pictures: Path | None = None, severity: int | None = None) -> Split:
    """A clean set under a shift, in the same order."""
    needed = shifts.find(name).texture is not None
    images = shifts.apply(name, clean.images, severity=severity, seed=SEED, textures=pictures)
    using = "" if not needed else f" with {'stand-ins' if pictures is None else 'the pictures in ' + pictures.name}"
    return Split(images, clean.labels, f"{name} of {clean.name}, made again{using}", clean.classes)


def origin(name: str, published: bool) -> Origin:
    """What stands on pictures of its own, such as textures, can only be rebuilt with others."""
    if published:
        return "published"
    return "regenerated" if shifts.find(name).texture is None else "rebuilt"
