"""Ready-made shifted sets, in the layout of their releases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shiftmend.errors import DataError
from shiftmend.inputs.arrays import map_npy
from shiftmend.inputs.folders import image_folder
from shiftmend.inputs.images import PathLike, Split, as_images, as_labels
from shiftmend.research.datasets.base import check_split, data_root, fetch_hint, first_existing, read_whole
from shiftmend.research.datasets.cifar import CIFAR10_CLASSES, CIFAR100_CLASSES
from shiftmend.research.datasets.digits import DIGITS, EMNIST_CLASSES, mnist
from shiftmend.research.datasets.pickles import read_pickled_arrays

CIFAR_CORRUPTIONS = (
    "brightness",
    "contrast",
    "defocus_blur",
    "elastic_transform",
    "fog",
    "frost",
    "gaussian_blur",
    "gaussian_noise",
    "glass_blur",
    "impulse_noise",
    "jpeg_compression",
    "motion_blur",
    "pixelate",
    "saturate",
    "shot_noise",
    "snow",
    "spatter",
    "speckle_noise",
    "zoom_blur",
)


MNIST_CORRUPTIONS = (
    "brightness",
    "canny_edges",
    "dotted_line",
    "fog",
    "glass_blur",
    "impulse_noise",
    "motion_blur",
    "rotate",
    "scale",
    "shear",
    "shot_noise",
    "spatter",
    "stripe",
    "translate",
    "zigzag",
)


EMNIST_SHIFTS = (
    "bricks",
    "crystals",
    "dotted_line",
    "fog",
    "gaussian_blur",
    "grass",
    "impulse_noise",
    "inverse",
    "oranges",
    "shot_noise",
    "sky",
    "stripe",
    "zigzag",
)


SEVERITIES = 5


def cifar10_c(corruption: str, severity: int = 5, root: PathLike | None = None, *, per_severity: int = 10_000) -> Split:
    """The CIFAR-10 test images under one corruption; of the five severities stored, only one is read."""
    return _cifar_c("cifar-10-c", "CIFAR-10-C", corruption, severity, root, per_severity, CIFAR10_CLASSES)


def cifar100_c(
    corruption: str, severity: int = 5, root: PathLike | None = None, *, per_severity: int = 10_000
) -> Split:
    """The CIFAR-100 test images under one corruption; of the five severities stored, only one is read."""
    return _cifar_c("cifar-100-c", "CIFAR-100-C", corruption, severity, root, per_severity, CIFAR100_CLASSES)


def mnist_c(corruption: str, split: str = "test", root: PathLike | None = None) -> Split:
    """MNIST under one of 15 corruptions (or `identity`), the images in MNIST's own order."""
    check_split(split, ("train", "test"), "MNIST-C")
    _check_shift(corruption, (*MNIST_CORRUPTIONS, "identity"), "MNIST-C")
    folder = data_root(root) / "mnist_c" / corruption
    images_path, labels_path = folder / f"{split}_images.npy", folder / f"{split}_labels.npy"
    images = map_npy(images_path, "uint8 images [N, 28, 28, 1]", fetch_hint("mnist-c"))
    labels = map_npy(labels_path, "one label an image", fetch_hint("mnist-c"))
    grey = images[..., 0] if images.ndim == 4 and images.shape[-1] == 1 else images
    if grey.dtype != np.uint8 or grey.shape[1:] != (28, 28):
        raise _wrong(images_path, images, "uint8 [N, 28, 28, 1]", "mnist-c")
    if labels.shape != grey.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
        raise _wrong(labels_path, labels, f"{len(grey):,} integer labels", "mnist-c")
    return Split(as_images(grey[:, None]), as_labels(labels), f"mnist-c-{corruption}-{split}", DIGITS)


