"""What a profile stores about a tap: a soft histogram of each unit, and slices of all units together.

Shared by the profile and by `StatsLayer`, so that there is one way to track a range, to count and to compare. The two
other kinds of `Statistic`, Gaussians, are in `gaussians.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from shiftmend.distributed.collectives import active, all_sum, joined_moments, joined_range
from shiftmend.errors import ProfileError
from shiftmend.stats.cuda import kernels
from shiftmend.stats.gaussians import MarginalGaussian
from shiftmend.stats.histograms import Bins, Divergence, divergence, scales, soft_histogram, usable_units
from shiftmend.utils.devices import split_rows, sum_dtype

_TOGETHER = "collect the others with like= the first, or all of them with like= one profile"


_NORMAL = torch.inference_mode(False)
"""For tensors that are kept: a loss could not be differentiated with what the caller's inference mode had made."""


class Statistic(Protocol):
    """Anything a profile can store about a tap.

    A tracker collects it over batches (`CountTracker`, `CovarianceTracker`, ...), several of them mix to that of all
    their samples, and a batch of values `[N, D]` has a divergence to it. The profile's file carries the kind of each.
    """

    @property
    def kind(self) -> str: ...

    @property
    def samples(self) -> int: ...

    def to(self, device: torch.device) -> Self: ...

    @classmethod
    def mixed(cls, parts: Sequence[Self], times: Sequence[float]) -> Self:
        """That of the samples of all parts, those of a part counted so many times (any number above 0)."""
        ...

    def divergence(self, values: Tensor) -> Tensor:
        """Of a batch of values to the source: one number, with a gradient."""
        ...


@dataclass(frozen=True, eq=False)
class Histogram:
    """Soft counts `[D, B]` (each row sums to `samples`) over the range `low` to `high` `[D]` of each unit."""

    kind: ClassVar[str] = "soft-histogram"
    counts: Tensor
    low: Tensor
    high: Tensor
    samples: int
    bins: Bins

    @cached_property
    @_NORMAL
    def usable(self) -> Tensor:
        """Units that varied on the source; the others are left out of every divergence."""
        return usable_units(self.low, self.high)

    @cached_property
    def usable_count(self) -> int:
        return int(self.usable.sum())

    @cached_property
    @_NORMAL
    def probabilities(self) -> Tensor:
        """Normalised counts, pi^s of equation (1)."""
        return self.counts / self.samples

    @property
    def units(self) -> int:
        return self.counts.shape[0]

    def to(self, device: torch.device) -> Histogram:
        if self.counts.device == device:
            return self
        moved = Histogram(self.counts.to(device), self.low.to(device), self.high.to(device), self.samples, self.bins)
        moved.__dict__["usable_count"] = self.usable_count  # known already: spares a wait for the device
        return moved

    def of(self, values: Tensor) -> Tensor:
        """The normalised counts of other values `[N, D]` in the bins of this histogram."""
        return soft_histogram(values, self.low, self.high, self.bins, scale=self.scale)

    def per_unit(self, target: Tensor, kind: Divergence = "psi") -> Tensor:
        """Divergence of each unit to normalised `target` counts; zero, without a gradient, where unusable."""
        per_unit = divergence(self.probabilities.to(target.dtype), target, kind)
        return torch.where(self.usable, per_unit, torch.zeros((), dtype=per_unit.dtype, device=per_unit.device))

    def mean_divergence(self, target: Tensor, kind: Divergence = "psi") -> Tensor:
        """Mean over usable units (zero if there is none)."""
        return self.per_unit(target, kind).sum() / max(1, self.usable_count)

    def divergence(self, values: Tensor, kind: Divergence = "psi") -> Tensor:
        """Mean divergence over usable units of values `[N, D]` of the tap."""
        if kernels.fit(values, self.bins):
            given = (self.low.float(), self.scale.float(), self.probabilities.float())
            return kernels.divergence(values, *given, self.bins, kind, 1 / max(1, self.usable_count)).sum()
        return self.mean_divergence(self.of(values), kind)

    @cached_property
    @_NORMAL
    def scale(self) -> Tensor:
        """One over the range of each usable unit, 0 for the others."""
        return scales(self.low, self.high)

    def counter(self) -> CountTracker:
        """Counts other values over the same ranges and bins."""
        return CountTracker(self.low, self.high, self.bins, self.scale)

    @classmethod
    def mixed(cls, parts: Sequence[Histogram], times: Sequence[float]) -> Histogram:
        """See `Statistic`. Ranges and bins must be the same."""
        first = parts[0]
        for other in parts[1:]:
            same_ranges = torch.equal(first.low, other.low) and torch.equal(first.high, other.high)
            if not same_ranges or first.bins != other.bins:
                raise ProfileError(f"these histograms were collected over different ranges or bins; {_TOGETHER}")
        counts = sum(part.counts.double() * number for part, number in zip(parts, times, strict=True))
        samples = round(sum(part.samples * number for part, number in zip(parts, times, strict=True)))
        assert isinstance(counts, Tensor)
        return Histogram(counts.to(first.counts.dtype), first.low, first.high, samples, first.bins)


