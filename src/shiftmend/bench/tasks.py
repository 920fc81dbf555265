"""What there is to do in a run, and doing one thing of it: source models first, then cells."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from shiftmend.bench.base import USUAL_PRESET, Benchmark
from shiftmend.bench.cells import Cell, Result
from shiftmend.bench.planning import settings_of
from shiftmend.bench.running import run_cell
from shiftmend.bench.suite import find
from shiftmend.bench.workshop import Workshop
from shiftmend.errors import ShiftmendError


@dataclass(frozen=True)
class Job:
    """What a worker has to know about a run; all of it can travel to another machine."""

    benchmark: str
    home: str
    root: str | None = None
    device: str = "auto"
    rates: tuple[float, ...] = ()
    threads: int = 0
    """Of torch in each worker; 0 leaves them as they are."""
    compile: bool = False
    """Steps of adaptation, on a GPU."""


@dataclass(frozen=True)
class Preparation:
    """A source model and its profiles, which cells share."""

    source: str
    seed: int
    temperature: float
    presets: tuple[str, ...] = (USUAL_PRESET,)

    def __str__(self) -> str:
        return f"source model {self.source}, seed {self.seed}"


Task = Cell | Preparation
Advance = Callable[[Task, int, int], None]
"""Called with a task, how much of it is done, and how much there is (0 if that is not known)."""


class WorkerError(ShiftmendError):
    """The process that ran a task is gone, or failed at it in a way that cannot be told otherwise."""


def preparation(benchmark: Benchmark, cell: Cell) -> Preparation:
    """What a cell starts from."""
    setting = settings_of(benchmark, cell.protocol)[cell.method]
    source, temperature = benchmark.source_for(setting, cell.shift), benchmark.protocols[cell.protocol].temperature
    return Preparation(source, cell.seed, temperature, (setting.preset,))


@functools.lru_cache(maxsize=1)
def workshop_of(job: Job) -> Workshop:
    """This process's workshop; the one of another job, with its data, is given up for it."""
    if job.threads:
        torch.set_num_threads(job.threads)
    root = Path(job.root) if job.root else None
    return Workshop(find(job.benchmark), Path(job.home), root, job.device, compile=job.compile)


def work(job: Job, task: Task, advance: Advance, workshop: Workshop | None = None) -> Result | None:
    """Do one task, in this process's workshop or another; a preparation gives nothing but its files."""
    workshop = workshop or workshop_of(job)
    if isinstance(task, Cell):
        return run_cell(workshop, task, rates=job.rates, tick=lambda done, total: advance(task, done, total))
    epochs, done = workshop.benchmark.sources[task.source].epochs, 0

    def tick() -> None:
        nonlocal done
        done += 1
        advance(task, done, epochs)

    workshop.model(task.source, task.seed, tick)
    for preset in task.presets:
        workshop.profile(task.source, task.seed, task.temperature, preset)
    return None


def lost(job: Job, task: Task, why: str, seconds: float = 0.0) -> Result:
    """What is recorded for a cell whose worker is gone; without its source model nothing can go on."""
    if isinstance(task, Preparation):
        raise WorkerError(f"{task} could not be made: {why}; run again to go on from what is done")
    return Result(
        task,
        find(job.benchmark).origin(task.shift, Path(job.root) if job.root else None),
        error=why,
        seconds=round(seconds, 3),
        finished=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )
