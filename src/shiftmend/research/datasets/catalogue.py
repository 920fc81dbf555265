"""The known datasets: their sources, their files, and checks that the files are complete.

A checksum is listed only if the publisher states it, or if several independent sources agree on it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from shiftmend.errors import DataError
from shiftmend.inputs.arrays import map_npy, open_npz, read_member
from shiftmend.inputs.folders import SUFFIXES
from shiftmend.inputs.images import PathLike
from shiftmend.research.datasets.cifar import CIFAR_CORRUPTIONS
from shiftmend.research.datasets.digits import EMNIST_COUNTS, EMNIST_SHIFTS, MNIST_CORRUPTIONS, idx_places, read_idx
from shiftmend.research.datasets.files import data_root, read_whole
from shiftmend.research.datasets.made_sets import check_made


@dataclass(frozen=True)
class Unpack:
    """Instructions for unpacking: members whose name begins with `only`, without their first `drop` folders."""

    into: str = "."
    only: str = ""
    drop: int = 0


@dataclass(frozen=True)
class Download:
    """A file to fetch: its path under the data root, its address, and its checksum."""

    path: str
    urls: tuple[str, ...]
    md5: str | None = None
    sha256: str | None = None
    size: int | None = None
    """Size in bytes, for progress only; the checksum decides."""
    unpack: Unpack | None = None


@dataclass(frozen=True)
class Content:
    """A file or folder that the readers need, and the known facts about it."""

    path: str
    md5: str | None = None
    md5_unpacked: str | None = None
    """MD5 of the content of a .gz file. The file itself may have been compressed again."""
    size: int | None = None
    shape: tuple[int, ...] | None = None
    """Shape of an idx or .npy array."""
    images: int | None = None
    """Number of image files in a folder."""
    exact_count: bool = True
    """Whether another number of images or array entries is an error; otherwise it is reported as another edition."""


@dataclass(frozen=True)
class Entry:
    """A data set of the catalogue. Any one of its `layouts` is complete."""

    name: str
    summary: str
    page: str
    layouts: tuple[tuple[Content, ...], ...]
    downloads: tuple[Download, ...] = ()
    licence: str | None = None
    arrangement: str = ""
    """Layout of the files, described in words."""

    def by_hand(self, root: Path) -> str:
        """Describe what to do if nothing can be fetched."""
        if self.downloads:
            places = ", ".join(str(root / download.path) for download in self.downloads)
            return f"get the files from {self.page} in a browser, put them at {places} and run this again"
        return f"get the set from {self.page} in a browser and unpack it so that there is {self.arrangement} in {root}"


def find_entry(name: str, catalogue: Mapping[str, Entry] | None = None) -> Entry:
    """Find a dataset by name; case, hyphens and underscores are ignored."""
    entries = CATALOGUE if catalogue is None else catalogue
    for key, entry in entries.items():
        if _plain(key) == _plain(name):
            return entry
    raise DataError(f"Expected the dataset to be one of {', '.join(entries)}, got {name!r}.")


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


State = Literal["complete", "missing", "damaged"]


@dataclass(frozen=True)
class Progress:
    """A step of a long job: `done` of `total` bytes or files (None if unknown), or a message."""

    dataset: str
    file: str
    done: int = 0
    total: int | None = None
    message: str = ""


Report = Callable[[Progress], None]


@dataclass(frozen=True)
class VerifyRow:
    """The state of a dataset, with the reason."""

    dataset: str
    state: State
    detail: str


@dataclass(frozen=True)
class ListingRow:
    """A dataset of the catalogue, and how to obtain it."""

    dataset: str
    summary: str
    download_bytes: int | None
    fetchable: bool
    licence: str | None
    page: str
    arrangement: str


def listing(catalogue: Mapping[str, Entry] | None = None) -> list[ListingRow]:
    """List all known datasets, whether present or not."""
    rows = []
    for entry in (CATALOGUE if catalogue is None else catalogue).values():
        sizes = [download.size for download in entry.downloads]
        known = [size for size in sizes if size is not None]
        rows.append(
            ListingRow(
                entry.name,
                entry.summary,
                sum(known) if sizes and len(known) == len(sizes) else None,
                any(download.urls for download in entry.downloads),
                entry.licence,
                entry.page,
                entry.arrangement,
            )
        )
    return rows


def verify(
    root: PathLike | None = None,
    names: Iterable[str] | None = None,
    *,
    checksums: bool = True,
    report: Report | None = None,
    catalogue: Mapping[str, Entry] | None = None,
) -> list[VerifyRow]:
    """Check every dataset, or those named, in the order of the catalogue.

    Without `checksums` only presence, sizes, shapes and counts are checked, which is quick even for large sets.
    """
    folder = data_root(root)
    if not folder.is_dir():
        raise DataError(
            f"Expected the folder that holds the datasets, got {folder}, which does not exist. Check the name."
        )
    chosen = None if names is None else {find_entry(name, catalogue).name for name in names}
    return [
        verify_entry(entry, folder, checksums=checksums, report=report)
        for entry in (CATALOGUE if catalogue is None else catalogue).values()
        if chosen is None or entry.name in chosen
    ]


def verify_entry(entry: Entry, root: Path, *, checksums: bool = True, report: Report | None = None) -> VerifyRow:
    """Check a dataset: complete if one of its layouts is, damaged if a present file is wrong, else missing.

    A set that `shiftmend data make` has written is checked against its own manifest.
    """
    parts, wrong = check_made(root, entry.name, checksums=checksums)
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return VerifyRow(entry.name, "damaged", f"{wrong[0]} is not what was made{more}; make the set again")
    if parts:
        return VerifyRow(entry.name, "complete", f"{parts} parts, made by shiftmend: not the published files")
    verdicts: list[tuple[int, int, VerifyRow]] = []
    for contents in entry.layouts:
        findings = []
        for content in contents:
            if report is not None:
                report(Progress(entry.name, content.path))
            findings.append((content, check_content(content, root, checksums=checksums)))
        row = _verdict(entry, findings)
        absent = sum(finding.state == "missing" for _, finding in findings)
        verdicts.append((("complete", "damaged", "missing").index(row.state), absent, row))
    return min(verdicts, key=lambda verdict: verdict[:2])[2]


@dataclass(frozen=True)
class Finding:
    """The state of one file or folder."""

    state: State
    note: str = ""


def check_content(content: Content, root: Path, *, checksums: bool = True) -> Finding:
    """Check a file or folder: present, of the right form and, if wanted and known, with the published checksum."""
    path: Path | None = root / content.path
    try:
        path = next((place for place in _places(content, root) if place.exists()), None)
        if path is None:
            return Finding("missing")
        note = _check_folder(path, content) if path.is_dir() else _check_file(path, content, checksums)
    except DataError as error:
        return Finding("damaged", str(error))
    except OSError as error:
        return Finding("damaged", f"{path} cannot be read ({error}); look at its permissions")
    return Finding("complete", note)


def file_digest(path: Path, algorithm: str) -> str:
    """Compute the checksum of a file, e.g. "md5", in hexadecimal digits."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as handle:
        while part := handle.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def _verdict(entry: Entry, findings: list[tuple[Content, Finding]]) -> VerifyRow:
    damaged = [finding.note for _, finding in findings if finding.state == "damaged"]
    missing = [content.path for content, finding in findings if finding.state == "missing"]
    if damaged:
        more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
        return VerifyRow(entry.name, "damaged", damaged[0] + more)
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return VerifyRow(entry.name, "missing", f"no {missing[0]}{others}; expected {entry.arrangement}")
    notes = [finding.note for _, finding in findings if finding.note]
    detail = f"{len(findings)} item{'s' if len(findings) > 1 else ''} in place"
    return VerifyRow(entry.name, "complete", "; ".join([detail, *dict.fromkeys(notes)]))


