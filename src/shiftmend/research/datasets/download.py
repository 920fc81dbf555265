"""Fetching datasets: from several mirrors, with resumption and checksums; files appear only when complete."""

from __future__ import annotations

import http.client
import lzma
import os
import re
import shutil
import stat
import struct
import tarfile
import time
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.parse import urlsplit

from shiftmend.__about__ import __version__
from shiftmend.errors import DataError
from shiftmend.inputs.images import PathLike
from shiftmend.research.datasets.catalogue import (
    Download,
    Entry,
    Progress,
    Report,
    Unpack,
    VerifyRow,
    check_content,
    file_digest,
    find_entry,
    verify_entry,
)
from shiftmend.research.datasets.files import data_root
from shiftmend.utils.checks import one_line
from shiftmend.utils.files import alone_with

_DAMAGE = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, OSError),
    *(ArithmeticError, LookupError, RuntimeError, ValueError),
)


def unpack(
    archive: Path,
    destination: Path,
    *,
    only: str = "",
    drop: int = 0,
    report: Callable[[int], None] | None = None,
) -> int:
    """Unpack a zip or tar archive and return the number of files.

    Only members whose name begins with `only` are unpacked, without their first `drop` folders. Each file is moved into
    place in one step, so after an interruption all files are whole, and unpacking again completes the set. Links,
    devices and names that lead out of `destination` raise an error. `report` gets the number of files so far.
    """
    count = 0
    try:
        members = _zip_members(archive) if zipfile.is_zipfile(archive) else _tar_members(archive)
        for name, open_member in members:
            parts = _safe_parts(name, archive)
            if not "/".join(parts).startswith(only) or len(parts) <= drop:
                continue
            with open_member() as source:
                _put(source, destination.joinpath(*parts[drop:]))
            count += 1
            if report is not None:
                report(count)
    except DataError:
        raise
    except _DAMAGE as error:
        raise DataError(
            f"Archive {archive} could not be unpacked into {destination} ({one_line(error)}). Delete it and fetch it "
            "again, or free disk space."
        ) from error
    if count == 0:
        raise DataError(f"Expected files {only + '*' if only else ''} in {archive}, got none. Replace the archive.")
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
    # Only members that are no regular files have no content.
    assert source is not None
    return source


def _safe_parts(name: str, archive: Path) -> tuple[str, ...]:
    path = PurePosixPath(name.replace("\\", "/"))
    parts = path.parts
    if path.is_absolute() or ".." in parts or not parts or "\0" in name or ":" in parts[0]:
        raise _refusal(archive, name, "leads out of the folder it is unpacked into")
    return parts


def _refusal(archive: Path, member: str, why: str) -> DataError:
    return DataError(
        f"{archive} was not unpacked: its member {one_line(repr(member))} {why}; expected plain files only: get the "
        "archive from its publisher"
    )


def _put(source: IO[bytes], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    try:
        # A leftover of a killed process, or a link that somebody has planted.
        partial.unlink(missing_ok=True)
        with partial.open("xb") as handle:
            shutil.copyfileobj(source, handle, 1 << 20)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


CHUNK_BYTES = 1 << 18

# Some publishers reject the default user agent of Python.
USER_AGENT = f"shiftmend/{__version__}"
TEMPORARY_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})