class RangeTracker:
    """First pass: the range of each unit, with its mean and variance, in float64 and mergeable in any order."""

    def __init__(self) -> None:
        self.samples = 0
        self.low: Tensor
        self.high: Tensor
        self.mean: Tensor
        self.squares: Tensor  # sum of squared deviations from the mean

    def update(self, values: Tensor) -> None:
        for part in split_rows(values.detach()):
            self._take(part)

    def _take(self, values: Tensor) -> None:
        low, high = values.amin(0).float(), values.amax(0).float()
        work = values.to(sum_dtype(values.device))
        count, mean = len(values), work.mean(0)
        squares = (work - mean).square().sum(0)
        if self.samples == 0:
            self.low, self.high, self.mean, self.squares = low, high, mean, squares
        else:
            total, delta = self.samples + count, mean - self.mean
            self.low, self.high = torch.minimum(self.low, low), torch.maximum(self.high, high)
            self.squares = self.squares + squares + delta.square() * (self.samples * count / total)
            self.mean = self.mean + delta * (count / total)
        self.samples += count

    def joined(self) -> RangeTracker:
        """That of all processes; itself where there are no others."""
        if not active():
            return self
        every = RangeTracker()
        every.low, every.high = joined_range(self.low, self.high)
        samples, every.mean, every.squares = joined_moments(self.samples, self.mean, self.squares)
        every.samples = int(samples)
        return every

    @property
    def deviation(self) -> Tensor:
        return (self.squares / max(1, self.samples)).sqrt()

    def gaussian(self) -> MarginalGaussian:
        variance = self.squares / max(1, self.samples - 1)
        return MarginalGaussian(self.mean.float().cpu(), variance.float().cpu(), self.samples)


class CountTracker:
    """Second pass: soft counts over ranges that are known by now."""

    def __init__(self, low: Tensor, high: Tensor, bins: Bins, scale: Tensor | None = None) -> None:
        self.low, self.high, self.bins = low, high, bins
        self.scale = scales(low, high) if scale is None else scale
        self.counts = torch.zeros(low.shape[0], bins.total, dtype=sum_dtype(low.device), device=low.device)
        self.samples: float = 0

    def update(self, values: Tensor, times: float = 1) -> None:
        """Count values, each so many times: one that was drawn stands for others."""
        values = values.detach()
        share = soft_histogram(values, self.low, self.high, self.bins, scale=self.scale)
        number = values.shape[0] * times
        self.counts += share.to(self.counts.dtype) * number
        self.samples += number

    def joined(self) -> CountTracker:
        """That of all processes; itself where there are no others."""
        if not active():
            return self
        every = CountTracker(self.low, self.high, self.bins)
        samples = torch.tensor(self.samples, dtype=self.counts.dtype, device=self.counts.device)
        every.counts, every.samples = all_sum(self.counts), all_sum(samples).item()
        return every

    def divergence(self, home: Histogram) -> Tensor:
        """Mean over the units of a histogram with the same ranges, on the device."""
        return home.mean_divergence((self.counts / self.samples).to(home.counts.dtype))

    def histogram(self) -> Histogram:
        counts, low, high = (part.float().cpu() for part in (self.counts, self.low, self.high))
        return Histogram(counts, low, high, round(self.samples), self.bins)
