"""What a person sees while a benchmark runs: bars on a terminal, a line for each finished cell elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from shiftmend.bench.cells import Result
from shiftmend.bench.executors import Task
from shiftmend.progress import Progress


class Display:
    """Cells done, what is running and how far it is, and the time left."""

    def __init__(self, show: Progress, title: str, total: int, workers: int, say: Callable[[str], None] | None) -> None:
        self.title, self.total, self.workers, self.say = title, total, workers, say
        self.done = 0
        self._times: list[float] = []
        self._bars: Any = None
        self._lines: dict[Task, Any] = {}
        self._whole: Any = None
        self._show = show is True or (show is None and sys.stderr.isatty())
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        if self._show and self.total:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bars

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
            self._bars = Bars(*columns, console=Console(stderr=True), transient=True)
            self._bars.start()
            self._whole = self._bars.add_task(self.title, total=self.total, note="preparing")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def advance(self, task: Task, done: int, total: int) -> None:
        """A task has begun (0 of 0), or has come further."""
        if self._bars is None:
            return
        if task not in self._lines:
            self._lines[task] = self._bars.add_task(f"  {task}", total=None, note="")
        note = f"{done} of {total}" if total > done else f"{done}" if done else ""
        self._bars.update(self._lines[task], completed=done, total=total or None, note=note)
        for other in [other for other in self._lines if type(other) is not type(task)]:
            self._bars.remove_task(self._lines.pop(other))  # the preparations are over

    def finished(self, result: Result) -> None:
        self.done += 1
        self._times.append(result.seconds)
        if self._bars is not None:
            line = self._lines.pop(result.cell, None)
            if line is not None:
                self._bars.remove_task(line)
            note = f"{self.done} of {self.total} cells, {left(self.remaining())}"
            self._bars.update(self._whole, completed=self.done, note=note)
        elif self.say is not None:
            self.say(f"{self.done}/{self.total}  {describe(result)}  ({left(self.remaining())})")

    def remaining(self) -> float:
        """Seconds that the cells to come will take if they are like those done."""
        if not self._times:
            return float("nan")
        return (self.total - self.done) * sum(self._times) / len(self._times) / self.workers


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
