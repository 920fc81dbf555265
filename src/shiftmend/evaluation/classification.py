"""Accuracy, calibration and proper scores of a classifier.

`update` adds a batch to a few sums on the device and never waits for it, `merge` adds the sums of another process,
and `compute` reads the sums once. Sums are float64, except on devices without it (`mps`). Labels out of range and
values that are not finite are counted on the device and raised by `compute`.

>>> metrics = ClassificationMetrics()
>>> metrics.update(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
>>> metrics.compute().accuracy
0.5
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.evaluation.accumulators import Sums, describe, describe_scores, format_score, refuse, to_device_of
from shiftmend.stats.histograms import as_samples
from shiftmend.utils.checks import brief, is_whole
from shiftmend.utils.devices import split_rows, sum_dtype

_LAST_AXIS = " Try a wrapper of the model that returns logits.movedim(-1, 1), if classes are on the last axis."


class ClassificationMetrics(Sums):
    """Accuracy, calibration and proper scores of logits `[N, classes]` against labels `[N]`.

    A single output, `[N, 1]` or `[N]`, is the logit of class 1 against class 0, as binary cross-entropy trains it.
    For dense logits `[N, classes, ...]` and labels `[N, ...]`, each position counts as a sample, and IoU is scored too.

    Args:
        bins: Number of equal-width bins of the confidence, closed on the right, for calibration errors.
        device: Device of the sums, by default that of the first batch. Any device other than that of the logits makes
            every update synchronise.
        ignore_label: Label of samples that no score counts.

    Raises:
        DataError: If `ignore_label` is not a whole number.
    """

    def __init__(
        self, bins: int = 10, device: torch.device | str | None = None, ignore_label: int | None = None
    ) -> None:

        if ignore_label is not None and not (is_whole(ignore_label) and -(2**63) <= ignore_label < 2**63):
            raise DataError(f"Expected a whole number as ignore_label, e.g. 255 or -1, got {brief(ignore_label)}.")
        super().__init__(device)
        self.bins = bins
        self.ignore_label = None if ignore_label is None else int(ignore_label)
        self._dense = False

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch of logits `[N, classes]` or `[N, classes, ...]` and labels `[N]` or `[N, ...]`."""
        dense = logits.ndim > 2 and labels.ndim > 1
        if dense:
            if labels.shape != logits.shape[:1] + logits.shape[2:]:
                raise DataError(
                    f"Expected labels {[len(logits), *logits.shape[2:]]} for logits {list(logits.shape)}, whose "
                    f"second axis is that of the classes, got {list(labels.shape)}."
                    f"{_LAST_AXIS if labels.shape == logits.shape[:-1] else ''}"
                )
            logits, labels = as_samples(logits), labels.flatten()
        if logits.ndim == 1 or (logits.ndim == 2 and logits.shape[1] == 1):
            single = logits.reshape(-1, 1)
            logits = torch.cat([torch.zeros_like(single), single], dim=1)
        if logits.ndim != 2 or logits.shape[1] < 2 or not logits.is_floating_point():
            raise DataError(
                f"Expected floating-point logits [N, classes], got {describe(logits)}. Try floating-point labels if "
                "the model predicts quantities."
            )
        if labels.shape != logits.shape[:1] or labels.is_floating_point() or labels.is_complex():
            raise DataError(
                f"Expected {len(logits)} class numbers, one for each row of logits, got {describe(labels)}."
                f"{_advice(labels)}"
            )
        labels = to_device_of(logits, labels).long()
        # A few images have millions of positions.
        parts = split_rows(logits)
        for some, own in zip(parts, labels.split(max(1, len(parts[0]))), strict=True):
            self._add(_classification_sums(some, own, self.bins, self.ignore_label), len(some), some.shape[1:])
        self._dense |= dense

    def merge(self, other: Self) -> None:
        """Add everything that `other` has seen; `other` stays as it is."""
        super().merge(other)
        self._dense |= other._dense

    def compute(self) -> Scores:
        """Return the scores of all batches. Raise DataError without batches, or if a label is no class of the model."""
        ignored, *sums = self._read()
        samples = self._samples - round(ignored)
        if samples == 0:
            raise DataError(f"Expected labels to score, got all {self._samples} equal to ignore_label.")
        classes = math.prod(self._sample_shape or ())
        scores = _scores(sums[: -2 * classes], samples, self.bins, classes)
        return replace(scores, iou=_iou(sums[-2 * classes :], self.ignore_label)) if self._dense else scores


