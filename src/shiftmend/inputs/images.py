"""Sets of 8-bit images, and functions that turn 8-bit images into the inputs of a network."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.utils.checks import counted

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, eq=False, repr=False)
class Split:
    """A set of images in memory, as stored, without scaling.

    Attributes:
        images: uint8 `[N, C, H, W]`.
        labels: Class numbers, int64 `[N]`, or None.
        name: Name of the set.
        classes: Names of the classes, in the order of their numbers.

    >>> Split(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1]), "scans", ("good", "bad"))
    scans: 2 images [1, 8, 8], 2 classes
    """

    images: Tensor
    labels: Tensor | None
    name: str
    classes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        known = "without labels" if self.labels is None else f"{len(self.classes) or 'unnamed'} classes"
        return f"{self.name}: {counted(len(self.images), 'image')} {list(self.images.shape[1:])}, {known}"

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if images.dtype != torch.uint8 or images.ndim != 4 or 0 in images.shape:
            raise DataError(
                f"Expected {self.name} to hold at least one image as uint8 [N, C, H, W], got "
                f"{str(images.dtype).removeprefix('torch.')} {list(images.shape)}."
            )
        if labels is None:
            return
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            raise DataError(
                f"Expected one int64 label for each of {counted(len(images), 'image')} of {self.name}, got "
                f"{str(labels.dtype).removeprefix('torch.')} {list(labels.shape)}."
            )
        lowest, highest = int(labels.min()), int(labels.max())
        if lowest < 0 or (self.classes and highest >= len(self.classes)):
            expected = f"0 to {len(self.classes) - 1}" if self.classes else "class numbers from 0"
            raise DataError(
                f"Expected {expected} as labels of {self.name}, got {lowest} to {highest}. Leave out images without "
                "a class, or replace damaged labels."
            )

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: Tensor, name: str | None = None) -> Split:
        """Take the images at `indices`, in that order."""
        labels = None if self.labels is None else self.labels[indices]
        return replace(self, images=self.images[indices], labels=labels, name=name or self.name)


def as_images(array: NDArray[np.uint8]) -> Tensor:
    """Copy an array into a tensor. Arrays from files may be read-only, memory-mapped or of another layout."""
    return torch.from_numpy(np.array(array, dtype=np.uint8, order="C"))


def check_range(array: NDArray[Any], what: str) -> None:
    """Refuse values beyond the range of int64 or float32, which would change silently."""
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and array.size and int(array.max()) >= 1 << 63:
        raise DataError(f"Expected every {what} below 2 ** 63, got {int(array.max())}. Try smaller numbers.")
    if array.dtype.kind == "f" and array.dtype.itemsize > 4 and array.size:
        with np.errstate(over="ignore", invalid="ignore"):
            beyond = np.isfinite(array) & ~np.isfinite(array.astype(np.float32))
        if beyond.any():
            raise DataError(f"Expected every {what} within float32, got {array[beyond].flat[0]:g}. Try other units.")


def as_labels(array: NDArray[np.integer]) -> Tensor:
    """Copy class numbers into an int64 tensor; refuse values beyond its range."""
    check_range(array, "class number")
    return torch.from_numpy(np.array(array, dtype=np.int64, order="C"))


def signed(images: Tensor) -> Tensor:
    """Scale 8-bit images, grey or in colour, to three channels in [-1, 1]."""
    scaled = images.float().div_(127.5).sub_(1)
    return scaled.expand(-1, 3, -1, -1) if images.shape[1] == 1 else scaled


def standardised(mean: Sequence[float], deviation: Sequence[float]) -> Callable[[Tensor], Tensor]:
    """Make a function that scales 8-bit images to [0, 1], subtracts a mean and divides by a deviation per channel."""
    # A partial can be pickled, for other processes, where a function inside a function cannot.
    return functools.partial(_standardise, mean=tuple(mean), deviation=tuple(deviation))


def _standardise(images: Tensor, mean: tuple[float, ...], deviation: tuple[float, ...]) -> Tensor:
    scaled = images.float().div_(255)
    return scaled.sub_(per_channel(mean, scaled)).div_(per_channel(deviation, scaled))


def per_channel(values: tuple[float, ...], like: Tensor) -> Tensor:
    """Return a tensor `[1, channels, 1, 1]` with the dtype and device of `like`, created once and cached.

    Copying the values to a GPU for every batch would synchronise each time, and cannot be part of a CUDA graph.
    """
    return _make_per_channel(values, like.dtype, like.device)


@functools.cache
def _make_per_channel(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # The cached tensor must be usable in training as well.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device).view(1, -1, 1, 1)
