"""MNIST and its relatives: the idx files they are all published in, and the three forms of USPS."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from shiftmend.errors import DataError
from shiftmend.inputs.arrays import open_npz, read_member
from shiftmend.inputs.images import PathLike, Split, as_images, as_labels
from shiftmend.research.datasets.base import check_split, data_root, fetch_hint, first_existing, read_whole

DIGITS = tuple("0123456789")


# upper case, then those lower-case letters that do not look like their capital
EMNIST_CLASSES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt")


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


EMNIST_COUNTS = {"train": 112_800, "test": 18_800}
"""Of the official Balanced split."""


UNSIGNED_BYTE = 0x08


USPS_SIDE = 16


def mnist(split: str = "train", root: PathLike | None = None) -> Split:
    """Handwritten digits: 60,000 to train with, 10,000 to test with, 28 x 28 grey."""
    return _idx_pair(root, "mnist", "MNIST", split, {"train": "train", "test": "t10k"}, DIGITS)


def fashion_mnist(split: str = "train", root: PathLike | None = None) -> Split:
    """Pictures of clothes in the form of MNIST."""
    names = {"train": "train", "test": "t10k"}
    return _idx_pair(root, "fashion-mnist", "FashionMNIST", split, names, FASHION_CLASSES)


def kmnist(split: str = "train", root: PathLike | None = None) -> Split:
    """Old Japanese cursive characters in the form of MNIST."""
    return _idx_pair(root, "kmnist", "KMNIST", split, {"train": "train", "test": "t10k"}, KMNIST_CLASSES)


def emnist(split: str = "train", root: PathLike | None = None) -> Split:
    """EMNIST Balanced: digits and letters, 47 classes. Stored lying on their side, returned upright."""
    names = {"train": "emnist-balanced-train", "test": "emnist-balanced-test"}
    stored = _idx_pair(root, "emnist", "EMNIST", split, names, EMNIST_CLASSES)
    upright = stored.images.transpose(2, 3).contiguous()
    return Split(upright, stored.labels, stored.name, stored.classes)


def emnist_edition(root: PathLike | None = None) -> str:
    """What sets the images that are there apart from the official Balanced split; empty if their numbers do not."""
    try:
        folder = data_root(root) / "EMNIST"
        counts = {
            split: read_idx(_idx_file(folder, f"emnist-balanced-{split}-labels-idx1-ubyte", "labels", "emnist")).size
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
    """Digits from envelopes, 16 x 16 grey: `usps.npz`, or the LIBSVM files `usps.bz2` and `usps.t.bz2`.

    The npz holds x_train, y_train, x_test, y_test. The LIBSVM files hold grey levels from -1 to 1, rounded
    here to 8 bits, and classes from 1 to 10, of which 10 is the digit 9.
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
                f"{path} holds {images.dtype} images {list(images.shape)} under x_{split} and labels {labels.dtype} "
                f"{list(labels.shape)} under y_{split}; expected uint8 [N, {USPS_SIDE}, {USPS_SIDE}] and one whole "
                "number each: replace the file"
            )
    else:
        images, labels = _read_libsvm(path)
    return Split(as_images(images[:, None]), as_labels(labels), f"usps-{split}", DIGITS)


def read_idx(path: PathLike) -> NDArray[np.uint8]:
    """One idx file of unsigned bytes, gzip-compressed (`.gz`) or not: two zero bytes, a type, a rank, the
    sizes.
    """
    file = Path(path)
    content = read_whole(file, "an idx file", "put the published one there")
    if len(content) < 4 or content[0] or content[1] or content[2] != UNSIGNED_BYTE:
        raise DataError(f"{file} is no idx file of bytes: expected it to begin with 00 00 08; replace the file")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise DataError(f"{file} ends inside its header; delete it and fetch it again")
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise DataError(
            f"{file} holds {len(content) - start:,} bytes of data where its header announces "
            f"{' x '.join(map(str, shape))}; it is truncated or damaged: delete it and fetch it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _idx_pair(
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
    images_path = _idx_file(base, f"{stem}-images-idx3-ubyte", "gzip-compressed images", dataset)
    labels_path = _idx_file(base, f"{stem}-labels-idx1-ubyte", "gzip-compressed labels", dataset)
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.shape[1:] != (28, 28) or len(images) == 0:
        raise DataError(
            f"{images_path} holds {' x '.join(map(str, images.shape))} bytes; expected N x 28 x 28 (images): "
            "put the right file there"
        )
    if labels.shape != images.shape[:1]:
        raise DataError(
            f"{labels_path} holds {' x '.join(map(str, labels.shape))} bytes; expected one label for each of "
            f"the {len(images):,} images beside it: put the right file there"
        )
    if int(labels.max()) >= len(classes):
        raise DataError(
            f"{labels_path} holds labels up to {int(labels.max())}; expected 0 to {len(classes) - 1}: "
            "put the right file there"
        )
    return Split(as_images(images[:, None]), as_labels(labels), f"{dataset}-{split}", classes)


def idx_places(folder: Path, name: str) -> list[Path]:
    """Compressed or not, in `raw/` as published tools leave it or straight in the folder of the set."""
    return [base / file for base in (folder / "raw", folder) for file in (f"{name}.gz", name)]


def _idx_file(folder: Path, name: str, what: str, dataset: str) -> Path:
    expected = f"the {what} of {dataset} (or the same without .gz)"
    return first_existing(idx_places(folder, name), expected, fetch_hint(dataset))


def _read_libsvm(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Lines of `class index:value ...`; an index that is left out has the value 0, as the format demands."""
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
            f"{path} is no LIBSVM file ({error}): expected lines of `class index:value` with indices 1 to 256; "
            "delete it and fetch it again"
        ) from error
    if len(lines) == 0 or not np.abs(values).max() <= 1 or labels.min() < 0 or labels.max() > 9:
        raise DataError(f"{path} is no USPS file: expected classes 1 to 10 and values from -1 to 1; replace the file")
    grey = np.rint((values + 1) * 127.5).astype(np.uint8)
    return grey.reshape(-1, USPS_SIDE, USPS_SIDE), labels


def enlarged_digits(size: int = 28) -> Split:
    """scikit-learn's 1,797 handwritten digits as uint8 `[1797, 1, size, size]`, enlarged from 8 x 8: no file needed."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    grey = torch.from_numpy(raw.images).float().unsqueeze(1) / 16
    large = torch.nn.functional.interpolate(grey, size=size, mode="bicubic").clamp(0, 1)
    large = large.where(large > 0.3, 0.0)  # enlarging smears ink over the paper, which has to be plain black again
    return Split((large * 255).to(torch.uint8), torch.from_numpy(raw.target).long(), "digits", DIGITS)
