"""Run a benchmark, stop it, go on tomorrow: each cell is recorded as soon as it is there, and never run twice."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from shiftmend.bench.base import Benchmark
from shiftmend.bench.cells import Cell, Result
from shiftmend.bench.clusters import on_ray
from shiftmend.bench.display import Display
from shiftmend.bench.executors import Execute, inline, processes
from shiftmend.bench.lanes import lanes
from shiftmend.bench.limits import TimeLimit
from shiftmend.bench.planning import plan
from shiftmend.bench.store import Store
from shiftmend.bench.suite import find
from shiftmend.bench.tasks import Advance, Job, Preparation, preparation
from shiftmend.data.base import ROOT_VARIABLE
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
    left: int
    """For which there was no time."""
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
    """Run the cells of a benchmark that are not in `folder/results.sqlite` yet.

    Source models and profiles are made where they are missing and kept in `folder`. A cell that fails is recorded with
    its error, and tried again in the next run. `rates` are learning rates to choose from without labels. `compile` is
    that of `adapt`: for many cells of a large network on a GPU. With `minutes`, nothing is begun that would likely last
    longer (`TimeLimit`); the rest is for the next run.
    """
    started = time.perf_counter()
    chosen, home, place = find(benchmark), Path(folder), _data_root(root)
    _refuse(executor, workers, minutes, rates or (), home)
    limit = TimeLimit(chosen, minutes)
    cells = plan(chosen, protocol, methods=methods, shifts=shifts, seeds=seeds, rates=rates, root=place)
    home.mkdir(parents=True, exist_ok=True)
    failed: list[Result] = []
    with Store(home / STORE) as store:
        known = store.cells()
        todo = [cell for cell in cells if cell not in known]
        needed = preparations(chosen, todo)
        count = min(workers or _workers(chosen, device), max(1, len(todo)))
        job = Job(
            _found_anywhere(benchmark),
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
                _executor(executor, job, display.advance, count) as execute,
            ):
                for tasks in (needed, todo):
                    for task, result in execute(limit.within(tasks)):
                        limit.over(task)
                        if result is not None:
                            store.record(result)
                            failed += [result] if result.failed else []
                        display.over(task, result)
    return Report(
        cells=len(cells),
        already=len(cells) - len(todo),
        done=len(todo) - len(failed) - len(limit.left),
        failed=tuple(failed),
        left=len(limit.left),
        seconds=time.perf_counter() - started,
    )


def _refuse(executor: str, workers: int | None, minutes: float | None, rates: Sequence[float], home: Path) -> None:
    """Say in a sentence what cannot be run."""
    if executor not in ("local", "ray"):
        raise DataError(f"unknown executor {executor!r}, expected local or ray")
    if workers is not None and workers < 1:
        raise DataError(f"the number of workers must be at least 1, got {workers}")
    if minutes is not None and executor == "ray":
        raise DataError("on a cluster, the time of a run is limited by the cluster; leave the minutes out")
    if any(not 0 < rate < float("inf") for rate in rates):
        raise DataError(f"learning rates must be positive numbers, got {list(rates)}")
    if home.exists() and not home.is_dir():
        raise DataError(f"{home} is a file, expected a folder for results; name another")


def preparations(benchmark: Benchmark, cells: Sequence[Cell]) -> list[Preparation]:
    """The source models that cells need, each once, with the profiles of all presets: one worker trains a model."""
    presets: dict[Preparation, tuple[str, ...]] = {}
    for one in dict.fromkeys(preparation(benchmark, cell) for cell in cells):
        model = replace(one, presets=())
        presets[model] = presets.get(model, ()) + one.presets
    return [replace(model, presets=found) for model, found in presets.items()]


def _executor(executor: Executor, job: Job, advance: Advance, workers: int) -> AbstractContextManager[Execute]:
    if executor == "ray":
        return on_ray(job, workers)
    if workers == 1:
        return inline(job, advance)
    return lanes(job, advance, workers) if _one_gpu(job.device) else processes(job, advance, workers)


def _data_root(root: str | os.PathLike[str] | None) -> Path | None:
    """The folder of the data sets by its name, since the environment of a worker elsewhere may not have it."""
    named = os.fspath(root) if root is not None else os.environ.get(ROOT_VARIABLE, "")
    place = Path(named).expanduser() if named else None
    if root is not None and (place is None or not place.is_dir()):
        raise DataError(f"the data folder {named!r} does not exist; name the folder that the data sets lie in")
    return place


def _found_anywhere(benchmark: str) -> str:
    """A benchmark's name, also from another working directory."""
    file, colon, attribute = benchmark.rpartition(":")
    return f"{Path(file).absolute()}:{attribute}" if colon else benchmark


def _workers(benchmark: Benchmark, device: str) -> int:
    """One for each GPU, or several on a single one; without any, one a core for a small network, else one with all."""
    if _one_gpu(device):
        return benchmark.lanes
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count()
    return min(8, os.cpu_count() or 1) if benchmark.small else 1


def _one_gpu(device: str) -> bool:
    """Whether all cells run on one GPU: there is but one, or it is named."""
    if device == "cpu" or not torch.cuda.is_available():
        return False
    return torch.cuda.device_count() == 1 or device.startswith("cuda:")
