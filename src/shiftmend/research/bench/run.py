"""Running a benchmark: each cell is stored as soon as it is done and never run twice, so a run can be interrupted."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch

from shiftmend.errors import DataError
from shiftmend.research.bench.benchmark import Benchmark, Cell, Result
from shiftmend.research.bench.execute import (
    Advance,
    Execute,
    Job,
    Task,
    TimeLimit,
    in_gpu_threads,
    in_processes,
    in_this_process,
    list_preparations,
    on_ray,
)
from shiftmend.research.bench.plan import plan
from shiftmend.research.bench.store import STORE, Store
from shiftmend.research.bench.suite import find
from shiftmend.research.datasets.files import ROOT_VARIABLE
from shiftmend.utils.progress import Progress
from shiftmend.utils.terminal import neutralise, open_console

Executor = Literal["local", "ray"]


@dataclass(frozen=True)
class Report:
    """Counts of the cells of a run: done, failed, and left over."""

    cells: int
    """Number of requested cells."""
    already: int
    done: int
    failed: tuple[Result, ...]
    left: int
    """Number of cells that were not started, for lack of time."""
    seconds: float


def run(
    benchmark: str,
    folder: str | os.PathLike[str],
    *,
    protocol: str = "offline",
    methods: Sequence[str] | None = None,
    shifts: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    rates: Sequence[float] | None = None,
    root: str | os.PathLike[str] | None = None,
    device: str = "auto",
    workers: int | None = None,
    compile: bool = False,
    minutes: float | None = None,
    executor: Executor = "local",
    progress: Progress = None,
    say: Callable[[str], None] | None = None,
) -> Report:
    """Run the cells of a benchmark that are not yet in `folder/results.sqlite`.

    Missing source models and profiles are made and kept in `folder`. A cell that fails is recorded with its error, and
    tried again in the next run.

    Args:
        benchmark: A name, or `file.py:NAME`.
        folder: Folder of results, source models and profiles.
        protocol: One of the benchmark's protocols.
        methods: Rows of its table; all by default.
        shifts: Shifts, or `clean`; all by default.
        seeds: The benchmark's own by default.
        rates: Learning rates to choose from without labels.
        root: The folder of the data sets.
        device: `auto`, `cpu`, `cuda`, ...
        workers: Number of processes; on a single GPU, of threads.
        compile: Whether to compile the steps of `adapt`; useful for many cells of a large network on a GPU.
        minutes: Time limit in minutes; see `TimeLimit`. The remaining cells are left for the next run.
        executor: `local`, or `ray` for a cluster.
        progress: Whether to show bars; by default only on a terminal.
        say: Function that is called with a line for each finished cell.
    """
    started = time.perf_counter()
    chosen, home, place = find(benchmark), Path(folder), _find_data_root(root)
    _check(executor, workers, minutes, rates or (), home)
    limit = TimeLimit(chosen, minutes)
    cells = plan(chosen, protocol, methods=methods, shifts=shifts, seeds=seeds, rates=rates, root=place)
    home.mkdir(parents=True, exist_ok=True)
    failed: list[Result] = []
    with Store(home / STORE) as store:
        known = store.cells()
        todo = [cell for cell in cells if cell not in known]
        needed = list_preparations(chosen, todo)
        count = min(workers or _count_workers(chosen, device), max(1, len(todo)))
        job = Job(
            _make_absolute(benchmark),
            str(home.absolute()),
            None if place is None else str(place.absolute()),
            device,
            tuple(rates or ()),
            threads=1 if chosen.small else 0 if count == 1 else max(1, (os.cpu_count() or 1) // count),
            compile=compile,
        )
        if todo:
            with (
                Display(progress, chosen.name, len(todo), len(needed), say) as display,
                _start_executor(executor, job, display.advance, count) as execute,
            ):
                for tasks in (needed, todo):
                    for task, result in execute(limit.within(tasks)):
                        limit.end(task)
                        if result is not None:
                            store.record(result)
                            failed += [result] if result.failed else []
                        display.end(task, result)
    return Report(
        cells=len(cells),
        already=len(cells) - len(todo),
        done=len(todo) - len(failed) - len(limit.left),
        failed=tuple(failed),
        left=len(limit.left),
        seconds=time.perf_counter() - started,
    )


def _check(executor: str, workers: int | None, minutes: float | None, rates: Sequence[float], home: Path) -> None:
    if executor not in ("local", "ray"):
        raise DataError(f"Expected the executor local or ray, got {executor!r}.")
    if workers is not None and workers < 1:
        raise DataError(f"Expected at least 1 worker, got {workers}.")
    if minutes is not None and executor == "ray":
        raise DataError("Expected no limit of minutes on a cluster, which limits the time itself. Leave it out.")
    if any(not 0 < rate < float("inf") for rate in rates):
        raise DataError(f"Expected learning rates to be positive numbers, got {list(rates)}.")
    if home.exists() and not home.is_dir():
        raise DataError(f"Expected a folder for results, got the file {home}. Name another.")


def _find_data_root(root: str | os.PathLike[str] | None) -> Path | None:
    """Resolve the folder of the data sets, because the environment of a remote worker may not define it."""
    named = os.fspath(root) if root is not None else os.environ.get(ROOT_VARIABLE, "")
    place = Path(named).expanduser() if named else None
    if root is not None and (place is None or not place.is_dir()):
        raise DataError(
            f"Expected the folder that the data sets lie in, got {named!r}, which does not exist. Name another."
        )
    return place


def _make_absolute(benchmark: str) -> str:
    """Return a name of the benchmark that is valid in any working directory."""
    file, colon, attribute = benchmark.rpartition(":")
    return f"{Path(file).absolute()}:{attribute}" if colon else benchmark


def _start_executor(executor: Executor, job: Job, advance: Advance, workers: int) -> AbstractContextManager[Execute]:
    if executor == "ray":
        return on_ray(job, workers)
    if workers == 1:
        return in_this_process(job, advance)
    return in_gpu_threads(job, advance, workers) if _is_one_gpu(job.device) else in_processes(job, advance, workers)


def _count_workers(benchmark: Benchmark, device: str) -> int:
    """Return one worker per GPU, or several on a single one; on CPUs, one per core for a small network, else one."""
    if _is_one_gpu(device):
        return benchmark.cells_per_gpu
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count()
    return min(8, os.cpu_count() or 1) if benchmark.small else 1


def _is_one_gpu(device: str) -> bool:
    """Tell whether all cells run on one GPU, because it is the only one or was named."""
    if device == "cpu" or not torch.cuda.is_available():
        return False
    return torch.cuda.device_count() == 1 or device.startswith("cuda:")


class Display:
    """The progress of a run: finished cells, running tasks with their progress, and the time left.

    Lines go to `say`. Where progress is to be shown without a terminal for bars and without `say`, lines go to standard
    error.
    """

    def __init__(
        self, show: Progress, title: str, cells: int, preparations: int = 0, say: Callable[[str], None] | None = None
    ) -> None:
        self.title, self.cells, self.preparations, self.say = title, cells, preparations, say
        self.done = self.prepared = 0
        # Workers may be threads, which report their progress concurrently.
        self._lock = threading.RLock()
        self._parts: dict[Task, tuple[int, int]] = {}
        self._show = cells > 0 and (show is True or (show is None and sys.stderr.isatty()))
        self._bars: Any = None
        self._lines: dict[Task, Any] = {}
        self._whole: Any = None
        # Set again with each preparation: cells can begin after the last.
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        if self._show:
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bars

            console = open_console(stderr=True)
            if console.is_terminal and not console.is_dumb_terminal:
                texts = (TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[note]"))
                self._bars = Bars(next(texts), BarColumn(), next(texts), console=console, transient=True)
                self._whole = self._bars.add_task(self.title, total=self.cells, note=self._note())
                self._bars.start()
            elif self.say is None:
                self.say = lambda line: print(neutralise(line), file=sys.stderr, flush=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def advance(self, task: Task, done: int, total: int) -> None:
        """Show that a task has started (0 of 0) or made progress; its total may be unknown."""
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

    def end(self, task: Task, result: Result | None) -> None:
        """Remove a finished task from the display, count the task as done, and report the result of a cell.

        Args:
            task: A cell (one method on one shift from one seed), or the preparation of a source model.
            result: The result of a cell, also of a failed one; None for a preparation.
        """
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
                    self._bars.console.print(describe_result(result), markup=False, highlight=False)
            if result is not None and self.say is not None:
                self.say(f"{self.done}/{self.cells}  {describe_result(result)}  ({format_left(self.remaining())})")

    def remaining(self) -> float:
        """Estimate the seconds left at the pace so far, including parts of cells; NaN at first."""
        with self._lock:
            parts = sum(done / total for task, (done, total) in self._parts.items() if total and isinstance(task, Cell))
        progress = self.done + parts
        elapsed = time.monotonic() - self._began
        return elapsed * (self.cells - progress) / progress if progress else float("nan")

    def _note(self) -> str:
        if self.prepared < self.preparations:
            return f"preparing: {self.prepared} of {self.preparations} source models"
        return f"{self.done} of {self.cells} cells, {format_left(self.remaining())}"


def format_left(seconds: float) -> str:
    """Format the remaining time of a run as part of a sentence; NaN means unknown."""
    if seconds != seconds:
        return "time left unknown"
    if seconds < 90:
        return f"{seconds:.0f} s left"
    return f"{seconds / 60:.0f} min left" if seconds < 5400 else f"{seconds / 3600:.1f} h left"


def describe_result(result: Result) -> str:
    """Describe a cell and its figures in one line."""
    if result.last is None or result.selected is None or result.best is None:
        return f"{result.cell}: failed: {result.error}"
    last, selected, best = (100 * outcome.accuracy for outcome in (result.last, result.selected, result.best))
    return f"{result.cell}: {last:.1f} % (selected {selected:.1f}, best {best:.1f}), {result.seconds:.1f} s"
