"""Errors of models that predict quantities: one a sample, several, or some at each position of a map."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.evaluation.accumulators import Sums, beside, describe, describe_scores, refuse
from shiftmend.stats.histograms import as_samples
from shiftmend.utils.devices import split_rows, sum_dtype


@dataclass(frozen=True)
class RegressionScores:
    """Scores of a model that predicts quantities; `r2` is None where all targets are equal.

    Of several, `quantities` has the scores of each, and the figures are means over them: `root_mean_square_error` the
    root of the mean square, `r2` over those that have one.
    """

    samples: int
    mean_absolute_error: float
    root_mean_square_error: float
    r2: float | None
    quantities: tuple[RegressionScores, ...] = ()

    def __str__(self) -> str:
        return describe_scores(self)


logger = logging.getLogger(__name__)


class RegressionMetrics(Sums):
    """Errors of predictions `[N]`, `[N, quantities]` or `[N, quantities, ...]` against targets of the same shape.

    Of several quantities each is scored by itself as well. Of maps each position is a sample.
    """

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        if predictions.shape != targets.shape or predictions.ndim == 0 or 0 in predictions.shape[1:]:
            raise DataError(
                "predictions and targets must be of one shape, [N], [N, quantities] or [N, quantities, ...], got "
                f"{describe(predictions)} and {describe(targets)}; labels of a classifier must be whole numbers, one "
                "class a sample"
            )
        if predictions.is_complex() or targets.is_complex():
            raise DataError(
                f"complex numbers are not scored, got {describe(predictions)} and {describe(targets)}; give their "
                "parts as quantities, e.g. torch.view_as_real(...)"
            )
        rows, theirs = as_samples(predictions), as_samples(beside(predictions, targets))
        if len(rows):
            parts = split_rows(rows)  # a few images have millions of positions
            for some, own in zip(parts, theirs.split(max(1, len(parts[0]))), strict=True):
                self._add(_sums(some, own), len(some), some.shape[1:])

    @staticmethod
    def _combine(ours: Tensor, theirs: Tensor) -> Tensor:
        # Mean and squared deviation are combined as such: a difference of two sums of squares would lose its
        # digits for targets far from 0.
        (_, _, mean, deviation), (_, _, other, further) = ours[3:].view(4, -1), theirs[3:].view(4, -1)
        total = ours + theirs
        share = theirs[0] / total[0]
        step = other - mean
        spread = deviation + further + step.square() * ours[0] * share
        return torch.cat([total[: 3 + 2 * len(mean)], mean + step * share, spread])

    def compute(self) -> RegressionScores:
        count, not_finite, fractions, *sums = self._read()
        refuse(not_finite, self._samples, "predictions or targets that are not finite")
        number = math.prod(self._sample_shape or ())
        by_quantity = zip(*(sums[place * number : (place + 1) * number] for place in range(4)), strict=True)
        found = tuple(_regression_scores(self._samples, count, *one) for one in by_quantity)
        explained = [one.r2 for one in found if one.r2 is not None]
        if explained and not fractions:
            self._say_what_zeros_and_ones_are(number)
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
    def _say_what_zeros_and_ones_are(number: int) -> None:
        if number > 1:
            raise DataError(
                "all labels are 0 or 1, several a sample: expected quantities, or for a classifier one class number a "
                "sample (of one-hot labels labels.argmax(1)); several classes a sample are not scored"
            )
        logger.warning(
            "all labels are 0 or 1, and as floating-point numbers they were scored as quantities; those of a "
            "classifier are whole numbers, e.g. labels.long()"
        )


def in_one_shape(predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Bring predictions and targets to one shape: the one that lacks axes of size 1 gets them.

    Of a lone sample a model that squeezes its output takes away the axis of samples too.
    """
    if targets.shape[:1] == (1,) and predictions.shape == targets.squeeze().shape:
        return predictions.reshape(targets.shape), targets
    shapes = predictions.shape, targets.shape
    ours, theirs = ((*shape[:1], *(size for size in shape[1:] if size != 1)) for shape in shapes)
    wide = max(shapes, key=len)
    return (predictions.reshape(wide), targets.reshape(wide)) if ours == theirs else (predictions, targets)


@torch.no_grad()
def _sums(predictions: Tensor, targets: Tensor) -> Tensor:
    """Count, rows with faults, targets that are neither 0 nor 1; and of each quantity in turn: absolute errors, squared
    errors, mean targets, squared deviations from these.
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
