"""Atomic writing of files: a reader never sees a partial file."""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from shiftmend.errors import DataError, ShiftmendError
from shiftmend.utils.checks import brief


def as_path(given: Any, what: str, error: type[ShiftmendError] = ShiftmendError) -> Path:
    """Convert a name to a path; refuse anything else, and empty names, which Python takes for the current folder."""
    if not isinstance(given, str | os.PathLike) or given == "":
        raise error(f"Expected a name, as text or as a Path, for {what}, got {brief(given)}.")
    return Path(given)


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Write `content` to `path` atomically; see `write_together`."""
    write_together({Path(path): content})


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Write files atomically, as `replacing` does; a device or a pipe, such as /dev/null, is written directly."""
    files = [path for path in contents if not is_special(path)]
    for path in contents.keys() - files:
        path.write_bytes(contents[path])
    with replacing(*files) as places:
        for path, place in zip(files, places, strict=True):
            place.write_bytes(contents[path])


def hash_file(path: Path) -> str:
    """Compute the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_special(path: Path) -> bool:
    """Tell whether a path is a device or a pipe, which must never be replaced by a file."""
    return path.exists() and not path.is_file() and not path.is_dir()


@contextmanager
def replacing(*paths: Path) -> Iterator[tuple[Path, ...]]:
    """Yield temporary files to write, and move them to `paths` at the end of the block, once all are on disk.

    If anything fails before the last step, existing files are not changed. A replaced file keeps its permissions. If a
    path is a link, its target is replaced. Each temporary file has a folder of its own, so a writer may itself replace
    the file. Leftovers of killed processes are removed at the end.
    """
    staged: dict[Path, Path] = {}
    with ExitStack() as stack:
        for path in paths:
            if path.is_dir():
                raise IsADirectoryError(f"{path} is a folder")
            if is_special(path):
                raise FileExistsError(f"{path} is a device or a pipe")
            target = Path(os.path.realpath(path))
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = stack.enter_context(_staging_folder(target.parent, target.name)) / target.name
            temporary.touch()
            staged[temporary] = target
        yield tuple(staged)
        for temporary, target in staged.items():
            _flush(temporary, _permissions(target))
        for temporary, target in staged.items():
            os.replace(temporary, target)
    for target in staged.values():
        sweep(target)


@contextmanager
def writing_folder(folder: Path, names: Sequence[str]) -> Iterator[tuple[Path, ...]]:
    """Yield temporary files to write, and move them into a folder at the end of the block, once all are on disk.

    A new folder appears atomically with all of its files. In an existing folder, the files are replaced in the order of
    their names: a reader may see a mixture if the process is killed meanwhile.
    """
    home = Path(os.path.realpath(folder))
    if home.exists():
        with replacing(*(home / name for name in names)) as places:
            yield places
        sweep(home)
        return
    home.parent.mkdir(parents=True, exist_ok=True)
    with _staging_folder(home.parent, home.name) as place:
        whole = place / home.name
        whole.mkdir()
        yield tuple(whole / name for name in names)
        for name in names:
            _flush(whole / name, _permissions(home / name))
        os.rename(whole, home)
    sweep(home)


_SECONDS_TO_LOCK = 1.0
"""Age in seconds from which a staging folder without a lock counts as a leftover of a killed process."""


@contextmanager
def _staging_folder(parent: Path, name: str) -> Iterator[Path]:
    """Make a folder for temporary files, locked inside the block and removed at its end."""
    place = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".partial", dir=parent))
    descriptor = _open_folder(place)
    try:
        if descriptor is not None:
            _lock(descriptor)
        yield place
    finally:
        if descriptor is not None:
            os.close(descriptor)
        shutil.rmtree(place, ignore_errors=True)


def sweep(target: Path) -> None:
    """Remove leftovers of killed processes beside a file; running processes hold a lock."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.{'?' * 8}.partial"):
        descriptor = _open_folder(left)
        if descriptor is None:
            continue
        try:
            if time.time() - os.fstat(descriptor).st_mtime > _SECONDS_TO_LOCK and _lock(descriptor):
                shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(descriptor)


def _open_folder(place: Path) -> int | None:
    """Open a folder, but not a link to one; None if that is not possible, as on Windows."""
    try:
        return os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (AttributeError, OSError):
        return None


def _flush(path: Path, permissions: int) -> None:
    """Flush a file to disk, with its final permissions."""
    with path.open("rb+") as handle:
        os.chmod(path, permissions)
        os.fsync(handle.fileno())


_LOCKS: set[BinaryIO] = set()


def _release_locks() -> None:
    """Release the locks of the parent process, which a worker that outlives it would otherwise keep."""
    for handle in _LOCKS:
        handle.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_locks)


@contextmanager
def alone_with(path: Path) -> Iterator[bool]:
    """Lock a file, and yield whether this process has the lock, as far as the system can tell.

    A killed process loses its lock. The lock file may remain, and may belong to another user.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    try:
        handle = lock.open("ab")
    except OSError as error:
        raise DataError(
            f"Lock {lock} cannot be opened ({error.strerror}). Wait for the process that holds it, or choose another "
            "place."
        ) from error
    with handle:
        alone = _lock(handle.fileno())
        _LOCKS.add(handle)
        try:
            yield alone
        finally:
            _LOCKS.discard(handle)
            # The handle is closed in a forked process, which does not own the lock.
            if alone and not handle.closed:
                # Not every system can delete an open file.
                with suppress(OSError):
                    lock.unlink()


def _lock(descriptor: int) -> bool:
    """Try to lock an open file. On Windows and some network drives, which have no locks, return True."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A deleted lock file protects nothing, because another process may have made a new one.
        return os.fstat(descriptor).st_nlink > 0
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return True


@contextmanager
def said_where(target: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a DataError that names `target`.

    The system's own error may name a temporary file, or no file at all.
    """
    try:
        yield
    except OSError as error:
        raise DataError(
            f"File {target} cannot be written ({error.strerror or error}). Choose another place."
        ) from error


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Check that files can be written into a folder, which need not exist.

    Raises:
        ShiftmendError: If the folder cannot be made or written into.
    """
    place = as_path(folder, "the folder to write into")
    try:
        there = next(parent for parent in (place, *place.absolute().parents) if parent.exists())
    except OSError as error:
        raise ShiftmendError(
            f"Folder {place} cannot be written into ({error.strerror}). Name another folder."
        ) from error
    if there == place and not place.is_dir():
        raise ShiftmendError(f"Expected a folder to write into, got the file {place}. Name another folder.")
    if not there.is_dir():
        raise ShiftmendError(
            f"Expected a folder to write into, got {place}, which cannot be made below the file {there}. Name another "
            "folder."
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise ShiftmendError(f"Folder {there} cannot be written into: no permission. Name another folder.")


def _permissions(target: Path) -> int:
    """Return the permissions of the replaced file, or the umask's for a new file."""
    try:
        return stat.S_IMODE(target.stat().st_mode)
    except FileNotFoundError:
        umask = os.umask(0)
        os.umask(umask)
        return 0o666 & ~umask
