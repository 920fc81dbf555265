"""Time and memory of a function, and tables of what was measured."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Run = Callable[[], Any]

WARM_UP = 3
"""Runs before a capture, as in `shiftmend.accelerate.cuda_graphs`."""


@dataclass(frozen=True)
class Timing:
    """Seconds: the median of several measurements, the shortest and the longest."""

    median: float
    low: float
    high: float

    def __truediv__(self, count: float) -> Timing:
        return Timing(self.median / count, self.low / count, self.high / count)

    @property
    def milliseconds(self) -> str:
        return f"{figure(1e3 * self.median)} ({figure(1e3 * self.low)} to {figure(1e3 * self.high)})"


@dataclass(frozen=True)
class Table:
    """Rows of text under titles, and sentences below them."""

    titles: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()
    notes: tuple[str, ...] = ()


WIDTH = 150
"""Characters in a line where there is no terminal that says how many it has."""


def show(table: Table) -> None:
    """Print a table. Nothing is cut off: what is too wide goes on in the next line."""
    from rich.console import Console
    from rich.table import Table as Grid

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = WIDTH
    if table.titles:
        grid = Grid(box=None, pad_edge=False, header_style="bold")
        for title in table.titles:
            grid.add_column(title, overflow="fold")
        for row in table.rows:
            grid.add_row(*row)
        console.print(grid, soft_wrap=False)
    for note in table.notes:
        console.print(note, markup=False)
    console.print()


def figure(value: float) -> str:
    """Write three digits that count, and all of those before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def mebibytes(count: int) -> str:
    return figure(count / 2**20)


def timed(run: Run, device: torch.device, *, repeats: int, inner: int = 1) -> Timing:
    """Run once to get warm, then measure `inner` runs `repeats` times; the seconds are those of one run."""
    run()
    wait(device)
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(inner):
            run()
        wait(device)
        seconds.append((time.perf_counter() - started) / inner)
    return Timing(statistics.median(seconds), min(seconds), max(seconds))


def timed_on_device(run: Run, device: torch.device, *, repeats: int, inner: int = 1) -> Timing:
    """Measure as `timed` does, but on CUDA without the time that Python needs to launch kernels."""
    if device.type != "cuda":
        return timed(run, device, repeats=repeats, inner=inner)
    return timed(captured(run, device, inner), device, repeats=repeats) / inner


def captured(run: Run, device: torch.device, inner: int = 1) -> Run:
    """Capture so many runs as one CUDA graph and return its replay."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(inner):
            run()
    return graph.replay


def wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def memory_of(run: Run, device: torch.device) -> int | None:
    """Measure the bytes of tensors that a run needs at most beyond what was there; None where nobody counts them."""
    if device.type == "cuda":
        forget_peak(device)
        before = torch.cuda.memory_allocated(device)
        run()
        wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    return _memory_on_cpu(run) if device.type == "cpu" else None


def _memory_on_cpu(run: Run) -> int:
    """Measure by the profiler, which sees every tensor come and go; the system's figures move with malloc's habits."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    # Some versions of the profiler announce their start and their end, and cannot be told not to.
    with _silent_errors(), torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        kept = run()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    del kept
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


@contextmanager
def _silent_errors() -> Iterator[None]:
    """Keep everything from standard error, even from C++."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def matrix_throughput(device: torch.device, dtype: torch.dtype, *, repeats: int) -> float:
    """Measure the operations a second of one large matrix product, at its best: what the chip really gives."""
    size = 8192 if device.type == "cuda" else 1024
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / timed(lambda: one @ other, device, repeats=repeats, inner=5).low
