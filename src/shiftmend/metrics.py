"""How good and how honest predictions are: accuracy, calibration, regression errors, restoration distance.

Everything streams: `update` adds a batch to a few sums on the device and never waits for it, `merge` adds
what another process or another part of the data gathered, and `compute` reads the sums once. Sums are
float64, except on devices that have none (`mps`), where they are float32. What only the device can know
(labels out of range, values that are not finite) is counted there and raised by `compute`.

>>> metrics = ClassificationMetrics()
>>> metrics.update(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
>>> metrics.compute().accuracy
0.5
"""

from __future__ import annotations

import math
from typing import Self

import torch
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.scores import RegressionScores, ReliabilityBin, Scores


class _Stream:
    """What the streaming classes share: one small vector of sums, and the shape all samples must have."""

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = None if device is None else torch.device(device)
        self._sums: Tensor | None = None
        self._samples = 0
        self._sample_shape: torch.Size | None = None

    def merge(self, other: Self) -> None:
        """Add everything that `other` has seen; `other` stays as it is."""
        if type(other) is not type(self):
            raise DataError(f"{type(self).__name__} cannot merge a {type(other).__name__}")
        if other._sums is not None and other._sample_shape is not None:
            self._add(other._sums, other._samples, other._sample_shape)

    def _add(self, sums: Tensor, samples: int, sample_shape: torch.Size) -> None:
        if self._sample_shape is not None and self._sample_shape != sample_shape:
            raise DataError(
                f"all samples must have one shape, got {list(sample_shape)} after {list(self._sample_shape)}"
            )
        device = self._device or sums.device
        sums = sums.to(device, _sum_dtype(device))
        # Not in place: a sum created under inference_mode could not be added to outside of it.
        self._sums = sums if self._sums is None else self._combine(self._sums, sums)
        self._device = device
        self._samples += samples
        self._sample_shape = sample_shape

    @staticmethod
    def _combine(ours: Tensor, theirs: Tensor) -> Tensor:
        return ours + theirs

    def _read(self) -> list[float]:
        """The sums on the host: the one place that waits for the device."""
        if self._sums is None or self._samples == 0:
            raise DataError("there are no samples to score, call update with at least one batch first")
        values: list[float] = self._sums.tolist()
        return values


class ClassificationMetrics(_Stream):
    """Accuracy, calibration and proper scores of logits `[N, classes]` against labels `[N]`.

    A single output, `[N, 1]` or `[N]`, is the logit of class 1 against class 0, as binary cross-entropy trains it.
    Calibration uses `bins` equal-width bins of the confidence, closed on the right. Sums live on `device`, by
    default where the first batch lies; a device other than that of the logits makes every update wait.
    """

    def __init__(self, bins: int = 10, device: torch.device | str | None = None) -> None:
        if bins < 1:
            raise DataError(f"calibration needs at least 1 bin, got {bins}")
        super().__init__(device)
        self.bins = bins

    def update(self, logits: Tensor, labels: Tensor) -> None:
        if logits.ndim == 1 or (logits.ndim == 2 and logits.shape[1] == 1):
            single = logits.reshape(-1, 1)
            logits = torch.cat([torch.zeros_like(single), single], dim=1)
        if logits.ndim != 2 or logits.shape[1] < 2 or not logits.is_floating_point():
            raise DataError(
                f"logits must be floating point of shape [N, classes], got {_describe(logits)}; for a model that "
                "predicts quantities the labels must be fractions"
            )
        if labels.shape != logits.shape[:1] or labels.is_floating_point() or labels.is_complex():
            raise DataError(
                f"labels must be {len(logits)} class numbers, one for each row of logits, got {_describe(labels)}"
            )
        sums = _classification_sums(logits, _beside(logits, labels).long(), self.bins)
        self._add(sums, len(logits), logits.shape[1:])

    def merge(self, other: Self) -> None:
        """Add everything that `other` has seen; `other` stays as it is."""
        if isinstance(other, ClassificationMetrics) and other.bins != self.bins:
            raise DataError(f"metrics with {self.bins} bins cannot merge metrics with {other.bins}")
        super().merge(other)

    def compute(self) -> Scores:
        return _scores(self._read(), self._samples, self.bins)


