"""Run a benchmark, stop it, go on tomorrow: each cell is recorded as soon as it is there, and never run twice."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from shiftmend.bench.base import Benchmark
from shiftmend.bench.cells import Cell, Result
from shiftmend.bench.display import Display
from shiftmend.bench.executors import Advance, Job, Preparation, Task, inline, on_ray, processes
from shiftmend.bench.planning import plan, settings_of
from shiftmend.bench.store import Store
from shiftmend.bench.suite import find
from shiftmend.errors import DataError
from shiftmend.progress import Progress

Executor = Literal["local", "ray"]
STORE = "results.sqlite"


@dataclass(frozen=True)
class Report:
    """How a run went."""

    cells: int
    """Asked for."""
    already: int
    done: int
    failed: tuple[Result, ...]
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
    executor: Executor = "local",
    progress: Progress = None,
    say: Callable[[str], None] | None = None,
) -> Report:
    """Run the cells of a benchmark that are not in `folder/results.sqlite` yet.

    Source models and profiles are made where they are missing and kept in `folder`. A cell that fails is recorded with
    its error, and tried again in the next run. `rates` are learning rates to choose from without labels.
    """
    started = time.perf_counter()
    home = Path(folder)
    chosen = find(benchmark)
    place = None if root is None else Path(root)
    if executor not in ("local", "ray"):
        raise DataError(f"unknown executor {executor!r}, expected local or ray")
    if workers is not None and workers < 1:
        raise DataError(f"the number of workers must be at least 1, got {workers}")
    if any(not 0 < rate < float("inf") for rate in rates or ()):
        raise DataError(f"learning rates must be positive numbers, got {list(rates or ())}")
    cells = plan(chosen, protocol, methods=methods, shifts=shifts, seeds=seeds, rates=rates, root=place)
    home.mkdir(parents=True, exist_ok=True)
    failed: list[Result] = []
    with Store(home / STORE) as store:
        known = store.cells()
        todo = [cell for cell in cells if cell not in known]
        count = workers or _workers(chosen, device)
        job = Job(
            benchmark,
            str(home.absolute()),
            None if place is None else str(place.absolute()),
            device,
            tuple(rates or ()),
            threads=1 if chosen.small else 0,
        )
        with Display(progress, chosen.name, len(todo), min(count, max(1, len(todo))), say) as display:
            for tasks in (preparations(chosen, protocol, todo), todo):
                for _, result in _execute(executor, job, tasks, display.advance, count):
                    if result is None:
                        continue
                    store.record(result)
                    failed += [result] if result.failed else []
                    display.finished(result)
    return Report(
        len(cells), len(cells) - len(todo), len(todo) - len(failed), tuple(failed), time.perf_counter() - started
    )


def preparations(benchmark: Benchmark, protocol: str, cells: Sequence[Cell]) -> list[Preparation]:
    """The source models and profiles that cells need, each once."""
    settings, temperature = settings_of(benchmark, protocol), benchmark.protocols[protocol].temperature
    needed = ((benchmark.source_for(settings[cell.method], cell.shift), cell.seed) for cell in cells)
    return [Preparation(source, seed, temperature) for source, seed in dict.fromkeys(needed)]


def _execute(
    executor: Executor, job: Job, tasks: Sequence[Task], advance: Advance, workers: int
) -> Iterator[tuple[Task, Result | None]]:
    if not tasks:
        return iter(())
    if executor == "ray":
        return on_ray(job, tasks, advance, workers)
    if workers == 1:
        return inline(job, tasks, advance)
    return processes(job, tasks, advance, workers)


def _workers(benchmark: Benchmark, device: str) -> int:
    """One for each GPU; without one, as many as there are cores for a small network, else one with all of them."""
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count() if device in ("auto", "cuda") else 1
    return min(8, os.cpu_count() or 1) if benchmark.small else 1
