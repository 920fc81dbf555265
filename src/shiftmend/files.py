"""Writing files so that a reader never sees half of one."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Put `content` at `path` in one step: temporary file beside it, flush, fsync, replace.

    An existing file keeps its permissions, and is untouched if anything fails before the last step.
    """
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder, expected the name of a file to write")
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fchmod(handle.fileno(), _permissions(target))
            os.fsync(handle.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _permissions(target: Path) -> int:
    """Those of the file that is replaced, or what the umask gives to a new one."""
    try:
        return stat.S_IMODE(target.stat().st_mode)
    except FileNotFoundError:
        umask = os.umask(0)
        os.umask(umask)
        return 0o666 & ~umask
