"""Reading NumPy files without unpickling: `.npz` archives of images, and memory-mapped `.npy` arrays."""

from __future__ import annotations

import lzma
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from shiftmend.errors import DataError
from shiftmend.inputs.images import PathLike, Split, as_images, as_labels
from shiftmend.utils.bounded import read_array, read_array_header
from shiftmend.utils.checks import one_line

# Damage can show in the directory of an archive (where a member may even seem encrypted), in the compressed data of a
# member, or in the header of an array, which is a Python literal.
DAMAGE = (
    *(OSError, ValueError, EOFError, KeyError, RuntimeError, SyntaxError, TypeError, OverflowError, MemoryError),
    *(tokenize.TokenError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
)


def npz_file(
    path: PathLike,
    *,
    images: str = "images",
    labels: str = "labels",
    classes: tuple[str, ...] = (),
    channels_last: bool | None = None,
    name: str | None = None,
) -> Split:
    """Read an `.npz` archive of uint8 images and, if present, integer labels.

    Args:
        path: The file.
        images: Name of the array of images, `[N, H, W]`, `[N, H, W, C]` or `[N, C, H, W]`.
        labels: Name of the array of labels `[N]`.
        classes: Names of the classes, in the order of their numbers.
        channels_last: Whether the channels are the last axis. By default, they are the axis of size 1 or 3.
        name: Name of the set; by default the name of the file.

    Raises:
        DataError: If the file is missing or damaged, or has other content.
    """
    file = Path(path)
    with open_npz(file) as archive:
        pictures = read_member(archive, file, images)
        numbers = read_member(archive, file, labels) if labels in archive.files else None
    if pictures.dtype != np.uint8 or pictures.ndim not in (3, 4):
        raise DataError(
            f"Expected uint8 images [N, H, W], [N, H, W, C] or [N, C, H, W] under {images!r} of {file}, got "
            f"{pictures.dtype} {list(pictures.shape)}. Convert them first."
        )
    if pictures.ndim == 3:
        if pictures.shape[2] in (1, 3) and channels_last is None:
            raise DataError(
                f"Expected several images [N, H, W, C] under {images!r} of {file}, got {list(pictures.shape)}. Store "
                "one image as [1, H, W, C], or pass channels_last=False."
            )
        pictures = pictures[:, None]
    elif _are_channels_last(pictures, channels_last, file):
        pictures = pictures.transpose(0, 3, 1, 2)
    if numbers is not None and not (numbers.ndim == 1 and np.issubdtype(numbers.dtype, np.integer)):
        raise DataError(
            f"Expected integer labels [N] under {labels!r} of {file}, got {numbers.dtype} {list(numbers.shape)}."
        )
    return Split(
        as_images(pictures),
        None if numbers is None else as_labels(numbers),
        name or file.stem,
        tuple(classes),
    )


def open_npz(path: Path) -> NpzFile:
    """Open an archive, as a context manager."""
    try:
        kind = _kind_of_file(path)
        if kind == "npy":
            raise DataError(f"Expected an .npz archive of named arrays, got {path}, a single array. Try numpy.savez.")
        archive: NpzFile = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"Expected an .npz archive, got {path}, which is missing. Put it there by hand.") from None
    except DataError:
        raise
    except DAMAGE as error:
        raise DataError(
            f"Expected an .npz archive, got {path}, which is none ({one_line(error)}). Replace the file."
        ) from error
    return archive


def read_member(archive: NpzFile, path: Path, key: str) -> NDArray[Any]:
    """Read one array of an open archive."""
    if key not in archive.files:
        raise DataError(f"Expected an array {key!r} in {path}, got {', '.join(archive.files) or 'nothing'}.")
    if holds_objects(archive, key):
        raise DataError(
            f"Expected numbers under {key!r} of {path}, got objects, perhaps arrays of different lengths. Pad all "
            "samples to one size."
        )
    try:
        with _open_member(archive, key) as file:
            held = _zip_of(archive).getinfo(file.name).file_size
            array = read_array(file, held)
    except DAMAGE as error:
        raise DataError(
            f"File {path} is damaged: array {key!r} cannot be read ({one_line(error)}). Replace the file."
        ) from error
    return array


def holds_objects(archive: NpzFile, key: str) -> bool:
    """Tell whether an array contains Python objects, which can only be unpickled."""
    try:
        with _open_member(archive, key) as file:
            return bool(read_array_header(file)[2].hasobject)
    except DAMAGE:
        return False


def _open_member(archive: NpzFile, key: str) -> IO[bytes]:
    names = _zip_of(archive).namelist()
    return _zip_of(archive).open(f"{key}.npy" if f"{key}.npy" in names else key)


def _zip_of(archive: NpzFile) -> zipfile.ZipFile:
    assert archive.zip is not None
    return archive.zip


def map_npy(path: Path, expected: str, remedy: str) -> NDArray[Any]:
    """Memory-map an `.npy` array, so that only the used parts are read."""
    try:
        kind = _kind_of_file(path)
        if kind == "npz":
            raise DataError(
                f"Expected {path} to hold {expected} as a single .npy array, got an archive of arrays; {remedy}."
            )
        mapped: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"Expected {expected}, got {path}, which is missing; {remedy}.") from None
    except DataError:
        raise
    except DAMAGE as error:
        raise DataError(
            f"Expected {expected}, got {path}, truncated or no .npy file ({one_line(error)}); {remedy}."
        ) from error
    return mapped


def _kind_of_file(path: Path) -> Literal["npy", "npz"]:
    """Return the format of a NumPy file. NumPy itself would take any other file for a pickle."""
    with path.open("rb") as file:
        magic = file.read(6)
    if magic.startswith(b"PK"):
        return "npz"
    if magic == b"\x93NUMPY":
        return "npy"
    raise ValueError("it holds no plain numbers")


def _are_channels_last(images: NDArray[Any], told: bool | None, path: Path) -> bool:
    first, last = images.shape[1] in (1, 3), images.shape[3] in (1, 3)
    if told is not None:
        return told
    if first == last:
        raise DataError(
            f"Expected images with channels of 1 or 3 on one axis in {path}, got {list(images.shape)}. Pass "
            "channels_last=True or False."
        )
    return last