def _places(content: Content, root: Path) -> list[Path]:
    path = root / content.path
    if _is_idx(path):
        return idx_places(path.parent.parent, path.name.removesuffix(".gz"))
    return [path]


def _is_idx(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith("-ubyte")


def _check_folder(path: Path, content: Content) -> str:
    found = 0
    for _, folders, names in os.walk(path):
        # Hidden files are skipped, as in the readers.
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += sum(os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith(".") for name in names)
    if found == 0 or (content.exact_count and content.images not in (None, found)):
        raise DataError(
            f"Expected {content.images or 1:,} images in {path}, got {found:,}. Unpack the set again, or remove what "
            "does not belong there."
        )
    if content.images in (None, found):
        return ""
    return f"{path.name}: {found:,} images, the release has {content.images:,}"


def _check_file(path: Path, content: Content, checksums: bool) -> str:
    size = path.stat().st_size
    if content.size not in (None, size):
        raise DataError(f"Expected {path} to have {content.size:,} bytes, got {size:,}. Delete it and fetch it again.")
    if size == 0:
        raise DataError(f"Expected a file with content, got {path}, which is empty. Delete it and fetch it again.")
    if checksums and content.md5 is not None:
        if file_digest(path, "md5") == content.md5:
            return ""
        if not _is_idx(path):
            raise DataError(
                f"Expected the published MD5 {content.md5} of {path}, got another: it is damaged or another edition. "
                "Delete it and fetch it again."
            )
    return _check_form(path, content, checksums)


def _check_form(path: Path, content: Content, checksums: bool) -> str:
    """Check the form of a file without a known checksum."""
    if _is_idx(path):
        return _check_idx(path, content, checksums)
    if path.suffix == ".npy":
        array = map_npy(path, f"an array {list(content.shape or ())}", "delete it and fetch it again")
        _compare_shape(path, array.shape, content)
    elif path.suffix == ".npz":
        with open_npz(path) as archive:
            # Every member has its own checksum.
            for key in archive.files:
                read_member(archive, path, key)
    elif path.suffix == ".gz" and checksums:
        # The file ends with its own checksum.
        read_whole(path, "a whole gzip file", "fetch it again")
    return ""


def _check_idx(path: Path, content: Content, checksums: bool) -> str:
    """Check the content instead of the compression, because many tools decompress or recompress these files."""
    note = _compare_shape(path, read_idx(path).shape, content)
    if not checksums or content.md5 is None:
        return note
    if content.md5_unpacked is None:
        return f"{path.name}: not byte for byte the published file, but whole"
    unpacked = read_whole(path, "an idx file", "fetch it again")
    found = hashlib.md5(unpacked, usedforsecurity=False).hexdigest()
    if found != content.md5_unpacked:
        raise DataError(
            f"Expected the published content of {path} (unpacked MD5 {content.md5_unpacked}), got {found}. Delete it "
            "and fetch it again."
        )
    return note


def _compare_shape(path: Path, shape: tuple[int, ...], content: Content) -> str:
    expected = content.shape
    if expected is None or shape == expected or (*shape, 1) == expected:
        return ""
    if content.exact_count or shape[1:] != expected[1:]:
        raise DataError(
            f"Expected an array {list(expected)} in {path}, got {list(shape)}. Delete it and fetch it again."
        )
    return f"{path.name}: {shape[0]:,} entries, the release has {expected[0]:,}"


class IdxFile(NamedTuple):
    """A file of MNIST or a relative: MD5 as published and of its decompressed content, size in bytes."""

    name: str
    md5: str
    md5_unpacked: str | None
    size: int


_IMAGES, _LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"
MNIST = (
    IdxFile(f"train-{_IMAGES}", "f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb", 9912422),
    IdxFile(f"train-{_LABELS}", "d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624", 28881),
    IdxFile(f"t10k-{_IMAGES}", "9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea", 1648877),
    IdxFile(f"t10k-{_LABELS}", "ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637", 4542),
)
FASHION_MNIST = (
    IdxFile(f"train-{_IMAGES}", "8d4fb7e6c68d591d4c3dfef9ec88bf0d", "f4a8712d7a061bf5bd6d2ca38dc4d50a", 26421880),
    IdxFile(f"train-{_LABELS}", "25c81989df183df01b3e8a0aad5dffbe", "9018921c3c673c538a1fc5bad174d6f9", 29515),
    IdxFile(f"t10k-{_IMAGES}", "bef4ecab320f06d8554ea6380940ec79", "8181f5470baa50b63fa0f6fddb340f0a", 4422102),
    IdxFile(f"t10k-{_LABELS}", "bb300cfdad3c16e7a12a480ee83cd310", "15d484375f8d13e6eb1aabb0c3f46965", 5148),
)
KMNIST = (
    IdxFile(f"train-{_IMAGES}", "bdb82020997e1d708af4cf47b453dcf7", None, 18165135),
    IdxFile(f"train-{_LABELS}", "e144d726b3acfaa3e44228e80efcd344", None, 29497),
    IdxFile(f"t10k-{_IMAGES}", "5c965bf0a639b31b8f53240b1b52f4d7", None, 3041136),
    IdxFile(f"t10k-{_LABELS}", "7320c461ea6c1c855c0b718fb2a4b134", None, 5120),
)
USPS = {"usps.bz2": "ec16c51db3855ca6c91edd34d0e9b197", "usps.t.bz2": "8ea070ee2aca1ac39742fdd1ef5ed118"}

CIFAR10_BINARY = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}

CIFAR10_PICKLED = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}

CIFAR10_C = {  # with .npy after each name
    "brightness": "0a81ef75e0b523c3383219c330a85d48",
    "contrast": "3c8262171c51307f916c30a3308235a8",
    "defocus_blur": "7d1322666342a0702b1957e92f6254bc",
    "elastic_transform": "9421657c6cd452429cf6ce96cc412b5f",
    "fog": "7b397314b5670f825465fbcd1f6e9ccd",
    "frost": "31f6ab3bce1d9934abfb0cc13656f141",
    "gaussian_blur": "c33370155bc9b055fb4a89113d3c559d",
    "gaussian_noise": "ecaf8b9a2399ffeda7680934c33405fd",
    "glass_blur": "7361fb4019269e02dbf6925f083e8629",
    "impulse_noise": "2090e01c83519ec51427e65116af6b1a",
    "jpeg_compression": "2b9cc4c864e0193bb64db8d7728f8187",
    "labels": "c439b113295ed5254878798ffe28fd54",
    "motion_blur": "fffa5f852ff7ad299cfe8a7643f090f4",
    "pixelate": "0f14f7e2db14288304e1de10df16832f",
    "saturate": "1cfae0964219c5102abbb883e538cc56",
    "shot_noise": "3a7239bb118894f013d9bf1984be7f11",
    "snow": "bb238de8555123da9c282dea23bd6e55",
    "spatter": "8a5a3903a7f8f65b59501a6093b4311e",
    "speckle_noise": "ef00b87611792b00df09c0b0237a1e30",
    "zoom_blur": "6ea8e63f1c5cdee1517533840641641b",
}

