"""How much memory of the machine is left to this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _Groups(NamedTuple):
    """Where a version of Linux control groups keeps what it says of memory; what it calls cache that can go."""

    mount: str
    limit: str
    usage: str
    cache: str


_V1 = _Groups("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Groups("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def available(root: Path = Path("/")) -> int | None:
    """Bytes that are free, or can be made so, here and in all control groups around; None where nobody can tell."""
    found = [_of_machine(root), *_of_groups(root)]
    return min((max(0, free) for free in found if free is not None), default=None)


def _of_machine(root: Path) -> int | None:
    free = _fields(root / "proc/meminfo").get("MemAvailable:")
    if free is not None:
        return 1024 * free
    try:  # macOS tells how much there is, not how much of it is free: half, for want of better
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):  # nor that on Windows
        return None


def _of_groups(root: Path) -> Iterator[int]:
    """What each group that this process is in, and each around it, leaves of its limit, if it has one."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, kinds, path = (*line.split(":", 2), "", "")[:3]
        if number != "0" and "memory" not in kinds.split(","):
            continue
        groups = _V2 if number == "0" else _V1
        names = [name for name in path.split("/") if name]
        for depth in range(len(names) + 1):  # in a container, the outermost that is seen may be its own
            folder = root.joinpath(groups.mount, *names[:depth])
            limit, usage = (_text(folder / name).strip() for name in (groups.limit, groups.usage))
            if limit.isdigit() and usage.isdigit():  # no limit is "max", or a number beyond all memory
                yield int(limit) - int(usage) + _fields(folder / "memory.stat").get(groups.cache, 0)


def _fields(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")  # groups may have any name
    except OSError:
        return ""
