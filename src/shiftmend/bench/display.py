"""What a person sees while a benchmark runs: bars on a terminal, a line for each finished cell elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from shiftmend.bench.cells import Cell, Result
from shiftmend.bench.tasks import Task
from shiftmend.progress import Progress


class Display:
    """Cells done, what is running and how far it is, and the time left.

    Lines go to `say`. Where there is no terminal for bars, but progress is to be shown and nobody to say it to, they
    go to standard error.
    """

    def __init__(
        self, show: Progress, title: str, cells: int, preparations: int = 0, say: Callable[[str], None] | None = None
    ) -> None:
        self.title, self.cells, self.preparations, self.say = title, cells, preparations, say
        self.done = self.prepared = 0
        self._lock = threading.RLock()  # lanes are threads, and each says how far it is
        self._parts: dict[Task, tuple[int, int]] = {}
        self._show = cells > 0 and (show is True or (show is None and sys.stderr.isatty()))
        self._bars: Any = None
        self._lines: dict[Task, Any] = {}
        self._whole: Any = None
        self._began = time.monotonic()  # and again with each preparation: when the first cell could begin

    def __enter__(self) -> Self:
        if self._show:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bars

            console = Console(stderr=True)
            if console.is_terminal and not console.is_dumb_terminal:
                texts = (TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[note]"))
                self._bars = Bars(next(texts), BarColumn(), next(texts), console=console, transient=True)
                self._whole = self._bars.add_task(self.title, total=self.cells, note=self._note())
                self._bars.start()
            elif self.say is None:
                self.say = lambda line: print(line, file=sys.stderr, flush=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def advance(self, task: Task, done: int, total: int) -> None:
        """A task has begun (0 of 0), or has come further; it may not know how far it has to go."""
        with self._lock:
            _, known = self._parts.get(task, (0, 0))
            known = total if total > done else known
            self._parts[task] = (done, known)
            if self._bars is not None:
                if task not in self._lines:
                    self._lines[task] = self._bars.add_task(f"  {task}", total=None, note="")
                note = f"{done} of {known}" if known else f"{done}" if done else ""
                self._bars.update(self._lines[task], completed=done, total=known or None, note=note)
                self._bars.update(self._whole, note=self._note())

    def over(self, task: Task, result: Result | None) -> None:
        """A task has ended; a cell has a result, if only that it failed."""
        with self._lock:
            self._parts.pop(task, None)
            if isinstance(task, Cell):
                self.done += 1
            else:
                self.prepared += 1
                self._began = time.monotonic()
            if self._bars is not None:
                line = self._lines.pop(task, None)
                if line is not None:
                    self._bars.remove_task(line)
                self._bars.update(self._whole, completed=self.done, note=self._note())
                if result is not None and result.failed:
                    self._bars.console.print(describe(result), markup=False, highlight=False)
            if result is not None and self.say is not None:
                self.say(f"{self.done}/{self.cells}  {describe(result)}  ({left(self.remaining())})")

    def remaining(self) -> float:
        """Seconds that the rest will take if it goes as fast as what is done, parts of cells included; NaN at first."""
        with self._lock:
            parts = sum(done / total for task, (done, total) in self._parts.items() if total and isinstance(task, Cell))
        progress = self.done + parts
        elapsed = time.monotonic() - self._began
        return elapsed * (self.cells - progress) / progress if progress else float("nan")

    def _note(self) -> str:
        if self.prepared < self.preparations:
            return f"preparing: {self.prepared} of {self.preparations} source models"
        return f"{self.done} of {self.cells} cells, {left(self.remaining())}"


def left(seconds: float) -> str:
    if seconds != seconds:
        return "time left unknown"
    if seconds < 90:
        return f"{seconds:.0f} s left"
    return f"{seconds / 60:.0f} min left" if seconds < 5400 else f"{seconds / 3600:.1f} h left"


def describe(result: Result) -> str:
    """A cell and its figures in one line."""
    if result.last is None or result.selected is None or result.best is None:
        return f"{result.cell}: failed: {result.error}"
    last, selected, best = (100 * outcome.accuracy for outcome in (result.last, result.selected, result.best))
    return f"{result.cell}: {last:.1f} % (selected {selected:.1f}, best {best:.1f}), {result.seconds:.1f} s"
