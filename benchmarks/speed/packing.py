"""The number of cells of a benchmark that a GPU does in a minute, one after the other and side by side."""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shiftmend.errors import ShiftmendError
from shiftmend.inputs.images import Split, signed
from shiftmend.research.bench.benchmark import Benchmark, Offline, Setting, Source, Target
from shiftmend.research.bench.execute import Job, Task, in_gpu_threads, in_this_process, preparation_for
from shiftmend.research.bench.plan import plan
from shiftmend.research.bench.recipes import Recipe
from shiftmend.research.bench.suite import find
from speed.timing import Table, Timing, figure

AT_ONCE = (1, 2, 4, 8, 16)

MAX_CELLS, MIN_CELLS = 16, 4

CLASSES, SAMPLES, EPOCHS_PER_BLOCK, SCORED_EVERY = 47, 18_800, 8, 5
"""A cell is as in EMNIST-DA, but for 8 epochs a block instead of 30; with 2, setting up and scoring was most of it."""

NOISE = f"{Path(__file__)}:BENCHMARK"
"""The benchmark below by its name, as anybody's own benchmark is run."""


@dataclass(frozen=True)
class PackedTime:
    """The time of so many cells at once, as `bench run --workers` has them."""

    at_once: int
    cells: int
    seconds: float
    """The time from the first cell to the last, with the start of each thread."""
    cell: Timing
    """Seconds of a cell among the others."""

    @property
    def a_minute(self) -> float:
        return 60 * self.cells / self.seconds

    def facts(self) -> dict[str, Any]:
        return asdict(self) | {"a_minute": self.a_minute}


def measure(device: torch.device, repeats: int) -> Iterator[PackedTime]:
    """Measure each number once: the median is over cells, whatever `repeats` says."""
    if device.type != "cuda":
        return
    yield from packed_times(AT_ONCE, device)


def packed_times(at_once: Sequence[int], device: torch.device, benchmark: str = NOISE) -> Iterator[PackedTime]:
    """Time cells. Source model, profile and one cell to get warm with come first and are not timed."""
    chosen = find(benchmark)
    cells = plan(chosen)
    with tempfile.TemporaryDirectory() as home:
        job = Job(benchmark, home, device=str(device))
        with in_this_process(job, _unwatched) as execute:
            for task, result in execute([preparation_for(chosen, cells[0]), cells[0]]):
                _refuse_failed(task, result)
        for count in at_once:
            some = cells[: max(MIN_CELLS, count)]
            seconds = []
            with in_this_process(job, _unwatched) if count == 1 else in_gpu_threads(job, _unwatched, count) as execute:
                started = time.perf_counter()
                for task, result in execute(some):
                    seconds.append(_refuse_failed(task, result))
                whole = time.perf_counter() - started
            spread = Timing(statistics.median(seconds), min(seconds), max(seconds))
            yield PackedTime(count, len(some), whole, spread)


def table(rows: Sequence[PackedTime]) -> Table:
    if not rows:
        sentence = "cells side by side are measured on a GPU only: on a CPU they are processes, one a core"
        return Table(notes=(sentence,))
    titles = ("cells at once on one GPU", "cells a minute", "times one", "seconds a cell")
    lines = []
    for row in rows:
        cell = f"{figure(row.cell.median)} ({figure(row.cell.low)} to {figure(row.cell.high)})"
        gain = row.a_minute / rows[0].a_minute
        lines.append((str(row.at_once), figure(row.a_minute), f"{gain:.2f}", cell))
    what = f"BUFR, {EPOCHS_PER_BLOCK} epochs a block, of the paper's CNN on {SAMPLES:,} random images in bfloat16"
    looks = f"verified after each epoch, scored after every {SCORED_EVERY}, source model given"
    return Table(titles, lines, (f"a cell is {what}, {looks}",))


@functools.cache
def random_images(samples: int, classes: int) -> Split:
    """Draw images, once: drawing them is nobody's speed."""
    generator = torch.Generator().manual_seed(samples)
    images = torch.randint(0, 256, (samples, 3, 28, 28), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, classes, (samples,), generator=generator)
    return Split(images, labels, f"noise-{samples}")


def _unwatched(task: Task, done: int, total: int) -> None:
    """Ignore progress."""


def _refuse_failed(task: Task, result: Any) -> float:
    """Return the seconds of a cell; a figure in which some failed would say nothing."""
    if result is not None and result.failed:
        raise ShiftmendError(f"{task} failed while speed was measured: {result.error}")
    return 0.0 if result is None else float(result.seconds)


def make_benchmark(
    samples: int = SAMPLES,
    epochs_per_block: int = EPOCHS_PER_BLOCK,
    width: int = 64,
    batch: int = 256,
    learning_rate: float = 0.01,
) -> Benchmark:
    """Make a benchmark of random images, in which every cell is one BUFR adaptation of the paper's CNN."""

    def load_source(source: str, root: object) -> Source:
        home = random_images(min(samples, 2048), CLASSES)
        return Source(home, home, home)

    def load_target(shift: str, root: object) -> Target:
        away = random_images(samples, CLASSES)
        return Target(away, away, away)

    setting = Setting("bufr", {"epochs_per_block": epochs_per_block, "learning_rate": learning_rate})
    network = {"classes": CLASSES, "width": width}
    return Benchmark(
        name="noise",
        title="random images",
        shifts=("none",),
        groups={},
        sources={"plain": Recipe(network="digit-cnn", options=network, epochs=1, batch_size=batch)},
        protocols={"offline": Offline(batch_size=batch, score_every=SCORED_EVERY, autocast=True)},
        settings={"offline": {f"cell-{number}": setting for number in range(MAX_CELLS)}},
        load_source=load_source,
        load_target=load_target,
        origin=lambda shift, root: "own",
        preprocess=signed,
        seeds=(1,),
    )


BENCHMARK = make_benchmark()
