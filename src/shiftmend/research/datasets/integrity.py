"""List the datasets, and check that their files are there and whole."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shiftmend.errors import DataError
from shiftmend.inputs.arrays import map_npy, open_npz, read_member
from shiftmend.inputs.folders import SUFFIXES
from shiftmend.inputs.images import PathLike
from shiftmend.research.datasets.catalogue import CATALOGUE, Content, Entry, find_entry
from shiftmend.research.datasets.digits import idx_places, read_idx
from shiftmend.research.datasets.files import data_root, read_whole

State = Literal["complete", "missing", "damaged"]


@dataclass(frozen=True)
class Progress:
    """A step of a long job: `done` of `total` bytes or files (None if unknown), or something to say."""

    dataset: str
    file: str
    done: int = 0
    total: int | None = None
    message: str = ""


Report = Callable[[Progress], None]


@dataclass(frozen=True)
class VerifyRow:
    """The state of a dataset, and why."""

    dataset: str
    state: State
    detail: str


@dataclass(frozen=True)
class ListingRow:
    """A dataset of the catalogue, and how it can be had."""

    dataset: str
    summary: str
    download_bytes: int | None
    fetchable: bool
    licence: str | None
    page: str
    arrangement: str


def listing(catalogue: Mapping[str, Entry] | None = None) -> list[ListingRow]:
    """List every known dataset, whether or not it is there."""
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
        raise DataError(f"there is no folder {folder}; expected the one that holds the datasets: is the name right?")
    chosen = None if names is None else {find_entry(name, catalogue).name for name in names}
    return [
        verify_entry(entry, folder, checksums=checksums, report=report)
        for entry in (CATALOGUE if catalogue is None else catalogue).values()
        if chosen is None or entry.name in chosen
    ]


def verify_entry(entry: Entry, root: Path, *, checksums: bool = True, report: Report | None = None) -> VerifyRow:
    """Check a dataset: complete if one of its layouts is, damaged if a file that is there is wrong, else missing."""
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
    """Check a file or folder: there, of the right form and, if a checksum is known and wanted, the published one."""
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
        # Hidden files are passed over, as the readers do.
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += sum(os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith(".") for name in names)
    if found == 0 or (content.exact_count and content.images not in (None, found)):
        raise DataError(
            f"{path} holds {found:,} images; expected {content.images or 1:,}: unpack the set again, or "
            "remove what does not belong there"
        )
    if content.images in (None, found):
        return ""
    return f"{path.name}: {found:,} images, the release has {content.images:,}"


def _check_file(path: Path, content: Content, checksums: bool) -> str:
    size = path.stat().st_size
    if content.size not in (None, size):
        raise DataError(f"{path} is {size:,} bytes long; expected {content.size:,}: delete it and fetch it again")
    if size == 0:
        raise DataError(f"{path} is empty; delete it and fetch it again")
    if checksums and content.md5 is not None:
        if file_digest(path, "md5") == content.md5:
            return ""
        if not _is_idx(path):
            raise DataError(
                f"{path} has not the published MD5 {content.md5}: it is damaged, or another edition; delete "
                "it and fetch it again"
            )
    return _check_form(path, content, checksums)


def _check_form(path: Path, content: Content, checksums: bool) -> str:
    """Check what can be read off a file that no checksum vouches for."""
    if _is_idx(path):
        return _check_idx(path, content, checksums)
    if path.suffix == ".npy":
        array = map_npy(path, f"an array {list(content.shape or ())}", "delete it and fetch it again")
        _compare_shape(path, array.shape, content)
    elif path.suffix == ".npz":
        with open_npz(path) as archive:
            # Every member carries a checksum of its own.
            for key in archive.files:
                read_member(archive, path, key)
    elif path.suffix == ".gz" and checksums:
        # The file ends with a checksum of its own.
        read_whole(path, "a whole gzip file", "fetch it again")
    return ""


def _check_idx(path: Path, content: Content, checksums: bool) -> str:
    """Check the content, not the compression: many tools leave these files uncompressed or compress them anew."""
    note = _compare_shape(path, read_idx(path).shape, content)
    if not checksums or content.md5 is None:
        return note
    if content.md5_unpacked is None:
        return f"{path.name}: not byte for byte the published file, but whole"
    unpacked = read_whole(path, "an idx file", "fetch it again")
    found = hashlib.md5(unpacked, usedforsecurity=False).hexdigest()
    if found != content.md5_unpacked:
        raise DataError(
            f"{path} holds other data than the published file (unpacked MD5 {found} instead of "
            f"{content.md5_unpacked}); delete it and fetch it again"
        )
    return note


def _compare_shape(path: Path, shape: tuple[int, ...], content: Content) -> str:
    expected = content.shape
    if expected is None or shape == expected or (*shape, 1) == expected:
        return ""
    if content.exact_count or shape[1:] != expected[1:]:
        raise DataError(f"{path} holds an array {list(shape)}; expected {list(expected)}: delete it and fetch it again")
    return f"{path.name}: {shape[0]:,} entries, the release has {expected[0]:,}"
