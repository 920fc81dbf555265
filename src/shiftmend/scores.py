"""What metrics give: how good and how honest predictions were, as numbers and as a line to read."""

from __future__ import annotations

from dataclasses import dataclass, fields

BY_PART = ("reliability", "iou", "quantities")
"""What scores hold beside single figures: of each bin, of each class, of each quantity."""


@dataclass(frozen=True)
class ReliabilityBin:
    """The samples whose confidence lies in `(lower, upper]`; both means are None where there are none."""

    lower: float
    upper: float
    count: int
    confidence: float | None
    accuracy: float | None


@dataclass(frozen=True)
class Scores:
    """Of a classifier. All are fractions, not percent: the paper's ECE of 4.8 is 0.048 here.

    `ece` and `mce` are the expected and the maximum calibration error: the gap between accuracy and mean
    confidence within a bin, averaged over samples and at its largest. `nll` is the mean negative
    log-likelihood in nats; `brier` the mean squared error of the probabilities, summed over classes (0 to 2). With a
    label for each position, `iou` has the intersection over union of each class over all samples, None for a class that
    is neither there nor predicted; the Dice score of a class is `2 * iou / (1 + iou)`.
    """

    samples: int
    accuracy: float
    ece: float
    mce: float
    nll: float
    brier: float
    reliability: tuple[ReliabilityBin, ...]
    iou: tuple[float | None, ...] = ()

    @property
    def mean_iou(self) -> float | None:
        """Over the classes that have one; None where labels are not by position."""
        known = [one for one in self.iou if one is not None]
        return sum(known) / len(known) if known else None

    def __str__(self) -> str:
        mean = "" if self.mean_iou is None else f", mean_iou {_written('mean_iou', self.mean_iou)}"
        return _line(self) + mean


@dataclass(frozen=True)
class RegressionScores:
    """Of a model that predicts quantities; `r2` is None where all targets are equal.

    Of several, `quantities` has the scores of each, and the figures are means over them: `root_mean_square_error` the
    root of the mean square, `r2` over those that have one.
    """

    samples: int
    mean_absolute_error: float
    root_mean_square_error: float
    r2: float | None
    quantities: tuple[RegressionScores, ...] = ()

    def __str__(self) -> str:
        return _line(self)


def _line(scores: Scores | RegressionScores) -> str:
    """What a person wants to read; `repr` has every digit and the bins."""
    shown = {field.name: getattr(scores, field.name) for field in fields(scores) if field.name not in BY_PART}
    return ", ".join(f"{name} {_written(name, value)}" for name, value in shown.items() if value is not None)


def _written(name: str, value: float) -> str:
    if name in ("accuracy", "ece", "mce", "mean_iou"):
        return f"{100 * value:.1f} %"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
