"""Progress: a bar on a terminal; lines or nothing otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

from shiftmend.utils.processes import rank, world_size
from shiftmend.utils.terminal import neutralise, open_console

Progress = bool | None
"""True shows a bar, or lines if there is no terminal; False shows nothing; None shows a bar on a terminal only."""


_shown = ContextVar("shown", default=False)
"""True while a bar is on the terminal."""


SECONDS_BETWEEN_LINES = 5.0
"""Seconds between two lines of progress in a log file."""
SECONDS_BETWEEN_LINES_OF_LONG_TASKS = 30.0
"""The same for tasks of many minutes that are not run from the command line."""

Piped = Literal["silent", "lines", "few lines", "off"]
"""Default progress: a bar on a terminal only, lines if there is no terminal (few of them for long tasks), or nothing at
all."""

_piped: ContextVar[Piped] = ContextVar("piped", default="silent")


@contextmanager
def piped_progress(how: Piped) -> Iterator[None]:
    """Set the default kind of progress inside the block; used by the command line."""
    before = _piped.set(how)
    try:
        yield
    finally:
        _piped.reset(before)


@contextmanager
def long_task() -> Iterator[None]:
    """Show a line of progress now and then inside the block if there is no terminal, e.g. in a notebook."""
    with piped_progress("few lines" if _piped.get() == "silent" else _piped.get()):
        yield


class Bar:
    """A bar that shows nothing; a subclass shows one on the terminal."""

    def advance(self, steps: int = 1, note: str = "") -> None:
        """Report that more steps are finished, with a note to show beside the bar."""


class PassProgress:
    """The progress of one pass over data, shown as a note on a bar; `total` is the number of samples, if known."""

    def __init__(self, bar: Bar, what: str, total: int | None) -> None:
        self.bar, self.what, self.total, self.done = bar, what, total, 0

    def __call__(self, samples: int) -> None:
        self.done += samples * world_size()
        # Processes may have parts of different sizes, so the product may exceed the total.
        done = f"{self.done:,}" if self.total is None else f"{min(self.done, self.total):,} of {self.total:,}"
        self.bar.advance(0, f"{self.what}  {done} samples")


@contextmanager
def progress_bar(show: Progress, title: str, total: int | None) -> Iterator[Bar]:
    """Show a progress bar during the block, in the first process only and only if no other bar is shown."""
    how, terminal = _piped.get() if show is None else None, sys.stderr.isatty()
    if show is False or rank() > 0 or _shown.get() or how == "off" or (how == "silent" and not terminal):
        yield Bar()
        return
    if not terminal:
        with _mark_shown():
            few = how == "few lines"
            lines = _Lines(title, total, SECONDS_BETWEEN_LINES_OF_LONG_TASKS if few else SECONDS_BETWEEN_LINES)
            yield lines
            if show:
                lines.write()
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    title_column, note = (TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[note]"))
    columns = (title_column, BarColumn(), note, TimeElapsedColumn())
    # On a terminal, the bar disappears when finished; in a log file, its last state stays.
    with RichProgress(*columns, console=open_console(stderr=True), transient=sys.stderr.isatty()) as shown:
        task = shown.add_task(neutralise(title), total=total, note="")

        class RichBar(Bar):
            def advance(self, steps: int = 1, note: str = "") -> None:
                shown.update(task, advance=steps, note=neutralise(note))

        with _mark_shown():
            yield RichBar()


class _Lines(Bar):
    """Progress as a line on standard error every few seconds, for log files."""

    def __init__(self, title: str, total: int | None, seconds: float) -> None:
        self.title, self.total, self.done, self.seconds = title, total, 0, seconds
        self.note = ""
        self._started = self._last = time.monotonic()

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.done += steps
        self.note = note
        if time.monotonic() - self._last >= self.seconds:
            self.write()

    def write(self) -> None:
        self._last = time.monotonic()
        counts = [] if self.total is None else [f"{self.done} of {self.total}"]
        parts = [*counts, *([self.note] if self.note else []), f"{self._last - self._started:.0f} s"]
        print(f"{self.title}: {', '.join(parts)}", file=sys.stderr, flush=True)


@contextmanager
def _mark_shown() -> Iterator[None]:
    before = _shown.set(True)
    try:
        yield
    finally:
        _shown.reset(before)
