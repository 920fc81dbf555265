"""Progress bars: one on the terminal if there is a terminal, silence otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from shiftmend.utils.processes import rank, world_size
from shiftmend.utils.terminal import neutralise, open_console

Progress = bool | None
"""True shows a bar, False shows none, None shows one if standard error is a terminal."""


_shown = ContextVar("shown", default=False)
"""True while a bar is on the terminal."""


class Bar:
    """A bar that shows nothing; its subclass shows one on the terminal."""

    def advance(self, steps: int = 1, note: str = "") -> None:
        """Report that more steps are done, with a note to show beside the bar."""


class PassProgress:
    """The progress of one pass over data, shown as a note on a bar; `total` is the number of samples, if known."""

    def __init__(self, bar: Bar, what: str, total: int | None) -> None:
        self.bar, self.what, self.total, self.done = bar, what, total, 0

    def __call__(self, samples: int) -> None:
        self.done += samples * world_size()
        # Processes may have parts of different sizes, so that the product may exceed the total.
        done = f"{self.done:,}" if self.total is None else f"{min(self.done, self.total):,} of {self.total:,}"
        self.bar.advance(0, f"{self.what}  {done} samples")


@contextmanager
def progress_bar(show: Progress, title: str, total: int | None) -> Iterator[Bar]:
    """Show a bar for the length of the block, unless one is shown already, and in the first process alone."""
    if show is False or rank() > 0 or _shown.get() or (show is None and not sys.stderr.isatty()):
        yield Bar()
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    title_column, note = (TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[note]"))
    columns = (title_column, BarColumn(), note, TimeElapsedColumn())
    # On a terminal the bar goes away when done; in a log file its last state stays.
    with RichProgress(*columns, console=open_console(stderr=True), transient=sys.stderr.isatty()) as shown:
        task = shown.add_task(neutralise(title), total=total, note="")

        class RichBar(Bar):
            def advance(self, steps: int = 1, note: str = "") -> None:
                shown.update(task, advance=steps, note=neutralise(note))

        before = _shown.set(True)
        try:
            yield RichBar()
        finally:
            _shown.reset(before)
