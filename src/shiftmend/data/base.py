"""What every dataset becomes: all of its images in one tensor, and where the files are looked for."""

from __future__ import annotations

import bz2
import gzip
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shiftmend.checks import counted
from shiftmend.errors import DataError

PathLike = str | os.PathLike[str]
ROOT_VARIABLE = "SHIFTMEND_DATA"


@dataclass(frozen=True, eq=False, repr=False)
class Split:
    """A set of images as it was stored, before any scaling: nothing is left to do per image.

    `labels[i]` indexes `classes`; both are absent for images without labels.
    """

    images: Tensor  # uint8 [N, C, H, W]
    labels: Tensor | None  # int64 [N]
    name: str
    classes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        known = "without labels" if self.labels is None else f"{len(self.classes) or 'unnamed'} classes"
        return f"{self.name}: {counted(len(self.images), 'image')} {list(self.images.shape[1:])}, {known}"

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if images.dtype != torch.uint8 or images.ndim != 4 or 0 in images.shape:
            raise DataError(
                f"{self.name} holds {str(images.dtype).removeprefix('torch.')} {list(images.shape)}; "
                "expected at least one image as uint8 [N, C, H, W]"
            )
        if labels is None:
            return
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            raise DataError(
                f"{self.name} has {counted(len(images), 'image')} but labels of "
                f"{str(labels.dtype).removeprefix('torch.')} {list(labels.shape)}; expected one int64 label "
                "an image"
            )
        lowest, highest = int(labels.min()), int(labels.max())
        if lowest < 0 or (self.classes and highest >= len(self.classes)):
            expected = f"0 to {len(self.classes) - 1}" if self.classes else "class numbers from 0"
            raise DataError(
                f"{self.name} has labels from {lowest} to {highest}; expected {expected}: the labels belong to another "
                "set or are damaged, or mark images without a class, which have to be left out"
            )

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: Tensor, name: str | None = None) -> Split:
        """The images at `indices`, in that order."""
        labels = None if self.labels is None else self.labels[indices]
        return replace(self, images=self.images[indices], labels=labels, name=name or self.name)


def data_root(argument: PathLike | None = None) -> Path:
    """The folder that holds all datasets: the argument, else the environment variable SHIFTMEND_DATA."""
    chosen = os.fspath(argument) if argument is not None else os.environ.get(ROOT_VARIABLE, "")
    if not chosen:
        raise DataError(
            "no data folder is known: expected the folder that holds the datasets; pass it as `root` (--data-root), or "
            f"name it once with `export {ROOT_VARIABLE}=/path/to/data`"
        )
    return Path(chosen).expanduser()


def first_existing(candidates: Iterable[Path], expected: str, remedy: str) -> Path:
    """The first of several places that exists; if none does, the error names the first of them."""
    places = list(candidates)
    for place in places:
        if place.exists():
            return place
    raise DataError(f"{places[0]} is missing: expected {expected} there; {remedy}")


def read_whole(path: Path, expected: str, remedy: str) -> bytes:
    """The content of a file, decompressed if its name says that it is compressed."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as handle:
                return handle.read()
        return bz2.decompress(path.read_bytes()) if path.suffix == ".bz2" else path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path} is missing: expected {expected} there; {remedy}") from None
    except (EOFError, zlib.error, ValueError, OSError) as error:
        raise DataError(
            f"{path} cannot be read whole ({error}): expected {expected}; delete it and {remedy}"
        ) from error


def fetch_hint(dataset: str) -> str:
    """What to do about a missing or damaged file of a set in the catalogue."""
    return f'fetch it with shiftmend.data.fetch("{dataset}"), or put it there by hand'


def check_split(split: str, known: Iterable[str], dataset: str) -> None:
    names = tuple(known)
    if split not in names:
        raise DataError(f"{dataset} has no split called {split!r}; expected one of {', '.join(names)}")


def as_images(array: NDArray[np.uint8]) -> Tensor:
    """A tensor of its own: what is read from a file is read-only, mapped or laid out in another order."""
    return torch.from_numpy(np.array(array, dtype=np.uint8, order="C"))


def as_labels(array: NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(np.array(array, dtype=np.int64, order="C"))
