"""CIFAR-10, CIFAR-100 and their corrupted versions, from the binary release or from the pickled one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shiftmend.errors import DataError
from shiftmend.inputs.arrays import map_npy
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

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
SEVERITIES = 5
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

_CIFAR100_CLASSES_TEXT = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can "
    "castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin "
    "elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard "
    "lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear "
    "pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark "
    "shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone "
    "television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)

CIFAR100_CLASSES = tuple(_CIFAR100_CLASSES_TEXT.split())
_CIFAR_CORRUPTIONS_TEXT = (
    "brightness contrast defocus_blur elastic_transform fog frost gaussian_blur gaussian_noise glass_blur "
    "impulse_noise jpeg_compression motion_blur pixelate saturate shot_noise snow spatter speckle_noise zoom_blur"
)
CIFAR_CORRUPTIONS = tuple(_CIFAR_CORRUPTIONS_TEXT.split())


def cifar10(split: str = "train", root: PathLike | None = None) -> Split:
    """Load CIFAR-10: 50,000 small photographs to train with and 10,000 to test with, 32 x 32, 10 classes."""
    check_split(split, ("train", "test"), "CIFAR-10")
    batches = [f"data_batch_{number}" for number in range(1, 6)] if split == "train" else ["test_batch"]
    folder = _find_release(root, "cifar-10", "cifar-10-batches-bin", "cifar-10-batches-py")
    if folder.name.endswith("-bin"):
        parts = [_read_binary(folder / f"{batch}.bin", 1, "cifar-10") for batch in batches]
    else:
        parts = [_read_pickled(folder / batch, "labels", "cifar-10") for batch in batches]
    sizes = [len(labels) for _, labels in parts]
    if len(set(sizes)) > 1:
        odd = batches[int(np.argmin(sizes))]
        raise DataError(
            f"Expected {max(sizes):,} images in {folder / odd}, as in another batch, got {min(sizes):,}. Delete it and "
            "fetch the set again."
        )
    return _assemble(parts, folder, f"cifar-10-{split}", CIFAR10_CLASSES)


def cifar100(split: str = "train", root: PathLike | None = None) -> Split:
    """Load CIFAR-100 with its 100 fine labels; the 20 coarse ones are ignored."""
    check_split(split, ("train", "test"), "CIFAR-100")
    folder = _find_release(root, "cifar-100", "cifar-100-binary", "cifar-100-python")
    if folder.name.endswith("-binary"):
        part = _read_binary(folder / f"{split}.bin", 2, "cifar-100")
    else:
        part = _read_pickled(folder / split, "fine_labels", "cifar-100")
    return _assemble([part], folder, f"cifar-100-{split}", CIFAR100_CLASSES)


def cifar10_c(corruption: str, severity: int = 5, root: PathLike | None = None, *, per_severity: int = 10_000) -> Split:
    """Load the CIFAR-10-C images and labels of one corruption at one severity, without reading other severities.

    Args:
        corruption: A name in `CIFAR_CORRUPTIONS`, e.g. "fog".
        severity: Severity of the corruption, from 1 to 5.
        root: Folder that holds all datasets; by default the environment variable SHIFTMEND_DATA.
        per_severity: Number of images of each severity in the file; 10,000 in the published files.

    Returns:
        The images in the order of the CIFAR-10 test images, with their labels.
    """
    return _read_corrupted("cifar-10-c", "CIFAR-10-C", corruption, severity, root, per_severity, CIFAR10_CLASSES)


def cifar100_c(
    corruption: str, severity: int = 5, root: PathLike | None = None, *, per_severity: int = 10_000
) -> Split:
    """Load the CIFAR-100 test images under one corruption; see `cifar10_c`."""
    return _read_corrupted("cifar-100-c", "CIFAR-100-C", corruption, severity, root, per_severity, CIFAR100_CLASSES)


_Part = tuple[NDArray[np.uint8], NDArray[np.int64]]


def _find_release(root: PathLike | None, dataset: str, binary: str, pickled: str) -> Path:
    base = data_root(root)
    return first_existing((base / binary, base / pickled), f"the binary release (or {pickled})", fetch_hint(dataset))


def _read_binary(path: Path, label_bytes: int, dataset: str) -> _Part:
    """Read records of label bytes (CIFAR-100: coarse, then fine) and 3072 pixels: red, green, blue, row by row."""
    record = label_bytes + PIXELS
    content = np.frombuffer(read_whole(path, f"images of {dataset}", fetch_hint(dataset)), np.uint8)
    if len(content) == 0 or len(content) % record:
        raise DataError(
            f"Expected whole records of {record:,} bytes of {dataset} in {path}, got {len(content):,} bytes; delete it "
            f"and {fetch_hint(dataset)}."
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
            f"Expected uint8 `data` [N, {PIXELS}] with as many `{label_key}` of {dataset} in {path}, got others; "
            f"delete it and {fetch_hint(dataset)}."
        )
    if not all(isinstance(label, int) for label in labels):
        raise DataError(f"Expected `{label_key}` in {path} to be whole numbers, got others; {fetch_hint(dataset)}.")
    return images, np.array(labels, np.int64)


def _assemble(parts: list[_Part], folder: Path, name: str, classes: tuple[str, ...]) -> Split:
    images = np.concatenate([part[0] for part in parts])
    labels = np.concatenate([part[1] for part in parts])
    if labels.min(initial=0) < 0 or labels.max(initial=0) >= len(classes):
        raise DataError(
            f"Expected labels from 0 to {len(classes) - 1} in {folder}, got {labels.min()} to {labels.max()}. Replace "
            "the file that is damaged or of another set."
        )
    return Split(as_images(images.reshape(-1, *SHAPE)), as_labels(labels), name, classes)


def _read_corrupted(
    dataset: str,
    folder: str,
    corruption: str,
    severity: int,
    root: PathLike | None,
    per_severity: int,
    classes: tuple[str, ...],
) -> Split:
    check_known(corruption, CIFAR_CORRUPTIONS, f"shift of {folder}", DataError)
    if not 1 <= severity <= SEVERITIES:
        raise DataError(f"Expected a severity from 1 to {SEVERITIES} of {folder}, got {severity}.")
    base = data_root(root) / folder
    rows = SEVERITIES * per_severity
    images_path, labels_path = base / f"{corruption}.npy", base / "labels.npy"
    images = map_npy(images_path, f"uint8 images [{rows}, 32, 32, 3]", fetch_hint(dataset))
    labels = map_npy(labels_path, f"{rows} labels", fetch_hint(dataset))
    if images.shape != (rows, 32, 32, 3) or images.dtype != np.uint8:
        raise wrong_array(images_path, images, f"uint8 [{rows}, 32, 32, 3]", dataset)
    if labels.shape != (rows,) or not np.issubdtype(labels.dtype, np.integer):
        raise wrong_array(labels_path, labels, f"{rows} integer labels", dataset)
    # The file starts with severity 1, and each severity is in the order of the test images.
    part = slice((severity - 1) * per_severity, severity * per_severity)
    pictures = as_images(images[part].transpose(0, 3, 1, 2))
    return Split(pictures, as_labels(labels[part]), f"{dataset}-{corruption}-{severity}", classes)
