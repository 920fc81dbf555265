"""Watch worker processes from a test."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

from shiftmend.research.bench.execute import Task


def silent(task: Task, done: int, total: int) -> None:
    pass


def eventually(condition: Callable[[], object], process: Popen[str] | None = None, seconds: float = 180.0) -> bool:
    """Wait until the condition holds; False if it does not in time, or the process ends first."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end or (process is not None and process.poll() is not None):
            return False
        time.sleep(0.02)
    return True


def alive(pid: int) -> bool:
    """Tell if a process still runs: an ended one may wait for its parent to ask about it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def seen(root: Path) -> set[int]:
    """List the processes that have loaded data."""
    return {int(file.name.rpartition("-")[2]) for file in root.glob("seen/*")}