def fetch(
    name: str,
    root: PathLike | None = None,
    *,
    report: Report | None = None,
    attempts: int = 3,
    pause: float = 2.0,
    timeout: float = 30.0,
    keep_archives: bool = False,
    catalogue: Mapping[str, Entry] | None = None,
) -> VerifyRow:
    """Fetch the missing files of a dataset, unpack and verify them.

    Complete files are not fetched again, and an archive that was put in place by hand is used. A download goes to
    `<file>.partial` and resumes there after an interruption. Another process that wants the same file meanwhile is
    refused.

    Args:
        name: A name from the catalogue, e.g. "mnist".
        root: The data folder; by default that of the environment variable SHIFTMEND_DATA.
        report: Function that is called with each `Progress`.
        attempts: Number of rounds through all mirrors without progress before giving up.
        pause: Seconds between two rounds, doubled each time.
        timeout: Seconds to wait for a response.
        keep_archives: Whether to keep an archive after it was unpacked.
        catalogue: Other datasets than the known ones.

    Returns:
        The state of the dataset, which is complete.

    Raises:
        DataError: If the set cannot be fetched, or is incomplete afterwards.
    """
    entry = find_entry(name, catalogue)
    folder = data_root(root)
    tell = report or _ignore
    before = verify_entry(entry, folder)
    if before.state == "complete":
        return before
    if not entry.downloads:
        raise DataError(f"Dataset {entry.name} cannot be fetched from here; {entry.by_hand(folder)}")
    for download in entry.downloads:
        transfer = _Transfer(entry, download, folder, tell, attempts, pause, timeout)
        try:
            with alone_with(transfer.target) as alone:
                if not alone:
                    raise DataError(f"Another process is fetching {transfer.target}. Let it finish, then call again.")
                _provide(transfer, keep_archives)
        except OSError as error:
            raise DataError(
                f"File {transfer.target} cannot be written ({error}). Make room or get leave to write there, or choose "
                "another data folder."
            ) from error
    after = verify_entry(entry, folder)
    if after.state != "complete":
        raise DataError(f"Dataset {entry.name} was fetched, but is {after.state}: {after.detail}")
    return after


@dataclass(frozen=True)
class _Transfer:
    """A file that is being fetched: its source, its destination, the progress callback and the time limit."""

    entry: Entry
    download: Download
    root: Path
    report: Report
    attempts: int
    pause: float
    timeout: float

    @property
    def target(self) -> Path:
        return self.root / self.download.path

    @property
    def partial(self) -> Path:
        return self.target.with_name(f"{self.target.name}.partial")

    def received(self) -> int:
        try:
            return self.partial.stat().st_size
        except FileNotFoundError:
            return 0

    def say(self, message: str = "", done: int = 0, total: int | None = None) -> None:
        self.report(Progress(self.entry.name, self.download.path, done, total or self.download.size, message))


class _Interrupted(Exception):
    """A failure that may be temporary."""


class _Refused(Exception):
    """Error for a mirror that does not have the file."""


def _provide(transfer: _Transfer, keep_archive: bool) -> None:
    """Put one file of the set in place, unpacked."""
    download, target = transfer.download, transfer.target
    if _is_there(transfer):
        return
    by_hand = target.is_file() and _difference(target, download) is None
    if not by_hand:
        _obtain(transfer)
    if download.unpack is not None:
        _unpack(transfer, download.unpack)
        if not by_hand and not keep_archive:
            target.unlink()


def _obtain(transfer: _Transfer) -> None:
    """Try the mirrors in turn until the file is complete, or no mirror makes progress."""
    mirrors = list(transfer.download.urls)
    failures: dict[str, str] = {}
    idle = 0
    while mirrors and idle < transfer.attempts:
        if idle:
            wait = transfer.pause * 2 ** (idle - 1)
            transfer.say(f"no mirror gave the file; trying again in {wait:g} s", transfer.received())
            time.sleep(wait)
        gained = False
        for url in tuple(mirrors):
            before = transfer.received()
            try:
                resumed = _transfer_from(url, transfer)
                _put_in_place(transfer, resumed)
                return
            except _Interrupted as error:
                gained = gained or transfer.received() > before
                failures[url] = str(error)
            except _Refused as error:
                mirrors.remove(url)
                failures[url] = str(error)
            transfer.say(f"{_host(url)}: {failures[url]}", transfer.received())
            if len(transfer.download.urls) > 1 and not _known_by_checksum(transfer.download):
                # Without a checksum, mismatched halves of two mirrors would go unnoticed.
                transfer.partial.unlink(missing_ok=True)
        idle = 0 if gained else idle + 1
    reasons = "; ".join(f"{url}: {reason}" for url, reason in failures.items())
    raise DataError(
        f"File {transfer.download.path} could not be fetched ({reasons or 'no address is known'}); "
        f"{transfer.entry.by_hand(transfer.root)}"
    )