class RegressionMetrics(_Stream):
    """Errors of predictions `[N]` or `[N, 1]` against targets of the same shape."""

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        one_number_each = predictions.ndim in (1, 2) and predictions.shape[1:].numel() == 1
        if predictions.shape != targets.shape or not one_number_each:
            raise DataError(
                "predictions and targets must both be of shape [N] or both of shape [N, 1], got "
                f"{_describe(predictions)} and {_describe(targets)}; labels of a classifier must be whole numbers, one "
                "class a sample"
            )
        if len(predictions):
            sums = _regression_sums(predictions.flatten(), _beside(predictions, targets.flatten()))
            self._add(sums, len(predictions), torch.Size(()))

    @staticmethod
    def _combine(ours: Tensor, theirs: Tensor) -> Tensor:
        # Mean and squared deviation are combined as such: a difference of two sums of squares would lose its
        # digits for targets far from 0.
        total = ours + theirs
        share = theirs[0] / total[0]
        step = theirs[3] - ours[3]
        mean = ours[3] + step * share
        deviation = total[4] + step.square() * ours[0] * share
        return torch.cat([total[:3], torch.stack([mean, deviation]), total[5:]])

    def compute(self) -> RegressionScores:
        count, absolute, squared, mean, deviation, not_finite = self._read()
        _refuse(not_finite, self._samples, "predictions or targets that are not finite")
        # The mean of equal targets is off by rounding, so their deviation is almost, not exactly, 0.
        targets_differ = deviation > count * (1e-12 * mean) ** 2
        r2 = 1 - squared / deviation if targets_differ else None
        return RegressionScores(self._samples, absolute / count, math.sqrt(squared / count), r2)


class RestorationDistance(_Stream):
    """How far adapted features are from those of the source model on the clean images (paper, section 5.5).

    The mean, over images and units, of the absolute difference between the source model's features of a clean
    image and the adapted model's features of the shifted version of that same image. The paper's D is the
    mean of this over the shifts.
    """

    def update(self, source_features: Tensor, adapted_features: Tensor) -> None:
        units = source_features.shape[1:].numel() if source_features.ndim > 1 else 0
        if source_features.shape != adapted_features.shape or units == 0:
            raise DataError(
                "source and adapted features must both be of one shape [N, units], row by row of the same "
                f"images, got {_describe(source_features)} and {_describe(adapted_features)}"
            )
        sums = _distance_sums(source_features, _beside(source_features, adapted_features))
        self._add(sums, len(source_features), source_features.shape[1:])

    def compute(self) -> float:
        total, not_finite = self._read()
        _refuse(not_finite, self._samples, "features that are not finite")
        units = math.prod(self._sample_shape or ())
        return total / (self._samples * units)


def restoration_distance(source_features: Tensor, adapted_features: Tensor) -> float:
    """`RestorationDistance` of two sets of features that are at hand as a whole."""
    distance = RestorationDistance()
    distance.update(source_features, adapted_features)
    return distance.compute()