@torch.no_grad()
def _classification_sums(logits: Tensor, labels: Tensor, bins: int, ignore_label: int | None) -> Tensor:
    """Sum everything that the scores of a batch need into one vector.

    The vector holds, in this order: the number of ignored samples; count, confidence and hits of each bin; NLL and
    Brier score; the numbers of labels out of range and of logits that are not finite; intersection and union of label
    and prediction for each class. Everything after the first number leaves ignored samples out.
    """
    # Autocast leaves float64 alone, and keeps softmax and sums in float32 where there is no float64.
    logits = logits.to(sum_dtype(logits.device))
    probabilities = logits.softmax(dim=1)
    confidence = probabilities.amax(dim=1)
    predicted = logits.argmax(dim=1)
    hit = predicted == labels
    ignored = torch.zeros_like(hit) if ignore_label is None else labels == ignore_label
    left_out = ignored.unsqueeze(1)
    # A mask, not an index: a label out of range then selects nothing instead of crashing the device.
    numbers = torch.arange(logits.shape[1], device=logits.device)
    is_label = numbers == labels.unsqueeze(1)
    is_predicted = numbers == predicted.unsqueeze(1)
    nll = -logits.log_softmax(dim=1).masked_fill(~is_label, 0).sum(dim=1)
    brier = (probabilities - is_label.to(logits.dtype)).square().sum(dim=1)

    # i / bins is rounded as 1 / classes is, so the confidence of a tie lies exactly on its edge.
    inner_edges = torch.arange(1, bins, device=logits.device).to(logits.dtype) / bins
    bin_of_sample = torch.bucketize(confidence, inner_edges)
    in_bin = bin_of_sample.unsqueeze(1) == torch.arange(bins, device=logits.device)
    columns = torch.stack([torch.ones_like(confidence), confidence, hit.to(logits.dtype)], dim=1)
    # Multiplying by 0 would not work, because outputs of ignored samples may be NaN.
    columns = columns.masked_fill(left_out, 0)
    # Masked sums are used instead of a scatter, whose order of additions varies on a GPU.
    table = (in_bin.unsqueeze(2) * columns.unsqueeze(1)).sum(dim=0)

    out_of_range = ~is_label.any(dim=1)
    no_number = confidence.isnan()
    rest = torch.stack([nll, brier, out_of_range.to(logits.dtype), no_number.to(logits.dtype)], dim=1)
    meet = (is_label & is_predicted & ~left_out).sum(dim=0)
    join = ((is_label | is_predicted) & ~left_out).sum(dim=0)
    return torch.cat([ignored.sum().view(1), table.flatten(), rest.masked_fill(left_out, 0).sum(dim=0), meet, join])


def _iou(sums: list[float], ignore_label: int | None) -> tuple[float | None, ...]:
    """Return the IoU of each class; None for a class that never occurs or is ignored."""
    pairs = zip(sums[: len(sums) // 2], sums[len(sums) // 2 :], strict=True)
    return tuple(meet / join if join and number != ignore_label else None for number, (meet, join) in enumerate(pairs))


def _scores(sums: list[float], samples: int, bins: int, classes: int) -> Scores:
    nll, brier, out_of_range, no_number = sums[3 * bins :]
    refuse(no_number, samples, "logits that are NaN or infinite")
    refuse(
        out_of_range,
        samples,
        f"a label that is no class number from 0 to {classes - 1}",
        "Try ignore_label for samples without a class, or floating-point labels for quantities",
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


def _advice(labels: Tensor) -> str:
    if labels.ndim == 2 and labels.shape[1] == 1:
        return " Try labels[:, 0]."
    one_hot = " Try labels.argmax(1) if they are one-hot; several classes a sample cannot be scored."
    return one_hot if labels.ndim == 2 else ""


@dataclass(frozen=True)
class ReliabilityBin:
    """The samples whose confidence lies in `(lower, upper]`; `confidence` and `accuracy` are None if there are none."""

    lower: float
    upper: float
    count: int
    confidence: float | None
    accuracy: float | None


@dataclass(frozen=True)
class Scores:
    """Scores of a classifier, as fractions rather than percent: the paper's ECE of 4.8 is 0.048 here.

    Example:
        >>> import torch, shiftmend
        >>> inputs, labels = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
        >>> scores = shiftmend.evaluate(torch.nn.Identity(), (inputs, labels))
        >>> scores.accuracy
        0.5
        >>> print(scores)
        samples 2, accuracy 50.0 %, ece 42.5 %, mce 73.1 %, nll 0.7201, brier 0.5487
    """

    samples: int
    """Number of labels that were scored: of samples, or of positions such as pixels."""
    accuracy: float
    """Share of correct predictions."""
    ece: float
    """Expected calibration error: the gap between accuracy and mean confidence in a bin, averaged over samples."""
    mce: float
    """Maximum calibration error: the largest of these gaps."""
    nll: float
    """Mean negative log-likelihood, in nats."""
    brier: float
    """Mean squared error of the probabilities, summed over classes (0 to 2)."""
    reliability: tuple[ReliabilityBin, ...]
    """Accuracy and confidence of each bin."""
    iou: tuple[float | None, ...] = ()
    """Intersection over union of each class, if positions were scored; None for a class that never occurs.

    The Dice score of a class is `2 * iou / (1 + iou)`.
    """

    @property
    def mean_iou(self) -> float | None:
        """The mean of `iou` over the classes that occur; None if no positions were scored."""
        known = [one for one in self.iou if one is not None]
        return sum(known) / len(known) if known else None

    def __str__(self) -> str:
        mean = "" if self.mean_iou is None else f", mean_iou {format_score('mean_iou', self.mean_iou)}"
        return describe_scores(self) + mean
