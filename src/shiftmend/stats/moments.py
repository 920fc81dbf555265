"""Moments of the inputs of a model: mean and variance per channel, per column, or of all values.

Images `[N, C, H, W]` and signals `[N, C, L]` have moments per channel if axis 1 has few entries, tables and spectra
`[N, D]` per column. All other inputs are treated as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shiftmend.errors import ProfileError
from shiftmend.stats.gaussians import MarginalGaussian
from shiftmend.stats.histograms import RangeTracker
from shiftmend.stats.statistics import Frame, read_whole_number, register
from shiftmend.utils.devices import split_rows

MAX_CHANNELS = 16
"""Inputs with more entries on axis 1 are treated as a whole instead of per channel."""

MAX_COLUMNS = 4096
"""Tables with more columns are treated as a whole, so that a profile stays small."""


def unit_shape(inputs: Tensor) -> tuple[int, ...]:
    """Return the shape of the moments of inputs `[N, ...]`, which broadcasts against the inputs.

    Example:
        >>> import torch
        >>> unit_shape(torch.zeros(8, 3, 32, 32)), unit_shape(torch.zeros(8, 20)), unit_shape(torch.zeros(8, 99, 5))
        ((3, 1, 1), (20,), (1,))
    """
    if inputs.ndim > 2 and inputs.shape[1] <= MAX_CHANNELS:
        return (inputs.shape[1],) + (1,) * (inputs.ndim - 2)
    if inputs.ndim == 2 and inputs.shape[1] <= MAX_COLUMNS:
        return (inputs.shape[1],)
    return (1,)


def as_units(inputs: Tensor) -> Tensor | None:
    """View inputs `[N, ...]` as `[values, units]`, one unit per channel or column; None if there are no units.

    Example:
        >>> import torch
        >>> as_units(torch.zeros(8, 3, 32, 32)).shape, as_units(torch.zeros(8, 99, 5)).shape
        (torch.Size([8192, 3]), torch.Size([3960, 1]))
    """
    if inputs.ndim < 2 or inputs.is_complex() or inputs.dtype == torch.bool:
        return None
    units = unit_shape(inputs)[0]
    return inputs.movedim(1, -1).reshape(-1, units) if units > 1 else inputs.reshape(-1, 1)


@register
@dataclass(frozen=True, eq=False)
class Moments:
    """Mean and unbiased variance `[D]` of each channel or column of the inputs; `D` is 1 for inputs as a whole."""

    kind: ClassVar[str] = "moments"
    tensor_dims: ClassVar[Mapping[str, int]] = {"mean": 1, "variance": 1}
    mean: Tensor
    variance: Tensor
    samples: int

    def to(self, device: torch.device) -> Moments:
        """Return the same moments on a device."""
        return Moments(self.mean.to(device), self.variance.to(device), self.samples)

    @classmethod
    def mix(cls, parts: Sequence[Moments], times: Sequence[float]) -> Moments:
        """Combine moments of several sets of samples, weighting each sample of `parts[i]` by `times[i]`."""
        return cls._from(MarginalGaussian.mix([part._gaussian() for part in parts], times))

    def divergence(self, values: Tensor) -> Tensor:
        """Compute the mean over the units of KL(N_source || N_batch) for values `[N, D]`."""
        return self._gaussian().divergence(values)

    def tensors(self) -> dict[str, Tensor]:
        """Return mean and variance."""
        return {"mean": self.mean, "variance": self.variance}

    def facts(self) -> dict[str, Any]:
        """Return the number of samples."""
        return {"samples": self.samples}

    @classmethod
    def from_file(cls, name: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor], frame: Frame) -> Moments:
        """Build the moments from the content of a file."""
        mean, variance = tensors["mean"], tensors["variance"]
        if mean.shape != variance.shape or not 0 < len(mean) <= MAX_COLUMNS:
            raise ProfileError(f"mean and variance of {name} are not of the same units, 1 to {MAX_COLUMNS}")
        return Moments(mean, variance, read_whole_number(facts["samples"], f"the number of samples of the {name}"))

    def problems(self) -> list[str]:
        """List the problems of the moments, one sentence each."""
        return self._gaussian().problems()

    def _gaussian(self) -> MarginalGaussian:
        return MarginalGaussian(self.mean, self.variance, self.samples)

    @classmethod
    def _from(cls, gaussian: MarginalGaussian) -> Moments:
        return cls(gaussian.mean, gaussian.variance, gaussian.samples)


def find_scale(variance: Tensor, home_variance: Tensor) -> Tensor:
    """Return the factor `[D]` that gives each unit the standard deviation of home.

    A unit that is constant on either side has no scale, and gets 1.

    Example:
        >>> import torch
        >>> find_scale(torch.tensor([4.0, 0.0]), torch.tensor([1.0, 1.0])).tolist()
        [0.5, 1.0]
    """
    ones = torch.ones_like(variance)
    varies = (variance > 0) & (home_variance > 0)
    return torch.where(varies, (home_variance / variance.where(varies, ones)).sqrt(), ones)


class MomentTracker:
    """Tracker of the moments of inputs over batches, in float64."""

    def __init__(self) -> None:
        self._tracker: RangeTracker | None = RangeTracker()
        """None as soon as batches do not fit together, or are not real numbers."""

    def update(self, inputs: Tensor) -> None:
        """Add a batch of inputs `[N, ...]`."""
        if self._tracker is None:
            return
        for part in split_rows(inputs.detach()):
            values = as_units(part)
            if values is None or (self._tracker.samples and len(self._tracker.mean) != values.shape[1]):
                self._tracker = None
                return
            self._tracker.update(values)

    def reduce_over_processes(self) -> MomentTracker:
        """Return the tracker of the samples of all processes, which see inputs of the same kind."""
        reduced = MomentTracker()
        reduced._tracker = None if self._tracker is None else self._tracker.reduce_over_processes()
        return reduced

    def exact(self) -> tuple[Tensor, Tensor] | None:
        """Return mean and unbiased variance `[D]` without rounding; None if they are not finite.

        The variance of a unit with equal values is exactly zero, which a sum of squares may not be.
        """
        found = self._tracker
        if found is None or found.samples == 0:
            return None
        variance = torch.where(found.low == found.high, 0.0, found.squares / max(1, found.samples - 1))
        finite = torch.isfinite(found.mean.float()).all() & torch.isfinite(variance.float()).all()
        return (found.mean, variance) if bool(finite) else None

    def moments(self) -> Moments | None:
        """Return the moments as a profile stores them: in float32 and on the CPU.

        Returns:
            The moments. None if no values were added, or a moment is not finite.
        """
        found = self.exact()
        if found is None or self._tracker is None:
            return None
        mean, variance = (part.float().cpu() for part in found)
        return Moments(mean, variance, self._tracker.samples)
