"""The soft histogram alone: the softmax of the paper against ours, and against one read of its input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shiftmend.stats import histograms
from shiftmend.stats.histograms import Bins
from speed.timing import Table, Timing, figure, mebibytes, memory_of, timed, timed_on_device

SIZES = ((256, 128), (1024, 128), (4096, 128), (16_384, 512), (65_536, 512))


ON_GPU_ONLY = 1 << 24
"""Values: from so many on, the softmax form takes a CPU half a minute."""


@dataclass(frozen=True)
class HistogramTimes:
    """Forward only. On CUDA as it is inside a captured step: what Python needs to launch kernels is not in it."""

    samples: int
    units: int
    naive: Timing
    ours: Timing
    read: Timing
    """The sum of all values."""
    called: Timing | None
    """Ours on CUDA, called from Python."""
    naive_memory: int | None
    memory: int | None
    naive_error: float
    error: float
    """Largest, of a bin probability, against float64."""

    @property
    def bytes(self) -> int:
        """The size of the input."""
        return 4 * self.samples * self.units

    def facts(self) -> dict[str, Any]:
        return asdict(self) | {
            "naive_to_ours": self.naive.median / self.ours.median,
            "ours_to_read": self.ours.median / self.read.median,
            "read_bytes_a_second": self.bytes / self.read.median,
            "ours_bytes_a_second": self.bytes / self.ours.median,
        }


def measure(device: torch.device, repeats: int) -> Iterator[HistogramTimes]:
    for samples, units in SIZES:
        if device.type == "cuda" or samples * units < ON_GPU_ONLY:
            yield histogram_times(samples, units, device, repeats)


def histogram_times(
    samples: int, units: int, device: torch.device, repeats: int, bins: Bins | None = None
) -> HistogramTimes:
    """Time histograms of values between 0.1 below and 0.1 above a range from 0 to 1."""
    bins = bins or Bins()
    generator = torch.Generator(device).manual_seed(0)
    values = torch.rand(samples, units, device=device, generator=generator) * 1.2 - 0.1
    low, high = torch.zeros(units, device=device), torch.ones(units, device=device)
    scale = histograms.inverse_range(low, high)
    inner = 20 if device.type == "cuda" else max(1, (1 << 20) // values.numel())

    def naive() -> Tensor:
        return histograms.soft_assignment(values, bins).mean(0)

    def ours() -> Tensor:
        return histograms.soft_histogram(values, low, high, bins, scale=scale)

    exact = _in_float64(values, bins)
    return HistogramTimes(
        samples,
        units,
        timed_on_device(naive, device, repeats=repeats, inner=inner),
        timed_on_device(ours, device, repeats=repeats, inner=inner),
        timed_on_device(values.sum, device, repeats=repeats, inner=inner),
        timed(ours, device, repeats=repeats, inner=inner) if device.type == "cuda" else None,
        memory_of(naive, device),
        memory_of(ours, device),
        float((naive().cpu() - exact).abs().max()),
        float((ours().cpu() - exact).abs().max()),
    )


def _in_float64(values: Tensor, bins: Bins) -> Tensor:
    """Compute the softmax in float64, some rows at a time; not every device has float64."""
    wide = values if values.is_cuda else values.cpu()
    total = sum(histograms.soft_assignment(rows.double(), bins).sum(0) for rows in wide.split(1024))
    assert isinstance(total, Tensor)
    return (total / len(values)).cpu()


def table(rows: Sequence[HistogramTimes]) -> Table:
    titles = (
        "soft histogram, ms",
        "softmax",
        "ours",
        "one read",
        "softmax / ours",
        "ours / read",
        "GB/s of ours, read",
    )
    lines, notes = [], []
    for row in rows:
        name = f"{row.samples:,} x {row.units}"
        times = (row.naive.milliseconds, row.ours.milliseconds, row.read.milliseconds)
        ratios = (figure(row.naive.median / row.ours.median), figure(row.ours.median / row.read.median))
        speeds = ", ".join(figure(row.bytes / 1e9 / time.median) for time in (row.ours, row.read))
        lines.append((name, *times, *ratios, speeds))
        said = [f"error {row.naive_error:.0e} of the softmax, {row.error:.0e} of ours"]
        if row.naive_memory is not None and row.memory is not None:
            said.append(f"memory {mebibytes(row.naive_memory)} and {mebibytes(row.memory)} MiB")
        if row.called is not None:
            said.append(f"ours called from Python {row.called.milliseconds} ms")
        notes.append(f"{name}: {', '.join(said)}")
    return Table(titles, lines, tuple(notes))
