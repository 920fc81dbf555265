"""Estimated scores at a site without labels, with intervals, from signals and a rehearsal.

Which signal predicts the score differs between models and candidates. So signals are ranked by how well they predict
each rehearsed shift from the others, and the median of the best few is the estimate. The interval comes from the errors
of such estimates when the whole family of a shift is left out of ranking and fitting (conformal prediction, with
families as the exchangeable units).

Accuracies are compared by their difference and errors of a regression by their ratio: maps and intervals of the latter
are made for the logarithm. A small network may err five times as much as a constant guess, and no error is negative.

An estimate is invalid if the site looks unlike everything that was rehearsed. It then has reasons instead of a value.
If all that is wrong is the width of its interval, the interval is given without a value.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shiftmend.profiles.rehearsal import UNTOUCHED, Rehearsal, Task, format_score, name_candidate
from shiftmend.verification.class_shares import Shares, expect_accuracy
from shiftmend.verification.maps import FITS, Floats, Map

LEVEL = 0.9
"""Nominal coverage of intervals."""
MIN_FAMILIES = 9
"""Smallest number of families for an interval of that level: the largest of eight errors covers only eight ninths."""
MANY_FAMILIES = 11
"""Number of families below which intervals allow for errors that grow with the difficulty. With few simulated devices,
errors may look constant although they are far larger at ruined sites."""
MAP_COUNTS = (3, 6)
"""Numbers of maps whose median may be the estimate. The rehearsal chooses between them: three if few signals are
useful, such as the untouched model's agreement with adapted ones; six if a single map may mislead."""
MIN_CELLS = 5
"""Smallest number of rehearsed shifts to fit a map."""
NORMAL_QUANTILE = 1.6449
"""Quantile of the normal distribution for a two-sided interval of 90 %."""

MIN_ERROR = 0.004
"""Smallest expected error of an accuracy, before the conformal factor."""
MIN_RELATIVE_ERROR = 0.02
"""The same for an error of a regression, as a fraction of it."""
EXPONENTS = (0.0, 1.0, 1.5)
"""Exponents with which errors may grow with the difficulty of an estimate. Estimates for adapted models are off by less
than a point near home and by up to fifty far from it; those for the untouched model, from its agreement with adapted
ones, are about equally good everywhere. The rehearsal chooses the exponent."""
MIN_LOG_UNIT = math.log(2)
"""Smallest distance from the logarithm of the error at home to that of a useless model. Some models of real
measurements are hardly better than a constant."""
MAX_HALF_WIDTH = 0.1
"""Largest useful half-width of an interval of an accuracy."""
MAX_RELATIVE_HALF_WIDTH = 0.3
"""The same for an error of a regression: its upper end, as a fraction above the estimate."""
WIDEST: Mapping[Task, float] = {"classes": MAX_HALF_WIDTH, "quantities": math.log1p(MAX_RELATIVE_HALF_WIDTH)}
"""Both on the scale of the score. An estimate with a wider interval has no value."""
WIDEST_RANGE: Mapping[Task, float] = {"classes": 0.25, "quantities": math.log(2)}
"""Half-width up to which such an interval is told without a value; beyond it, it says too little."""
NEAR = 0.01
"""Distance from the score at home, in accuracy, below which all errors weigh the same when signals are ranked. Farther
away, errors weigh relative to the distance: an estimate of 50 % may be off by more than one of 90 %."""

RANGE_MARGIN = 0.1
"""Share of the rehearsed range of a signal by which a site may exceed it, unless chance among few samples is more."""
DIVERGING = ("slices", "marginals", "skew", "outside")
"""Signals that tell how far the target is from home: less than was rehearsed is no reason for doubt."""
MAX_SPREAD_RATIO = 1.5
"""Disagreement between maps, relative to the largest at home, above which an estimate is invalid."""
MIN_SIZE_RATIO = 0.5
"""Number of samples at the site, relative to the smallest rehearsed size, below which an estimate is invalid."""
MAX_SIZE_RATIO = 16.0
"""Number of samples at the site, relative to the largest rehearsed size, above which an estimate is invalid."""
MAX_OUTSIDE = 0.02
"""Share of the features beyond the range of home, beyond chance, that other class shares can explain. Of five boards of
gas sensors, which make a model wrong and certain, each had 0.08 or more; single classes at home had less than 0.01."""
GOOD, POOR = 0.05, 0.1
"""Loss of accuracy up to which a rehearsed model counts as good, and above which as poor. For the error of a regression
they are fractions of the error at home."""
LIMIT_MARGIN = 0.1
"""Share by which a divergence may exceed the largest of good rehearsed models."""
UNREHEARSED_DISTANCE = 0.07
"""Total variation between class shares from which on an estimate needs errors that were measured for other shares."""
HOME_DEVIATIONS = 3.0
"""Number of standard deviations within which signals count as those of home."""
AS_CERTAIN = 0.02
"""Drop of the mean confidence, beyond sampling noise, up to which a model counts as confident as at home. Other class
shares cost at most 0.014 on EMNIST and digits; devices that cost more than five points of accuracy, at least 0.03."""

MAX_DISTANCE_RATIO = 1.1
"""Largest distance of class shares from home at which estimates hold, as a multiple of the largest rehearsed one."""
TOO_MUCH_OPEN = "the signals leave too much open"
OTHER_WEIGHTS = "the weights of the model are not those that the profile was made with"


