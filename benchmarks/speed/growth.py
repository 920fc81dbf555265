"""The divergence, forward and backward, as samples, units, bins and taps double: time should at most double too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from shiftmend.stats.histograms import Bins, CountTracker
from speed.timing import Run, Table, Timing, timed_on_device

FACTORS = (1, 2, 4, 8)


BINS = 8


TEMPERATURE = 0.01


@dataclass(frozen=True)
class Size:
    samples: int
    units: int
    bins: Bins = Bins(BINS)  # noqa: RUF009 (it is frozen)
    taps: int = 1


@dataclass(frozen=True)
class GrowthTime:
    """One of the four grown by a factor, the rest as at the base."""

    what: str
    factor: int
    size: Size
    time: Timing
    ratio: float
    """To the base."""

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def sizes(base: Size) -> dict[str, list[Size]]:
    """List the sizes by what grows. More bins under one temperature are softer, and other forms may be needed."""
    samples, units, taps = base.samples, base.units, base.taps
    return {
        "samples": [Size(factor * samples, units) for factor in FACTORS],
        "units": [Size(samples, factor * units) for factor in FACTORS],
        "bins, equally sharp": [
            Size(samples, units, Bins(BINS * factor, temperature=TEMPERATURE / factor)) for factor in FACTORS
        ],
        "bins, one temperature": [Size(samples, units, Bins(BINS * factor)) for factor in FACTORS],
        "taps": [Size(samples, units, taps=factor * taps) for factor in FACTORS],
    }


def measure(device: torch.device, repeats: int) -> Iterator[GrowthTime]:
    base = Size(16_384, 256) if device.type == "cuda" else Size(1024, 64)
    for what, grown in sizes(base).items():
        yield from grow(what, grown, device, repeats)


def grow(what: str, grown: Sequence[Size], device: torch.device, repeats: int) -> Iterator[GrowthTime]:
    first, inner = 0.0, 20 if device.type == "cuda" else 3
    for factor, size in zip(FACTORS, grown, strict=True):
        time = timed_on_device(divergence(size, device), device, repeats=repeats, inner=inner)
        first = first or time.median
        yield GrowthTime(what, factor, size, time, time.median / first)


def divergence(size: Size, device: torch.device) -> Run:
    """Sum over taps and gradient by each tap's values."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(samples: int) -> torch.Tensor:
        return torch.rand(samples, size.units, device=device, generator=generator)

    homes, values = [], [drawn(size.samples).requires_grad_() for _ in range(size.taps)]
    for _ in values:
        counter = CountTracker(torch.zeros(size.units, device=device), torch.ones(size.units, device=device), size.bins)
        counter.update(drawn(1000))
        homes.append(counter.histogram().to(device))

    def run() -> tuple[torch.Tensor, ...]:
        terms = [home.divergence(tap) for home, tap in zip(homes, values, strict=True)]
        return torch.autograd.grad(torch.stack(terms).sum(), values)

    return run


def table(rows: Sequence[GrowthTime]) -> Table:
    titles = ("divergence and gradient", "ms", *(f"x {factor}" for factor in FACTORS[1:]))
    found: dict[str, list[GrowthTime]] = {}
    for row in rows:
        found.setdefault(row.what, []).append(row)
    lines = [
        (what, grown[0].time.milliseconds, *(f"{row.ratio:.2f}" for row in grown[1:])) for what, grown in found.items()
    ]
    base = rows[0].size
    start = f"{base.samples:,} samples, {base.units} units, {base.bins.total} bins, {base.taps} tap"
    note = f"from {start}; what doubles takes so many times the time of its base: 2, 4 and 8 are linear growth"
    return Table(titles, lines, (note,))
