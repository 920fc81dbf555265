"""Progress for people: a bar on the terminal if there is one, silence otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from shiftmend.utils.processes import rank, world_size

Progress = bool | None
"""True: show; False: do not; None: show if standard error is a terminal."""


_shown = ContextVar("shown", default=False)
"""Whether there is a bar on the terminal."""


class Bar:
    """Takes the steps of some work; this one shows nothing."""

    def advance(self, steps: int = 1, note: str = "") -> None:
        """Say that so many steps more are done."""


class Pass:
    """Says on a bar how far a pass over data has come; of `whole` samples, where it is known how many there are."""

    def __init__(self, bar: Bar, what: str, whole: int | None) -> None:
        self.bar, self.what, self.whole, self.done = bar, what, whole, 0

    def __call__(self, samples: int) -> None:
        self.done += samples * world_size()
        # the shares of processes are not all alike
        far = f"{self.done:,}" if self.whole is None else f"{min(self.done, self.whole):,} of {self.whole:,}"
        self.bar.advance(0, f"{self.what}  {far} samples")


@contextmanager
def progress_bar(show: Progress, title: str, total: int | None) -> Iterator[Bar]:
    """A bar for the length of the block, unless there is one; of several processes only the first shows one."""
    if show is False or rank() > 0 or _shown.get() or (show is None and not sys.stderr.isatty()):
        yield Bar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    title_column, note = (TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[note]"))
    columns = (title_column, BarColumn(), note, TimeElapsedColumn())
    # on a terminal it goes away when done; in a log file, where asked for, its last state stays
    with RichProgress(*columns, console=Console(stderr=True), transient=sys.stderr.isatty()) as shown:
        task = shown.add_task(title, total=total, note="")

        class RichBar(Bar):
            def advance(self, steps: int = 1, note: str = "") -> None:
                shown.update(task, advance=steps, note=note)

        before = _shown.set(True)
        try:
            yield RichBar()
        finally:
            _shown.reset(before)
