"""Gaussians of features, the paper's alternative descriptions: one per feature, or one over all features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shiftmend.distributed.collectives import all_sum, is_distributed, reduce_moments
from shiftmend.errors import AdaptationError, ProfileError
from shiftmend.stats.statistics import Frame, read_whole_number, register
from shiftmend.utils.checks import counted
from shiftmend.utils.devices import sum_dtype

MIN_RELATIVE_VARIANCE = 1e-6
"""Smallest variance of a batch, relative to the source's (for a full Gaussian: to the part that other units do not
explain). A unit that is constant on the target then gives a large number instead of NaN or infinity."""


@register
@dataclass(frozen=True, eq=False)
class MarginalGaussian:
    """Mean and unbiased variance `[D]` of each unit by itself."""

    kind: ClassVar[str] = "marginal-gaussian"
    tensor_dims: ClassVar[Mapping[str, int]] = {"mean": 1, "variance": 1}
    mean: Tensor
    variance: Tensor
    samples: int

    def to(self, device: torch.device) -> MarginalGaussian:
        """Return the same Gaussian on a device."""
        return MarginalGaussian(self.mean.to(device), self.variance.to(device), self.samples)

    def of_units(self, units: Tensor) -> MarginalGaussian:
        """Select some units by their positions."""
        return MarginalGaussian(self.mean[units], self.variance[units], self.samples)

    @classmethod
    def mix(cls, parts: Sequence[MarginalGaussian], times: Sequence[float]) -> MarginalGaussian:
        """Combine Gaussians of several sets of samples, weighting each sample of `parts[i]` by `times[i]`."""
        return MarginalGaussian(*_mix_moments(parts, [part.variance for part in parts], times))

    def divergence(self, values: Tensor) -> Tensor:
        """Compute the mean over units of KL(N_source || N_batch), from the batch's mean and unbiased variance.

        With means m and variances v: (1 / 2D) sum of ln(v_b / v_s) + (v_s + (m_s - m_b)^2) / v_b - 1.
        """
        _check_has_variance(len(values))
        values = values.float()
        batch_variance = torch.maximum(values.var(0, unbiased=True), MIN_RELATIVE_VARIANCE * self.variance)
        ratio = (self.variance + (self.mean - values.mean(0)).square()) / batch_variance
        return 0.5 * (torch.log(batch_variance / self.variance) + ratio - 1).mean()

    def tensors(self) -> dict[str, Tensor]:
        """Return mean and variance."""
        return {"mean": self.mean, "variance": self.variance}

    def facts(self) -> dict[str, Any]:
        """Return the number of samples."""
        return {"samples": self.samples}

    @classmethod
    def from_file(
        cls, name: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor], frame: Frame
    ) -> MarginalGaussian:
        """Build the Gaussian from the content of a file."""
        _check_sizes(name, tensors, {"mean": len(frame.mean), "variance": len(frame.mean)})
        samples = read_whole_number(facts["samples"], f"the number of samples of the {name}")
        return MarginalGaussian(tensors["mean"], tensors["variance"], samples)

    def problems(self) -> list[str]:
        """List the problems of the moments, one sentence each."""
        if not bool(torch.isfinite(self.mean).all() & torch.isfinite(self.variance).all()):
            return ["mean or variance is not finite"]
        # Zero is valid: a unit can be constant for one class and vary for others.
        return ["a variance is negative"] if bool((self.variance < 0).any()) else []


@register
@dataclass(frozen=True, eq=False)
class FullGaussian:
    """Mean `[D]` and unbiased covariance `[D, D]` of all units together."""

    kind: ClassVar[str] = "full-gaussian"
    tensor_dims: ClassVar[Mapping[str, int]] = {"mean": 1, "covariance": 1}
    mean: Tensor
    covariance: Tensor
    samples: int

    @property
    def variance(self) -> Tensor:
        """The variance `[D]` of each unit."""
        return self.covariance.diagonal()

    def to(self, device: torch.device) -> FullGaussian:
        """Return the same Gaussian on a device."""
        return FullGaussian(self.mean.to(device), self.covariance.to(device), self.samples)

    def of_units(self, units: Tensor) -> FullGaussian:
        """Select some units by their positions."""
        return FullGaussian(self.mean[units], self.covariance[units][:, units], self.samples)

    def marginal(self) -> MarginalGaussian:
        """Drop the covariances between units."""
        return MarginalGaussian(self.mean, self.variance, self.samples)

    @classmethod
    def mix(cls, parts: Sequence[FullGaussian], times: Sequence[float]) -> FullGaussian:
        """Combine Gaussians of several sets of samples into the Gaussian of their union.

        Args:
            parts: A Gaussian of each set, all of the same units.
            times: Weight of each sample of a set, one number per set. A 2 counts each sample twice.

        Returns:
            The Gaussian of the weighted samples, with their number rounded.

        Raises:
            ProfileError: If the Gaussians have different numbers of units.
        """
        return FullGaussian(*_mix_moments(parts, [part.covariance for part in parts], times))

    def divergence(self, values: Tensor, shrinkage: float = 0.0) -> Tensor:
        """Compute KL(N_batch || N_source). To compare many batches, keep a `Comparison`, which inverts once."""
        return Comparison.to_source(self, shrinkage)(values)

    def tensors(self) -> dict[str, Tensor]:
        """Return the mean and the upper triangle of the symmetric covariance, row by row."""
        rows, columns = torch.triu_indices(*self.covariance.shape, device="cpu")
        return {"mean": self.mean, "covariance": self.covariance[rows, columns]}

    def facts(self) -> dict[str, Any]:
        """Return the number of samples."""
        return {"samples": self.samples}

    @classmethod
    def from_file(
        cls, name: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor], frame: Frame
    ) -> FullGaussian:
        """Build the Gaussian from the content of a file."""
        units = len(frame.mean)
        _check_sizes(name, tensors, {"mean": units, "covariance": (units * (units + 1)) // 2})
        samples = read_whole_number(facts["samples"], f"the number of samples of the {name}")
        triangle = tensors["covariance"]
        rows, columns = torch.triu_indices(units, units, device="cpu")
        covariance = triangle.new_empty(units, units)
        covariance[rows, columns] = triangle
        covariance[columns, rows] = triangle
        return FullGaussian(tensors["mean"], covariance, samples)

    def problems(self) -> list[str]:
        """List the problems of the moments, one sentence each."""
        if not bool(torch.isfinite(self.covariance).all()):
            return ["a covariance is not finite"]
        found = self.marginal().problems()
        variance = self.variance.double()
        if not found and bool((self.covariance.double().square() > 1.001 * torch.outer(variance, variance)).any()):
            found.append("a covariance of two units is larger than their variances allow")
        return found


def _check_sizes(name: str, tensors: Mapping[str, Tensor], sizes: Mapping[str, int]) -> None:
    if any(tensors[part].shape != (size,) for part, size in sizes.items()):
        raise ProfileError(f"{name} is not of as many units as the features")


def _mix_moments(
    parts: Sequence[MarginalGaussian | FullGaussian], spreads: Sequence[Tensor], times: Sequence[float]
) -> tuple[Tensor, Tensor, int]:
    """Compute mean, unbiased (co)variance and number of all samples together, in float64."""
    first = parts[0]
    for other in parts[1:]:
        if first.mean.shape != other.mean.shape:
            raise ProfileError(
                f"Expected Gaussians of as many units to merge, got {len(first.mean)} and {len(other.mean)}."
            )
    sizes = [number * part.samples for part, number in zip(parts, times, strict=True)]
    total = sum(sizes)
    # Means are averaged as differences from the first, which keeps digits if they are close together and far from zero.
    start = first.mean.double()
    mean = start + sum((part.mean.double() - start) * (size / total) for part, size in zip(parts, sizes, strict=True))
    squares = torch.zeros_like(spreads[0], dtype=torch.float64)
    for part, spread, number, size in zip(parts, spreads, times, sizes, strict=True):
        delta = part.mean.double() - mean
        between = delta.square() if spread.ndim == 1 else torch.outer(delta, delta)
        squares += spread.double() * (number * (part.samples - 1)) + between * size
    spread = squares / max(1, total - 1)
    return mean.to(first.mean.dtype), spread.to(first.mean.dtype), round(total)


def _check_has_variance(samples: int) -> None:
    if samples < 2:
        raise AdaptationError(
            "Expected batches of at least two samples, since one has no variance, got one. Use larger batches."
        )


def shrink(covariance: Tensor, shrinkage: float) -> Tensor:
    """Scale the covariances between different units by 1 - `shrinkage`, so that few samples suffice to invert."""
    if shrinkage == 0:
        return covariance
    return covariance * (1 - shrinkage) + torch.diag(covariance.diagonal() * shrinkage)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Source Gaussian with full covariance, prepared for the closed form of KL(N_batch || N_source).

    A call takes values `[N, D]` of a batch and returns the divergence, a scalar. With means m, covariances C and the
    source's precision P = C_s^-1, the divergence is 1/2 (tr(P C_b) + (m_s - m_b)' P (m_s - m_b) - D + ln det C_s - ln
    det C_b).

    Shrinkage multiplies the covariances between different units by 1 - `shrinkage`, in the source and in each batch.
    So the divergence of the source from itself stays zero. Without shrinkage, a batch needs more than D samples;
    otherwise the determinant of the batch's covariance is zero. The computation is in float64 if the device supports
    float64.
    """

    mean: Tensor
    precision: Tensor
    log_determinant: Tensor
    shrinkage: float

    @staticmethod
    def to_source(source: FullGaussian, shrinkage: float = 0.0) -> Comparison:
        """Prepare comparisons with the source; its covariance is inverted once for all batches."""
        device = source.mean.device
        dtype = sum_dtype(device)
        if dtype != torch.float64:
            # The device has no float64; the CPU does.
            source = source.to(torch.device("cpu"))
        factor, failed = torch.linalg.cholesky_ex(shrink(source.covariance.double(), shrinkage))
        if bool(failed):
            raise AdaptationError(
                f"Expected a covariance that can be inverted, got a singular one of {len(source.mean)} features from "
                f"{counted(source.samples, 'sample')}. Try full-gauss with shrinkage=0.1."
            )
        parts = source.mean, torch.cholesky_inverse(factor), _log_determinant(factor)
        mean, precision, log_determinant = (part.to(dtype).to(device) for part in parts)
        return Comparison(mean, precision, log_determinant, shrinkage)

    def __call__(self, values: Tensor) -> Tensor:
        samples, units = values.shape
        if samples <= units and self.shrinkage == 0:
            raise AdaptationError(
                f"Expected batches of more than {units} samples for the covariance of {units} features, got {samples}. "
                "Use larger batches, or shrinkage=0.1."
            )
        _check_has_variance(samples)
        values = values.to(self.mean.dtype)
        mean = values.mean(0)
        centred = values - mean
        covariance = shrink(centred.T @ centred / (samples - 1), self.shrinkage)
        floor = MIN_RELATIVE_VARIANCE / self.precision.diagonal()
        covariance = covariance + torch.diag((floor - covariance.diagonal()).clamp_min(0))
        # `cholesky` would check its result and wait for the device; here a matrix that is not positive definite gives
        # NaN.
        factor, _ = torch.linalg.cholesky_ex(covariance)
        delta = self.mean - mean
        return 0.5 * (
            (self.precision * covariance).sum()
            + delta @ self.precision @ delta
            - units
            + self.log_determinant
            - _log_determinant(factor)
        )