@dataclass(frozen=True)
class Estimate:
    """An estimated score with a 90 % interval, made without labels.

    Attributes:
        value: The estimate; None if it is invalid.
        low: Lower end of the interval. It is also given if the estimate is invalid only because the interval is wide:
            more than 0.1 to one side, or 30 % of an error. None if the estimate is invalid otherwise, if that interval
            is more than 0.25 or a factor of 2, or with fewer than nine rehearsed families.
        high: Upper end of the interval.
        metric: `"accuracy"`, `"agreement"` (with the model's own predictions on clean inputs), `"rmse"` or
            `"deviation"`.
        reasons: Reasons why the estimate is invalid, one sentence each; empty if it is valid.
        withheld: Value, low and high of an invalid estimate, for research only. Do not show them to a user.
        labelled: Score of the few labelled samples alone, as value, low, high and their number; None without such
            samples.

    Example:
        >>> from shiftmend import Estimate
        >>> print(Estimate(0.853, 0.82, 0.87, "accuracy"))
        accuracy about 85.3 % (82.0 to 87.0)
        >>> print(Estimate(None, 0.55, 0.85, "accuracy", ("there are too few samples",)))
        accuracy between 55.0 and 85.0 %: there are too few samples
    """

    value: float | None
    low: float | None
    high: float | None
    metric: str
    reasons: tuple[str, ...] = ()
    withheld: tuple[float, float | None, float | None] | None = None
    labelled: tuple[float, float, float, int] | None = None

    @property
    def reliable(self) -> bool:
        """True if the estimate is valid."""
        return self.value is not None

    @property
    def is_range(self) -> bool:
        """True if the estimate is invalid only because its interval is wide, and the interval is told."""
        return self.value is None and self.low is not None and self.high is not None

    @property
    def best_guess(self) -> float | None:
        """The value; within a range that is told, its most likely value. None if nothing is known."""
        if not self.is_range:
            return self.value
        assert self.low is not None
        assert self.high is not None
        return self.withheld[0] if self.withheld is not None else (self.low + self.high) / 2

    @property
    def task(self) -> Task:
        """Task of the model that the score belongs to."""
        return "classes" if self.metric in ("accuracy", "agreement") else "quantities"

    def to_json(self) -> dict[str, Any]:
        """Convert the estimate to a JSON object for a manifest.

        Returns:
            The entries `value`, `low`, `high`, `metric`, `reliable` and `reasons`, and `labelled` if there are labelled
            samples. The `value` of an invalid estimate is None. The attribute `withheld` is never included, because a
            reader of the manifest could mistake its number for a valid estimate.

        Example:
            >>> from shiftmend import Estimate
            >>> Estimate(0.85, 0.82, 0.87, "accuracy").to_json()
            {'value': 0.85, 'low': 0.82, 'high': 0.87, 'metric': 'accuracy', 'reliable': True, 'reasons': []}
        """
        facts: dict[str, Any] = {name: getattr(self, name) for name in ("value", "low", "high", "metric", "reliable")}
        facts["reasons"] = list(self.reasons)
        if self.labelled is not None:
            facts["labelled"] = dict(zip(("value", "low", "high", "samples"), self.labelled, strict=True))
        return facts

    def __str__(self) -> str:
        ends = () if self.low is None or self.high is None else (self.low, self.high)
        low, high = [format_score(end, self.task).removesuffix(" %") for end in ends] or ("", "")
        if self.value is None:
            reasons = "; ".join(self.reasons) or "nothing was rehearsed"
            percent = " %" if self.task == "classes" else ""
            if ends:
                return f"{self.metric} between {low} and {high}{percent}: {reasons}"
            return f"{self.metric} unknown: {reasons}"
        return f"{self.metric} about {format_score(self.value, self.task)}" + (f" ({low} to {high})" if ends else "")

    def with_labels(self, correct: int, samples: int) -> Estimate:
        """Combine the estimate with a few labelled samples of the site.

        The estimate is treated as a beta distribution with the same mean and width, which the labelled samples update.
        An invalid estimate is replaced by the score of the labelled samples alone.

        Args:
            correct: Number of labelled samples that the model predicts correctly.
            samples: Number of labelled samples, at least one.

        Returns:
            The combined estimate; its `labelled` holds the score of the labelled samples alone.

        Example:
            >>> from shiftmend import Estimate
            >>> both = Estimate(0.8, 0.7, 0.9, "accuracy").with_labels(45, 50)
            >>> print(both)
            accuracy about 85.4 % (79.0 to 91.0)
        """
        alone = _beta_interval(1 + correct, 1 + samples - correct)
        # If all or none are correct, their share lies just outside of the interval.
        few = (min(max(correct / samples, alone[0]), alone[1]), *alone, samples)
        if self.value is None or self.low is None or self.high is None:
            return replace(self, value=few[0], low=few[1], high=few[2], reasons=(), labelled=few)
        mean = min(max(self.value, 1e-4), 1 - 1e-4)
        deviation = max((self.high - self.low) / (2 * NORMAL_QUANTILE), 1e-4)
        strength = max(mean * (1 - mean) / deviation**2 - 1, 1.0)
        first, second = mean * strength + correct, (1 - mean) * strength + samples - correct
        low, high = _beta_interval(first, second)
        return replace(self, value=first / (first + second), low=low, high=high, labelled=few)

    def bound(self, agreement: float | None, reason: str) -> Estimate:
        """Estimate the score of another model from its agreement with this one on the same samples.

        Both scores differ by at most the share of samples on which the predictions differ, so the interval grows by
        that share.

        Args:
            agreement: Share of equal predictions; None if unknown.
            reason: Reason why the other model has no estimate of its own. It becomes a reason of the result if the
                interval gets too wide, or if the agreement is unknown.

        Example:
            >>> from shiftmend import Estimate
            >>> print(Estimate(0.9, 0.88, 0.92, "accuracy").bound(0.99, "not rehearsed"))
            accuracy about 90.0 % (87.0 to 93.0)
            >>> Estimate(0.9, 0.88, 0.92, "accuracy").bound(0.5, "not rehearsed").reliable
            False
        """
        if self.value is None or self.low is None or self.high is None or agreement is None:
            return Estimate(None, None, None, self.metric, (reason, *self.reasons))
        low, high = max(0.0, self.low - (1 - agreement)), min(1.0, self.high + (1 - agreement))
        if max(self.value - low, high - self.value) > MAX_HALF_WIDTH:
            changed = f"{100 * (1 - agreement):.0f} % of its answers are not those of the untouched model"
            return Estimate(None, None, None, self.metric, (reason, changed))
        return replace(self, low=low, high=high)


def _beta_interval(first: float, second: float) -> tuple[float, float]:
    """Return the central 90 % interval of a beta distribution, from its density on a fine grid."""
    grid = (np.arange(20_000) + 0.5) / 20_000
    logarithm = (first - 1) * np.log(grid) + (second - 1) * np.log1p(-grid)
    below = np.cumsum(np.exp(logarithm - logarithm.max()))
    ends = np.interp([(1 - LEVEL) / 2, (1 + LEVEL) / 2], below / below[-1], grid)
    return float(ends[0]), float(ends[1])


# ---- predicting one candidate's score


@dataclass(frozen=True)
class Prediction:
    """The score that the maps predict for a candidate.

    Attributes:
        value: Median of the predictions of the best maps.
        difficulty: Distance of the value from the score at home plus the spread, where 1 is the distance to a useless
            model.
        spread: Range of the predictions of the maps, without the two outermost.
        used: Names of the signals that the value comes from.
    """

    value: float
    difficulty: float
    spread: float
    used: tuple[str, ...] = ()


def to_scale(task: Task, scores: Any) -> Any:
    """Return scores on the scale on which they are compared: accuracies as they are, errors by their logarithm."""
    return scores if task == "classes" else np.log(np.maximum(scores, 1e-30))


def from_scale(task: Task, values: Any) -> Any:
    """Undo `to_scale`."""
    return values if task == "classes" else np.exp(np.minimum(values, 60.0))


@dataclass(frozen=True, eq=False)
class Cells:
    """Cells of one candidate at one size: signals `[F, G]` with their names, scores `[F]` and families of the shifts.

    `home` is the score at home, and `unit` the distance from that score to the score of a useless model. All are on the
    scale of `to_scale`.
    """

    names: tuple[str, ...]
    signals: Floats
    scores: Floats
    families: tuple[str, ...]
    places: tuple[int, ...]
    home: float
    unit: float
    least: float

    @staticmethod
    def of(record: Rehearsal, candidate: str, size: int) -> Cells:
        """Select the cells of a candidate: its finished shifts, and the signals that all of them have."""
        place = record.index(candidate)
        values, scores = (one[:, size, place].double().numpy() for one in (record.values, record.scores))
        rows = np.flatnonzero(np.isfinite(scores))
        there = np.isfinite(values[rows]).all(0)
        home = float(to_scale(record.task, record.score))
        unit, least = 1.0, MIN_ERROR
        if record.task == "quantities":
            useless = float(record.output_deviation.square().mean().sqrt())
            unit = max(float(to_scale(record.task, useless)) - home, MIN_LOG_UNIT)
            least = MIN_RELATIVE_ERROR
        return Cells(
            tuple(name for name, complete in zip(record.signals, there, strict=True) if complete),
            values[rows][:, there],
            to_scale(record.task, scores[rows]),
            tuple(record.shifts[row].family for row in rows),
            tuple(int(row) for row in rows),
            home,
            unit,
            least,
        )

    def take(self, rows: NDArray[np.intp]) -> Cells:
        """Return the cells of some rows."""
        families, places = (tuple(one[row] for row in rows) for one in (self.families, self.places))
        return replace(self, signals=self.signals[rows], scores=self.scores[rows], families=families, places=places)

    def restrict(self, names: Mapping[str, Any]) -> Cells:
        """Return the cells with only those signals that a site could measure."""
        kept = [place for place, name in enumerate(self.names) if name in names]
        return replace(self, names=tuple(self.names[place] for place in kept), signals=self.signals[:, kept])

    @property
    def fit_for_use(self) -> bool:
        """True if there are enough cells and at least one signal."""
        return bool(self.names) and len(self.scores) >= MIN_CELLS

    def rate(self, value: float, spread: float) -> float:
        """Return the difficulty of an estimate, from 0 to 1."""
        return min(1.0, (abs(self.home - value) + spread) / self.unit)


