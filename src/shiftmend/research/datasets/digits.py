"""MNIST and related sets, their shifted versions, and their file formats."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shiftmend.errors import DataError
from shiftmend.inputs.arrays import map_npy, open_npz, read_member
from shiftmend.inputs.digits import DIGITS
from shiftmend.inputs.folders import image_folder
from shiftmend.inputs.images import PathLike, Split, as_images, as_labels
from shiftmend.research.datasets.files import (
    check_split,
    data_root,
    fetch_hint,
    first_existing,
    read_pickled_arrays,
    read_whole,
    wrong_array,
)
from shiftmend.utils.checks import check_known

# Upper case, then those lower-case letters that do not look like their capital.
EMNIST_CLASSES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt")
EMNIST_COUNTS = {"train": 112_800, "test": 18_800}
"""Number of images in the official Balanced split."""

FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)

KMNIST_CLASSES = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")
_MNIST_CORRUPTIONS_TEXT = (
    "brightness canny_edges dotted_line fog glass_blur impulse_noise motion_blur rotate scale shear shot_noise "
    "spatter stripe translate zigzag"
)
MNIST_CORRUPTIONS = tuple(_MNIST_CORRUPTIONS_TEXT.split())
_EMNIST_SHIFTS_TEXT = (
    "bricks crystals dotted_line fog gaussian_blur grass impulse_noise inverse oranges shot_noise sky stripe zigzag"
)
EMNIST_SHIFTS = tuple(_EMNIST_SHIFTS_TEXT.split())
UNSIGNED_BYTE = 0x08
USPS_SIDE = 16


def mnist(split: str = "train", root: PathLike | None = None) -> Split:
    """Load MNIST: 60,000 handwritten digits to train with and 10,000 to test with, 28 x 28 grey."""
    return _read_idx_pair(root, "mnist", "MNIST", split, {"train": "train", "test": "t10k"}, DIGITS)


def fashion_mnist(split: str = "train", root: PathLike | None = None) -> Split:
    """Load Fashion-MNIST: pictures of clothes in the form of MNIST."""
    names = {"train": "train", "test": "t10k"}
    return _read_idx_pair(root, "fashion-mnist", "FashionMNIST", split, names, FASHION_CLASSES)


def kmnist(split: str = "train", root: PathLike | None = None) -> Split:
    """Load KMNIST: old Japanese cursive characters in the form of MNIST."""
    return _read_idx_pair(root, "kmnist", "KMNIST", split, {"train": "train", "test": "t10k"}, KMNIST_CLASSES)


def emnist(split: str = "train", root: PathLike | None = None) -> Split:
    """Load EMNIST Balanced: digits and letters, 47 classes. The stored images are transposed, which is undone."""
    names = {"train": "emnist-balanced-train", "test": "emnist-balanced-test"}
    stored = _read_idx_pair(root, "emnist", "EMNIST", split, names, EMNIST_CLASSES)
    return replace(stored, images=stored.images.transpose(2, 3).contiguous())


def emnist_edition(root: PathLike | None = None) -> str:
    """Describe how the EMNIST files differ in number from the official Balanced split; empty if they do not."""
    try:
        folder = data_root(root) / "EMNIST"
        counts = {
            split: read_idx(_find_idx(folder, f"emnist-balanced-{split}-labels-idx1-ubyte", "labels", "emnist")).size
            for split in EMNIST_COUNTS
        }
    except DataError:
        return ""
    differ = [
        f"its {split} file has {count:,} images, officially {EMNIST_COUNTS[split]:,}"
        for split, count in counts.items()
        if count != EMNIST_COUNTS[split]
    ]
    return f"EMNIST, rebuilt: not the official Balanced split ({'; '.join(differ)})" if differ else ""


def usps(split: str = "train", root: PathLike | None = None) -> Split:
    """Load USPS: greyscale digits from envelopes, 16 x 16 pixels.

    Files are `usps.npz`, or `usps.bz2` and `usps.t.bz2` in the LIBSVM format. The npz holds x_train, y_train, x_test
    and y_test. The LIBSVM files hold grey levels from -1 to 1, rounded here to 8 bits, and classes from 1 to 10 for the
    digits 0 to 9.
    """
    check_split(split, ("train", "test"), "USPS")
    folder = data_root(root) / "USPS"
    text = "usps.bz2" if split == "train" else "usps.t.bz2"
    path = first_existing((folder / text, folder / "usps.npz"), "the LIBSVM text (or usps.npz)", fetch_hint("usps"))
    if path.suffix == ".npz":
        with open_npz(path) as archive:
            images = read_member(archive, path, f"x_{split}")
            labels = read_member(archive, path, f"y_{split}")
        whole = labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer)
        if images.dtype != np.uint8 or images.shape[1:] != (USPS_SIDE, USPS_SIDE) or not whole:
            raise DataError(
                f"Expected uint8 [N, {USPS_SIDE}, {USPS_SIDE}] as x_{split} of {path} with integer labels, got "
                f"{images.dtype} {list(images.shape)} and {labels.dtype} {list(labels.shape)}."
            )
    else:
        images, labels = _read_libsvm(path)
    return Split(as_images(images[:, None]), as_labels(labels), f"usps-{split}", DIGITS)


def mnist_c(corruption: str, split: str = "test", root: PathLike | None = None) -> Split:
    """Load MNIST under one of 15 corruptions (or `identity`), in MNIST's own order."""
    check_split(split, ("train", "test"), "MNIST-C")
    check_known(corruption, (*MNIST_CORRUPTIONS, "identity"), "shift of MNIST-C", DataError)
    folder = data_root(root) / "mnist_c" / corruption
    images_path, labels_path = folder / f"{split}_images.npy", folder / f"{split}_labels.npy"
    images = map_npy(images_path, "uint8 images [N, 28, 28, 1]", fetch_hint("mnist-c"))
    labels = map_npy(labels_path, "one label an image", fetch_hint("mnist-c"))
    grey = images[..., 0] if images.ndim == 4 and images.shape[-1] == 1 else images
    if grey.dtype != np.uint8 or grey.shape[1:] != (28, 28):
        raise wrong_array(images_path, images, "uint8 [N, 28, 28, 1]", "mnist-c")
    if labels.shape != grey.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
        raise wrong_array(labels_path, labels, f"{len(grey):,} integer labels", "mnist-c")
    return Split(as_images(grey[:, None]), as_labels(labels), f"mnist-c-{corruption}-{split}", DIGITS)


