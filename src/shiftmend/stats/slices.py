"""Random directions for slices, the same for a seed on every machine and for ever."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shiftmend.errors import ProfileError
from shiftmend.stats.histograms import SHARP, Bins, Divergence
from shiftmend.stats.statistics import _TOGETHER, Histogram
from shiftmend.utils.devices import split_rows

MOST_WEIGHTS = 1 << 26
"""Of all slices of a profile together: they are rebuilt from their seeds, 16 bytes each at most."""


@dataclass(frozen=True, eq=False)
class Projector:
    """Turns values `[N, D]` of a tap into slices `[N, S]`: standardise, then project on fixed directions.

    Units that were constant on the source are left out: their weight in every direction is zero.
    """

    weight: Tensor
    offset: Tensor

    @staticmethod
    def build(mean: Tensor, deviation: Tensor, usable: Tensor, count: int, seed: int) -> Projector:
        weight = random_directions(count, mean.shape[0], seed).double()
        weight *= usable.cpu()
        weight /= weight.norm(dim=1, keepdim=True).clamp_min(1e-12)
        weight *= torch.where(usable.cpu(), 1 / deviation.cpu().double().clamp_min(1e-30), 0.0)
        return Projector(weight.float(), (weight @ mean.cpu().double()).float())

    def to(self, device: torch.device) -> Projector:
        return Projector(self.weight.to(device), self.offset.to(device))

    def __call__(self, values: Tensor) -> Tensor:
        with torch.autocast(device_type=values.device.type, enabled=False):
            projected: Tensor = torch.nn.functional.linear(values.to(self.weight.dtype), self.weight)
            return projected - self.offset

    def by_parts(self, values: Tensor) -> Iterator[Tensor]:
        """The same of some rows at a time: of a feature map there are many times more slices than units."""
        return map(self, split_rows(values, len(self.weight)))


def bins_of_slices(name: str, bins: Bins) -> Bins:
    """The bins of slices in a profile with these: those that verify are sharp, so that verdicts compare."""
    return bins.at(SHARP) if name == "verification" else bins


@dataclass(frozen=True, eq=False)
class Slices:
    """Histograms of random projections of a tap: they see the joint distribution, where marginals cannot."""

    kind: ClassVar[str] = "sliced-histogram"
    histogram: Histogram
    seed: int
    projector: Projector

    @property
    def samples(self) -> int:
        return self.histogram.samples

    def to(self, device: torch.device) -> Slices:
        return Slices(self.histogram.to(device), self.seed, self.projector.to(device))

    @classmethod
    def mixed(cls, parts: Sequence[Slices], times: Sequence[float]) -> Slices:
        """See `Statistic`. The directions must be the same."""
        first = parts[0]
        for other in parts[1:]:
            if first.seed != other.seed or not torch.equal(first.projector.weight, other.projector.weight):
                raise ProfileError(f"these slices were taken in different directions; {_TOGETHER}")
        return Slices(Histogram.mixed([part.histogram for part in parts], times), first.seed, first.projector)

    def divergence(self, values: Tensor, kind: Divergence = "psi") -> Tensor:
        """Mean divergence over slices of values `[N, D]` of the tap."""
        return self.histogram.divergence(self.projector(values), kind)


def random_directions(count: int, units: int, seed: int) -> Tensor:
    """`count` fixed random unit vectors `[count, units]`, the same on every machine and in every version.

    A profile stores only the seed, so the numbers must never change: they come from a splitmix64 counter and
    Box-Muller written out here rather than from a library's generator, whose stream may change. A few rows are
    made at a time, so that a file which asks for many costs little more memory than the result.
    """
    directions = torch.empty(count, units, dtype=torch.float32, device="cpu")
    done = 0
    for part in split_rows(directions):
        index = np.arange(done, done + part.numel(), dtype=np.uint64)
        radius, angle = _uniform(index, seed), _uniform(index + np.uint64(count * units), seed)
        normal = np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)
        vectors = torch.from_numpy(normal.reshape(part.shape))
        part.copy_(torch.nn.functional.normalize(vectors, dim=1))
        done += part.numel()
    return directions


def _uniform(index: NDArray[np.uint64], seed: int) -> NDArray[np.float64]:
    """The numbers at these places of the splitmix64 stream of a seed, above 0 and at most 1."""
    with np.errstate(over="ignore"):
        z = (index + np.uint64(seed) * np.uint64(0xD1342543DE82EF95) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