@dataclass(frozen=True, eq=False)
class Fitted:
    """Maps of one candidate at one sample size, ranked by leave-one-out error."""

    cells: Cells
    ranked: tuple[tuple[int, Map], ...]
    """Index of the signal and its map, the best first; each signal once."""
    largest_spread: Mapping[int, float]
    """Largest spread of the leave-one-out predictions of a cell, by the number of maps."""

    @staticmethod
    def fit(cells: Cells) -> Fitted:
        """Rank all signals and kinds of maps by their error, relative to the distance of the truth from home."""
        weight = 1 / (NEAR * cells.unit + np.abs(cells.home - cells.scores))
        found: list[tuple[float, int, str, Floats]] = []
        for place in range(len(cells.names)):
            tried = [(kind, _leave_one_out(cells.signals[:, place], cells.scores, kind)) for kind in FITS]
            errors = [float((weight * np.abs(guess - cells.scores)).mean()) for _, guess in tried]
            best = int(np.argmin(errors))
            found.append((errors[best], place, *tried[best]))
        found = sorted(found, key=lambda one: one[:2])[: max(MAP_COUNTS)]
        maps = tuple((place, FITS[kind](cells.signals[:, place], cells.scores)) for _, place, kind, _ in found)
        guesses = np.array([guess for *_, guess in found])
        return Fitted(cells, maps, {count: float(_spread(guesses[:count]).max()) for count in MAP_COUNTS})

    def predict(self, signals: Floats, count: int) -> Prediction:
        """Predict the score from signals `[G]`, by the best `count` maps."""
        guesses = np.array([fitted(signals[place]) for place, fitted in self.ranked[:count]])
        value, spread = float(np.median(guesses)), float(_spread(guesses))
        used = tuple(self.cells.names[place] for place, _ in self.ranked[:count])
        return Prediction(value, self.cells.rate(value, spread), spread, used)


def _spread(guesses: Floats) -> Floats:
    """Return the range of predictions `[maps, ...]`; of five or more maps, without the two outermost."""
    ordered = np.sort(guesses, axis=0)
    return np.asarray(ordered[-2] - ordered[1] if len(ordered) >= 5 else ordered[-1] - ordered[0])


def _leave_one_out(signals: Floats, scores: Floats, kind: str) -> Floats:
    """Predict each cell `[F]` by a map that was fitted without that cell."""
    everything = np.arange(len(scores))
    guesses = [FITS[kind](signals[everything != one], scores[everything != one])(signals[one]) for one in everything]
    return np.array(guesses)


@dataclass(frozen=True, eq=False)
class CrossFit:
    """Predictions of each cell without its whole family.

    Attributes:
        guesses: Predictions and their difficulties, `[F]` each, by the number of maps.
        fits: Maps that were fitted without a family, by its name.
    """

    guesses: Mapping[int, tuple[Floats, Floats]]
    fits: Mapping[str, Fitted]

    @staticmethod
    def fit(cells: Cells) -> CrossFit:
        """Leave each family out in turn."""
        nothing = np.full_like(cells.scores, np.nan)
        found = {count: (nothing.copy(), nothing.copy()) for count in MAP_COUNTS}
        families, fits = np.array(cells.families), {}
        for family in dict.fromkeys(cells.families):
            others = cells.take(np.flatnonzero(families != family))
            if not others.fit_for_use:
                continue
            fits[family] = Fitted.fit(others)
            for row in np.flatnonzero(families == family):
                for count, (guesses, difficulties) in found.items():
                    told = fits[family].predict(cells.signals[row], count)
                    guesses[row], difficulties[row] = told.value, told.difficulty
        return CrossFit(found, fits)


@dataclass(frozen=True)
class Width:
    """Half-width of an interval by the difficulty of the estimate: a conformal factor times an expected error.

    Attributes:
        count: Number of maps whose median is the estimate.
        factor: Quantile of the errors at home, relative to the expected errors.
        exponent: Exponent by which the expected error grows with the difficulty.
        least: Smallest expected error.
        unit: Distance from the score at home to that of a useless model.
        is_claimed: Whether there were enough families for an interval of 90 %.
        growing: The width whose errors grow in proportion to the difficulty, if those of this one are constant.
    """

    count: int
    factor: float
    exponent: float
    least: float
    unit: float
    is_claimed: bool
    growing: Width | None = None

    def __call__(self, difficulty: float, *, cautious: bool = False) -> float:
        expected = self.least + self.unit * float(max(difficulty, 0.0) ** self.exponent)
        own = min(1.0, self.factor * expected)
        return max(own, self.growing(difficulty)) if cautious and self.growing is not None else own


def fit_width(
    guesses: Mapping[int, tuple[Floats, Floats]],
    scores: Floats,
    families: Sequence[str],
    least: float,
    unit: float,
) -> Width | None:
    """Fit the number of maps and the width of intervals to the errors of rehearsed estimates.

    Each family counts once, by its worst shift. Of all numbers of maps and exponents, the pair with the narrowest
    median interval is taken.

    Args:
        guesses: Estimates and their difficulties, `[F]` each, by the number of maps. Each estimate was made without the
            family of its shift; NaN if nothing could be estimated.
        scores: True scores `[F]`.
        families: Families of the shifts.
        least: Smallest expected error.
        unit: Distance from home to a useless model.

    Returns:
        The width; None if there are no estimates.
    """
    of_family = np.array(families)
    widths: list[tuple[float, Width]] = []
    for count, (values, difficulties) in guesses.items():
        errors = np.abs(values - scores)
        known = np.isfinite(errors)
        groups = [known & (of_family == family) for family in dict.fromkeys(families)]
        groups = [group for group in groups if group.any()]
        if not groups:
            return None
        rank = math.ceil((len(groups) + 1) * LEVEL - 1e-9)
        tried = []
        for exponent in EXPONENTS:
            ratios = errors / (least + unit * np.maximum(difficulties, 0.0) ** exponent)
            worst = sorted(float(ratios[group].max()) for group in groups)
            factor = worst[min(rank, len(worst)) - 1]
            tried.append(Width(count, factor, exponent, least, unit, is_claimed=rank <= len(worst)))
        for width in tried:
            median = float(np.median([width(value) for value in difficulties[known]]))
            widths.append((median, width if width.exponent else replace(width, growing=tried[1])))
    return min(widths, key=lambda one: one[0])[1]


def cross_fit(record: Rehearsal, estimator: Estimator | None = None) -> Rehearsal:
    """Estimate the score of each rehearsed shift as if its family had not been rehearsed.

    The maps from signals to scores are ranked and fitted on the other families. The best candidate is chosen as `auto`
    would choose it. So `estimates - scores` approximates the error on a new kind of shift.

    Args:
        record: A rehearsal with scores and signals. It is not changed.
        estimator: An estimator of `record`, which stores the fitted maps for later use. A new one by default.

    Returns:
        A copy of `record` with new `estimates`, `scales` (the difficulties) and `chosen`. Missing estimates are NaN.
    """
    estimator = Estimator(record) if estimator is None else estimator
    shape = (len(record.shifts), len(record.sizes), len(record.candidates) + 1)
    estimates, difficulties = np.full(shape, np.nan), np.full(shape, np.nan)
    chosen = np.zeros(shape[:2])
    for size in range(len(record.sizes)):
        every = {name: Cells.of(record, name, size) for name in record.candidates}
        guesses = {name: estimator.cross_fit(name, size, cells).guesses for name, cells in every.items()}
        for family in record.families:
            for shift in (place for place, one in enumerate(record.shifts) if one.family == family):
                told = {}
                for place, (name, cells) in enumerate(every.items()):
                    found = _estimate_left_out(cells, guesses[name], family, shift)
                    if found is not None:
                        value, difficulties[shift, size, place], half = found
                        estimates[shift, size, place] = from_scale(record.task, value)
                        told[name] = value, half
                name = choose(told, record.higher_is_better, every[UNTOUCHED].least, WIDEST[record.task])
                best = record.index(name) if told else 0
                chosen[shift, size] = best
                for table in (estimates, difficulties):
                    table[shift, size, -1] = table[shift, size, best]
    as_tensor = [torch.from_numpy(table).float() for table in (estimates, difficulties, chosen)]
    return replace(record, estimates=as_tensor[0], scales=as_tensor[1], chosen=as_tensor[2])


