"""The score at a site without labels, with an interval, from signals and a rehearsal.

Which signal goes with the score differs between models and candidates. So signals are ranked by how well they would
have predicted each rehearsed shift from the others, and the median of the best few is the estimate. How far such
estimates were off, with the whole family of a shift left out of ranking and fitting, gives the interval (conformal
prediction; the families are the units that are exchanged).

An estimate does not hold where the site looks like nothing that was rehearsed. It then says why and has no value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shiftmend.profiles.rehearsal import UNTOUCHED, Rehearsal, Task, format_score, name_candidate
from shiftmend.verification.maps import FITS, Floats

LEVEL = 0.9
"""Share of intervals that should hold the truth."""
MIN_FAMILIES = 9
"""Families below which no interval of that level can be had: the largest of eight errors covers eight ninths."""
BEST_MAPS = 3
"""Maps whose median is the estimate."""
MIN_CELLS = 5
"""Rehearsed shifts below which nothing is fitted."""
NORMAL_QUANTILE = 1.6449
"""Quantile of the normal distribution for a two-sided interval of 90 %."""

MIN_SCALE = 0.004
"""Smallest expected error of an accuracy, before the conformal factor."""
MIN_RELATIVE_SCALE = 0.02
"""The same for an error of a regression, as a share of the error at home."""
DISTANCE_SHARE = 1.0
"""Expected error that is added for each unit that an estimate lies below home: ruined models are harder to judge."""

RANGE_MARGIN = 0.1
"""Share of the rehearsed range of a signal by which a site may exceed it."""
MAX_SPREAD_RATIO = 1.5
"""Disagreement between the maps, as a multiple of the largest one at home, above which an estimate does not hold."""
MIN_SIZE_RATIO = 0.5
"""Samples at the site, as a share of the smallest rehearsed size, below which an estimate does not hold."""
MAX_SIZE_RATIO = 16.0
"""Samples at the site, as a multiple of the largest rehearsed size, above which an estimate does not hold."""
HOME_DEVIATIONS = 3.0
"""Deviations within which the signals of data count as those of home."""


@dataclass(frozen=True)
class Estimate:
    """A score without labels, with a 90 % interval.

    Attributes:
        value: The estimate, or None if it does not hold.
        low: Lower end of the interval; None without a value or with fewer than nine rehearsed families.
        high: Upper end of the interval.
        metric: `"accuracy"`, `"agreement"` (with the model's own clean answers), `"rmse"` or `"deviation"`.
        reasons: Why the estimate does not hold, in words.
        withheld: Value, low and high of an estimate that does not hold, for research. Do not show them to a user.
        labelled: Score of the few labelled samples alone as value, low, high and their number, if there were some.

    Example:
        >>> from shiftmend import Estimate
        >>> print(Estimate(0.853, 0.82, 0.87, "accuracy"))
        accuracy about 85.3 % (82.0 to 87.0)
        >>> Estimate(None, None, None, "accuracy", ("there are too few samples",)).reliable
        False
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
        """True if the estimate holds."""
        return self.value is not None

    @property
    def task(self) -> Task:
        """Kind of the score."""
        return "classes" if self.metric in ("accuracy", "agreement") else "quantities"

    def to_json(self) -> dict[str, Any]:
        """Return the estimate for a manifest. A withheld value is left out, so that nobody misreads it."""
        facts: dict[str, Any] = {name: getattr(self, name) for name in ("value", "low", "high", "metric", "reliable")}
        facts["reasons"] = list(self.reasons)
        if self.labelled is not None:
            facts["labelled"] = dict(zip(("value", "low", "high", "samples"), self.labelled, strict=True))
        return facts

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.metric} cannot be told: {'; '.join(self.reasons) or 'nothing was rehearsed'}"
        text = f"{self.metric} about {format_score(self.value, self.task)}"
        if self.low is not None and self.high is not None:
            ends = [format_score(end, self.task).removesuffix(" %") for end in (self.low, self.high)]
            text += f" ({ends[0]} to {ends[1]})"
        return text

    def with_labels(self, correct: int, samples: int) -> Estimate:
        """Combine the estimate with a few labelled samples of the site.

        The estimate counts as a beta distribution of its mean and width, to which the labelled samples are added. An
        estimate that does not hold gives way to the labelled samples alone.

        Args:
            correct: Labelled samples that the model answers correctly.
            samples: Labelled samples, at least one.

        Returns:
            The combined estimate; `labelled` has the samples alone.

        Example:
            >>> from shiftmend import Estimate
            >>> both = Estimate(0.8, 0.7, 0.9, "accuracy").with_labels(45, 50)
            >>> print(both)
            accuracy about 85.4 % (79.0 to 91.0)
        """
        alone = _beta_interval(1 + correct, 1 + samples - correct)
        few = (correct / samples, *alone, samples)
        if self.value is None or self.low is None or self.high is None:
            return replace(self, value=few[0], low=few[1], high=few[2], reasons=(), labelled=few)
        mean = min(max(self.value, 1e-4), 1 - 1e-4)
        deviation = max((self.high - self.low) / (2 * NORMAL_QUANTILE), 1e-4)
        strength = max(mean * (1 - mean) / deviation**2 - 1, 1.0)
        first, second = mean * strength + correct, (1 - mean) * strength + samples - correct
        low, high = _beta_interval(first, second)
        return replace(self, value=first / (first + second), low=low, high=high, labelled=few)


