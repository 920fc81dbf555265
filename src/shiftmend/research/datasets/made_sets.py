"""Making EMNIST-DA, MNIST-C, MNIST-M, CIFAR-10-C and CIFAR-100-C from clean images, in the published layout.

The readers of this package treat these files like the published ones; a manifest beside them, `shiftmend.json`, records
that they are not, their origin, and the checksum of each part. The images equal those that the benchmarks make in
memory without files.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shiftmend import shifts
from shiftmend.__about__ import __version__
from shiftmend.errors import DataError
from shiftmend.inputs.images import PathLike, Split
from shiftmend.profiles.fingerprints import digest
from shiftmend.research.datasets.cifar import CIFAR_CORRUPTIONS, SEVERITIES, cifar10, cifar100
from shiftmend.research.datasets.digits import EMNIST_SHIFTS, MNIST_CORRUPTIONS, emnist, mnist
from shiftmend.research.datasets.files import data_root
from shiftmend.research.datasets.partitions import MNIST_VALIDATION, emnist_source, held_out
from shiftmend.shifts import textures
from shiftmend.utils import sealing
from shiftmend.utils.checks import check_known, counted
from shiftmend.utils.files import alone_with, check_folder, write_atomically

SEED = 2022
"""Seed of the noise. A published set is one fixed draw, whatever the seed of a run, and so is a made set."""

MANIFEST = "shiftmend.json"

FORMAT = "shiftmend made data"

PHOTOGRAPHS = 200
"""The number in the training set of BSDS500, on which the published digits of MNIST-M stand; with fewer they differ."""

HASHED_BYTES = 1 << 20

MadeOrigin = Literal["regenerated", "rebuilt"]
"""Made by the published recipe; or with other pictures than the published ones."""

Report = Callable[[str, int, int], None]
"""Function that is called with the current part, the number of finished parts, and their total."""


@dataclass(frozen=True)
class Part:
    """A unit of the work of making a set: some files, or a folder of images."""

    name: str
    origin: MadeOrigin
    outputs: tuple[str, ...]
    """Files and folders under the folder of the set."""
    made_from: Mapping[str, str]
    """Hashes of the clean images and of the pictures."""
    write: Callable[[Sequence[Path]], None]
    """Write the outputs to these places."""


@dataclass(frozen=True)
class MadeSet:
    """The result of `make`: the folder of the set, and the numbers of parts that were made and that existed."""

    folder: Path
    made: int
    found: int


def make(
    name: str,
    out: PathLike,
    *,
    root: PathLike | None = None,
    only: Sequence[str] | None = None,
    splits: Sequence[str] | None = None,
    report: Report | None = None,
) -> MadeSet:
    """Make a shifted set from its clean images, and write it under `out` in the published layout.

    Existing complete parts are kept, so that a second call continues where the first was stopped.

    Args:
        name: `emnist-da`, `mnist-c`, `mnist-m`, `cifar-10-c` or `cifar-100-c`.
        out: A folder; its layout is that of the data root, which may be the same folder.
        root: The data root with the clean images. Pictures are taken from its folders `textures` (EMNIST-DA, and frost
            of CIFAR-C) and `BSDS500` (MNIST-M), else drawn.
        only: Names of shifts; all by default.
        splits: `train`, `valid` or `test`, of sets that have them; all by default.
        report: Function that is called with the progress.

    Returns:
        The folder of the set, and how much of it was made.

    Raises:
        DataError: If a clean set is missing, or if files exist that were not made here or from other images.
    """
    check_known(name, SETS, "data set to make", DataError)
    check_folder(out)
    kind = SETS[name]
    for wanted, known, what in ((only, kind.shifts, "shift"), (splits, kind.splits, "split")):
        for each in wanted or ():
            check_known(each, known, f"{what} of {name}", DataError)
    folder = Path(out).expanduser() / kind.folder
    parts = list(kind.parts(data_root(root), only or kind.shifts, splits or kind.splits))
    made = 0
    with alone_with(folder / MANIFEST) as alone:
        if not alone:
            raise DataError(f"Another process is writing {folder}. Wait for its end.")
        manifest = _read_manifest(folder) or {"format": FORMAT, "version": 1, "set": name, "seed": SEED, "parts": {}}
        for number, part in enumerate(parts):
            if report is not None:
                report(part.name, number, len(parts))
            if not _is_whole(folder, part, manifest):
                _make_part(folder, part, manifest)
                made += 1
    return MadeSet(folder, made, len(parts) - made)


def find_origin(root: PathLike | None, name: str, part: str) -> MadeOrigin | None:
    """Find out how `make` made one part of a data set.

    Args:
        root: The data root; by default the folder named by the environment variable SHIFTMEND_DATA.
        name: Name of the set, a key of `SETS`, such as `"mnist-c"`.
        part: Name of the part, such as `"fog/train"`.

    Returns:
        `"regenerated"` if the part was made by the published recipe, `"rebuilt"` if it was made with other pictures or
        the manifest is damaged. None if `make` did not make the part, or if there is no data root.
    """
    try:
        folder = data_root(root) / SETS[name].folder
    except DataError:
        return None
    try:
        manifest = _read_manifest(folder)
    except DataError:
        # Even a damaged manifest shows that the files are not the published ones.
        return "rebuilt"
    found: MadeOrigin | None = ((manifest or {}).get("parts", {}).get(part) or {}).get("origin")
    return found


def check_made(root: Path, name: str, *, checksums: bool = True) -> tuple[int, list[str]]:
    """Count the parts of a generated set under the data root, and list those that differ from its manifest.

    A set without a manifest has no parts.
    """
    if name not in SETS:
        return 0, []
    folder = root / SETS[name].folder
    parts = (_read_manifest(folder) or {}).get("parts", {})
    wrong = [
        f"{folder / output}"
        for part in parts.values()
        for output, facts in part["outputs"].items()
        if not (folder / output).exists() or (checksums and _describe(folder / output) != facts)
    ]
    return len(parts), wrong


# ---- parts and the manifest


def _is_whole(folder: Path, part: Part, manifest: Mapping[str, Any]) -> bool:
    known = manifest["parts"].get(part.name)
    there = [output for output in part.outputs if (folder / output).exists()]
    if known is None:
        if there:
            raise DataError(
                f"Expected a new folder, got {folder}, where {there[0]} was not made here. Name another folder."
            )
        return False
    if known["made_from"] != dict(part.made_from):
        raise DataError(
            f"Expected {part.name} in {folder} to be made from the images here, got one from others. Name another "
            "folder."
        )
    return len(there) == len(part.outputs) and all(
        _describe(folder / output) == known["outputs"][output] for output in part.outputs
    )


def _make_part(folder: Path, part: Part, manifest: dict[str, Any]) -> None:
    """Write a part to a temporary place, record it in the manifest, and move it into place.

    After a kill in between, the manifest lists a part that does not exist, which is made again.
    """
    finals = [folder / output for output in part.outputs]
    staged = [final.with_name(f".{final.name}.partial") for final in finals]
    for place in staged:
        place.parent.mkdir(parents=True, exist_ok=True)
        _remove(place)
    part.write(staged)
    manifest["parts"][part.name] = {
        "origin": part.origin,
        "made_from": dict(part.made_from),
        "shiftmend": __version__,
        "outputs": {output: _describe(place) for output, place in zip(part.outputs, staged, strict=True)},
    }
    text = json.dumps(sealing.blank_entries() | manifest, indent=1, sort_keys=True) + "\n"
    write_atomically(folder / MANIFEST, sealing.seal_json(text).encode())
    for place, final in zip(staged, finals, strict=True):
        _remove(final)
        os.replace(place, final)


def _remove(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def _describe(place: Path) -> dict[str, Any]:
    """Return size and SHA-256 of a file; for a folder, the number of files, and a hash of names and contents."""
    if place.is_file():
        return {"bytes": place.stat().st_size, "sha256": _hash_file(place).hexdigest()}
    files = sorted(path for path in place.rglob("*") if path.is_file() and not path.name.startswith("."))
    whole = hashlib.sha256()
    for path in files:
        whole.update(f"{path.relative_to(place).as_posix()} {_hash_file(path).hexdigest()}\n".encode())
    return {"files": len(files), "bytes": sum(path.stat().st_size for path in files), "sha256": whole.hexdigest()}


def _hash_file(path: Path) -> Any:
    found = hashlib.sha256()
    with path.open("rb") as handle:
        while content := handle.read(HASHED_BYTES):
            found.update(content)
    return found


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    path = folder / MANIFEST
    if not path.is_file():
        return None
    with suppress(ValueError, AttributeError):
        found, _ = sealing.check_json(path.read_text(encoding="utf-8"))
        if found.get("format") == FORMAT and isinstance(found.get("parts"), dict):
            return found
    raise DataError(
        f"Expected a manifest of made data, got {path}, which is none. Remove it together with what was made beside it."
    )


# ---- images


def _shift_in_portions(
    name: str, images: Tensor, pictures: Path | None = None, severity: int | None = None, seed: int = SEED
) -> Iterator[NDArray[np.uint8]]:
    """Yield shifted images in portions, uint8 `[N, H, W, C]`."""
    for portion in shifts.apply_in_portions(name, images, severity=severity, seed=seed, textures=pictures):
        yield portion.permute(0, 2, 3, 1).contiguous().numpy()


def _fill(array: NDArray[np.uint8], name: str, images: Tensor, places: Tensor, **options: Any) -> None:
    """Shift the images at some indices of a set, and write them to the same indices of an array on disk."""
    start = 0
    for portion in _shift_in_portions(name, images[places], **options):
        array[places[start : start + len(portion)].numpy()] = portion
        start += len(portion)


def _create_npy(place: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = np.lib.format.open_memmap(place, mode="w+", dtype=np.uint8, shape=shape)
    return array


def _list_mnist_parts(split: str, count: int) -> list[tuple[Tensor, int]]:
    """Divide MNIST as the benchmarks do, with seeds: the source part, and the held-out part."""
    if split == "test" or count <= MNIST_VALIDATION:
        return [(torch.arange(count), SEED)]
    source, rest = held_out(count)
    return [(source, SEED), (rest, SEED + 1)]


def _make_from(images: Tensor, shift: str, pictures: Path | None = None) -> dict[str, str]:
    texture = shifts.find(shift).texture
    facts = {"images": digest(images)}
    if texture is not None:
        facts |= {f"picture {key}": facts["sha256"] for key, facts in textures.digest(texture, pictures).items()}
    return facts


def _origin_of(shift: str) -> MadeOrigin:
    return "regenerated" if shifts.find(shift).texture is None else "rebuilt"


def _find_pictures(root: Path, *parts: str) -> Path | None:
    place = root.joinpath(*parts)
    return place if place.exists() else None


# ---- MNIST-C: arrays by corruption and split


def _list_mnist_c(root: Path, only: Sequence[str], splits: Sequence[str]) -> Iterator[Part]:
    clean = cache(lambda split: mnist(split, root))
    for shift in only:
        for split in splits:
            name = f"mnist-c/{shift}"
            files = (f"{shift}/{split}_images.npy", f"{shift}/{split}_labels.npy")
            made_from = _make_from(clean(split).images, name)
            write = partial(_write_mnist_c, clean(split), name, split)
            yield Part(f"{shift}/{split}", _origin_of(name), files, made_from, write)


def _write_mnist_c(clean: Split, shift: str, split: str, places: Sequence[Path]) -> None:
    assert clean.labels is not None
    array = _create_npy(places[0], (len(clean), 28, 28, 1))
    for indices, seed in _list_mnist_parts(split, len(clean)):
        _fill(array, shift, clean.images, indices, seed=seed)
    _close(array)
    _save_npy(places[1], clean.labels.numpy())


def _close(array: NDArray[np.uint8]) -> None:
    assert isinstance(array, np.memmap)
    array.flush()


def _save_npy(place: Path, array: NDArray[Any]) -> None:
    # numpy.save would add a suffix to the name.
    with place.open("wb") as handle:
        np.save(handle, array)


# ---- CIFAR-C: an array for each corruption, severities one after the other


def _list_cifar_c(
    clean: Callable[[str, Path], Split], root: Path, only: Sequence[str], splits: Sequence[str]
) -> Iterator[Part]:
    test, pictures = clean("test", root), _find_pictures(root, "textures")
    assert test.labels is not None
    labels = test.labels.repeat(SEVERITIES)
    yield Part(
        "labels",
        "regenerated",
        ("labels.npy",),
        {"labels": digest(test.labels)},
        lambda places: _save_npy(places[0], labels.numpy()),
    )
    for shift in only:
        name = f"cifar-c/{shift}"
        write = partial(_write_cifar_c, test.images, name, pictures)
        yield Part(shift, _origin_of(name), (f"{shift}.npy",), _make_from(test.images, name, pictures), write)


def _write_cifar_c(images: Tensor, shift: str, pictures: Path | None, places: Sequence[Path]) -> None:
    array = _create_npy(places[0], (SEVERITIES * len(images), 32, 32, 3))
    for severity in range(SEVERITIES):
        own = array[severity * len(images) : (severity + 1) * len(images)]
        _fill(own, shift, images, torch.arange(len(images)), pictures=pictures, severity=severity + 1)
    _close(array)


# ---- EMNIST-DA: a PNG file for each image


def _list_emnist_da(root: Path, only: Sequence[str], splits: Sequence[str]) -> Iterator[Part]:
    clean, pictures = cache(lambda split: _load_emnist_split(split, root)), _find_pictures(root, "textures")
    for shift in only:
        for split in splits:
            images = clean(split)
            # The images that a rebuilt EMNIST has may not be enough for a validation split.
            if images is not None:
                name = f"emnist-da/{shift}"
                write = partial(_write_pngs, images, name, pictures)
                made_from = _make_from(images.images, name, pictures)
                yield Part(f"{shift}/{split}", _origin_of(name), (f"{shift}/{split}",), made_from, write)


def _load_emnist_split(split: str, root: Path) -> Split | None:
    if split == "test":
        return emnist("test", root)
    whole = emnist("train", root)
    assert whole.labels is not None
    train, valid = emnist_source(whole.labels)
    chosen = train if split == "train" else valid
    return None if chosen is None else whole.take(chosen, f"emnist-{split}")


def _write_pngs(clean: Split, shift: str, pictures: Path | None, places: Sequence[Path]) -> None:
    """Write an image as `<class>/<place in the split>.png`."""
    from PIL import Image

    assert clean.labels is not None
    for label in clean.labels.unique().tolist():
        (places[0] / str(label)).mkdir(parents=True)
    number = 0
    for portion in _shift_in_portions(shift, clean.images, pictures):
        for pixels in portion:
            file = places[0] / str(int(clean.labels[number])) / f"{number}.png"
            Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(file)
            number += 1


# ---- MNIST-M: a compressed pickle of two arrays


def _list_mnist_m(root: Path, only: Sequence[str], splits: Sequence[str]) -> Iterator[Part]:
    sets = {split: mnist(split, root).images for split in ("train", "test")}
    pictures = _find_pictures(root, "BSDS500", "images", "train")
    number = 0 if pictures is None else len(textures.photograph_files(pictures))
    made_from = _make_from(sets["train"], "mnist-m", pictures) | {"test": digest(sets["test"])}
    write = partial(_write_mnist_m, sets, pictures)
    origin: MadeOrigin = "regenerated" if number == PHOTOGRAPHS else "rebuilt"
    yield Part("archive", origin, ("keras_mnistm.pkl.gz",), made_from, write)


def _write_mnist_m(sets: Mapping[str, Tensor], pictures: Path | None, places: Sequence[Path]) -> None:
    arrays, scratch = {}, []
    for split, images in sets.items():
        scratch.append(places[0].with_name(f".{split}.npy.partial"))
        arrays[split] = _create_npy(scratch[-1], (len(images), 28, 28, 3))
        for indices, seed in _list_mnist_parts(split, len(images)):
            _fill(arrays[split], "mnist-m", images, indices, pictures=pictures, seed=seed)
    with places[0].open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as handle:
        write_pickled_arrays(handle, arrays)
    del arrays
    for place in scratch:
        place.unlink()


def write_pickled_arrays(handle: BinaryIO | gzip.GzipFile, arrays: Mapping[str, NDArray[np.uint8]]) -> None:
    """Write a pickle of a dictionary of uint8 arrays, row by row, in the format of the MNIST-M release.

    Only instructions of protocol 3 that make arrays are used; `read_pickled_arrays` accepts no others.
    """
    handle.write(b"\x80\x03}(")
    for name, array in arrays.items():
        data = struct.pack("<I", array.nbytes)
        shape = b"".join(b"J" + struct.pack("<i", size) for size in array.shape)
        handle.write(_pickle_text(name))
        handle.write(
            b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R(K\x01(" + shape + b"t"
        )
        handle.write(b"cnumpy\ndtype\n" + _pickle_text("u1") + b"K\x00K\x01\x87R(K\x03" + _pickle_text("|"))
        handle.write(b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89B" + data)
        for row in array:
            handle.write(row.tobytes())
        handle.write(b"tb")
    handle.write(b"u.")


def _pickle_text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text.encode())) + text.encode()


# ---- the sets


@dataclass(frozen=True)
class Kind:
    """A set that can be made: its folder in the published layout, its shifts and splits, and its parts."""

    folder: str
    shifts: tuple[str, ...]
    splits: tuple[str, ...]
    parts: Callable[[Path, Sequence[str], Sequence[str]], Iterator[Part]]


SETS: dict[str, Kind] = {
    "emnist-da": Kind("EMNIST", (*EMNIST_SHIFTS, "identity"), ("train", "valid", "test"), _list_emnist_da),
    "mnist-c": Kind("mnist_c", (*MNIST_CORRUPTIONS, "identity"), ("train", "test"), _list_mnist_c),
    "mnist-m": Kind("MNISTM", ("mnist-m",), (), _list_mnist_m),
    "cifar-10-c": Kind("CIFAR-10-C", CIFAR_CORRUPTIONS, (), partial(_list_cifar_c, cifar10)),
    "cifar-100-c": Kind("CIFAR-100-C", CIFAR_CORRUPTIONS, (), partial(_list_cifar_c, cifar100)),
}


def describe_made(made: MadeSet) -> str:
    """Describe in a sentence what `make` has done."""
    return f"{counted(made.made, 'part')} made, {made.found} were whole already: {made.folder}"