def _transfer_from(url: str, transfer: _Transfer) -> bool:
    """Receive the missing part of a file; return whether the part was appended to an earlier one."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise _Refused("is no http address")
    start = transfer.received()
    headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=transfer.timeout)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and start:
                if error.headers.get("Content-Range") == f"bytes */{start}":
                    # The file was already complete.
                    return True
                transfer.partial.unlink(missing_ok=True)
                raise _Interrupted("does not continue where it stopped") from None
            kind = _Interrupted if error.code in TEMPORARY_STATUSES else _Refused
            raise kind(f"answered {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        raise _Interrupted(str(getattr(error, "reason", error)) or type(error).__name__) from None
    with response:
        resumed = start > 0 and _is_resumed(response, start, transfer)
        if start and not resumed:
            transfer.say(f"{_host(url)} cannot continue a download; starting over")
        _receive(response, transfer, start if resumed else 0)
    return resumed


def _is_resumed(response: http.client.HTTPResponse, start: int, transfer: _Transfer) -> bool:
    """Tell whether the response continues at the requested position; a server may send everything instead."""
    if response.status != http.client.PARTIAL_CONTENT:
        return False
    place = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
    if place is None or int(place[1]) != start:
        transfer.partial.unlink(missing_ok=True)
        raise _Interrupted("continued the download at another place than asked")
    return True


def _receive(response: http.client.HTTPResponse, transfer: _Transfer, start: int) -> None:
    length = response.headers.get("Content-Length")
    total = start + int(length) if length is not None and length.isdecimal() else None
    done = start
    with open(transfer.partial, "ab" if start else "wb", opener=_open_no_link) as handle:
        while True:
            try:
                part = response.read(CHUNK_BYTES)
            except (OSError, http.client.HTTPException) as error:
                raise _Interrupted(f"broke off after {done:,} bytes ({error})") from None
            if not part:
                break
            handle.write(part)
            done += len(part)
            transfer.say("", done, total)
        handle.flush()
        os.fsync(handle.fileno())
    if total is not None and done < total:
        raise _Interrupted(f"broke off after {done:,} of {total:,} bytes")


def _open_no_link(path: str, flags: int) -> int:
    """Open a file for writing, but refuse links that somebody may have planted."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _put_in_place(transfer: _Transfer, resumed: bool) -> None:
    difference = _difference(transfer.partial, transfer.download)
    if difference is None:
        os.replace(transfer.partial, transfer.target)
        return
    transfer.partial.unlink(missing_ok=True)
    if resumed:
        # The first part may belong to another file, so the download starts again.
        raise _Interrupted(f"the continued download has {difference}")
    raise _Refused(f"sent a file with {difference}")


def _difference(path: Path, download: Download) -> str | None:
    """Describe how a file differs from the published one; None if no difference is known."""
    for algorithm, expected in (("sha256", download.sha256), ("md5", download.md5)):
        if expected is not None:
            found = file_digest(path, algorithm)
            return None if found == expected else f"{algorithm.upper()} {found} instead of {expected}"
    return None if path.stat().st_size else "no content"


def _known_by_checksum(download: Download) -> bool:
    return download.md5 is not None or download.sha256 is not None


def _is_there(transfer: _Transfer) -> bool:
    """Tell whether a file needs no unpacking, is in its place, and is valid."""
    path = transfer.download.path
    contents = [content for layout in transfer.entry.layouts for content in layout if content.path == path]
    good = any(check_content(content, transfer.root).state == "complete" for content in contents)
    return transfer.download.unpack is None and good


def _unpack(transfer: _Transfer, how: Unpack) -> None:
    def tell(count: int) -> None:
        if count % 1000 == 0:
            transfer.report(Progress(transfer.entry.name, transfer.download.path, count, None, "unpacking"))

    tell(0)
    unpack(transfer.target, transfer.root / how.into, only=how.only, drop=how.drop, report=tell)


def _host(url: str) -> str:
    return urlsplit(url).netloc or url


def _ignore(progress: Progress) -> None:
    """Ignore progress."""