def _beta_interval(first: float, second: float) -> tuple[float, float]:
    """Return the central 90 % of a beta distribution, by its density on a fine grid."""
    grid = (np.arange(20_000) + 0.5) / 20_000
    logarithm = (first - 1) * np.log(grid) + (second - 1) * np.log1p(-grid)
    below = np.cumsum(np.exp(logarithm - logarithm.max()))
    ends = np.interp([(1 - LEVEL) / 2, (1 + LEVEL) / 2], below / below[-1], grid)
    return float(ends[0]), float(ends[1])


# ---- predicting one candidate's score


@dataclass(frozen=True)
class Prediction:
    """What the maps say of one candidate.

    Attributes:
        value: Median of the best maps.
        scale: Expected size of the error, before the conformal factor.
        spread: Largest distance between two of the maps that were looked at.
        used: Names of the signals behind the value.
    """

    value: float
    scale: float
    spread: float
    used: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Cells:
    """Cells of one candidate: signals `[F, S, G]` with their names, and scores `[F, S]`."""

    names: tuple[str, ...]
    signals: Floats
    scores: Floats
    home: float
    task: Task
    sizes: tuple[int, ...]

    @staticmethod
    def of(record: Rehearsal, candidate: str) -> Cells:
        """Take the cells of a candidate out of a record, with the signals that all of them have."""
        place = record.index(candidate)
        values = record.values[:, :, place].double().numpy()
        scores = record.scores[:, :, place].double().numpy()
        there = np.isfinite(values).all((0, 1))
        names = tuple(name for name, complete in zip(record.signals, there, strict=True) if complete)
        return Cells(names, values[:, :, there], scores, record.score, record.task, record.sizes)

    def take(self, shifts: NDArray[np.intp]) -> Cells:
        """Return the cells of some shifts."""
        return replace(self, signals=self.signals[shifts], scores=self.scores[shifts])

    def restrict(self, names: Mapping[str, Any]) -> Cells:
        """Return the cells with those signals alone that a site could measure."""
        kept = [place for place, name in enumerate(self.names) if name in names]
        return replace(self, names=tuple(self.names[place] for place in kept), signals=self.signals[:, :, kept])

    def expected_error(self, value: float, spread: float) -> float:
        """Return the expected error of an estimate, before the conformal factor."""
        least = MIN_SCALE if self.task == "classes" else MIN_RELATIVE_SCALE * abs(self.home)
        return least + DISTANCE_SHARE * abs(self.home - value) + spread