@torch.no_grad()
def _classification_sums(logits: Tensor, labels: Tensor, bins: int) -> Tensor:
    """Count, confidence and hits of every bin; then nll, brier, labels out of range, logits not finite."""
    # Autocast leaves float64 alone, and keeps softmax and sums in float32 where there is no float64.
    logits = logits.to(_sum_dtype(logits.device))
    probabilities = logits.softmax(dim=1)
    confidence = probabilities.amax(dim=1)
    hit = logits.argmax(dim=1) == labels
    # A mask, not an index: a label out of range then selects nothing instead of crashing the device.
    is_label = torch.arange(logits.shape[1], device=logits.device) == labels.unsqueeze(1)
    nll = -logits.log_softmax(dim=1).masked_fill(~is_label, 0).sum(dim=1)
    brier = (probabilities - is_label.to(logits.dtype)).square().sum(dim=1)

    # i / bins is rounded as 1 / classes is, so the confidence of a tie lies exactly on its edge.
    inner_edges = torch.arange(1, bins, device=logits.device).to(logits.dtype) / bins
    bin_of_sample = torch.bucketize(confidence, inner_edges)
    in_bin = bin_of_sample.unsqueeze(1) == torch.arange(bins, device=logits.device)
    columns = torch.stack([torch.ones_like(confidence), confidence, hit.to(logits.dtype)], dim=1)
    # Masked sums rather than a scatter: the order of additions, and so the last digit, never varies on a GPU.
    table = (in_bin.unsqueeze(2) * columns.unsqueeze(1)).sum(dim=0)

    out_of_range = ~is_label.any(dim=1)
    no_number = confidence.isnan()
    rest = torch.stack([nll, brier, out_of_range.to(logits.dtype), no_number.to(logits.dtype)], dim=1).sum(dim=0)
    return torch.cat([table.flatten(), rest])


def _scores(sums: list[float], samples: int, bins: int) -> Scores:
    nll, brier, out_of_range, no_number = sums[3 * bins :]
    _refuse(no_number, samples, "logits that are NaN or infinite")
    _refuse(
        out_of_range,
        samples,
        "a label that is no class number (0 to classes - 1; a quantity is given as floating-point numbers)",
    )
    counts, confidences, hits = sums[0 : 3 * bins : 3], sums[1 : 3 * bins : 3], sums[2 : 3 * bins : 3]
    gaps = [abs(hit - confidence) for hit, confidence in zip(hits, confidences, strict=True)]
    reliability = tuple(
        ReliabilityBin(
            lower=index / bins,
            upper=(index + 1) / bins,
            count=round(count),
            confidence=confidence / count if count else None,
            accuracy=hit / count if count else None,
        )
        for index, (count, confidence, hit) in enumerate(zip(counts, confidences, hits, strict=True))
    )
    return Scores(
        samples=samples,
        accuracy=sum(hits) / samples,
        ece=sum(gaps) / samples,
        mce=max(gap / count for gap, count in zip(gaps, counts, strict=True) if count),
        nll=nll / samples,
        brier=brier / samples,
        reliability=reliability,
    )


@torch.no_grad()
def _regression_sums(predictions: Tensor, targets: Tensor) -> Tensor:
    """Count, absolute error, squared error, mean target, squared deviation from that mean, faults."""
    dtype = _sum_dtype(predictions.device)
    predictions, targets = predictions.to(dtype), targets.to(dtype)
    error = predictions - targets
    mean = targets.mean()
    return torch.stack(
        [
            torch.ones_like(error).sum(),
            error.abs().sum(),
            error.square().sum(),
            mean,
            (targets - mean).square().sum(),
            (~error.isfinite()).sum().to(dtype),
        ]
    )


@torch.no_grad()
def _distance_sums(source: Tensor, adapted: Tensor) -> Tensor:
    """Absolute difference over all images and units, number of faulty images."""
    dtype = _sum_dtype(source.device)
    difference = (source.to(dtype) - adapted.to(dtype)).abs().flatten(1)
    return torch.stack([difference.sum(), (~difference.isfinite()).any(dim=1).sum().to(dtype)])


def _sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _beside(anchor: Tensor, other: Tensor) -> Tensor:
    """`other` on the device of `anchor`; only a copy towards an accelerator is safe in the background."""
    return other.to(anchor.device, non_blocking=anchor.device.type != "cpu")


def _refuse(faults: float, samples: int, what: str) -> None:
    if faults:
        raise DataError(f"{round(faults)} of {samples} samples have {what}, so no score would mean anything")


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
