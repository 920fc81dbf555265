"""Errors of models that predict quantities: one per sample, several, or some at each position of a map."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.evaluation.accumulators import Sums, describe, describe_scores, refuse, to_device_of
from shiftmend.stats.histograms import as_samples
from shiftmend.utils.devices import split_rows, sum_dtype


@dataclass(frozen=True)
class RegressionScores:
    """Scores of a model that predicts quantities, in the units of the targets.

    For several quantities, each figure is the mean over them.

    Example:
        >>> import torch, shiftmend
        >>> inputs = torch.tensor([[1.0], [2.0], [4.0]])
        >>> scores = shiftmend.evaluate(torch.nn.Identity(), (inputs, inputs + 0.5))
        >>> scores.mean_absolute_error
        0.5
        >>> print(scores)
        samples 3, mean_absolute_error 0.5, root_mean_square_error 0.5, r2 0.8393
    """

    samples: int
    """Number of samples, or of positions in a map."""
    mean_absolute_error: float
    root_mean_square_error: float
    """For several quantities, the root of the mean over all squared errors."""
    r2: float | None
    """Coefficient of determination; None if all targets are equal."""
    quantities: tuple[RegressionScores, ...] = ()
    """The scores of each quantity, if there are several."""

    def __str__(self) -> str:
        return describe_scores(self)


logger = logging.getLogger(__name__)


class RegressionMetrics(Sums):
    """Errors of predictions `[N]`, `[N, quantities]` or `[N, quantities, ...]` against targets of the same shape.

    Several quantities are also scored one by one. Each position of a map counts as a sample.
    """

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Add a batch of predictions and targets, both `[N]`, `[N, quantities]` or `[N, quantities, ...]`."""
        if predictions.shape != targets.shape or predictions.ndim == 0 or 0 in predictions.shape[1:]:
            raise DataError(
                "Expected predictions and targets of one shape [N, quantities, ...], got "
                f"{describe(predictions)} and {describe(targets)}. Try whole numbers as labels of a classifier."
            )
        if predictions.is_complex() or targets.is_complex():
            raise DataError(
                f"Expected real numbers, got {describe(predictions)} and {describe(targets)}. "
                "Try torch.view_as_real, which makes two quantities of each."
            )
        rows, theirs = as_samples(predictions), as_samples(to_device_of(predictions, targets))
        if len(rows):
            # A few images have millions of positions.
            parts = split_rows(rows)
            for some, own in zip(parts, theirs.split(max(1, len(parts[0]))), strict=True):
                self._add(_sums(some, own), len(some), some.shape[1:])

    @staticmethod
    def _combine(ours: Tensor, theirs: Tensor) -> Tensor:
        # Mean and squared deviation are combined directly; a difference of two sums of squares would lose digits for
        # targets far from 0.
        (_, _, mean, deviation), (_, _, other, further) = ours[3:].view(4, -1), theirs[3:].view(4, -1)
        total = ours + theirs
        share = theirs[0] / total[0]
        step = other - mean
        spread = deviation + further + step.square() * ours[0] * share
        return torch.cat([total[: 3 + 2 * len(mean)], mean + step * share, spread])

    def compute(self) -> RegressionScores:
        """Return the scores of all batches.

        Raises:
            DataError: If no batch was added, or a prediction or target is not finite.
        """
        count, not_finite, fractions, *sums = self._read()
        refuse(not_finite, self._samples, "predictions or targets that are not finite")
        number = math.prod(self._sample_shape or ())
        by_quantity = zip(*(sums[place * number : (place + 1) * number] for place in range(4)), strict=True)
        found = tuple(_regression_scores(self._samples, count, *one) for one in by_quantity)
        explained = [one.r2 for one in found if one.r2 is not None]
        if explained and not fractions:
            self._warn_about_zeros_and_ones(number)
        if number == 1:
            return found[0]
        squared = sum(one.root_mean_square_error**2 for one in found) / number
        return RegressionScores(
            self._samples,
            sum(one.mean_absolute_error for one in found) / number,
            math.sqrt(squared),
            sum(explained) / len(explained) if explained else None,
            found,
        )

    @staticmethod
    def _warn_about_zeros_and_ones(number: int) -> None:
        if number > 1:
            raise DataError(
                "Expected quantities, got only 0 and 1. Try labels.argmax(1) if they are one-hot; several classes a "
                "sample cannot be scored."
            )
        logger.warning(
            "Labels are floating-point numbers, all 0 or 1, and were scored as quantities. Try labels.long() for a "
            "classifier."
        )


def match_shapes(predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Bring predictions and targets to one shape by adding axes of size 1 to one of them.

    A model that squeezes its output also removes the axis of samples if the batch holds a single sample.
    """
    if targets.shape[:1] == (1,) and predictions.shape == targets.squeeze().shape:
        return predictions.reshape(targets.shape), targets
    shapes = predictions.shape, targets.shape
    ours, theirs = ((*shape[:1], *(size for size in shape[1:] if size != 1)) for shape in shapes)
    wide = max(shapes, key=len)
    return (predictions.reshape(wide), targets.reshape(wide)) if ours == theirs else (predictions, targets)


@torch.no_grad()
def _sums(predictions: Tensor, targets: Tensor) -> Tensor:
    """Sum everything that the scores of a batch need into one vector.

    The vector holds, in this order: the number of rows, the number of rows that are not finite, the number of targets
    other than 0 and 1; then, of every quantity, the sum of absolute errors, the sum of squared errors, the mean target
    and the sum of squared deviations from this mean.
    """
    dtype = sum_dtype(predictions.device)
    predictions, targets = predictions.to(dtype), targets.to(dtype)
    error = predictions - targets
    mean = targets.mean(0)
    faults = (~error.isfinite()).any(1).sum()
    fractions = ((targets != 0) & (targets != 1)).sum()
    of_all = torch.stack([torch.ones_like(error[:, 0]).sum(), faults.to(dtype), fractions.to(dtype)])
    columns = torch.stack([error.abs().sum(0), error.square().sum(0), mean, (targets - mean).square().sum(0)])
    return torch.cat([of_all, columns.flatten()])


def _regression_scores(
    samples: int, count: float, absolute: float, squared: float, mean: float, deviation: float
) -> RegressionScores:
    # The mean of equal targets is off by rounding, so their deviation is almost, not exactly, 0.
    targets_differ = deviation > count * (1e-12 * mean) ** 2
    r2 = 1 - squared / deviation if targets_differ else None
    return RegressionScores(samples, absolute / count, math.sqrt(squared / count), r2)
