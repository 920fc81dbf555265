"""What all measurements share: how time and memory are taken, and what a table is."""

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
"""Runs before a capture, as in `captures.py`."""


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


def figure(value: float) -> str:
    """Three digits that count, and all of those before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def mebibytes(count: int) -> str:
    return figure(count / 2**20)


def timed(run: Run, device: torch.device, *, repeats: int, inner: int = 1) -> Timing:
    """Warm, then `repeats` measurements of `inner` runs each; seconds of one run."""
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
    """`timed`, but on CUDA without the time that Python needs to launch kernels, as it is inside a captured step."""
    if device.type != "cuda":
        return timed(run, device, repeats=repeats, inner=inner)
    return timed(captured(run, device, inner), device, repeats=repeats) / inner


def captured(run: Run, device: torch.device, inner: int = 1) -> Run:
    """Replays so many runs, captured as one CUDA graph."""
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
    """Bytes of tensors that a run needs at most beyond what was there before; None where nobody counts them."""
    if device.type == "cuda":
        forget_peak(device)
        before = torch.cuda.memory_allocated(device)
        run()
        wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    return _memory_on_cpu(run) if device.type == "cpu" else None


def _memory_on_cpu(run: Run) -> int:
    """By the profiler, which sees every tensor come and go; what the system says moves with malloc's habits."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    # some versions of the profiler announce their start and their end, and know no way to be told not to
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
    """Nothing reaches standard error, not even from C++."""
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
    """Operations a second of one large matrix product, at its best: what the chip really gives."""
    size = 8192 if device.type == "cuda" else 1024
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / timed(lambda: one @ other, device, repeats=repeats, inner=5).low
