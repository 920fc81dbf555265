"""The paper's other ways to describe features: one Gaussian a feature, or one over all of them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shiftmend.distributed.collectives import active, all_sum, joined_moments
from shiftmend.errors import AdaptationError, ProfileError
from shiftmend.utils.checks import counted
from shiftmend.utils.devices import sum_dtype

LEAST_VARIANCE = 1e-6
"""Of the source's variance (in a full Gaussian of what the other units do not explain of it): what a batch's variance
is taken for at least, so that a unit which is dead on the target gives a large number and neither NaN nor infinity."""


@dataclass(frozen=True, eq=False)
class MarginalGaussian:
    """Mean and unbiased variance `[D]` of each unit by itself."""

    kind: ClassVar[str] = "marginal-gaussian"
    mean: Tensor
    variance: Tensor
    samples: int

    def to(self, device: torch.device) -> MarginalGaussian:
        return MarginalGaussian(self.mean.to(device), self.variance.to(device), self.samples)

    def of_units(self, units: Tensor) -> MarginalGaussian:
        """That of some units, by their positions."""
        return MarginalGaussian(self.mean[units], self.variance[units], self.samples)

    @classmethod
    def mixed(cls, parts: Sequence[MarginalGaussian], times: Sequence[float]) -> MarginalGaussian:
        """That of the samples of all parts, those of a part counted so many times."""
        return MarginalGaussian(*_mixed(parts, [part.variance for part in parts], times))

    def divergence(self, values: Tensor) -> Tensor:
        """Mean over units of KL(N_source || N_batch), from the batch's mean and unbiased variance.

        (1 / 2D) sum of ln(v_b / v_s) + (v_s + (m_s - m_b)^2) / v_b - 1.
        """
        _check_spread(len(values))
        values = values.float()
        batch_variance = torch.maximum(values.var(0, unbiased=True), LEAST_VARIANCE * self.variance)
        ratio = (self.variance + (self.mean - values.mean(0)).square()) / batch_variance
        return 0.5 * (torch.log(batch_variance / self.variance) + ratio - 1).mean()


@dataclass(frozen=True, eq=False)
class FullGaussian:
    """Mean `[D]` and unbiased covariance `[D, D]` of all units together."""

    kind: ClassVar[str] = "full-gaussian"
    mean: Tensor
    covariance: Tensor
    samples: int

    @property
    def variance(self) -> Tensor:
        return self.covariance.diagonal()

    def to(self, device: torch.device) -> FullGaussian:
        return FullGaussian(self.mean.to(device), self.covariance.to(device), self.samples)

    def of_units(self, units: Tensor) -> FullGaussian:
        """That of some units, by their positions."""
        return FullGaussian(self.mean[units], self.covariance[units][:, units], self.samples)

    def marginal(self) -> MarginalGaussian:
        return MarginalGaussian(self.mean, self.variance, self.samples)

    @classmethod
    def mixed(cls, parts: Sequence[FullGaussian], times: Sequence[float]) -> FullGaussian:
        """That of the samples of all parts, those of a part counted so many times."""
        return FullGaussian(*_mixed(parts, [part.covariance for part in parts], times))

    def divergence(self, values: Tensor, shrinkage: float = 0.0) -> Tensor:
        """KL(N_batch || N_source); see `Comparison`, which is to be kept where many batches are compared."""
        return Comparison.to_source(self, shrinkage)(values)


def _mixed(
    parts: Sequence[MarginalGaussian | FullGaussian], spreads: Sequence[Tensor], times: Sequence[float]
) -> tuple[Tensor, Tensor, int]:
    """Mean, unbiased (co)variance and number of all samples together, in float64 in between."""
    first = parts[0]
    for other in parts[1:]:
        if first.mean.shape != other.mean.shape:
            raise ProfileError(f"a Gaussian of {len(first.mean)} units cannot be merged with one of {len(other.mean)}")
    sizes = [number * part.samples for part, number in zip(parts, times, strict=True)]
    total = sum(sizes)
    start = first.mean.double()  # means far from zero and close together would lose digits
    mean = start + sum((part.mean.double() - start) * (size / total) for part, size in zip(parts, sizes, strict=True))
    squares = torch.zeros_like(spreads[0], dtype=torch.float64)
    for part, spread, number, size in zip(parts, spreads, times, sizes, strict=True):
        away = part.mean.double() - mean
        apart = away.square() if spread.ndim == 1 else torch.outer(away, away)
        squares += spread.double() * (number * (part.samples - 1)) + apart * size
    spread = squares / max(1, total - 1)
    return mean.to(first.mean.dtype), spread.to(first.mean.dtype), round(total)


def _check_spread(samples: int) -> None:
    if samples < 2:
        raise AdaptationError("a batch of one sample has no variance to compare with the source's; use larger batches")


def shrunk(covariance: Tensor, shrinkage: float) -> Tensor:
    """Covariances between different units times 1 - `shrinkage`: positive definite even from few samples."""
    if shrinkage == 0:
        return covariance
    return covariance * (1 - shrinkage) + torch.diag(covariance.diagonal() * shrinkage)


@dataclass(frozen=True, eq=False)
class Comparison:
    """A full Gaussian made ready to compare batches with: KL(N_batch || N_source), in closed form.

    1/2 (tr(P C_b) + (m_s - m_b)' P (m_s - m_b) - D + ln det C_s - ln det C_b) with the source's precision P, inverted
    once. Without shrinkage a batch needs more samples than there are units, else its determinant is zero. Shrinkage
    applies to both sides, so that the source against itself still gives zero. The arithmetic is in float64 where
    the device has it.
    """

    mean: Tensor
    precision: Tensor
    log_determinant: Tensor
    shrinkage: float

    @staticmethod
    def to_source(source: FullGaussian, shrinkage: float = 0.0) -> Comparison:
        place = source.mean.device
        wide = sum_dtype(place)
        if wide != torch.float64:  # inverted on the CPU, which has it
            source = source.to(torch.device("cpu"))
        factor, failed = torch.linalg.cholesky_ex(shrunk(source.covariance.double(), shrinkage))
        if bool(failed):
            raise AdaptationError(
                f"the covariance of the source's {len(source.mean)} features is singular "
                f"({counted(source.samples, 'sample')}); use full-gauss with shrinkage, e.g. shrinkage=0.1"
            )
        parts = source.mean, torch.cholesky_inverse(factor), _log_determinant(factor)
        mean, precision, log_determinant = (part.to(wide).to(place) for part in parts)
        return Comparison(mean, precision, log_determinant, shrinkage)

    def __call__(self, values: Tensor) -> Tensor:
        samples, units = values.shape
        if samples <= units and self.shrinkage == 0:
            raise AdaptationError(
                f"full-gauss needs batches of more than {units} samples for {units} features, got {samples}; use a "
                "larger batch, or shrinkage, e.g. shrinkage=0.1"
            )
        _check_spread(samples)
        values = values.to(self.mean.dtype)
        mean = values.mean(0)
        centred = values - mean
        covariance = shrunk(centred.T @ centred / (samples - 1), self.shrinkage)
        floor = LEAST_VARIANCE / self.precision.diagonal()
        covariance = covariance + torch.diag((floor - covariance.diagonal()).clamp_min(0))
        # without a check of its own, which would wait for the device; what is not positive definite becomes NaN
        factor, _ = torch.linalg.cholesky_ex(covariance)
        away = self.mean - mean
        return 0.5 * (
            (self.precision * covariance).sum()
            + away @ self.precision @ away
            - units
            + self.log_determinant
            - _log_determinant(factor)
        )


def _log_determinant(factor: Tensor) -> Tensor:
    return 2 * factor.diagonal().log().sum()


class CovarianceTracker:
    """Collects mean and covariance of all units together, in float64 and mergeable in any order."""

    def __init__(self) -> None:
        self.samples = 0
        self.mean: Tensor
        self.products: Tensor  # sum of products of deviations from the mean

    def update(self, values: Tensor) -> None:
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

    def joined(self) -> CovarianceTracker:
        """That of all processes; itself where there are no others."""
        if not active():
            return self
        every = CovarianceTracker()
        samples, every.mean, _ = joined_moments(self.samples, self.mean, self.products.diagonal())
        away = self.mean - every.mean
        every.products = all_sum(self.products + torch.outer(away, away) * self.samples)
        every.samples = int(samples)
        return every

    def gaussian(self) -> FullGaussian:
        covariance = self.products / max(1, self.samples - 1)
        return FullGaussian(self.mean.float().cpu(), covariance.float().cpu(), self.samples)
