"""Turn what stands on the command line into data and their normalisation."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from torch import Tensor
from torch.nn import functional

from shiftmend.errors import DataError, ShiftmendError
from shiftmend.evaluation.evaluate import metrics_for
from shiftmend.inputs.arrays import npz_file, open_npz, read_member
from shiftmend.inputs.images import as_labels, per_channel
from shiftmend.utils.checks import counted

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Normalisation:
    """8-bit images to what the model was trained on: x / 255, less the mean, over the deviation, per channel."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    channels: int | None = None

    def __call__(self, images: Tensor) -> Tensor:
        if self.channels is not None:
            images = _with_channels(images, self.channels)
        if images.dtype != torch.uint8:
            return images
        present, means, deviations = images.shape[1], len(self.mean), len(self.deviation)
        if len({present, means, deviations} - {1}) > 1:
            raise DataError(
                f"--mean names {counted(means, 'number')} and --std {deviations}, and the images have "
                f"{counted(present, 'channel')}; expected one number, or one per channel"
            )
        values = images.float().div_(255)
        return (values - per_channel(self.mean, values)) / per_channel(self.deviation, values)


def _with_channels(images: Tensor, channels: int) -> Tensor:
    if images.dtype != torch.uint8 or images.ndim != 4:
        kind = str(images.dtype).removeprefix("torch.")
        raise DataError(
            f"--channels {channels} is for 8-bit images, and the inputs are {kind} {list(images.shape[1:])}: "
            "leave it out"
        )
    present = images.shape[1]
    if present == channels:
        return images
    if present == 1:
        return images.expand(-1, channels, -1, -1)
    if (present, channels) == (3, 1):  # grey as Pillow rounds it, so that it is what image_folder(channels=1) reads
        red, green, blue = images.int().unbind(1)
        return ((19595 * red + 38470 * green + 7471 * blue + 32768) >> 16).to(torch.uint8).unsqueeze(1)
    raise DataError(
        f"the images have {present} channels, which --channels {channels} cannot make of them; expected grey images to "
        "repeat, or colour and --channels 1"
    )


def normalisation(mean: str, deviation: str, channels: int | None) -> Normalisation:
    """From the text of the options, e.g. `0.485,0.456,0.406`."""

    def numbers(text: str, what: str) -> tuple[float, ...]:
        try:
            values = tuple(float(part) for part in text.split(","))
        except ValueError as error:
            raise ShiftmendError(f"--{what} {text!r} should be one number, or one per channel with commas") from error
        if not all(map(math.isfinite, values)):
            raise ShiftmendError(f"--{what} {text!r} should be finite")
        if what == "std" and any(value <= 0 for value in values):
            raise ShiftmendError(f"--std {text!r} should be positive")
        return values

    if channels is not None and channels < 1:
        raise ShiftmendError(f"--channels {channels} should be at least 1")
    return Normalisation(numbers(mean, "mean"), numbers(deviation, "std"), channels)


class Given(NamedTuple):
    """What a command was given to work on."""

    inputs: Tensor
    labels: Tensor | None
    classes: tuple[str, ...] | None = None
    """Names of the classes, where there is one folder for each."""


def load_data(path: Path, size: int | None) -> Given:
    """A folder of images, or an `.npz` of images or of any other inputs."""
    from shiftmend.inputs.folders import image_folder

    if size is not None and size < 1:
        raise DataError(f"--size {size} should be at least 1 pixel")
    if path.is_dir():
        folder = image_folder(path, size=size)
        return Given(folder.images, folder.labels, folder.classes or None)
    if not path.exists():
        raise DataError(f"there is no {path}; expected a folder of images or an .npz file")
    if path.suffix != ".npz":
        raise DataError(f"{path} is neither a folder of images nor an .npz file")
    with open_npz(path) as archive:
        if "inputs" in archive.files:
            inputs = _other_inputs(archive, path, size)
        elif "images" in archive.files:
            inputs = _images(archive, path, size)
        else:
            raise DataError(
                f"{path} holds {', '.join(archive.files) or 'nothing'}; expected an array 'images' (uint8), or "
                "'inputs' for anything else"
            )
        return Given(inputs, _labels(archive, path, len(inputs)))