def mnist_m(split: str = "test", root: PathLike | None = None) -> Split:
    """Load MNIST-M, digits blended with photographs: the released archive, or `train/` and `test/` image folders.

    The archive `keras_mnistm.pkl.gz` holds no labels. They are MNIST's, whose files are needed as well.
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
        raise DataError(
            f"Expected uint8 images [N, 28, 28, 3] under {split!r} of {path}, got none; {fetch_hint('mnist-m')}."
        )
    labels = mnist(split, root).labels
    if labels is None or len(labels) != len(images):
        raise DataError(
            f"Expected as many images under {split!r} of {path} as MNIST beside it has labels, "
            f"{0 if labels is None else len(labels):,}, got {len(images):,}. Complete both."
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
    """Load EMNIST-DA from one folder of PNG files per class number; only the folder of this split has to be there.

    The decoded images are kept as one array in the folder of the shift, or in `cache`, until a PNG changes.
    """
    check_split(split, ("train", "valid", "test"), "EMNIST-DA")
    check_known(shift, (*EMNIST_SHIFTS, "identity"), "shift of EMNIST-DA", DataError)
    base = data_root(root) / "EMNIST" / shift
    folder = first_existing((base / split,), "the folders 0 to 46 of PNG images", fetch_hint("emnist-da"))
    read = image_folder(
        folder,
        name=f"emnist-da-{shift}-{split}",
        cache=base if cache is None else cache,
        classes=tuple(str(number) for number in range(len(classes))),
    )
    return replace(read, classes=classes)


def read_idx(path: PathLike) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes, compressed (`.gz`) or not: two zero bytes, a type, a rank, the sizes."""
    file = Path(path)
    content = read_whole(file, "an idx file", "put the published one there")
    if len(content) < 4 or content[0] or content[1] or content[2] != UNSIGNED_BYTE:
        raise DataError(f"Expected an idx file of bytes, which begins with 00 00 08, got {file}. Replace the file.")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise DataError(f"File {file} ends inside its header. Delete it and fetch it again.")
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise DataError(
            f"Expected {' x '.join(map(str, shape))} bytes in {file}, as its header says, got "
            f"{len(content) - start:,}. Delete it and fetch it again."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def idx_places(folder: Path, name: str) -> list[Path]:
    """List the paths where an idx file may be: compressed or not, in the folder or in `raw/` below it."""
    return [base / file for base in (folder / "raw", folder) for file in (f"{name}.gz", name)]


def _read_idx_pair(
    root: PathLike | None,
    dataset: str,
    folder: str,
    split: str,
    prefixes: dict[str, str],
    classes: tuple[str, ...],
) -> Split:
    check_split(split, prefixes, dataset)
    base = data_root(root) / folder
    stem = prefixes[split]
    images_path = _find_idx(base, f"{stem}-images-idx3-ubyte", "gzip-compressed images", dataset)
    labels_path = _find_idx(base, f"{stem}-labels-idx1-ubyte", "gzip-compressed labels", dataset)
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.shape[1:] != (28, 28) or len(images) == 0:
        raise DataError(
            f"Expected images of N x 28 x 28 bytes in {images_path}, got {' x '.join(map(str, images.shape))}. Put the "
            "right file there."
        )
    if labels.shape != images.shape[:1]:
        raise DataError(
            f"Expected one label for each of {len(images):,} images in {labels_path}, got "
            f"{' x '.join(map(str, labels.shape))} bytes. Put the right file there."
        )
    if int(labels.max()) >= len(classes):
        raise DataError(
            f"Expected labels from 0 to {len(classes) - 1} in {labels_path}, got {int(labels.max())}. Put the right "
            "file there."
        )
    return Split(as_images(images[:, None]), as_labels(labels), f"{dataset}-{split}", classes)


def _find_idx(folder: Path, name: str, what: str, dataset: str) -> Path:
    expected = f"the {what} of {dataset} (or the same without .gz)"
    return first_existing(idx_places(folder, name), expected, fetch_hint(dataset))


def _read_libsvm(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read lines of `class index:value ...`; an index that is left out has the value 0, as the format demands."""
    text = read_whole(path, "bz2-compressed lines of `class index:value`", fetch_hint("usps"))
    try:
        lines = text.decode("ascii").splitlines()
        values = np.zeros((len(lines), USPS_SIDE * USPS_SIDE))
        labels = np.empty(len(lines), np.int64)
        for row, line in enumerate(lines):
            label, *pairs = line.split()
            labels[row] = int(label) - 1
            for pair in pairs:
                index, value = pair.split(":")
                if not 1 <= int(index) <= values.shape[1]:
                    raise ValueError(f"line {row + 1} has pixel {index}")
                values[row, int(index) - 1] = float(value)
    except (ValueError, OverflowError) as error:
        raise DataError(
            f"Expected a LIBSVM file, lines of `class index:value` with indices 1 to 256, got {path} ({error}). Delete "
            "it and fetch it again."
        ) from error
    if len(lines) == 0 or not np.abs(values).max() <= 1 or labels.min() < 0 or labels.max() > 9:
        raise DataError(
            f"Expected a USPS file of classes 1 to 10 and values from -1 to 1, got {path}. Replace the file."
        )
    grey = np.rint((values + 1) * 127.5).astype(np.uint8)
    return grey.reshape(-1, USPS_SIDE, USPS_SIDE), labels