def mnist_m(split: str = "test", root: PathLike | None = None) -> Split:
    """MNIST digits blended with patches of photographs: the released archive, or `train/` and `test/` image
    folders.

    The archive `keras_mnistm.pkl.gz` holds no labels; they are MNIST's, whose files are therefore needed too.
    """
    check_split(split, ("train", "test"), "MNIST-M")
    folder = data_root(root) / "MNISTM"
    path = first_existing(
        (folder / "keras_mnistm.pkl.gz", folder / "keras_mnistm.pkl", folder / split),
        f"the released archive (or a folder {split}/ with one folder of images per digit)",
        fetch_hint("mnist-m"),
    )
    if path.is_dir():
        return image_folder(path, channels=3, name=f"mnist-m-{split}", cache=folder, classes=DIGITS)
    content = read_whole(path, "a gzip-compressed pickle of arrays", fetch_hint("mnist-m"))
    images: Any = read_pickled_arrays(content, path).get(split)
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (28, 28, 3):
        raise DataError(f"{path} lacks uint8 images [N, 28, 28, 3] under {split!r}; {fetch_hint('mnist-m')}")
    labels = mnist(split, root).labels
    if labels is None or len(labels) != len(images):
        raise DataError(
            f"{path} holds {len(images):,} images under {split!r}, but MNIST beside it has "
            f"{0 if labels is None else len(labels):,} labels; expected as many: one of the two is incomplete"
        )
    return Split(as_images(images.transpose(0, 3, 1, 2)), labels, f"mnist-m-{split}", DIGITS)


def emnist_da(
    shift: str,
    split: str = "test",
    root: PathLike | None = None,
    *,
    cache: PathLike | None = None,
    classes: tuple[str, ...] = EMNIST_CLASSES,
) -> Split:
    """EMNIST-DA, one folder of PNG files per class number; decoded once and kept as one array.

    The array lies in the folder of the shift, or in `cache`; it is made anew when a PNG changes. Only the
    folder of the split that is asked for has to be there.
    """
    check_split(split, ("train", "valid", "test"), "EMNIST-DA")
    _check_shift(shift, (*EMNIST_SHIFTS, "identity"), "EMNIST-DA")
    base = data_root(root) / "EMNIST" / shift
    folder = first_existing((base / split,), "the folders 0 to 46 of PNG images", fetch_hint("emnist-da"))
    read = image_folder(
        folder,
        name=f"emnist-da-{shift}-{split}",
        cache=base if cache is None else cache,
        classes=tuple(str(number) for number in range(len(classes))),
    )
    return replace(read, classes=classes)


def _cifar_c(
    dataset: str,
    folder: str,
    corruption: str,
    severity: int,
    root: PathLike | None,
    per_severity: int,
    classes: tuple[str, ...],
) -> Split:
    _check_shift(corruption, CIFAR_CORRUPTIONS, folder)
    if not 1 <= severity <= SEVERITIES:
        raise DataError(f"{folder} has severities 1 to {SEVERITIES}, got {severity}")
    base = data_root(root) / folder
    rows = SEVERITIES * per_severity
    images_path, labels_path = base / f"{corruption}.npy", base / "labels.npy"
    images = map_npy(images_path, f"uint8 images [{rows}, 32, 32, 3]", fetch_hint(dataset))
    labels = map_npy(labels_path, f"{rows} labels", fetch_hint(dataset))
    if images.shape != (rows, 32, 32, 3) or images.dtype != np.uint8:
        raise _wrong(images_path, images, f"uint8 [{rows}, 32, 32, 3]", dataset)
    if labels.shape != (rows,) or not np.issubdtype(labels.dtype, np.integer):
        raise _wrong(labels_path, labels, f"{rows} integer labels", dataset)
    part = slice((severity - 1) * per_severity, severity * per_severity)  # severity 1 first, each in test order
    pictures = as_images(images[part].transpose(0, 3, 1, 2))
    return Split(pictures, as_labels(labels[part]), f"{dataset}-{corruption}-{severity}", classes)


def _check_shift(shift: str, known: tuple[str, ...], dataset: str) -> None:
    if shift not in known:
        raise DataError(f"{dataset} has no shift called {shift!r}; expected one of {', '.join(known)}")


def _wrong(path: Path, array: NDArray[Any], expected: str, dataset: str) -> DataError:
    return DataError(
        f"{path} holds {array.dtype} {list(array.shape)}; expected {expected}: delete it and {fetch_hint(dataset)}"
    )
