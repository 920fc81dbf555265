"""Unpacking archives from elsewhere: plain files only, and none outside the folder they belong in."""

from __future__ import annotations

import lzma
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from shiftmend.errors import DataError

_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, NotImplementedError)


def unpack(
    archive: Path,
    destination: Path,
    *,
    only: str = "",
    drop: int = 0,
    report: Callable[[int], None] | None = None,
) -> int:
    """Unpack a zip or tar archive and return the number of files.

    Members whose name begins with `only` are taken, less their first `drop` folders. Each file is put in
    place in one step, so an interruption leaves whole files, and unpacking again completes them. A link, a
    device, or a name that leads out of `destination` is an error: a dataset has none. `report` is told the
    number of files so far.
    """
    count = 0
    members = _zip_members(archive) if zipfile.is_zipfile(archive) else _tar_members(archive)
    try:
        for name, open_member in members:
            parts = _safe_parts(name, archive)
            if not "/".join(parts).startswith(only) or len(parts) <= drop:
                continue
            with open_member() as source:
                _put(source, destination.joinpath(*parts[drop:]))
            count += 1
            if report is not None:
                report(count)
    except _DAMAGE as error:
        raise DataError(
            f"{archive} could not be unpacked into {destination} ({error}): expected a whole zip or tar "
            "archive and room for it; delete the archive and fetch it again, or make room"
        ) from error
    if count == 0:
        raise DataError(f"{archive} holds no file {only + '*' if only else 'at all'}: it is not the expected archive")
    return count


_Member = tuple[str, Callable[[], IO[bytes]]]


def _zip_members(path: Path) -> Iterator[_Member]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _refusal(path, info.filename, "is a link or a device")
            if info.flag_bits & 1:
                raise _refusal(path, info.filename, "is encrypted")
            if not info.is_dir():
                yield info.filename, lambda info=info: archive.open(info)  # type: ignore[misc]


def _tar_members(path: Path) -> Iterator[_Member]:
    with tarfile.open(path, "r:*") as archive:
        for info in archive:
            if info.isdir():
                continue
            if not info.isreg():
                raise _refusal(path, info.name, "is a link or a device")
            yield info.name, lambda info=info: _tar_file(archive, info)  # type: ignore[misc]


def _tar_file(archive: tarfile.TarFile, info: tarfile.TarInfo) -> IO[bytes]:
    source = archive.extractfile(info)
    assert source is not None  # a regular file
    return source


def _safe_parts(name: str, archive: Path) -> tuple[str, ...]:
    path = PurePosixPath(name.replace("\\", "/"))
    parts = path.parts
    if path.is_absolute() or ".." in parts or not parts or "\0" in name or ":" in parts[0]:
        raise _refusal(archive, name, "leads out of the folder it is unpacked into")
    return parts


def _refusal(archive: Path, member: str, why: str) -> DataError:
    return DataError(
        f"{archive} was not unpacked: its member {member!r} {why}; expected plain files only: get the "
        "archive from its publisher"
    )


def _put(source: IO[bytes], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    try:
        with partial.open("wb") as handle:
            shutil.copyfileobj(source, handle, 1 << 20)
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