CIFAR100_C = {  # with .npy after each name
    "brightness": "f22d7195aecd6abb541e27fca230c171",
    "contrast": "322bb385f1d05154ee197ca16535f71e",
    "defocus_blur": "d923e3d9c585a27f0956e2f2ad832564",
    "elastic_transform": "a0792bd6581f6810878be71acedfc65a",
    "fog": "4efc7ebd5e82b028bdbe13048e3ea564",
    "frost": "3a39c6823bdfaa0bf8b12fe7004b8117",
    "gaussian_blur": "5204ba0d557839772ef5a4196a052c3e",
    "gaussian_noise": "ecc4d366eac432bdf25c024086f5e97d",
    "glass_blur": "0bf384f38e5ccbf8dd479d9059b913e1",
    "impulse_noise": "3b3c210ddfa0b5cb918ff4537a429fef",
    "jpeg_compression": "c851b7f1324e1d2ffddeb76920576d11",
    "labels": "bb4026e9ce52996b95f439544568cdb2",
    "motion_blur": "732a7e2e54152ff97c742d4c388c5516",
    "pixelate": "96c00c60f144539e14cffb02ddbd0640",
    "saturate": "c0697e9fdd646916a61e9c312c77bf6b",
    "shot_noise": "b0a1fa6e1e465a747c1b204b1914048a",
    "snow": "0237be164583af146b7b144e73b43465",
    "spatter": "12ccf41d62564d36e1f6a6ada5022728",
    "speckle_noise": "e3f215b1a0f9fd9fd6f0d1cf94a7ce99",
    "zoom_blur": "0204613400c034a81c4830d5df81cb82",
}


def _like_mnist(
    name: str,
    summary: str,
    page: str,
    folder: str,
    files: Iterable[IdxFile],
    *mirrors: str,
    licence: str | None = None,
) -> Entry:
    """Describe MNIST or a relative: four files."""
    downloads, contents = [], []
    for file in files:
        path = f"{folder}/raw/{file.name}.gz"
        urls = tuple(f"{mirror}/{file.name}.gz" for mirror in mirrors)
        count = 60_000 if file.name.startswith("train") else 10_000
        shape = (count, 28, 28) if "images" in file.name else (count,)
        downloads.append(Download(path, urls, md5=file.md5, size=file.size))
        contents.append(Content(path, md5=file.md5, md5_unpacked=file.md5_unpacked, shape=shape))
    return Entry(
        name,
        f"{summary}, 28 x 28 grey, 60,000 + 10,000",
        page,
        (tuple(contents),),
        tuple(downloads),
        licence=licence,
        arrangement=f"{folder}/raw/{{train,t10k}}-{{images-idx3,labels-idx1}}-ubyte.gz (or without .gz)",
    )


def _emnist_contents() -> tuple[Content, ...]:
    """List the files of EMNIST Balanced, without checksums, since none are published.

    Rebuilt editions with other numbers of images are in use, so another number is accepted.
    """
    contents = []
    for split, count in EMNIST_COUNTS.items():
        stem = f"EMNIST/raw/emnist-balanced-{split}"
        contents.append(Content(f"{stem}-images-idx3-ubyte.gz", shape=(count, 28, 28), exact_count=False))
        contents.append(Content(f"{stem}-labels-idx1-ubyte.gz", shape=(count,), exact_count=False))
    return tuple(contents)


def _mnist_c_contents() -> tuple[Content, ...]:
    contents = []
    for corruption in MNIST_CORRUPTIONS:
        for split, count in (("train", 60_000), ("test", 10_000)):
            stem = f"mnist_c/{corruption}/{split}"
            contents.append(Content(f"{stem}_images.npy", shape=(count, 28, 28, 1)))
            contents.append(Content(f"{stem}_labels.npy", shape=(count,)))
    return tuple(contents)


def _zenodo(record: int, file: str) -> tuple[str, str]:
    """Return the current and the former address of a file of a record."""
    return (
        f"https://zenodo.org/records/{record}/files/{file}?download=1",
        f"https://zenodo.org/record/{record}/files/{file}",
    )


def _cifar_archive(classes: int, folder: str, md5: str, size: int) -> Download:
    file = f"cifar-{classes}-binary.tar.gz"
    urls = (f"https://www.cs.toronto.edu/~kriz/{file}",)
    return Download(file, urls, md5=md5, size=size, unpack=Unpack(only=f"{folder}/"))


def _cifar_c(classes: int, record: int, md5: str, size: int, sums: Mapping[str, str]) -> Entry:
    """Describe CIFAR-10-C or CIFAR-100-C: one array per corruption, and the labels they share."""
    folder = f"CIFAR-{classes}-C"
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(CIFAR_CORRUPTIONS, (50_000, 32, 32, 3))
    shapes["labels"] = (50_000,)
    archive = Download(
        f"{folder}.tar", _zenodo(record, f"{folder}.tar"), md5=md5, size=size, unpack=Unpack(only=f"{folder}/")
    )
    return Entry(
        folder.lower(),
        f"the CIFAR-{classes} test images under 19 corruptions at 5 severities",
        f"https://zenodo.org/records/{record}",
        (tuple(Content(f"{folder}/{name}.npy", md5=sums[name], shape=shape) for name, shape in shapes.items()),),
        (archive,),
        licence="CC BY 4.0",
        arrangement=f"{folder}/<corruption>.npy and {folder}/labels.npy",
    )


