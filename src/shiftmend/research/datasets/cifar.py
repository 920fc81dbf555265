"""CIFAR-10 and CIFAR-100, from the binary release or from the pickled one (read without unpickling)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shiftmend.errors import DataError
from shiftmend.inputs.images import PathLike, Split, as_images, as_labels
from shiftmend.research.datasets.base import check_split, data_root, fetch_hint, first_existing, read_whole
from shiftmend.research.datasets.pickles import read_pickled_arrays

SHAPE = (3, 32, 32)


PIXELS = 3 * 32 * 32


CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)


CIFAR100_NAMES = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly "
    "camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup "
    "dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower "
    "leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid "
    "otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray "
    "road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar "
    "sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle "
    "wardrobe whale willow_tree wolf woman worm "
)


CIFAR100_CLASSES = tuple(CIFAR100_NAMES.split())


def cifar10(split: str = "train", root: PathLike | None = None) -> Split:
    """50,000 small photographs to train with and 10,000 to test with, 32 x 32 in colour, 10 classes."""
    check_split(split, ("train", "test"), "CIFAR-10")
    batches = [f"data_batch_{number}" for number in range(1, 6)] if split == "train" else ["test_batch"]
    folder = _release(root, "cifar-10", "cifar-10-batches-bin", "cifar-10-batches-py")
    if folder.name.endswith("-bin"):
        parts = [_read_binary(folder / f"{batch}.bin", 1, "cifar-10") for batch in batches]
    else:
        parts = [_read_pickled(folder / batch, "labels", "cifar-10") for batch in batches]
    sizes = [len(labels) for _, labels in parts]
    if len(set(sizes)) > 1:
        odd = batches[int(np.argmin(sizes))]
        raise DataError(
            f"{folder / odd} holds {min(sizes):,} images where another batch holds {max(sizes):,}; expected "
            "equal batches: it is truncated, delete it and fetch the set again"
        )
    return _assemble(parts, folder, f"cifar-10-{split}", CIFAR10_CLASSES)


def cifar100(split: str = "train", root: PathLike | None = None) -> Split:
    """As CIFAR-10 with 100 classes: the fine labels, not the 20 coarse ones stored beside them."""
    check_split(split, ("train", "test"), "CIFAR-100")
    folder = _release(root, "cifar-100", "cifar-100-binary", "cifar-100-python")
    if folder.name.endswith("-binary"):
        part = _read_binary(folder / f"{split}.bin", 2, "cifar-100")
    else:
        part = _read_pickled(folder / split, "fine_labels", "cifar-100")
    return _assemble([part], folder, f"cifar-100-{split}", CIFAR100_CLASSES)


_Part = tuple[NDArray[np.uint8], NDArray[np.int64]]


def _release(root: PathLike | None, dataset: str, binary: str, pickled: str) -> Path:
    base = data_root(root)
    return first_existing((base / binary, base / pickled), f"the binary release (or {pickled})", fetch_hint(dataset))


def _read_binary(path: Path, label_bytes: int, dataset: str) -> _Part:
    """Records of a label byte (CIFAR-100: coarse, then fine) and 3072 bytes: red, green, blue, row by row."""
    record = label_bytes + PIXELS
    content = np.frombuffer(read_whole(path, f"images of {dataset}", fetch_hint(dataset)), np.uint8)
    if len(content) == 0 or len(content) % record:
        raise DataError(
            f"{path} holds {len(content):,} bytes; expected whole records of {record:,}: it is truncated or "
            f"no file of {dataset}, delete it and {fetch_hint(dataset)}"
        )
    rows = content.reshape(-1, record)
    return rows[:, label_bytes:], rows[:, label_bytes - 1].astype(np.int64)


def _read_pickled(path: Path, label_key: str, dataset: str) -> _Part:
    content = read_whole(path, f"pickled images of {dataset}", fetch_hint(dataset))
    batch = read_pickled_arrays(content, path)
    images: Any = batch.get("data")
    labels: Any = batch.get(label_key)
    good_images = isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.ndim == 2
    if not good_images or images.shape[1] != PIXELS or not isinstance(labels, list) or len(labels) != len(images):
        raise DataError(
            f"{path} lacks uint8 `data` [N, {PIXELS}] with as many `{label_key}`; it is no file of "
            f"{dataset}: delete it and {fetch_hint(dataset)}"
        )
    if not all(isinstance(label, int) for label in labels):
        raise DataError(f"{path} holds `{label_key}` that are no whole numbers; {fetch_hint(dataset)}")
    return images, np.array(labels, np.int64)


def _assemble(parts: list[_Part], folder: Path, name: str, classes: tuple[str, ...]) -> Split:
    images = np.concatenate([part[0] for part in parts])
    labels = np.concatenate([part[1] for part in parts])
    if labels.min(initial=0) < 0 or labels.max(initial=0) >= len(classes):
        raise DataError(
            f"{folder} holds labels from {labels.min()} to {labels.max()}; expected 0 to {len(classes) - 1}: "
            "a file in it belongs to another set or is damaged"
        )
    return Split(as_images(images.reshape(-1, *SHAPE)), as_labels(labels), name, classes)
