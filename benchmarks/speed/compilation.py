"""Our step compiled by `torch.compile` beside the one that is captured as it is, and what compiling costs."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from shiftmend.accelerate.cuda_graphs import CapturedEpoch
from shiftmend.engine.step import Steps
from speed.steps import Scene, Workload, epoch_time, ours, scene, sgd, time_step, under, workloads
from speed.timing import Table, Timing, figure, wait

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@dataclass(frozen=True)
class Compiled:
    step: Timing
    seconds: float
    """To compile: the first epoch less a later one. Three steps to get warm and the capture are in it."""


@dataclass(frozen=True)
class CompiledTime:
    """Seconds a step of ours in bfloat16, channels last."""

    workload: Workload
    plain: Timing
    """Captured as it is."""
    compiled: Compiled | None
    """None if it could not be compiled: steps then run as they are, and the log says why."""

    def derived(self) -> dict[str, float]:
        """Compute images a second, and after how many steps of a stage compiling has paid off, if ever."""
        found = {"images": self.workload.batch / self.plain.median}
        if self.compiled is not None:
            step = self.compiled.step.median
            found |= {"compiled_images": self.workload.batch / step, "gain": self.plain.median / step}
            if step < self.plain.median:
                found["won_back"] = self.compiled.seconds / (self.plain.median - step)
        return found

    def facts(self) -> dict[str, Any]:
        return asdict(self) | self.derived()


class WatchedSteps(Steps):
    """Steps that know whether those they replay are compiled: what cannot be compiled is captured as it is."""

    compiled = False

    def _capture(self, compiled: bool = False) -> CapturedEpoch | None:
        found = super()._capture(compiled)
        self.compiled = compiled and found is not None
        return found


def measure(device: torch.device, repeats: int) -> Iterator[CompiledTime]:
    if device.type != "cuda":  # nothing is captured there, and only what is captured is compiled
        return
    for work in workloads(device):
        yield compiled_time(scene(work, device), repeats)


def compiled_time(stage: Scene, repeats: int) -> CompiledTime:
    plain = time_step(stage, ours(stage), autocast=True, repeats=repeats)
    steps = WatchedSteps(
        stage.model,
        stage.feed,
        stage.taps,
        ours(stage),
        sgd(stage),
        precision=under(stage, autocast=True),
        compile=True,
    )
    with nothing_kept():
        wait(stage.device)
        started = time.perf_counter()
        steps.run(0, 1)
        wait(stage.device)
        first = time.perf_counter() - started
        if not steps.compiled:
            return CompiledTime(stage.work, plain, None)
        later = epoch_time(steps, repeats)
    return CompiledTime(stage.work, plain, Compiled(later / stage.steps, first - later.median))


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Hide the disk cache of `torch.compile` inside the block, and delete what is compiled there."""
    before = {name: os.environ.get(name) for name in CACHES}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ.update({name: os.path.join(folder, name) for name in CACHES})
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def table(rows: Sequence[CompiledTime]) -> Table:
    if not rows:
        return Table(notes=("compiled steps are measured on a CUDA device only: elsewhere none are captured",))
    titles = ("milliseconds a step of ours", "as it is", "compiled", "as it is / compiled", "seconds to compile")
    lines, notes = [], []
    for row in rows:
        name = f"{row.workload.name}, batch {row.workload.batch}"
        if row.compiled is None:
            lines.append((name, row.plain.milliseconds, "failed", "", ""))
            notes.append(
                f"{row.workload.name}: could not be compiled; the log of shiftmend.accelerate.cuda_graphs says why"
            )
            continue
        derived, times = row.derived(), (row.plain.milliseconds, row.compiled.step.milliseconds)
        lines.append((name, *times, f"{derived['gain']:.2f}", figure(row.compiled.seconds)))
        rates = f"{figure(derived['compiled_images'])} images a second, {figure(derived['images'])} as it is"
        won = f"won back after {figure(derived['won_back'])} steps" if "won_back" in derived else "never won back"
        notes.append(f"{row.workload.name}: {rates}; {won}")
    return Table(titles, lines, (*notes, "bfloat16 autocast, channels last; nothing kept from an earlier compilation"))
