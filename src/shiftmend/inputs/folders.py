"""Reading images from a folder: decode them in a pool of threads, and optionally cache them as one array."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from shiftmend.errors import DataError
from shiftmend.inputs.arrays import DAMAGE
from shiftmend.inputs.images import PathLike, Split
from shiftmend.utils.bounded import read_array
from shiftmend.utils.checks import brief, counted, is_whole
from shiftmend.utils.files import as_path, replacing

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
GREY_MODES = frozenset({"1", "L", "LA"})
COLOUR_MODES = frozenset({"RGB", "RGBA", "P", "PA", "CMYK", "YCbCr", "HSV", "LAB", "RGBX", "RGBa"})
CACHE_VERSION = 1


@dataclass(frozen=True)
class FolderListing:
    """Image files of a folder in reading order, with the class of each."""

    files: tuple[str, ...]
    """Paths relative to the folder, with forward slashes."""
    labels: tuple[int, ...] | None
    classes: tuple[str, ...]
    signature: str
    """Hash that changes when a file is added, removed or modified."""


def image_folder(
    folder: PathLike,
    *,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    cache: PathLike | None = None,
    classes: tuple[str, ...] | None = None,
    name: str | None = None,
    workers: int | None = None,
) -> Split:
    """Read all images of a folder, either flat (without labels) or with one folder per class.

    The label of an image is the index of its folder in sorted order: by value (2 before 10) if all names are numbers,
    else as text.

    Args:
        folder: The folder of image files, or of one folder per class.
        size: Side length, or (height, width), to scale images to. By default, all images must have the same size.
        channels: 1 or 3. By default, 3 if any image has colour.
        cache: Folder that caches the decoded images as one `.npy` file until a file changes.
        classes: Names of the folders that must exist, and no others.
        name: Name of the set; by default the name of the folder.
        workers: Number of decoding threads.

    Returns:
        A `Split`: `images` are uint8 `[N, channels, height, width]`, `labels` int64 `[N]` or None.

    Raises:
        DataError: If the folder is missing, has no images, or has images that do not fit together.

    >>> import tempfile
    >>> from PIL import Image
    >>> folder = tempfile.TemporaryDirectory()
    >>> Image.new("L", (8, 6)).save(f"{folder.name}/first.png")
    >>> image_folder(folder.name, name="scans")
    scans: 1 image [1, 6, 8], without labels
    >>> folder.cleanup()
    """
    path = as_path(folder, "the folder of images", DataError)
    if channels not in (None, 1, 3):
        raise DataError(f"Expected images of 1 or 3 channels, got channels={channels}.")
    shape = (size, size) if isinstance(size, int) else size
    if shape is not None and not (
        isinstance(shape, tuple) and len(shape) == 2 and all(is_whole(side) and side > 0 for side in shape)
    ):
        raise DataError(f"Expected size to be a side in pixels, or (height, width), at least 1, got {brief(size)}.")
    listing = list_images(path)
    if classes is not None and listing.classes != classes:
        raise DataError(
            f"Expected {_summarise(classes)} in {path}, got {_summarise(listing.classes)}. Put the right folders "
            "there, since labels count folders."
        )
    label = name or path.name
    stored = None if cache is None else _cache_file(Path(cache), label, listing, shape, channels)
    images = None if stored is None else _read_cache(stored, len(listing.files))
    if images is None:
        images = decode_images([path / file for file in listing.files], shape, channels, workers)
        if stored is not None:
            _write_cache(stored, images)
    labels = None if listing.labels is None else torch.tensor(listing.labels, dtype=torch.int64, device="cpu")
    return Split(torch.from_numpy(np.ascontiguousarray(images)), labels, label, listing.classes)


def list_images(folder: Path) -> FolderListing:
    """List the images of a folder, at most one level deep."""
    if not folder.is_dir():
        raise DataError(f"Expected a folder of images, or of one folder per class, got {folder}, which is missing.")
    flat, folders = _scan(folder)
    found = {name: _scan(folder / name) for name in folders}
    parts = {name: files for name, (files, _) in found.items()}
    filled = {name: files for name, files in parts.items() if files}
    if flat and filled:
        raise DataError(
            f"Expected either images or one folder per class in {folder}, got both ({flat[0].name}, "
            f"{next(iter(filled))}). Move one of the two away."
        )
    if flat:
        return FolderListing(tuple(entry.name for entry in flat), None, (), _signature({"": flat}))
    if not filled:
        raise DataError(
            f"Expected images in {folder}, or in one folder per class, got none. Put files such as 0.png there."
        )
    if len(filled) < len(parts):
        empty = next(name for name, files in parts.items() if not files)
        raise DataError(
            f"Expected images of class {empty}, got none in {folder / empty}. Put them there, or remove the folder; "
            "labels count the folders in order."
        )
    for below in (folder / name / inner for name, (_, within) in found.items() for inner in within):
        if deeper := _scan(below)[0]:
            raise DataError(
                f"Expected images in {below.parent} itself, got {deeper[0].name} a level deeper, in {below}. Move them "
                "up, or away."
            )
    files = tuple(f"{name}/{entry.name}" for name, entries in parts.items() for entry in entries)
    labels = tuple(number for number, entries in enumerate(parts.values()) for _ in entries)
    return FolderListing(files, labels, tuple(parts), _signature(parts))


def decode_images(
    paths: Sequence[Path],
    size: tuple[int, int] | None = None,
    channels: int | None = None,
    workers: int | None = None,
) -> NDArray[np.uint8]:
    """Decode image files to one array.

    Args:
        paths: The files.
        size: Height and width to resize to. By default, all images must have the size of the first.
        channels: 1 for greyscale, 3 for colour; by default 3 if any image has colour.
        workers: Number of threads; by default one for each CPU, at most eight.

    Returns:
        Images `[N, C, H, W]`, uint8.
    """
    with _open(paths[0]) as first:
        common = (first.height, first.width) if size is None else size

    def decode(path: Path) -> NDArray[np.uint8]:
        picture = decode_image(path, size, channels)
        if picture.shape[1:] != common:
            raise DataError(
                f"Expected images of one size, got {picture.shape[1]} x {picture.shape[2]} pixels in {path} and "
                f"{common[0]} x {common[1]} in {paths[0]}. Pass size= (--size)."
            )
        return picture

    with ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1)) as pool:
        images = np.empty((len(paths), 1, *common), np.uint8)
        # Images are copied into the array one by one; a separate list would double the memory.
        for position, picture in enumerate(pool.map(decode, paths)):
            if len(picture) > images.shape[1]:
                grey, images = images[:position], np.empty((len(paths), len(picture), *common), np.uint8)
                images[:position] = grey
            # A grey image among coloured ones fills all three channels.
            images[position] = picture
    return images


def decode_image(path: Path, size: tuple[int, int] | None, channels: int | None) -> NDArray[np.uint8]:
    """Decode one image file to uint8 `[C, H, W]`, scaled to `size`; `channels` None keeps its own channels."""
    from PIL.Image import Resampling

    with _open(path) as image:
        grey = image.mode in GREY_MODES if channels is None else channels == 1
        try:
            picture = image.convert("L" if grey else "RGB")
        except (OSError, SyntaxError, ValueError) as error:
            raise _damaged(path, error) from error
    if size is not None and picture.size != (size[1], size[0]):
        picture = picture.resize((size[1], size[0]), Resampling.BILINEAR)
    pixels = np.asarray(picture, np.uint8)
    return pixels[None] if grey else pixels.transpose(2, 0, 1)


def _open(path: Path) -> Image:
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(path)
    except FileNotFoundError:
        raise DataError(f"Expected an image, got {path}, which is missing. Fetch or unpack the set again.") from None
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        raise _damaged(path, error) from error
    if image.mode not in GREY_MODES | COLOUR_MODES or _is_cut_to_8_bits(image):
        mode = f"{image.mode} with 16 bits" if image.mode in GREY_MODES | COLOUR_MODES else image.mode
        image.close()
        raise DataError(f"Expected 8 bits a channel in {path}, got pixels of mode {mode}. Convert it to 8 bits first.")
    return image


def _is_cut_to_8_bits(image: Image) -> bool:
    """Tell whether Pillow would keep only the upper 8 of 16 bits per channel, so that 12-bit images become black.

    The raw mode of the file shows it, e.g. `RGB;16B`. `BGR;16` of bitmaps means 16 bits for all channels together. A
    .ppm file states its white level, by which Pillow scales, so 12 bits (4095) are read correctly.
    """
    layouts = [tile[3] for tile in getattr(image, "tile", ())]
    parts = [part for layout in layouts for part in (layout if isinstance(layout, tuple) else (layout,))]
    if image.format == "PPM":
        return 65535 in parts
    return any(isinstance(part, str) and re.search(";16[BLN]$", part) for part in parts)


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(
        f"Expected an image such as PNG or JPEG, got {path}, which is damaged or none ({error}). Replace it."
    )


def _scan(folder: Path) -> tuple[list[os.DirEntry[str]], list[str]]:
    """List the image files in sorted order and the names of the folders; skip hidden ones."""
    with os.scandir(folder) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(".")]
    images = [entry for entry in visible if os.path.splitext(entry.name)[1].lower() in SUFFIXES]
    for entry in images:
        try:
            # The entry caches its stat, which the signature needs.
            entry.stat()
        except OSError as error:
            raise DataError(
                f"Expected an image, got {entry.path}, a link to a file that cannot be reached ({error.strerror}). "
                "Fetch that file, or remove the link."
            ) from error
    files = {entry.name: entry for entry in images if entry.is_file()}
    folders = [entry.name for entry in visible if entry.name not in files and os.path.isdir(entry)]
    return [files[name] for name in _sort(list(files), suffixed=True)], _sort(folders)


def _sort(names: list[str], suffixed: bool = False) -> list[str]:
    """Sort by value if all names are numbers; as text, 10 would come before 2 and labels would be wrong."""
    stems = {name: os.path.splitext(name)[0] if suffixed else name for name in names}
    if all(stem.isdecimal() for stem in stems.values()):
        return sorted(names, key=lambda name: (int(stems[name]), name))
    return sorted(names)


def _summarise(classes: tuple[str, ...]) -> str:
    names = ", ".join(classes) if len(classes) < 6 else f"{', '.join(classes[:3])}, ... {classes[-1]}"
    return f"{counted(len(classes), 'class folder')} ({names})" if classes else "no class folders"


def _signature(parts: dict[str, list[os.DirEntry[str]]]) -> str:
    digest = hashlib.sha256()
    for name, entries in parts.items():
        for entry in entries:
            status = entry.stat()
            digest.update(
                f"{name}/{entry.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape")
            )
    return digest.hexdigest()


def _cache_file(
    folder: Path, name: str, listing: FolderListing, size: tuple[int, int] | None, channels: int | None
) -> Path:
    """Return the path of the cache, which depends on the set, the decoding options and the files."""
    manner = hashlib.sha256(json.dumps([CACHE_VERSION, size, channels]).encode()).hexdigest()[:8]
    return folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}-{manner}-{listing.signature[:16]}.npy"


def _read_cache(path: Path, count: int) -> NDArray[np.uint8] | None:
    """Read the cached array; None if it is missing or incomplete, so that images are decoded again."""
    try:
        with path.open("rb") as file:
            array: NDArray[Any] = read_array(file, path.stat().st_size)
    except DAMAGE:
        return None
    whole = array.dtype == np.uint8 and array.ndim == 4 and len(array) == count
    return array if whole else None


def _write_cache(path: Path, images: NDArray[np.uint8]) -> None:
    """Write the array to the cache, replacing older ones; skip a folder that cannot be written to."""
    try:
        with replacing(path) as (place,), place.open("wb") as file:
            np.save(file, images)
        for old in path.parent.glob(f"{path.stem[:-16]}{'?' * 16}.npy"):
            if old != path:
                old.unlink(missing_ok=True)
    except OSError:
        return