@dataclass(frozen=True, eq=False)
class Fitted:
    """Maps of one candidate, ranked by how well they predict one rehearsed shift from the others."""

    cells: Cells
    ranked: tuple[tuple[int, str], ...]
    """Signal and kind of fit, the best first; each signal once."""
    errors: tuple[float, ...]
    """Mean error of each, leaving out one shift at a time."""
    left_out: Floats
    """Predictions of the best maps for each cell, made without its shift, `[maps, F, S]`."""

    @staticmethod
    def fit(cells: Cells) -> Fitted:
        """Rank all signals and ways to fit."""
        found: list[tuple[float, int, str, Floats]] = []
        for place in range(len(cells.names)):
            tried = [(kind, _leave_one_out(cells.signals[:, :, place], cells.scores, kind)) for kind in FITS]
            errors = [float(np.abs(guess - cells.scores).mean()) for _, guess in tried]
            best = int(np.argmin(errors))
            found.append((errors[best], place, *tried[best]))
        found.sort(key=lambda one: one[:2])
        found = found[:BEST_MAPS]
        return Fitted(
            cells,
            tuple((place, kind) for _, place, kind, _ in found),
            tuple(error for error, *_ in found),
            np.array([guess for *_, guess in found]),
        )

    def predict(self, signals: Floats, samples: int) -> Prediction:
        """Predict the score of a model from its signals `[G]` on so many samples."""
        guesses = [self._interpolate(place, kind, signals[place], samples) for place, kind in self.ranked]
        value, spread = float(np.median(guesses)), float(np.ptp(guesses))
        used = tuple(self.cells.names[place] for place, _ in self.ranked)
        return Prediction(value, self.cells.expected_error(value, spread), spread, used)

    def _interpolate(self, place: int, kind: str, signal: float, samples: int) -> float:
        """Apply the maps of the two nearest sizes, and interpolate in the logarithm of the size."""
        signals, scores = self.cells.signals[:, :, place], self.cells.scores
        values = [FITS[kind](signals[:, size], scores[:, size])(signal) for size in range(len(self.cells.sizes))]
        return float(np.interp(math.log(samples), np.log(self.cells.sizes), values))

    @property
    def largest_spread(self) -> float:
        """Largest distance between the maps' predictions of one cell at home."""
        return float(np.ptp(self.left_out, axis=0).max())


def _leave_one_out(signals: Floats, scores: Floats, kind: str) -> Floats:
    """Predict each cell `[F, S]` by a map that was fitted without its shift."""
    guesses = np.empty_like(scores)
    everything = np.arange(len(scores))
    for shift in everything:
        others = everything != shift
        for size in range(scores.shape[1]):
            guesses[shift, size] = FITS[kind](signals[others, size], scores[others, size])(signals[shift, size])
    return guesses


def _leave_families_out(cells: Cells, record: Rehearsal) -> tuple[Floats, Floats]:
    """Predict each cell without its whole family; return predictions and expected errors, `[F, S]` each."""
    guesses, scales = np.full_like(cells.scores, np.nan), np.full_like(cells.scores, np.nan)
    families = np.array([shift.family for shift in record.shifts])
    for family in record.families:
        inside, outside = np.flatnonzero(families == family), np.flatnonzero(families != family)
        if len(outside) < MIN_CELLS or not cells.names:
            continue
        fit = Fitted.fit(cells.take(outside))
        for shift in inside:
            for size, samples in enumerate(record.sizes):
                told = fit.predict(cells.signals[shift, size], samples)
                guesses[shift, size], scales[shift, size] = told.value, told.scale
    return guesses, scales


def _conformal_quantile(ratios: Floats, record: Rehearsal) -> float | None:
    """Return the quantile of errors in units of what was expected, `[F, S]`; each family counts once, by its worst."""
    places = [[shift.family == family for shift in record.shifts] for family in record.families]
    worst = sorted(float(np.max(ratios[place])) for place in places if np.isfinite(ratios[place]).all())
    rank = math.ceil((len(worst) + 1) * LEVEL - 1e-9)
    return worst[rank - 1] if rank <= len(worst) else None


def cross_fit(record: Rehearsal) -> Rehearsal:
    """Fill in what would have been estimated for each rehearsed shift without its whole family.

    Ranking, fitting and the choice among candidates are repeated without the family, so the errors are those of shifts
    that nobody rehearsed.

    Args:
        record: A rehearsal with scores and signals.

    Returns:
        A new record with `estimates`, `scales` and `chosen`.
    """
    shape = (len(record.shifts), len(record.sizes), len(record.candidates) + 1)
    estimates, scales = np.full(shape, np.nan), np.full(shape, np.nan)
    chosen = np.zeros(shape[:2])
    for place, name in enumerate(record.candidates):
        cells = Cells.of(record, name)
        estimates[..., place], scales[..., place] = _leave_families_out(cells, record)
    for shift, size in np.ndindex(*chosen.shape):
        told = {
            name: Prediction(estimates[shift, size, place], scales[shift, size, place], 0.0)
            for place, name in enumerate(record.candidates)
            if math.isfinite(estimates[shift, size, place])
        }
        best = record.index(choose(told, record.higher_is_better)) if told else 0
        chosen[shift, size] = best
        for table in (estimates, scales):
            table[shift, size, -1] = table[shift, size, best]
    as_tensor = [torch.from_numpy(table).float() for table in (estimates, scales, chosen)]
    return replace(record, estimates=as_tensor[0], scales=as_tensor[1], chosen=as_tensor[2])