def _estimate_left_out(
    cells: Cells, guesses: Mapping[int, tuple[Floats, Floats]], family: str, shift: int
) -> tuple[float, float, float] | None:
    """Return estimate, difficulty and half-width of a shift; the number of maps is chosen without its family."""
    if shift not in cells.places:
        return None
    row, outside = cells.places.index(shift), np.array(cells.families) != family
    others = {count: (values[outside], hard[outside]) for count, (values, hard) in guesses.items()}
    families = [one for one in cells.families if one != family]
    width = fit_width(others, cells.scores[outside], families, cells.least, cells.unit)
    if width is None or not math.isfinite(guesses[width.count][0][row]):
        return None
    value, difficulty = (float(one[row]) for one in guesses[width.count])
    return value, difficulty, width(difficulty)


GAIN_IN_WIDTHS = 0.1
"""Gain, relative to the half-widths of both intervals, below which the untouched model is kept."""
GAIN_IN_WIDE_WIDTHS = 0.2
"""The same for a candidate whose interval is too wide to be told. Of 0.1, 0.2 and 0.3, the two lower mend 3 points more
between gas boards (56 cells) and lose nothing on the stored cells of EMNIST, CIFAR-10 and digits."""
OVERWHELMING = 0.2
"""Gain in accuracy over the upper bound of the untouched model above which doubts are ignored."""


def choose(
    told: Mapping[str, tuple[float, float]],
    higher_is_better: bool = True,
    least: float = MIN_ERROR,
    widest: float = MAX_HALF_WIDTH,
    once_chosen: Mapping[str, tuple[int, float]] | None = None,
    references: Mapping[str, tuple[float, float]] | None = None,
) -> str:
    """Choose the candidate with the best estimate; keep the untouched model unless another is clearly better.

    Args:
        told: Estimate and half-width by candidate. The caller leaves out invalid estimates.
        higher_is_better: False for errors.
        least: Gain that is too small to count in any case.
        widest: Half of the widest interval that is worth telling. Beyond it, more gain is asked for.
        once_chosen: For each candidate, how close its features are to home (2: as those of good models in the
            rehearsal; 0: farther than those of all but poor ones; 1: between), and the half-width of its estimate once
            chosen. If the best estimate is too wide to be told, closeness is compared first.
        references: For each candidate, estimate and half-width of the untouched model that the candidate is compared
            with. Without an entry, that is the untouched model's own estimate.

    Returns:
        Name of the candidate.

    Example:
        >>> choose({"source-only": (0.5, 0.05), "bufr": (0.85, 0.03)})
        'bufr'
        >>> choose({"source-only": (0.84, 0.05), "bufr": (0.85, 0.03)})
        'source-only'
    """
    sign = 1.0 if higher_is_better else -1.0
    clear: dict[str, float] = {}
    for name, (value, half) in told.items():
        if name == UNTOUCHED:
            continue
        own = told.get(UNTOUCHED, (-sign * math.inf, 0.0))
        reference, around = own if references is None else references.get(name, own)
        share = GAIN_IN_WIDTHS if half <= widest else GAIN_IN_WIDE_WIDTHS
        close, width = (2, 0.0) if once_chosen is None else once_chosen[name]
        if close == 0 and width > widest:
            continue
        if sign * (value - reference) > least + share * (half + around):
            clear[name] = sign * value
    if not clear:
        return UNTOUCHED
    best = max(clear, key=lambda name: clear[name])
    if once_chosen is None or once_chosen[best][1] <= widest:
        return best
    return max(clear, key=lambda name: (once_chosen[name][0], clear[name]))


# ---- estimates at the site


def fits_sizes(sizes: Sequence[int], samples: int) -> bool:
    """Return whether a number of samples is near enough to the rehearsed sizes."""
    return MIN_SIZE_RATIO * sizes[0] <= samples <= MAX_SIZE_RATIO * sizes[-1]


def weigh_sizes(sizes: Sequence[int], samples: int) -> list[tuple[int, float]]:
    """Return the indices of the rehearsed sizes nearest to a number of samples, with their weights.

    Example:
        >>> [(size, round(weight, 3)) for size, weight in weigh_sizes((100, 10_000), 1_000)]
        [(0, 0.5), (1, 0.5)]
    """
    place = float(np.interp(math.log(max(1, samples)), np.log(sizes), np.arange(len(sizes))))
    lower, share = int(place), place - int(place)
    both = [(lower, 1 - share), (min(lower + 1, len(sizes) - 1), share)]
    return [(size, weight) for size, weight in both if weight > 0]


@dataclass(frozen=True)
class Limits:
    """Limits of the verdict that a rehearsal taught, for one method and number of samples.

    Attributes:
        restored: Divergence of the slices up to which features count as restored; 0 if good and poor models had the
            same divergences.
        failed: Divergence of the slices above which features count as not restored.
        marginals: Largest divergence of single features and logits of good models.
    """

    restored: float
    failed: float
    marginals: float


def learn_limits(record: Rehearsal, candidate: str | None, samples: int) -> Limits | None:
    """Learn from a rehearsal which divergences good and poor models of a method had.

    Features count as restored up to the largest divergence of good models that is below those of all poor ones, and
    as not restored above all divergences of models that were not poor.

    Args:
        record: The rehearsal in the profile.
        candidate: Name of the method; `source-only` for the untouched model.
        samples: Number of samples at the site. Between two rehearsed sizes, limits are interpolated.

    Returns:
        The limits; None if the method or such a number of samples was not rehearsed, or no model was good.
    """
    if candidate not in record.candidates or not fits_sizes(record.sizes, samples):
        return None
    found = []
    for size, weight in weigh_sizes(record.sizes, samples):
        cells = Cells.of(record, candidate, size)
        if not {"slices", "marginals"} <= set(cells.names):
            return None
        slices, marginals = (cells.signals[:, cells.names.index(name)] for name in ("slices", "marginals"))
        loss = cells.home - cells.scores if record.higher_is_better else (cells.scores - cells.home) / cells.home
        good, poor = loss <= GOOD, loss > POOR
        if not good.any():
            return None
        least_poor = float(slices[poor].min()) if poor.any() else math.inf
        below = good & (slices < least_poor)
        restored = min(float((1 + LIMIT_MARGIN) * slices[below].max()), least_poor) if below.any() else 0.0
        failed = max([float((1 + LIMIT_MARGIN) * slices[~poor].max()), *([least_poor] if poor.any() else [])])
        most = float((1 + LIMIT_MARGIN) * marginals[below if below.any() else good].max())
        found.append((weight, (restored, failed, most)))
    return Limits(*(sum(weight * one[place] for weight, one in found) for place in range(3)))


