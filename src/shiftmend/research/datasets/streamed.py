"""Datasets that do not fit in memory: the workers of a `DataLoader` decode images on demand."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from shiftmend.errors import DataError
from shiftmend.inputs.folders import decode_image
from shiftmend.inputs.images import PathLike
from shiftmend.research.datasets.files import check_split, data_root, fetch_hint, first_existing
from shiftmend.research.datasets.partitions import balanced

Transform = Callable[[Tensor], Tensor]
HOSPITALS = (0, 1, 2, 3, 4)
SOURCE_HOSPITAL = 3
PATCH = (96, 96)
TISSUE_CLASSES = ("normal", "tumour")

VISDA_CLASSES = (
    "aeroplane",
    "bicycle",
    "bus",
    "car",
    "horse",
    "knife",
    "motorcycle",
    "person",
    "plant",
    "skateboard",
    "train",
    "truck",
)

# Images of each class that the paper keeps when it removes the label shift (appendix on common benchmarks).
VISDA_PER_CLASS = {"train": 11_000, "validation": 3_500}


class ImageFiles(Dataset[tuple[Tensor, int, int]]):
    """Image files with labels. An item is (uint8 image [3, H, W], label, index).

    An image of another `size` (height, width) is scaled or, with `scale=False`, refused. Then `transform` is applied,
    if given. File names are stored as one array of bytes instead of Python strings, so that the workers of a loader
    share it.
    """

    def __init__(
        self,
        folder: Path,
        files: list[str],
        labels: Tensor,
        name: str,
        classes: tuple[str, ...],
        *,
        size: tuple[int, int] | None = None,
        scale: bool = True,
        transform: Transform | None = None,
    ) -> None:
        if not files or len(files) != len(labels):
            raise DataError(
                f"Expected as many images as labels in {name}, and some, got {len(files)} images and {len(labels)} "
                "labels."
            )
        if int(labels.min()) < 0 or int(labels.max()) >= len(classes):
            raise DataError(
                f"Expected labels from 0 to {len(classes) - 1} in {name}, got {int(labels.min())} to "
                f"{int(labels.max())}. Replace its list of labels."
            )
        self.folder = folder
        self.labels = labels
        self.name = name
        self.classes = classes
        self.size = size
        self.scale = scale
        self.transform = transform
        self._files = np.array([os.fsencode(file) for file in files])

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        image = torch.from_numpy(np.array(decode_image(self.path(index), self.size if self.scale else None, 3)))
        if self.size is not None and image.shape[1:] != self.size:
            raise DataError(
                f"Expected images of {self.size[0]} x {self.size[1]} pixels in {self.name}, got {image.shape[1]} x "
                f"{image.shape[2]} in {self.path(index)}. Replace the file."
            )
        if self.transform is not None:
            image = self.transform(image)
        return image, int(self.labels[index]), index

    def path(self, index: int) -> Path:
        """Return the path of an image."""
        return self.folder / os.fsdecode(bytes(self._files[index]))

    def take(self, indices: Tensor, name: str | None = None) -> ImageFiles:
        """Take the images at `indices`, in that order; repeated indices are allowed."""
        files = [os.fsdecode(bytes(file)) for file in self._files[indices.numpy()]]
        return ImageFiles(
            self.folder,
            files,
            self.labels[indices],
            name or self.name,
            self.classes,
            size=self.size,
            scale=self.scale,
            transform=self.transform,
        )


def camelyon17(hospital: int, root: PathLike | None = None, *, transform: Transform | None = None) -> ImageFiles:
    """Load CAMELYON17: patches of lymph-node tissue, 96 x 96, of one of five hospitals, as WILDS released them (v1.0).

    The column `center` of the metadata names the hospital; the splits of WILDS play no part. Hospital 3 is the source.
    """
    if hospital not in HOSPITALS:
        raise DataError(f"Expected a hospital of CAMELYON17 from {HOSPITALS[0]} to {HOSPITALS[-1]}, got {hospital}.")
    base = data_root(root)
    table = first_existing(
        (base / "CAMELYON17" / "camelyon17_v1.0" / "metadata.csv", base / "camelyon17_v1.0" / "metadata.csv"),
        "the metadata of the WILDS release v1.0",
        fetch_hint("camelyon17"),
    )
    files, labels = _read_metadata(table, hospital)
    if not files:
        raise DataError(f"Expected patches of hospital {hospital} in {table}, got none. Unpack the set again.")
    return ImageFiles(
        table.parent,
        files,
        torch.tensor(labels, device="cpu"),
        f"camelyon17-hospital-{hospital}",
        TISSUE_CLASSES,
        size=PATCH,
        scale=False,
        transform=transform,
    )


def _read_metadata(table: Path, hospital: int) -> tuple[list[str], list[int]]:
    """Read the patches of a hospital, and whether they show a tumour."""
    wanted = ("patient", "node", "x_coord", "y_coord", "tumor", "center")
    files: list[str] = []
    labels: list[int] = []
    line = 1
    with table.open(newline="", encoding="utf-8", errors="surrogateescape") as handle:
        rows = csv.reader(handle)
        try:
            header = next(rows, [])
            if absent := [column for column in wanted if column not in header]:
                raise DataError(
                    f"Expected the columns {', '.join(wanted)} in {table}, got no {absent[0]!r}. Unpack the set again."
                )
            columns = [header.index(column) for column in wanted]
            for row in rows:
                line += 1
                patient, node, x, y, tumour, center = (row[column] for column in columns)
                if int(float(center)) == hospital:
                    # Patient numbers have leading zeros in the release, which a spreadsheet may have removed.
                    slide = f"patient_{patient.zfill(3)}_node_{node}"
                    files.append(f"patches/{slide}/patch_{slide}_x_{x}_y_{y}.png")
                    labels.append(int(float(tumour)))
        except DataError:
            raise
        except (IndexError, ValueError, OverflowError, csv.Error):
            raise DataError(f"Table {table} is damaged in line {line}. Delete it and unpack the set again.") from None
    return files, labels


def visda_c(
    split: str = "train",
    root: PathLike | None = None,
    *,
    per_class: int | None = None,
    seed: int = 0,
    size: tuple[int, int] | None = (256, 256),
    transform: Transform | None = None,
) -> ImageFiles:
    """Load VisDA-C: rendered objects (`train`) and photographs of them (`validation`), 12 classes, of any size.

    `per_class` removes the label shift between the two: so many of each class, by dropping some and repeating others.
    The paper's numbers are in `VISDA_PER_CLASS`.
    """
    check_split(split, VISDA_PER_CLASS, "VisDA-C")
    base = data_root(root)
    table = first_existing(
        (base / "VisDA-C" / split / "image_list.txt", base / "visda-c" / split / "image_list.txt"),
        "the list of its images",
        fetch_hint("visda-c"),
    )
    files: list[str] = []
    labels: list[int] = []
    for number, line in enumerate(table.read_text(encoding="utf-8", errors="surrogateescape").splitlines(), start=1):
        if not line.strip():
            continue
        file, _, label = line.strip().rpartition(" ")
        if not file or not label.isdecimal():
            raise DataError(f"Expected `path label` in line {number} of {table}, got {line!r}. Unpack the set again.")
        files.append(file.strip())
        labels.append(int(label))
    whole = ImageFiles(
        table.parent,
        files,
        torch.tensor(labels, device="cpu"),
        f"visda-c-{split}",
        VISDA_CLASSES,
        size=size,
        transform=transform,
    )
    if per_class is None:
        return whole
    return whole.take(balanced(whole.labels, per_class, seed), f"{whole.name}-{per_class}-per-class")