def _log_determinant(factor: Tensor) -> Tensor:
    return 2 * factor.diagonal().log().sum()


class CovarianceTracker:
    """Tracker of the mean and covariance of all units, in float64 and independent of the order of batches."""

    def __init__(self) -> None:
        self.samples = 0
        self.mean: Tensor
        self.products: Tensor
        """Sums of products of deviations from the mean `[D, D]`."""

    def update(self, values: Tensor) -> None:
        """Add a batch of values `[N, D]`."""
        values = values.detach().to(sum_dtype(values.device))
        mean = values.mean(0)
        centred = values - mean
        products = centred.T @ centred
        count = len(values)
        if self.samples == 0:
            self.mean, self.products = mean, products
        else:
            total = self.samples + count
            delta = mean - self.mean
            self.products = self.products + products + torch.outer(delta, delta) * (self.samples * count / total)
            self.mean = self.mean + delta * (count / total)
        self.samples += count

    def reduce_over_processes(self) -> CovarianceTracker:
        """Return the tracker of the samples of all processes; in a single process, this tracker."""
        if not is_distributed():
            return self
        reduced = CovarianceTracker()
        samples, reduced.mean, _ = reduce_moments(self.samples, self.mean, self.products.diagonal())
        delta = self.mean - reduced.mean
        reduced.products = all_sum(self.products + torch.outer(delta, delta) * self.samples)
        reduced.samples = int(samples)
        return reduced

    def gaussian(self) -> FullGaussian:
        """Return mean and unbiased covariance as a profile stores them: in float32 and on the CPU."""
        covariance = self.products / max(1, self.samples - 1)
        return FullGaussian(self.mean.float().cpu(), covariance.float().cpu(), self.samples)