class Estimator:
    """Estimates for one rehearsed model, with maps that are fitted once per candidate.

    Between two rehearsed sizes, predictions are interpolated in the logarithm of the number of samples.

    Args:
        record: The rehearsal in the profile.
        without: A family of shifts whose cells no map is fitted to, as if nobody had rehearsed them.
    """

    def __init__(self, record: Rehearsal, without: str | None = None) -> None:
        self.record, self.without = record, without
        self._fits: dict[tuple[str, int, tuple[str, ...]], Fitted] = {}
        self._widths: dict[tuple[str, int, tuple[str, ...]], Width | None] = {}
        self._crossed: dict[tuple[str, int, tuple[str, ...]], CrossFit] = {}

    def leave_out(self, family: str) -> Estimator:
        """Return an estimator that does not know a family of shifts, but how wide intervals are."""
        other = Estimator(self.record, family)
        # Widths come from errors of shifts that were left out, each with its family, so that they can be shared.
        other._widths, other._crossed = self._widths, self._crossed
        return other

    def cross_fit(self, candidate: str, size: int, cells: Cells) -> CrossFit:
        """Leave each family out of the cells of a candidate, once."""
        key = candidate, size, cells.names
        if key not in self._crossed:
            self._crossed[key] = CrossFit.fit(cells)
        return self._crossed[key]

    def predict(self, candidate: str, signals: Mapping[str, float], samples: int) -> Prediction | None:
        """Predict the score of a candidate; None if too little was rehearsed, or no known signal was measured."""
        finite = {name: value for name, value in signals.items() if math.isfinite(value)}
        parts = []
        for size, weight in weigh_sizes(self.record.sizes, samples):
            fit, width = self._fit(candidate, size, finite), self._fit_width(candidate, size, finite)
            if fit is None or width is None:
                return None
            parts.append((weight, fit.predict(np.array([finite[name] for name in fit.cells.names]), width.count)))
        value, difficulty, spread = (
            sum(weight * getattr(told, name) for weight, told in parts) for name in ("value", "difficulty", "spread")
        )
        return Prediction(value, difficulty, spread, parts[-1][1].used)

    def _fit(self, candidate: str, size: int, signals: Mapping[str, Any]) -> Fitted | None:
        if candidate not in self.record.candidates:
            return None
        cells = Cells.of(self.record, candidate, size).restrict(signals)
        if self.without in cells.families:
            return self.cross_fit(candidate, size, cells).fits.get(self.without) if cells.names else None
        if not cells.fit_for_use:
            return None
        key = candidate, size, cells.names
        if key not in self._fits:
            self._fits[key] = Fitted.fit(cells)
        return self._fits[key]

    def find_obstacles(self, candidate: str, signals: Mapping[str, float], samples: int) -> list[str]:
        """List the reasons why nothing can be estimated for a candidate."""
        if not all(math.isfinite(value) for value in signals.values()):
            return ["the model gives values that are NaN or infinite"]
        obstacles = self._check_size(samples)
        if not self._list_fits(candidate, signals, samples):
            obstacles.append(f"{name_candidate(candidate)} was not rehearsed")
        return obstacles

    def find_doubts(self, candidate: str, signals: Mapping[str, float], samples: int) -> list[str]:
        """List how a candidate's signals differ from everything that was rehearsed."""
        doubts = []
        known = self._list_fits(candidate, signals, samples)
        used = [fit.cells.names[place] for fit in known for place, _ in fit.ranked[: min(MAP_COUNTS)]]
        for name in dict.fromkeys(["slices", "skew", *used]):
            rehearsed = [fit.cells.signals[:, fit.cells.names.index(name)] for fit in known if name in fit.cells.names]
            if rehearsed:
                chance = self._find_chance(name, signals[name], samples)
                remark = _check_range(np.concatenate(rehearsed), name, signals[name], chance)
                doubts += [remark] if remark else []
        for fit in known:
            values = np.array([signals[name] for name in fit.cells.names])
            spreads = {count: fit.predict(values, count).spread for count in MAP_COUNTS}
            if all(
                spread > MAX_SPREAD_RATIO * fit.largest_spread[count] + fit.cells.least
                for count, spread in spreads.items()
            ):
                doubts.append("the signals contradict each other more than they ever did at home")
                break
        return doubts

    def _find_chance(self, name: str, value: float, samples: int) -> float:
        """Return how far chance moves a signal on the samples of the site and of home, at most; 0 if unknown."""
        deviation = self._describe_home(name, samples)[1]
        if not math.isfinite(deviation):
            share = min(max(value, 0.0), 1.0) if self.record.task == "classes" else 0.0
            both = 1 / samples + 1 / self.record.samples
            deviation = math.sqrt(share * (1 - share) * both * self.record.design_effect)
        return NORMAL_QUANTILE * deviation

    def _list_fits(self, candidate: str, signals: Mapping[str, float], samples: int) -> list[Fitted]:
        fits = [self._fit(candidate, size, signals) for size, _ in weigh_sizes(self.record.sizes, samples)]
        return [fit for fit in fits if fit is not None]

    def _check_size(self, samples: int) -> list[str]:
        sizes = self.record.sizes
        needed = math.ceil(MIN_SIZE_RATIO * sizes[0])
        if samples < needed:
            return [f"there are too few samples ({samples}; at least {needed} are needed)"]
        if samples > MAX_SIZE_RATIO * sizes[-1]:
            return [f"there are far more samples ({samples:,}) than were rehearsed ({sizes[-1]:,})"]
        return []

    def choose(
        self,
        readings: Mapping[str, Mapping[str, float]],
        samples: int,
        strict: Collection[str] = (),
        only: Collection[str] | None = None,
        forcing: Collection[str] = (),
    ) -> str:
        """Choose among candidates by their signals.

        Candidates whose signals are unlike everything that was rehearsed take part only if the untouched model has
        failed both by its estimate and by its own confidence.

        Args:
            readings: Signals by candidate, the untouched model among them.
            samples: Samples at the site.
            strict: Candidates that take part only if their estimate could be told.
            only: Candidates that take part at all; None for all of them.
            forcing: Candidates that bring features home whatever the class shares are. If their estimate could not be
                told, they take part only if their interval lies wholly on the better side of the untouched model's.
        """
        told: dict[str, tuple[float, float]] = {}
        readings = {name: signals for name, signals in readings.items() if only is None or name in only}
        for name, signals in readings.items():
            prediction = self.predict(name, signals, samples)
            if prediction is not None and (name == UNTOUCHED or not self.find_obstacles(name, signals, samples)):
                half, _ = self.find_width(name, signals, samples, prediction.difficulty)
                told[name] = prediction.value, half

        def takes_part(name: str) -> bool:
            if name == UNTOUCHED:
                return True
            is_wide = told[name][1] > self._widest
            if is_wide and (name in strict or (name in forcing and not self._is_apart(name, readings, samples))):
                return False
            if name not in strict and self._is_overwhelming(told[name][0], told.get(UNTOUCHED), readings[UNTOUCHED]):
                return True
            return not self.find_doubts(name, readings[name], samples)

        held = {name: one for name, one in told.items() if takes_part(name)}
        least = Cells.of(self.record, UNTOUCHED, -1).least
        once_chosen = {name: self._describe_choice(name, readings[name], samples) for name in held}
        references = self._find_references(held, readings, samples) if UNTOUCHED in held else None
        return choose(held, self.record.higher_is_better, least, self._widest, once_chosen, references)

    def _find_references(
        self, told: Mapping[str, tuple[float, float]], readings: Mapping[str, Mapping[str, float]], samples: int
    ) -> dict[str, tuple[float, float]]:
        """Return estimate and half-width of the untouched model, as each candidate's estimate and agreement tell it.

        The untouched model's own maps may say little where its agreement with a good candidate says much.
        """
        own, found, sign = told[UNTOUCHED], {}, 1.0 if self.record.higher_is_better else -1.0
        for name, (value, half) in told.items():
            ends = self._place_ends(value, half)
            bound = self._bound_by_agreement(name, readings[UNTOUCHED], samples, ends)
            if bound is not None:
                low, before, high = (float(to_scale(self.record.task, one)) for one in bound)
                around = max(high - before, before - low)
                if around < own[1]:
                    # Agreement may tell too little, so that its own estimate has to be beaten as well.
                    found[name] = sign * max(sign * before, sign * own[0]), around
        return found

    def looks_good(self, candidate: str, signals: Mapping[str, float], samples: int) -> bool:
        """Return whether a candidate's features are as close to home as those of good models in the rehearsal."""
        limits = learn_limits(self.record, candidate, samples)
        return limits is not None and signals["slices"] <= limits.restored and signals["marginals"] <= limits.marginals

    def _describe_choice(self, candidate: str, signals: Mapping[str, float], samples: int) -> tuple[int, float]:
        """Return closeness to home and half-width of a candidate, as `choose` takes them."""
        prediction, limits = self.predict(candidate, signals, samples), learn_limits(self.record, candidate, samples)
        assert prediction is not None
        half, _ = self.find_width(candidate, signals, samples, prediction.difficulty, chosen=True)
        if self.looks_good(candidate, signals, samples):
            return 2, half
        return int(limits is None or signals["slices"] <= limits.failed), half

    def _is_apart(self, candidate: str, readings: Mapping[str, Mapping[str, float]], samples: int) -> bool:
        """Return whether a candidate's interval lies wholly on the better side of the untouched model's.

        Intervals are the cautious ones, with errors that may grow with the difficulty.
        """
        gain, widths = 0.0, 0.0
        for name, sign in ((candidate, 1.0), (UNTOUCHED, -1.0)):
            told = self.predict(name, readings[name], samples) if name in readings else None
            if told is None:
                return False
            gain += sign * told.value
            widths += self.find_width(name, readings[name], samples, told.difficulty, cautious=True)[0]
        return (gain if self.record.higher_is_better else -gain) > widths

    def _is_overwhelming(
        self, value: float, untouched: tuple[float, float] | None, signals: Mapping[str, float]
    ) -> bool:
        if untouched is None or self.record.task != "classes" or "confidence" not in signals:
            return False
        return value > max(untouched[0], signals["confidence"]) + OVERWHELMING

    def find_width(
        self,
        candidate: str,
        signals: Mapping[str, Any],
        samples: int,
        difficulty: float,
        *,
        chosen: bool = False,
        cautious: bool = False,
    ) -> tuple[float, bool]:
        """Return the half-width of an estimate's interval, and whether the interval has the level of 90 %.

        Args:
            candidate: Name of the candidate.
            signals: Signals that the site could measure.
            samples: Number of samples at the site.
            difficulty: Difficulty of the estimate.
            chosen: Whether `auto` chose the candidate. If so, the wider of two intervals is used.
            cautious: Whether errors may grow with the difficulty although they looked constant at home.

        Returns:
            The half-width without sampling noise, and whether there are the nine families that a level of 90 % needs.
        """
        total, is_claimed = 0.0, True
        for size, weight in weigh_sizes(self.record.sizes, samples):
            found = [self._fit_width(candidate, size, signals)]
            if chosen:
                found.append(self._fit_width_of_auto(size))
            known = [width for width in found if width is not None]
            is_claimed &= len(known) == len(found) and all(width.is_claimed for width in known)
            cells = Cells.of(self.record, candidate, size)
            halves = [width(difficulty, cautious=cautious) for width in known]
            total += weight * max(halves, default=cells.unit)
        return total, is_claimed

    def _fit_width(self, candidate: str, size: int, signals: Mapping[str, Any]) -> Width | None:
        if candidate not in self.record.candidates:
            return None
        cells = Cells.of(self.record, candidate, size).restrict(signals)
        key = candidate, size, cells.names
        if key not in self._widths:
            guesses = self.cross_fit(candidate, size, cells).guesses if cells.names else {}
            found = fit_width(guesses, cells.scores, cells.families, cells.least, cells.unit) if guesses else None
            self._widths[key] = found
        return self._widths[key]

    def _fit_width_of_auto(self, size: int) -> Width | None:
        record, cells = self.record, Cells.of(self.record, UNTOUCHED, size)
        estimates, difficulties = (one[:, size, -1].double().numpy() for one in (record.estimates, record.scales))
        scores = record.chosen_scores()[:, size].double().numpy()
        values, scores = (to_scale(record.task, one) for one in (estimates, scores))
        families = [shift.family for shift in record.shifts]
        return fit_width({max(MAP_COUNTS): (values, difficulties)}, scores, families, cells.least, cells.unit)

    def estimate(
        self,
        candidate: str,
        signals: Mapping[str, float],
        samples: int,
        *,
        chosen: bool = False,
        reasons: Sequence[str] = (),
        distance: float = 0.0,
    ) -> Estimate:
        """Estimate the score of a candidate at the site.

        Args:
            candidate: Name of the candidate.
            signals: Its signals.
            samples: Samples they were read from.
            chosen: Whether `auto` chose the candidate, which makes its estimate a little too good.
            reasons: Further reasons for which the estimate does not hold.
            distance: Total variation between the class shares that the candidate was compared for and those of home.
                The interval grows with it, as errors did at the rehearsed sites.
        """
        found = [*reasons, *self.find_obstacles(candidate, signals, samples)]
        found += self.find_doubts(candidate, signals, samples) if not found else []
        told = self.predict(candidate, signals, samples)
        if told is None:
            return Estimate(None, None, None, self.record.metric, tuple(found))
        width, is_claimed = self.find_width(candidate, signals, samples, told.difficulty, chosen=chosen)
        chance = NORMAL_QUANTILE * self._sampling_error(told.value, samples)
        by_distance = self.record.find_share_error(candidate)
        if by_distance is None and distance > UNREHEARSED_DISTANCE:
            found.append("too few rehearsed sites with other class shares got an estimate")
        if far := self.check_distance(distance):
            found.append(far)
        half = math.hypot(width, chance, (by_distance or 0.0) * distance)
        if half > self._widest or len(self.record.families) < MANY_FAMILIES:
            width, _ = self.find_width(candidate, signals, samples, told.difficulty, chosen=chosen, cautious=True)
            half = math.hypot(width, chance, (by_distance or 0.0) * distance)
        low, value, high = self._place_ends(told.value, half)
        if not is_claimed:
            reasons = [*found, TOO_MUCH_OPEN] if not found and half > self._widest else found
            if reasons:
                return Estimate(None, None, None, self.record.metric, tuple(reasons), (value, None, None))
            return Estimate(value, None, None, self.record.metric)
        if found:
            return Estimate(None, None, None, self.record.metric, tuple(found), (value, low, high))
        return self._tell(low, value, high)

    def check_distance(self, distance: float) -> str | None:
        """Return a reason if class shares are farther from home than behind any rehearsed device, and None otherwise.

        So far from home, a candidate with free class shares may find wrong shares and still bring the features home.

        Args:
            distance: Total variation between the class shares at the site and those of home.
        """
        farthest = self.record.find_farthest_shares()
        if farthest is None or distance <= MAX_DISTANCE_RATIO * farthest:
            return None
        return (
            f"class shares differ more from home than in the rehearsal ({distance:.2f}, rehearsed up to {farthest:.2f})"
        )

    def _place_ends(self, value: float, half: float) -> tuple[float, float, float]:
        """Return lower end, value and upper end of an interval, as scores, from the scale of the maps."""
        task = self.record.task
        low, middle, high = (float(from_scale(task, one)) for one in (value - half, value, value + half))
        return (max(0.0, low), middle, min(1.0, high)) if task == "classes" else (low, middle, high)

    def _measure_half(self, low: float, value: float, high: float) -> float:
        """Return the larger half of an interval of scores, on the scale of the maps."""
        ends = [float(to_scale(self.record.task, one)) for one in (low, value, high)]
        return max(ends[1] - ends[0], ends[2] - ends[1])

    def _tell(self, low: float, value: float, high: float, reason: str = TOO_MUCH_OPEN) -> Estimate:
        """Tell a score with its interval; the interval alone if it is wide; only the reason if it is very wide."""
        half, metric, task = self._measure_half(low, value, high), self.record.metric, self.record.task
        if half <= WIDEST[task]:
            return Estimate(value, low, high, metric)
        shown = half <= WIDEST_RANGE[task]
        ends = (low, high) if shown else (None, None)
        return Estimate(None, ends[0], ends[1], metric, (reason,), (value, low, high))

    def estimate_before(
        self,
        own: Estimate,
        after: Estimate,
        candidate: str,
        signals: Mapping[str, float],
        samples: int,
        *,
        distance: float = 0.0,
    ) -> Estimate:
        """Estimate the score of the untouched model from its agreement with an adapted model whose score is known.

        Where both models agree, the untouched model is as good as the adapted one. So its accuracy differs from the
        share of equal predictions by at most the adapted model's error. The rehearsal teaches what part of that error
        it is, for each agreement. The errors of a regression are bounded likewise, by the triangle inequality.

        Args:
            own: Estimate from the untouched model's own maps.
            after: Estimate of the adapted model on the same samples.
            candidate: Name of the adapted model's method.
            signals: Signals of the untouched model, its agreement with that method among them.
            samples: Number of samples that the signals come from.
            distance: As for `estimate`. At other class shares, nothing but the bound itself is used.

        Returns:
            The estimate with the narrower interval; `own` if the agreement tells nothing.
        """
        if after.value is None or after.low is None or after.high is None:
            return own
        ends = after.low, after.value, after.high
        bound = self._bound_by_agreement(candidate, signals, samples, ends, distance=distance)
        if bound is None:
            return own
        low, value, high = (float(to_scale(self.record.task, one)) for one in bound)
        chance = NORMAL_QUANTILE * self._sampling_error(value, samples)
        lower, upper = math.hypot(value - low, chance), math.hypot(high - value, chance)
        told = self._tell(self._place_ends(value, lower)[0], bound[1], self._place_ends(value, upper)[2])
        if told.low is None or told.high is None:
            return own
        if own.low is not None and own.high is not None and own.high - own.low <= told.high - told.low:
            return own
        return told

    def _bound_by_agreement(
        self,
        candidate: str,
        signals: Mapping[str, float],
        samples: int,
        after: tuple[float, float, float],
        *,
        distance: float = 0.0,
    ) -> tuple[float, float, float] | None:
        """Bound the untouched model's score by its agreement with an adapted model.

        Args:
            candidate: Name of the adapted model's method.
            signals: Signals of the untouched model.
            samples: Number of samples that the signals come from.
            after: Lower end, value and upper end of the adapted model's estimate.
            distance: As for `estimate`.

        Returns:
            Lower end, value and upper end without sampling noise; None if the agreement tells nothing.
        """
        agreement = signals.get(f"agreement with {candidate}", math.nan)
        if candidate == UNTOUCHED or not all(math.isfinite(value) for value in (agreement, *signals.values())):
            return None
        parts = []
        for size, weight in weigh_sizes(self.record.sizes, samples):
            found = self._fit_part_of_error(candidate, size, agreement)
            if found is None:
                return None
            parts.append((weight, found))
        part, around = (sum(weight * found[place] for weight, found in parts) for place in range(2))
        if distance > UNREHEARSED_DISTANCE:
            around = 2.0
        lowest, highest = max(-1.0, part - around), min(1.0, part + around)
        low, value, high = after
        base, (error,) = self._convert_agreement(agreement), self._convert_to_errors(value)
        errors = [max(0.0, one) for one in self._convert_to_errors(low, high)]
        low = max(0.0, min(base + lowest * one for one in errors))
        high = max(base + highest * one for one in errors)
        return low, min(max(base + part * error, low), high), high

    def _convert_agreement(self, agreement: float) -> float:
        """Return the share of equal predictions; for a regression, the root mean square difference in its unit."""
        if self.record.task == "classes":
            return agreement
        return -agreement * float(self.record.output_deviation.square().mean().sqrt())

    def _convert_to_errors(self, *scores: float) -> list[float]:
        """Return the error rates of accuracies; the scores of a regression are errors already."""
        return [1 - score if self.record.task == "classes" else score for score in scores]

    def _fit_part_of_error(self, candidate: str, size: int, agreement: float) -> tuple[float, float] | None:
        """Fit by which part of a candidate's error the untouched model's score differs from their agreement.

        Returns:
            The part, between -1 and 1, and how far it was off for nine in ten of the families that were left out; None
            if too little was rehearsed.
        """
        record, name = self.record, f"agreement with {candidate}"
        if candidate not in record.candidates or name not in record.signals:
            return None
        if record.task == "quantities" and record.output_deviation.numel() != 1:
            return None
        known = record.values[:, size, 0, record.signals.index(name)].double().numpy()
        before, after = (record.scores[:, size, place].double().numpy() for place in (0, record.index(candidate)))
        families = np.array([shift.family for shift in record.shifts])
        rows = np.isfinite(known) & np.isfinite(before) & np.isfinite(after) & (families != (self.without or ""))
        known, before, after, families = known[rows], before[rows], after[rows], families[rows]
        if len(known) < MIN_CELLS:
            return None
        bases = np.array([self._convert_agreement(value) for value in known])
        errors = np.maximum(self._convert_to_errors(*after), 1e-6)
        parts = np.clip((before - bases) / errors, -1.0, 1.0)

        def predict(rows: NDArray[np.bool_], values: Floats) -> Floats:
            fitted = FITS["monotone"](known[rows], parts[rows])
            return np.array([fitted(value) for value in values])

        worst = []
        for family in dict.fromkeys(families):
            inside = families == family
            worst.append(float(np.abs(predict(~inside, known[inside]) - parts[inside]).max()))
        rank = math.ceil((len(worst) + 1) * LEVEL - 1e-9)
        if rank > len(worst):
            return None
        return float(predict(np.isfinite(known), np.array([agreement]))[0]), sorted(worst)[rank - 1]

    def measure_share_error(
        self, candidate: str, signals: Mapping[str, float], samples: int, score: float, distance: float
    ) -> float | None:
        """Return by how much an estimate errs beyond its interval, in each unit of the distance between class shares.

        Args:
            candidate: Name of a candidate that leaves class shares free.
            signals: Its signals at a site with other class shares, drawn from home.
            samples: Samples they were read from.
            score: True score of the candidate there.
            distance: As for `estimate`.

        Returns:
            The error, 0 within the interval; None if the estimate does not hold anyway, or shares are those of home.
        """
        told = self.predict(candidate, signals, samples)
        if told is None or not distance > 0 or self.find_obstacles(candidate, signals, samples):
            return None
        if self.find_doubts(candidate, signals, samples):
            return None
        width, _ = self.find_width(candidate, signals, samples, told.difficulty)
        half = math.hypot(width, NORMAL_QUANTILE * self._sampling_error(told.value, samples))
        if half > self._widest:
            return None
        error = told.value - float(to_scale(self.record.task, score))
        return math.sqrt(max(0.0, error**2 - half**2)) / distance

    @property
    def _widest(self) -> float:
        """Largest half-width of an interval whose value is told, on the scale of the maps."""
        return WIDEST[self.record.task]

    def _sampling_error(self, value: float, samples: int) -> float:
        """Return the standard error of a score, on the scale of the maps, from the samples at the site and at home.

        Where home samples come in groups, those of the site are assumed to come in groups of the same size.
        """
        both = self.record.design_effect * (1 / samples + 1 / self.record.samples)
        if self.record.task == "classes":
            share = min(max(value, 0.0), 1.0)
            return math.sqrt(max(share * (1 - share), 1e-6) * both)
        # The variance of a mean square depends on a few large squared errors; taking the root halves the relative
        # error, and the relative error is that of the logarithm.
        return math.sqrt(both * (self.record.error_kurtosis - 1) / 4)

    def estimate_at_home(self, samples: int) -> Estimate:
        """Return the score at home as the estimate for data that look like home data.

        The interval covers sampling noise, and the largest loss of a rehearsed device that this number of samples would
        not reveal.
        """
        record = self.record
        score = float(to_scale(record.task, record.score))
        chance = NORMAL_QUANTILE * self._sampling_error(score, samples)
        unnoticed = HOME_DEVIATIONS * self._describe_home("confidence", samples)[1]
        either = math.hypot(chance, unnoticed) if math.isfinite(unnoticed) else chance
        worse = max(either, math.hypot(chance, self._measure_unnoticed_loss(samples)))
        below, above = (worse, either) if record.higher_is_better else (either, worse)
        ends = self._place_ends(score, below)[0], self._place_ends(score, above)[2]
        return self._tell(ends[0], record.score, ends[1], f"a change could go unnoticed among {samples:,} samples")

    def _measure_unnoticed_loss(self, samples: int) -> float:
        """Return the largest loss of the untouched model that `is_at_home` would not notice, on the scale of the maps.

        Rehearsed devices are ordered by how far their most conspicuous signal is from home. Between those that pass for
        home and the next one, the loss is interpolated.
        """
        loss = 0.0
        for size, weight in weigh_sizes(self.record.sizes, samples):
            cells = Cells.of(self.record, UNTOUCHED, size)
            seen = np.zeros(len(cells.scores))
            for place, name in enumerate(cells.names):
                deviation = self._describe_home(name, samples)[1]
                if name == "transported confidence" or not math.isfinite(deviation):
                    continue
                beyond = cells.signals[:, place] - self.record.home_level(name, self.record.sizes[size])
                beyond = beyond if name in DIVERGING else np.abs(beyond)
                seen = np.maximum(seen, beyond / (deviation + 1e-6))
            order = np.argsort(seen)
            worse = cells.home - cells.scores if self.record.higher_is_better else cells.scores - cells.home
            largest = np.maximum.accumulate(np.maximum(worse, 0.0)[order])
            loss += weight * float(np.interp(HOME_DEVIATIONS, [0.0, *seen[order]], [0.0, *largest]))
        return loss

    def measure_hidden_loss(self, divergence: float, samples: int) -> float:
        """Return the largest loss of the untouched model that a device of a small divergence had at home.

        Args:
            divergence: Divergence of the slices, beyond that of unshifted data.
            samples: Number of samples at the site.
        """
        loss = 0.0
        for size, weight in weigh_sizes(self.record.sizes, samples):
            cells = Cells.of(self.record, UNTOUCHED, size)
            if "slices" in cells.names:
                slices = cells.signals[:, cells.names.index("slices")]
                order = np.argsort(slices)
                largest = np.maximum.accumulate(np.maximum(cells.home - cells.scores, 0.0)[order])
                loss += weight * float(np.interp(divergence, slices[order] - slices.min(), largest))
        return loss

    def estimate_with_shares(self, shares: Shares, hidden: float = 0.0) -> Estimate:
        """Estimate the score of the untouched model if only class shares changed.

        Each class is predicted as well as at home. The interval covers sampling noise, the uncertainty of the shares,
        and the largest loss of a device change that would go unnoticed. Where difficult classes are frequent, a device
        changes more answers, for better or worse, so that the loss grows with the expected error.

        Args:
            shares: Estimated class shares of the site.
            hidden: Loss that what chance and shares leave of the divergence may hide; see `measure_hidden_loss`.
        """
        record = self.record
        values = torch.tensor(shares.values, dtype=torch.float64)
        score = expect_accuracy(values, record)
        recalls = [expect_accuracy(one, record) for one in torch.eye(len(values), dtype=torch.float64)]
        ends = zip(shares.low, shares.high, recalls, strict=True)
        unknown = math.hypot(*((high - low) / 2 * (recall - score) for low, high, recall in ends))
        counts = record.confusion.double().sum(1)
        # The accuracy of a class comes from its samples at home, which may be few; one pseudo-count per outcome is
        # added.
        known = (record.confusion.double().diagonal() + 1) / (counts + 2)
        at_home = float((values.square() * known * (1 - known) / counts.clamp_min(1)).sum())
        variance = at_home + max(score * (1 - score), 1e-6) / shares.samples
        chance = NORMAL_QUANTILE * math.sqrt(record.design_effect * variance)
        harder = max(1.0, (1 - score) / max(1 - record.score, 1 / record.samples))
        half = math.hypot(chance, unknown, max(AS_CERTAIN, hidden * harder))
        low, high = max(0.0, score - half), min(1.0, score + half)
        if shares.reasons:
            return Estimate(None, None, None, record.metric, tuple(shares.reasons), (score, low, high))
        return self._tell(low, score, high, f"there are too few samples ({shares.samples})")

    def is_at_home(self, signals: Mapping[str, float], samples: int, *, grouped: bool = False) -> bool:
        """Return whether the untouched model's signals look like those of unshifted home data of the same size.

        Means and standard deviations at home are interpolated between the rehearsed sizes, in 1 / n and in the
        logarithm. Sampling noise of the home samples themselves is added.

        Args:
            signals: Signals of the untouched model.
            samples: Number of samples that the signals come from.
            grouped: Compare with draws of other groups, such as patients, instead of other samples. The range is wider
                and may hide a device.
        """
        if grouped and not self.record.groups:
            return False
        # Draws from home share its class shares, unlike a site. Transport reacts to that most, and skew covers it.
        compared = {name: value for name, value in signals.items() if name != "transported confidence"}
        deviations = {name: self._compare(name, value, samples, grouped) for name, value in compared.items()}
        known = {name: far for name, far in deviations.items() if far is not None}
        # Less divergence or skew than at home is no sign of a shift. Not a number is not at home either.
        strayed = [not (far if name in DIVERGING else abs(far)) <= HOME_DEVIATIONS for name, far in known.items()]
        return bool(known) and not any(strayed)

    def has_other_shares(self, signals: Mapping[str, float], samples: int, shares: Tensor | None = None) -> bool:
        """Return whether the untouched model is as confident as at home but predicts other classes.

        A new device lowers the confidence, or moves features out of their range at home. Other class shares do neither,
        and aligning features would then push samples into wrong classes.

        Args:
            signals: Signals of the untouched model.
            samples: Number of samples that the signals come from.
            shares: Share of each class among the predictions, `[classes]`. If given, the lower confidence in classes
                that are harder at home is taken into account.
        """
        if "skew" not in signals or "confidence" not in signals:
            return False
        skewed, certain = (self._compare(name, signals[name], samples) for name in ("skew", "confidence"))
        if skewed is None or certain is None:
            return False
        if not self.lies_in_range(signals, samples):
            return False
        mean, deviation = self._describe_home("confidence", samples)
        expected = mean + self._expect_change(shares)
        return skewed > HOME_DEVIATIONS and signals["confidence"] >= expected - AS_CERTAIN - 2 * deviation

    def lies_in_range(self, signals: Mapping[str, float], samples: int, margin: float = MAX_OUTSIDE) -> bool:
        """Return whether the features lie within their range at home, which only another device makes them leave.

        Home data that drifted away from the profile already lie outside. That hides a new device, so the answer is
        False.

        Args:
            signals: Signals of the untouched model.
            samples: Number of samples that the signals come from.
            margin: Share of the features that may lie outside beyond chance.
        """
        mean, deviation = self._describe_home("outside", samples)
        if not math.isfinite(mean):
            return True
        return mean <= MAX_OUTSIDE and signals.get("outside", 0.0) <= mean + HOME_DEVIATIONS * deviation + margin

    def _expect_change(self, shares: Tensor | None) -> float:
        """Return the change of confidence that other class shares cause, from the accuracy of each class at home."""
        if shares is None or len(shares) != len(self.record.confusion):
            return 0.0
        return expect_accuracy(shares, self.record) - self.record.score

    def _compare(self, name: str, value: float, samples: int, grouped: bool = False) -> float | None:
        """Return how many standard deviations a signal lies above its mean at home; None if home lacks the signal."""
        mean, deviation = self._describe_home(name, samples, grouped)
        return (value - mean) / (deviation + 1e-6) if math.isfinite(mean) and math.isfinite(deviation) else None

    def _describe_home(self, name: str, samples: int, grouped: bool = False) -> tuple[float, float]:
        """Return mean and standard deviation of a signal on unshifted home data of a size; NaN if there are none."""
        record = self.record
        if name not in record.signals:
            return math.nan, math.nan
        place = record.signals.index(name)
        sizes = np.array(record.sizes, dtype=float)
        table = record.group_deviation if grouped else record.home_deviation
        deviations = table[:, place].double().numpy()
        spread = [_scale_deviation(sizes, deviations, number) for number in (samples, record.samples)]
        return record.home_level(name, samples), math.hypot(*spread)


def _check_range(rehearsed: Floats, name: str, value: float, chance: float) -> str | None:
    """Return a remark if a signal lies outside of what was rehearsed, by more than chance.

    Less divergence than rehearsed, and more agreement, are on the good side. Maps are constant there, so that nothing
    better than rehearsed is told.
    """
    low, high = float(rehearsed.min()), float(rehearsed.max())
    margin = max(RANGE_MARGIN * (high - low), chance)
    too_low = name not in DIVERGING and not value >= low - margin
    too_high = not name.startswith("agreement") and not value <= high + margin
    if not (too_low or too_high):
        return None
    if name == "skew":
        return f"answers fall into other classes than ever at home (skew {value:.2f}, rehearsed up to {high:.2f})"
    return f"{name} {value:.3g} lies outside of what was rehearsed ({low:.3g} to {high:.3g})"


def _scale_deviation(sizes: Floats, deviations: Floats, samples: int) -> float:
    """Scale a standard deviation to a sample size by 1 / sqrt(n), from the nearest size."""
    nearest = int(np.argmin(np.abs(np.log(sizes / samples))))
    return float(deviations[nearest] * math.sqrt(sizes[nearest] / samples))
