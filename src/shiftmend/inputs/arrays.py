"""NumPy files, read without unpickling: `.npz` archives of images, and `.npy` arrays part by part."""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from shiftmend.errors import DataError
from shiftmend.inputs.images import PathLike, Split, as_images, as_labels

# A damaged archive shows itself in its directory (where a member may even seem encrypted), in a member's compressed
# stream, or in the array inside, whose header is Python.
DAMAGE = (OSError, ValueError, EOFError, KeyError, RuntimeError, tokenize.TokenError, zipfile.BadZipFile, zlib.error)


def npz_file(
    path: PathLike,
    *,
    images: str = "images",
    labels: str = "labels",
    classes: tuple[str, ...] = (),
    channels_last: bool | None = None,
    name: str | None = None,
) -> Split:
    """An `.npz` with uint8 images [N, H, W], [N, H, W, C] or [N, C, H, W], and integer labels [N] if there
    are any.

    `images` and `labels` name the two arrays. Where the channels stand is seen from which axis has length 1
    or 3; if both could be meant, say so with `channels_last`.
    """
    file = Path(path)
    with open_npz(file) as archive:
        pictures = read_member(archive, file, images)
        numbers = read_member(archive, file, labels) if labels in archive.files else None
    if pictures.dtype != np.uint8 or pictures.ndim not in (3, 4):
        raise DataError(
            f"{file} holds {pictures.dtype} {list(pictures.shape)} under {images!r}; expected uint8 images "
            "[N, H, W], [N, H, W, C] or [N, C, H, W]: convert them first"
        )
    if pictures.ndim == 3:
        if pictures.shape[2] in (1, 3) and channels_last is None:
            raise DataError(
                f"{file} holds {list(pictures.shape)} under {images!r}, which looks like one image [H, W, C]; expected "
                "[N, H, W], [N, H, W, C] or [N, C, H, W]: store it as [1, H, W, C], or pass channels_last=False"
            )
        pictures = pictures[:, None]
    elif _channels_last(pictures, channels_last, file):
        pictures = pictures.transpose(0, 3, 1, 2)
    if numbers is not None and not (numbers.ndim == 1 and np.issubdtype(numbers.dtype, np.integer)):
        raise DataError(
            f"{file} holds {numbers.dtype} {list(numbers.shape)} under {labels!r}; expected integer labels [N]"
        )
    return Split(
        as_images(pictures),
        None if numbers is None else as_labels(numbers),
        name or file.stem,
        tuple(classes),
    )


def open_npz(path: Path) -> NpzFile:
    """The archive, opened; a context manager."""
    try:
        archive = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"{path} is missing: expected an .npz archive there; put it there by hand") from None
    except DAMAGE as error:
        raise DataError(f"{path} is no .npz archive ({_reason(error)}); replace the file") from error
    if not isinstance(archive, NpzFile):
        raise DataError(f"{path} holds a single array; expected an .npz archive of named arrays")
    return archive


def read_member(archive: NpzFile, path: Path, key: str) -> NDArray[Any]:
    if key not in archive.files:
        raise DataError(f"{path} has no array {key!r}; expected it beside {', '.join(archive.files) or 'nothing'}")
    try:
        array: NDArray[Any] = archive[key]
    except DAMAGE as error:
        if "Object arrays" in str(error):
            raise DataError(
                f"{path} holds objects under {key!r}, as arrays of different lengths are stored; expected numbers: pad "
                "all samples to one size"
            ) from error
        raise DataError(
            f"{path} is damaged: array {key!r} cannot be read ({_reason(error)}); replace the file"
        ) from error
    return array


def map_npy(path: Path, expected: str, remedy: str) -> NDArray[Any]:
    """An `.npy` array mapped into memory: only what is taken from it is read."""
    try:
        mapped: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"{path} is missing: expected {expected} there; {remedy}") from None
    except DAMAGE as error:
        raise DataError(
            f"{path} is truncated or no .npy file ({_reason(error)}): expected {expected}; {remedy}"
        ) from error
    if not isinstance(mapped, np.ndarray):
        raise DataError(f"{path} is an archive of arrays: expected {expected} as a single .npy array; {remedy}")
    return mapped


def _reason(error: Exception) -> str:
    """NumPy takes whatever it does not know for a pickle and advises to run it; nobody should."""
    return "it holds no plain numbers" if "pickle" in str(error) else str(error)


def _channels_last(images: NDArray[Any], told: bool | None, path: Path) -> bool:
    first, last = images.shape[1] in (1, 3), images.shape[3] in (1, 3)
    if told is not None:
        return told
    if first == last:
        raise DataError(
            f"{path} holds images {list(images.shape)}, in which the channels cannot be told from the other "
            "axes; pass channels_last=True or False"
        )
    return last
