"""Slices: histograms of random projections of the features, which depend on their joint distribution.

Histograms of single units say nothing about their joint distribution. The distributions of all projections determine it
(Cramér and Wold), so some fixed random projections detect its changes. A profile stores only the seed of the
directions: `random_directions` gives the same numbers on every machine and in every version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shiftmend.errors import ProfileError
from shiftmend.stats.histograms import SHARP_TEMPERATURE, Bins, Histogram
from shiftmend.stats.statistics import LIKE_HINT, Frame, read_whole_number, register
from shiftmend.utils.devices import split_rows

MAX_WEIGHTS = 1 << 26
"""Largest number of weights of the slice directions. They are rebuilt from a seed, with up to 16 bytes each in between,
so a small file could otherwise ask for any amount of memory."""


@dataclass(frozen=True, eq=False)
class Projector:
    """A linear map of values `[N, D]` of a tap to slices `[N, S]`: standardise, then project onto S directions.

    Units that were constant on the source have zero weight in every direction.
    """

    weight: Tensor
    offset: Tensor

    @staticmethod
    def build(mean: Tensor, deviation: Tensor, usable: Tensor, count: int, seed: int) -> Projector:
        """Build `count` directions from a seed, for features with this mean and deviation `[D]` on the source."""
        weight = random_directions(count, mean.shape[0], seed).double()
        weight *= usable.cpu()
        weight /= weight.norm(dim=1, keepdim=True).clamp_min(1e-12)
        weight *= torch.where(usable.cpu(), 1 / deviation.cpu().double().clamp_min(1e-30), 0.0)
        return Projector(weight.float(), (weight @ mean.cpu().double()).float())

    def to(self, device: torch.device) -> Projector:
        """Return the same projector on a device."""
        return Projector(self.weight.to(device), self.offset.to(device))

    def __call__(self, values: Tensor) -> Tensor:
        with torch.autocast(device_type=values.device.type, enabled=False):
            projected: Tensor = torch.nn.functional.linear(values.to(self.weight.dtype), self.weight)
            return projected - self.offset

    def project_in_parts(self, values: Tensor) -> Iterator[Tensor]:
        """Project some rows at a time, because a feature map has many more slices than units."""
        return map(self, split_rows(values, len(self.weight)))


def bins_of_slices(name: str, bins: Bins) -> Bins:
    """Return the bins of a set of slices: sharp ones for verification, so that verdicts compare across profiles."""
    return bins.with_temperature(SHARP_TEMPERATURE) if name == "verification" else bins


@register
@dataclass(frozen=True, eq=False)
class Slices:
    """Histograms of random projections of the features."""

    kind: ClassVar[str] = "sliced-histogram"
    tensor_dims: ClassVar[Mapping[str, int]] = Histogram.tensor_dims
    histogram: Histogram
    seed: int
    projector: Projector

    @property
    def samples(self) -> int:
        """The number of samples that were projected."""
        return self.histogram.samples

    def to(self, device: torch.device) -> Slices:
        """Return the same slices on a device."""
        return Slices(self.histogram.to(device), self.seed, self.projector.to(device))

    @classmethod
    def mix(cls, parts: Sequence[Slices], times: Sequence[float]) -> Slices:
        """Add slices in the same directions, weighting each sample of `parts[i]` by `times[i]`."""
        first = parts[0]
        for other in parts[1:]:
            if first.seed != other.seed or not torch.equal(first.projector.weight, other.projector.weight):
                raise ProfileError(f"Expected slices of the same directions, got different ones. {LIKE_HINT}.")
        return Slices(Histogram.mix([part.histogram for part in parts], times), first.seed, first.projector)

    def divergence(self, values: Tensor, kind: str = "psi") -> Tensor:
        """Compute the mean divergence over slices of values `[N, D]` of the tap."""
        return self.histogram.divergence(self.projector(values), kind)

    def tensors(self) -> dict[str, Tensor]:
        """Return counts and ranges; the directions are rebuilt from their seed."""
        return self.histogram.tensors()

    def facts(self) -> dict[str, Any]:
        """Return the seed and the number of samples."""
        return {"seed": self.seed, **self.histogram.facts()}

    @classmethod
    def from_file(cls, name: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor], frame: Frame) -> Slices:
        """Build the slices `slices.NAME` from the content of a file."""
        seed = read_whole_number(facts["seed"], f"the seed of {name}", 0, (1 << 64) - 1)
        bins = bins_of_slices(name.removeprefix("slices."), frame.bins)
        histogram = Histogram.from_file(name, facts, tensors, Frame(bins, frame.mean, frame.deviation, frame.usable))
        if histogram.units * len(frame.mean) > MAX_WEIGHTS:
            raise ProfileError(f"{name} needs more than {MAX_WEIGHTS:,} weights")
        projector = Projector.build(frame.mean, frame.deviation, frame.usable, histogram.units, seed)
        return Slices(histogram, seed, projector)

    def problems(self) -> list[str]:
        """List the problems of the counts, one sentence each."""
        return self.histogram.problems()


def random_directions(count: int, units: int, seed: int) -> Tensor:
    """Draw fixed random unit vectors `[count, units]`, the same on every machine and in every version.

    A profile stores only the seed, so these numbers must never change. They come from a splitmix64 counter and the
    Box-Muller transform, implemented here because the stream of a library's generator may change. Rows are drawn in
    parts, so that many directions need little more memory than the result.
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
    """Compute the numbers at these positions of the splitmix64 stream of a seed, in (0, 1]."""
    with np.errstate(over="ignore"):
        z = (index + np.uint64(seed) * np.uint64(0xD1342543DE82EF95) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