def _images(archive: NpzFile, path: Path, size: int | None) -> Tensor:
    try:
        images = npz_file(path, labels="").images  # labels are read apart: not every command needs them
    except DataError as error:
        if read_member(archive, path, "images").dtype == np.uint8:
            raise
        raise DataError(f"{error}, or name the array 'inputs' if the model takes these numbers as they are") from error
    return scaled(images, size)


def scaled(images: Tensor, size: int | None) -> Tensor:
    """8-bit images `[N, C, H, W]` brought to a height and width, as Pillow scales those of a folder."""
    if size is None or images.shape[2:] == (size, size):
        return images
    return functional.interpolate(images, (size, size), mode="bilinear", antialias=True)


def _other_inputs(archive: NpzFile, path: Path, size: int | None) -> Tensor:
    """Tables, signals or tokens: an array `inputs`; whole numbers stay whole, since they may be tokens."""
    if size is not None:
        raise DataError(f"--size {size} is for images, and {path} holds 'inputs', which are not scaled: leave it out")
    inputs = np.asarray(read_member(archive, path, "inputs"))
    whole, real = np.issubdtype(inputs.dtype, np.integer), np.issubdtype(inputs.dtype, np.floating)
    if inputs.ndim < 2 or 0 in inputs.shape or not (whole or real):
        raise DataError(f"{path} holds {inputs.dtype} {list(inputs.shape)} under 'inputs'; expected numbers [N, ...]")
    if inputs.dtype == np.uint8 and inputs.ndim != 4:
        raise DataError(
            f"{path} holds uint8 {list(inputs.shape)} under 'inputs', but 8-bit inputs are images [N, C, H, W]; store "
            "tokens as int64 and measurements as float32"
        )
    kind = np.uint8 if inputs.dtype == np.uint8 else np.int64 if whole else np.float32
    return torch.from_numpy(np.array(inputs, dtype=kind, order="C"))


def _labels(archive: NpzFile, path: Path, count: int) -> Tensor | None:
    """Class numbers or fractions, one an input or more; with a warning, none where they are text or objects."""
    if "labels" not in archive.files:
        return None
    try:
        labels = np.asarray(read_member(archive, path, "labels"))
    except DataError as error:
        if "pickle" not in str(error.__cause__):
            raise
        labels = np.empty(count, dtype=object)  # what NumPy would have to unpickle are objects
    fractions = np.issubdtype(labels.dtype, np.floating)
    if not (fractions or np.issubdtype(labels.dtype, np.integer)):
        logger.warning(
            "the labels in %s are %s and are not used; expected class numbers from 0, or fractions for a model that "
            "predicts a quantity",
            path,
            labels.dtype,
        )
        return None
    if labels.shape[:1] != (count,) or 0 in labels.shape:
        raise DataError(
            f"{path} has {count} inputs but labels {list(labels.shape)}; expected one label an input [N], or one for "
            "each position of an output [N, ...]"
        )
    labels = labels.reshape(count) if labels.size == count else labels
    if fractions:
        return torch.from_numpy(labels.astype(np.float32))
    return as_labels(labels)  # also what is no class number, which may be the --ignore-label: scoring looks at them


def telling(labels: Tensor, ignore_label: int | None) -> list[int]:
    """The inputs with the lowest and the highest label that counts, and with most that are neither 0 nor 1."""
    metrics_for(labels, ignore_label=ignore_label)  # refuses what could be no label
    rows = labels.reshape(len(labels), -1)
    left_out = torch.zeros_like(rows, dtype=torch.bool) if ignore_label is None else rows == ignore_label
    low, high = rows.masked_fill(left_out, rows.max()), rows.masked_fill(left_out, rows.min())
    others = ((rows != 0) & (rows != 1)).sum(1)
    return [int(low.amin(1).argmin()), int(high.amax(1).argmax()), int(others.argmax())]