MIN_GAIN = 0.005
"""Gain in accuracy below which the untouched model is kept."""
GAIN_IN_SCALES = 0.1
"""Gain, in expected errors of both, below which the untouched model is kept."""


def choose(told: Mapping[str, Prediction], higher_is_better: bool = True) -> str:
    """Choose the candidate with the best estimate; the untouched model wins unless another is clearly better.

    Args:
        told: Predictions by candidate. Those that do not hold are left out by the caller.
        higher_is_better: False for errors.

    Returns:
        Name of the candidate.
    """
    sign = 1.0 if higher_is_better else -1.0
    others = {name: one for name, one in told.items() if name != UNTOUCHED}
    if not others:
        return UNTOUCHED
    best = max(others, key=lambda name: sign * others[name].value)
    if UNTOUCHED not in told:
        return best
    untouched = told[UNTOUCHED]
    gain = sign * (others[best].value - untouched.value)
    least = MIN_GAIN if higher_is_better else MIN_RELATIVE_SCALE * abs(untouched.value)
    return best if gain > least + GAIN_IN_SCALES * (others[best].scale + untouched.scale) else UNTOUCHED


# ---- estimates at the site


class Estimator:
    """Estimates for one rehearsed model: maps of each candidate, fitted once.

    Args:
        record: The rehearsal in the profile.
    """

    def __init__(self, record: Rehearsal) -> None:
        self.record = record
        self._fits: dict[tuple[str, tuple[str, ...]], Fitted] = {}
        self._ratios: dict[tuple[str, tuple[str, ...]], Floats] = {}

    def predict(self, candidate: str, signals: Mapping[str, float], samples: int) -> Prediction | None:
        """Predict the score of a candidate; None if too little was rehearsed, or no signal could be measured."""
        finite = {name: value for name, value in signals.items() if math.isfinite(value)}
        fit = self._fit(candidate, finite)
        if fit is None:
            return None
        return fit.predict(np.array([finite[name] for name in fit.cells.names]), samples)

    def _fit(self, candidate: str, signals: Mapping[str, float]) -> Fitted | None:
        if candidate not in self.record.candidates:
            return None
        cells = Cells.of(self.record, candidate).restrict(signals)
        if not cells.names or len(cells.scores) < MIN_CELLS:
            return None
        key = candidate, cells.names
        if key not in self._fits:
            self._fits[key] = Fitted.fit(cells)
        return self._fits[key]

    def find_reasons(self, candidate: str, signals: Mapping[str, float], samples: int) -> list[str]:
        """List why an estimate of a candidate would not hold, in words."""
        broken = [name for name, value in signals.items() if not math.isfinite(value)]
        if broken:
            return ["the model gives values that are NaN or infinite"]
        reasons = self._check_size(samples)
        fit = self._fit(candidate, signals)
        if fit is None:
            return [*reasons, f"{name_candidate(candidate)} was not rehearsed"]
        cells = fit.cells
        watched = dict.fromkeys(["slices", "skew", *(cells.names[place] for place, _ in fit.ranked)])
        for name in watched:
            if name in cells.names and (remark := self._check_range(cells, name, signals[name])):
                reasons.append(remark)
        told = fit.predict(np.array([signals[name] for name in cells.names]), samples)
        if told.spread > MAX_SPREAD_RATIO * fit.largest_spread + MIN_SCALE:
            reasons.append("the signals contradict each other more than they ever did at home")
        return reasons

    def _check_size(self, samples: int) -> list[str]:
        sizes = self.record.sizes
        if samples < MIN_SIZE_RATIO * sizes[0]:
            return [f"there are too few samples ({samples}; rehearsed with {sizes[0]})"]
        if samples > MAX_SIZE_RATIO * sizes[-1]:
            return [f"there are far more samples ({samples:,}) than were rehearsed ({sizes[-1]:,})"]
        return []

    def _check_range(self, cells: Cells, name: str, value: float) -> str | None:
        rehearsed = cells.signals[:, :, cells.names.index(name)]
        low, high = float(rehearsed.min()), float(rehearsed.max())
        margin = RANGE_MARGIN * (high - low)
        if low - margin <= value <= high + margin:
            return None
        if name == "skew":
            return f"answers fall into other classes than ever at home (skew {value:.2f}, rehearsed up to {high:.2f})"
        return f"{name} {value:.3g} lies outside of what was rehearsed ({low:.3g} to {high:.3g})"

    def factor(self, candidate: str, signals: Mapping[str, Any], *, chosen: bool = False) -> float | None:
        """Return the conformal factor to the expected error: how far estimates were off at home.

        Args:
            candidate: Name of the candidate.
            signals: Signals that the site could measure.
            chosen: Whether `auto` chose the candidate. The larger factor of both then counts.

        Returns:
            None with fewer than nine families, where no interval of 90 % can be had.
        """
        cells = Cells.of(self.record, candidate).restrict(signals)
        key = candidate, cells.names
        if key not in self._ratios:
            guesses, scales = _leave_families_out(cells, self.record)
            self._ratios[key] = np.abs(guesses - cells.scores) / scales
        factors = [_conformal_quantile(self._ratios[key], self.record)]
        if chosen:
            record = self.record
            ratios = (record.estimates[..., -1] - record.chosen_scores()).abs() / record.scales[..., -1]
            factors.append(_conformal_quantile(ratios.double().numpy(), record))
        known = [factor for factor in factors if factor is not None]
        return max(known) if len(known) == len(factors) else None

    def estimate(
        self,
        candidate: str,
        signals: Mapping[str, float],
        samples: int,
        *,
        chosen: bool = False,
        reasons: Sequence[str] = (),
    ) -> Estimate:
        """Estimate the score of a candidate at the site.

        Args:
            candidate: Name of the candidate.
            signals: Its signals.
            samples: Samples they were read from.
            chosen: Whether `auto` chose the candidate, which makes its estimate a little too good.
            reasons: Further reasons for which the estimate does not hold.
        """
        found = [*reasons, *self.find_reasons(candidate, signals, samples)]
        told = self.predict(candidate, signals, samples)
        if told is None:
            return Estimate(None, None, None, self.record.metric, tuple(found))
        factor = self.factor(candidate, signals, chosen=chosen)
        low = high = None
        if factor is not None:
            half = math.hypot(factor * told.scale, NORMAL_QUANTILE * self._sampling_error(told.value, samples))
            low, high = max(0.0, told.value - half), told.value + half
            if self.record.task == "classes":
                high = min(1.0, high)
        if found:
            return Estimate(None, None, None, self.record.metric, tuple(found), (told.value, low, high))
        return Estimate(told.value, low, high, self.record.metric)

    def _sampling_error(self, value: float, samples: int) -> float:
        """Return the standard error that chance gives a score on the samples of the site and of home."""
        both = 1 / samples + 1 / self.record.samples
        if self.record.task == "classes":
            share = min(max(value, 0.0), 1.0)
            return math.sqrt(max(share * (1 - share), 1e-6) * both)
        return abs(value) * math.sqrt(both / 2)

    def is_at_home(self, signals: Mapping[str, float], samples: int) -> bool:
        """Return whether the signals of the untouched model are those of unshifted home data of that size.

        Mean and deviation of each signal at home are interpolated between the rehearsed sizes, in 1 / n and in the
        logarithm. Chance of the home samples themselves is added.
        """
        record = self.record
        sizes = np.array(record.sizes, dtype=float)
        compared = 0
        for name, value in signals.items():
            if name not in record.signals:
                continue
            place = record.signals.index(name)
            means = record.home_mean[:, place].double().numpy()
            deviations = record.home_deviation[:, place].double().numpy()
            if not (np.isfinite(means).all() and np.isfinite(deviations).all()):
                continue
            mean, own = _extrapolate(sizes, means, samples), _scale_deviation(sizes, deviations, samples)
            allowed = HOME_DEVIATIONS * math.hypot(own, _scale_deviation(sizes, deviations, record.samples))
            compared += 1
            above, below = value - mean, mean - value
            if name in ("slices", "marginals", "skew"):
                # Less divergence than at home is no sign of a shift.
                below = -math.inf
            if not max(above, below) <= allowed + 1e-6:  # Not a number is not at home either.
                return False
        return compared > 0


def _extrapolate(sizes: Floats, means: Floats, samples: int) -> float:
    """Return the mean at a sample size: linear in 1 / n through the smallest and the largest size."""
    if len(sizes) == 1:
        return float(means[0])
    slope = (means[0] - means[-1]) / (1 / sizes[0] - 1 / sizes[-1])
    return float(means[-1] + slope * (1 / samples - 1 / sizes[-1]))


def _scale_deviation(sizes: Floats, deviations: Floats, samples: int) -> float:
    """Return the deviation at a sample size: as one over the root of n, from the nearest size."""
    nearest = int(np.argmin(np.abs(np.log(sizes / samples))))
    return float(deviations[nearest] * math.sqrt(sizes[nearest] / samples))