_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass"
_CIFAR_LICENCE = "none stated; the authors ask for a citation of their technical report"

_ENTRIES = (
    _like_mnist(
        "mnist",
        "handwritten digits",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "MNIST",
        MNIST,
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
    ),
    Entry(
        "emnist",
        "handwritten digits and letters (Balanced), 47 classes, 28 x 28 grey, 112,800 + 18,800",
        "https://www.nist.gov/itl/products-and-services/emnist-dataset",
        (_emnist_contents(),),
        (
            Download(
                "EMNIST/gzip.zip",
                ("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",),
                md5="58c8d27c78d21e728a6bc7b3cc06412e",
                size=561_753_746,
                unpack=Unpack("EMNIST/raw", only="gzip/emnist-balanced-", drop=1),
            ),
        ),
        arrangement="EMNIST/raw/emnist-balanced-{train,test}-{images-idx3,labels-idx1}-ubyte.gz (or without .gz)",
    ),
    Entry(
        "usps",
        "digits from envelopes, 16 x 16 grey, 7,291 + 2,007",
        "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps",
        (
            tuple(Content(f"USPS/{name}", md5=md5) for name, md5 in USPS.items()),
            (Content("USPS/usps.npz"),),
        ),
        tuple(Download(f"USPS/{name}", (f"{_LIBSVM}/{name}",), md5=md5) for name, md5 in USPS.items()),
        arrangement="USPS/usps.bz2 and USPS/usps.t.bz2, or USPS/usps.npz with x_train, y_train, x_test, y_test",
    ),
    _like_mnist(
        "fashion-mnist",
        "pictures of clothes",
        "https://github.com/zalandoresearch/fashion-mnist",
        "FashionMNIST",
        FASHION_MNIST,
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        licence="MIT",
    ),
    _like_mnist(
        "kmnist",
        "old Japanese cursive characters",
        "https://github.com/rois-codh/kmnist",
        "KMNIST",
        KMNIST,
        "http://codh.rois.ac.jp/kmnist/dataset/kmnist",
        licence="CC BY-SA 4.0",
    ),
    Entry(
        "cifar-10",
        "small photographs, 10 classes, 32 x 32 colour, 50,000 + 10,000",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        (
            tuple(
                Content(f"cifar-10-batches-bin/{name}", md5=md5, size=10_000 * 3073)
                for name, md5 in CIFAR10_BINARY.items()
            ),
            tuple(Content(f"cifar-10-batches-py/{name}", md5=md5) for name, md5 in CIFAR10_PICKLED.items()),
        ),
        (_cifar_archive(10, "cifar-10-batches-bin", "c32a1d4ab5d03f1284b67883e8d87530", 170_052_171),),
        licence=_CIFAR_LICENCE,
        arrangement="cifar-10-batches-bin/{data_batch_1..5,test_batch}.bin, or the folder cifar-10-batches-py",
    ),
    Entry(
        "cifar-100",
        "small photographs, 100 classes, 32 x 32 colour, 50,000 + 10,000",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        (
            (
                Content("cifar-100-binary/train.bin", size=50_000 * 3074),
                Content("cifar-100-binary/test.bin", size=10_000 * 3074),
            ),
            (
                Content("cifar-100-python/train", md5="16019d7e3df5f24257cddd939b257f8d"),
                Content("cifar-100-python/test", md5="f0ef6b0ae62326f3e7ffdfab6717acfc"),
            ),
        ),
        (_cifar_archive(100, "cifar-100-binary", "03b5dce01913d631647c71ecec9e9cb8", 168_513_733),),
        licence=_CIFAR_LICENCE,
        arrangement="cifar-100-binary/{train,test}.bin, or the folder cifar-100-python",
    ),
    _cifar_c(10, 2535967, "56bf5dcef84df0e2308c6dcbcbbd8499", 2_918_471_680, CIFAR10_C),
    _cifar_c(100, 3555552, "11f0ed0f1191edbf9fa23466ae6021d3", 2_918_473_216, CIFAR100_C),
    Entry(
        "mnist-c",
        "MNIST under 15 corruptions",
        "https://zenodo.org/records/3239543",
        (_mnist_c_contents(),),
        (
            Download(
                "mnist_c.zip",
                _zenodo(3239543, "mnist_c.zip"),
                md5="4b34b33045869ee6d424616cd3a65da3",
                unpack=Unpack(only="mnist_c/"),
            ),
        ),
        licence="CC BY 4.0",
        arrangement="mnist_c/<corruption>/{train,test}_{images,labels}.npy",
    ),
    Entry(
        "mnist-m",
        "MNIST digits blended with patches of photographs, 28 x 28 colour; needs mnist for its labels",
        "https://github.com/VanushVaswani/keras_mnistm/releases/tag/1.0",
        (
            (Content("MNISTM/keras_mnistm.pkl.gz"),),
            (Content("MNISTM/keras_mnistm.pkl"),),
            (
                Content("MNISTM/train", images=60_000, exact_count=False),
                Content("MNISTM/test", images=10_000, exact_count=False),
            ),
        ),
        (
            Download(
                "MNISTM/keras_mnistm.pkl.gz",
                ("https://github.com/VanushVaswani/keras_mnistm/releases/download/1.0/keras_mnistm.pkl.gz",),
            ),
        ),
        arrangement="MNISTM/keras_mnistm.pkl.gz, or MNISTM/{train,test}/<0..9>/*.png",
    ),
    Entry(
        "emnist-da",
        "EMNIST under the 13 shifts of the paper; only the test folders are needed",
        "https://zenodo.org/records/6602351",
        (tuple(Content(f"EMNIST/{shift}/test", images=18_800) for shift in EMNIST_SHIFTS),),
        arrangement="EMNIST/<shift>/test/<0..46>/<number>.png",
    ),
    Entry(
        "camelyon17",
        "patches of lymph-node tissue from five hospitals, 96 x 96 colour (WILDS v1.0)",
        "https://wilds.stanford.edu/downloads",
        tuple(
            (Content(f"{folder}/metadata.csv"), Content(f"{folder}/patches", images=455_954))
            for folder in ("CAMELYON17/camelyon17_v1.0", "camelyon17_v1.0")
        ),
        (
            Download(
                "CAMELYON17/archive.tar.gz",
                ("https://worksheets.codalab.org/rest/bundles/0xe45e15f39fb54e9d9e919556af67aabe/contents/blob/",),
                size=10_658_709_504,
                unpack=Unpack("CAMELYON17/camelyon17_v1.0"),
            ),
        ),
        licence="CC0",
        arrangement="CAMELYON17/camelyon17_v1.0/metadata.csv and patches/patient_*_node_*/*.png beside it",
    ),
    Entry(
        "visda-c",
        "rendered objects and photographs of them, 12 classes, 152,397 + 55,388",
        "http://ai.bu.edu/visda-2017/",
        (
            (
                Content("VisDA-C/train/image_list.txt"),
                Content("VisDA-C/train", images=152_397),
                Content("VisDA-C/validation/image_list.txt"),
                Content("VisDA-C/validation", images=55_388),
            ),
        ),
        tuple(
            Download(f"VisDA-C/{file}", (f"http://csr.bu.edu/ftp/visda17/clf/{file}",), unpack=Unpack("VisDA-C"))
            for file in ("train.tar", "validation.tar")
        ),
        arrangement="VisDA-C/{train,validation}/image_list.txt and the images it lists",
    ),
    Entry(
        "bsds500",
        "the Berkeley photographs, backgrounds of MNIST-M",
        "https://www2.eecs.berkeley.edu/Research/Projects/CS/vision/grouping/resources.html",
        ((Content("BSDS500/images/train", images=200, exact_count=False),),),
        (
            Download(
                "BSDS500/BSR_bsds500.tgz",
                ("http://www.eecs.berkeley.edu/Research/Projects/CS/vision/grouping/BSR/BSR_bsds500.tgz",),
                unpack=Unpack("BSDS500", only="BSR/BSDS500/data/images/", drop=3),
            ),
        ),
        arrangement="BSDS500/images/train/*.jpg",
    ),
)

CATALOGUE: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}
