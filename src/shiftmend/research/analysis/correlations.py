"""Correlations over results: restoration with calibration, and label-free signals with accuracy.

Signals are also tested as judges: can one tell a good adaptation from a bad one without labels? The good side of a
signal is fixed beforehand: an area under the curve below one half means a misleading signal. A threshold is found with
labels, which flatters it on the same cells; so it is tested on shifts that were left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from shiftmend.errors import DataError
from shiftmend.research.analysis.comparisons import index_by_place
from shiftmend.research.bench.benchmark import CLEAN, SIGNALS, UNADAPTED, Cell, Outcome, Result, Which, sees_labels

FEWEST_POINTS = 3
"""Smallest number of points, since two always correlate by 1 or -1."""

HIGH_IS_GOOD = ("confidence",)
"""Signals whose high values should be good; for the others, low values."""

TOGETHER = ("slices", "marginals")
"""Signals that a method can each fool by aligning it: marginals by scrambling features, slices by their covariance."""

MARGIN = 0.1
"""Largest loss of accuracy, compared with the source model at home, of a good cell."""


@dataclass(frozen=True)
class Correlation:
    """Spearman's coefficient; if it is None, `remark` says why."""

    value: float | None
    points: int
    remark: str = ""


@dataclass(frozen=True)
class RestorationAndCalibration:
    """The correlation over methods of restoration distance and ECE: do they get smaller together?"""

    correlation: Correlation
    means: Mapping[str, tuple[float, float]]
    """Restoration distance, and ECE as a fraction, of each method."""
    places: int
    """Number of pairs of shift and seed that all methods have, over which the means are taken."""
    without: tuple[str, ...] = ()
    """Variants that were left out because they share nothing with all others."""


@dataclass(frozen=True)
class SignalAndAccuracy:
    """The correlation of a label-free signal with accuracy: over the methods and seeds of a shift, and over all cells.

    The two may differ: a signal can separate easy from hard shifts without separating good from bad methods.
    """

    within_shifts: float | None
    """Mean of the shifts' coefficients; None if no shift has one."""
    shifts: int
    """The number of shifts that have one."""
    overall: Correlation


def restoration_and_calibration(
    results: Iterable[Result], which: Which = "last", exclude: Collection[str] = (), variants: Collection[str] = ()
) -> RestorationAndCalibration:
    """Correlate, over methods, mean restoration distance and mean ECE (Spearman).

    Both are averaged over the shifts and seeds that all compared methods have done, so that none is favoured by the
    shifts it lacks. Methods without any restoration distance are not compared. `exclude` is for those that cannot be,
    such as SHOT, whose own source model has other features to restore. `variants` are compared as well, unless no shift
    and seed has them and all the rest. The distance is always that of the last epoch, also where `which` takes the ECE
    from another.
    """
    if which not in get_args(Which):
        raise DataError(f"Expected the outcome to be one of {', '.join(get_args(Which))}, got {which!r}.")
    points: dict[str, dict[tuple[str, int], tuple[float, float]]] = {}
    for cell, result in _one_table(results).items():
        outcome: Outcome | None = getattr(result, which)
        if cell.method not in exclude and outcome is not None and result.restoration_distance is not None:
            points.setdefault(cell.method, {})[cell.shift, cell.seed] = result.restoration_distance, outcome.ece
    without: tuple[str, ...] = ()
    shared = _intersect(points.values())
    if not shared:
        without = tuple(method for method in variants if method in points)
        points = {method: of for method, of in points.items() if method not in without}
        shared = _intersect(points.values())
    if not shared:
        nothing = "there is no shift and seed for which all methods have a restoration distance"
        return RestorationAndCalibration(Correlation(None, 0, nothing), {}, 0)
    means = {
        method: (_mean([of[place][0] for place in shared]), _mean([of[place][1] for place in shared]))
        for method, of in sorted(points.items())
    }
    return RestorationAndCalibration(correlate(*zip(*means.values(), strict=True)), means, len(shared), without)


def signals_and_accuracy(results: Iterable[Result]) -> dict[str, SignalAndAccuracy]:
    """Correlate each of `SIGNALS` with the accuracy of the last epoch, to which it belongs (Spearman).

    Cells for which a signal was not measured take no part in its correlations.
    """
    table = _one_table(results)
    found = {}
    for signal in SIGNALS:
        by_shift: dict[str, list[tuple[float, float]]] = {}
        left_out = 0
        for cell in sorted(table):
            last, signals = table[cell].last, table[cell].signals
            if last is None or signal not in signals:
                continue
            if math.isnan(signals[signal]) or math.isnan(last.accuracy):
                left_out += 1
            else:
                by_shift.setdefault(cell.shift, []).append((signals[signal], last.accuracy))
        within = [_correlate_pairs(pairs).value for pairs in by_shift.values()]
        known = [value for value in within if value is not None]
        overall = _correlate_pairs([pair for pairs in by_shift.values() for pair in pairs])
        if left_out:
            remarks = (overall.remark, f"left out {left_out} whose signal or accuracy is not a number")
            overall = replace(overall, remark="; ".join(filter(None, remarks)))
        found[signal] = SignalAndAccuracy(_mean(known) if known else None, len(known), overall)
    return found


def correlate(first: Sequence[float], second: Sequence[float]) -> Correlation:
    """Compute Pearson's coefficient of the ranks, ties having their average rank. NaN has no rank; infinities do."""
    points = len(first)
    if points != len(second):
        raise DataError(f"Expected as many values of both to correlate, got {points} and {len(second)}.")
    if points < FEWEST_POINTS:
        return Correlation(None, points, f"too few points, expected at least {FEWEST_POINTS}")
    values = np.asarray([first, second], dtype=np.float64)
    if np.isnan(values).any():
        return Correlation(None, points, "a value is not a number")
    if (values == values[:, :1]).all(axis=1).any():
        return Correlation(None, points, "all values of one side are the same")
    left, right = (ranks(row) - (points + 1) / 2 for row in values)
    return Correlation(float(left @ right / math.sqrt((left @ left) * (right @ right))), points)


def ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rank values from 1 for the smallest; equal values share their mean rank."""
    _, position, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[position]


def _intersect(points: Iterable[Mapping[tuple[str, int], object]]) -> list[tuple[str, int]]:
    """List the common shifts and seeds."""
    places = [set(of) for of in points]
    return sorted(set.intersection(*places)) if places else []


def _correlate_pairs(pairs: Sequence[tuple[float, float]]) -> Correlation:
    return correlate([a for a, _ in pairs], [b for _, b in pairs])


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _one_table(results: Iterable[Result]) -> dict[Cell, Result]:
    """Map cells to finished results, which must be of one benchmark and protocol, since others have other scales."""
    table = index_by_place(results)
    names = sorted({f"{cell.benchmark} ({cell.protocol})" for cell in table})
    if len(names) > 1:
        raise DataError(f"Expected results of one table, got several: {', '.join(names)}. Choose those of one.")
    return table


@dataclass(frozen=True)
class HeldOut:
    """Decisions on each shift by the threshold found on the others, combined."""

    balanced: float
    """Balanced accuracy: the mean of the shares of good cells accepted and of bad cells rejected."""
    bad_accepted: float
    """Share of bad cells that were accepted."""
    good_rejected: float
    """Share of good cells that were rejected."""
    shifts: int
    """The number of shifts that could be judged: the others have both good and bad cells."""


@dataclass(frozen=True)
class Judge:
    """Power of a signal to separate good cells from bad ones. Fields that need both kinds are None without one."""

    signal: str
    good: int
    bad: int
    area: float | None = None
    """Area under the ROC curve: the probability that a good cell has the better signal; ties count one half. None for a
    pair of signals."""
    threshold: float | None = None
    """Threshold of the signal with the best balanced accuracy; the strictest of several. NaN accepts nothing."""
    balanced: float | None = None
    held_out: HeldOut | None = None
    second: tuple[str, float] | None = None
    """Another signal and its threshold, which must accept the cell as well."""


def find_near_clean(results: Iterable[Result], clean: Iterable[Result], margin: float = MARGIN) -> dict[Cell, bool]:
    """Call a cell good if its accuracy is at most `margin` below that of its seed's source model on clean images.

    Clean images of other source models, such as `clean without pretraining`, are ignored.
    """
    at_home = {
        result.cell.seed: result.last.accuracy
        for result in clean
        if result.last is not None and result.cell.shift == CLEAN
    }
    return {
        # As floats, 0.8 - 0.7 is above 0.1.
        cell: at_home[cell.seed] - result.last.accuracy <= margin + 1e-9
        for cell, result in _select_judged(results).items()
        if result.last is not None and cell.seed in at_home
    }


def find_helped(results: Iterable[Result]) -> dict[Cell, bool]:
    """Call a cell good if it is more accurate than the unadapted model on the same shift and seed."""
    judged = _select_judged(results)
    found = {}
    for cell, result in judged.items():
        before = judged.get(replace(cell, method=UNADAPTED))
        if cell.method != UNADAPTED and before is not None and before.last is not None and result.last is not None:
            found[cell] = result.last.accuracy > before.last.accuracy
    return found


def judges(results: Iterable[Result], good: Mapping[Cell, bool]) -> dict[str, Judge]:
    """Test each signal, and the two of `TOGETHER`, as judges of the cells in `good`."""
    judged = _select_judged(results)
    found = {}
    for signal in SIGNALS:
        cells = sorted(cell for cell in good if signal in judged[cell].signals)
        values = [judged[cell].signals[signal] for cell in cells]
        found[signal] = judge(signal, values, [good[cell] for cell in cells], [cell.shift for cell in cells])
    cells = sorted(cell for cell in good if judged[cell].signals.keys() >= set(TOGETHER))
    one, other = ([judged[cell].signals[signal] for cell in cells] for signal in TOGETHER)
    kinds, shifts = [good[cell] for cell in cells], [cell.shift for cell in cells]
    found[" and ".join(TOGETHER)] = judge_together(one, other, kinds, shifts)
    return found


def judge(signal: str, values: Sequence[float], good: Sequence[bool], shifts: Sequence[str]) -> Judge:
    """Test one signal over cells. NaN, from a diverged run, is the worst value."""
    sign = -1.0 if signal in HIGH_IS_GOOD else 1.0
    costs = [math.inf if math.isnan(value) else sign * value for value in values]
    made = Judge(signal, sum(good), len(good) - sum(good))
    if not (made.good and made.bad):
        return made
    threshold, balanced = best_threshold(costs, good)
    known = np.asarray(costs)
    held_out = _hold_out(lambda seen, kinds: known <= best_threshold(known[seen].tolist(), kinds)[0], good, shifts)
    return replace(made, area=area(costs, good), threshold=sign * threshold, balanced=balanced, held_out=held_out)


def judge_together(
    first: Sequence[float], second: Sequence[float], good: Sequence[bool], shifts: Sequence[str]
) -> Judge:
    """Test how well the two signals of `TOGETHER` separate good cells from bad ones.

    A cell is accepted if neither signal exceeds its threshold. NaN, from a diverged run, is never accepted.

    Args:
        first: First signal of each cell.
        second: Second signal of each cell.
        good: True for good cells.
        shifts: Shift of each cell. Each shift is also judged by thresholds found on the others.

    Returns:
        The judge. Its `area` is None, because a pair of signals has no ranking.
    """
    made = Judge(TOGETHER[0], sum(good), len(good) - sum(good))
    if not (made.good and made.bad):
        return made
    one, other = (np.asarray([math.inf if math.isnan(cost) else cost for cost in costs]) for costs in (first, second))

    def decide(seen: NDArray[np.bool_], kinds: list[bool]) -> NDArray[np.bool_]:
        limits = best_pair(one[seen].tolist(), other[seen].tolist(), kinds)
        return (one <= limits[0]) & (other <= limits[1])

    threshold, beside, balanced = best_pair(one.tolist(), other.tolist(), good)
    return replace(
        made,
        threshold=threshold,
        second=(TOGETHER[1], beside),
        balanced=balanced,
        held_out=_hold_out(decide, good, shifts),
    )


def area(costs: Sequence[float], good: Sequence[bool]) -> float:
    """Compute from ranks the probability that a good cell costs less than a bad one, ties counting one half."""
    chosen = np.asarray(good, dtype=bool)
    number, others = int(chosen.sum()), int((~chosen).sum())
    bad_ranks = float(ranks(np.asarray(costs, dtype=np.float64))[~chosen].sum())
    return (bad_ranks - others * (others + 1) / 2) / (number * others)


def best_threshold(costs: Sequence[float], good: Sequence[bool]) -> tuple[float, float]:
    """Find the threshold of a cost that separates good cells from bad ones best, and its balanced accuracy.

    Cells with at most this cost are accepted. Both good and bad cells must occur. The threshold is the midpoint of two
    neighbouring costs, or NaN, which accepts nothing, if no threshold beats chance.
    """
    values, position = np.unique(np.asarray(costs, dtype=np.float64), return_inverse=True)
    chosen = np.asarray(good, dtype=bool)
    accepted_good = np.cumsum(np.bincount(position[chosen], minlength=len(values)))
    accepted_bad = np.cumsum(np.bincount(position[~chosen], minlength=len(values)))
    number, others = int(chosen.sum()), int((~chosen).sum())
    # Integers make equal values exactly equal.
    gains = accepted_good * others - accepted_bad * number
    best = int(np.argmax(gains))
    # Accepting nothing is as good, and stricter.
    if gains[best] <= 0:
        return math.nan, 0.5
    return _go_half_way(values, best), 0.5 + float(gains[best]) / (2 * number * others)


def best_pair(first: Sequence[float], second: Sequence[float], good: Sequence[bool]) -> tuple[float, float, float]:
    """Find the thresholds of two costs that separate good cells from bad ones best.

    A cell is accepted if neither cost exceeds its threshold. Both good and bad cells must occur. If several pairs are
    equally good, the pair with the lowest first threshold is returned, then the lowest second one.

    Args:
        first: First cost of each cell.
        second: Second cost of each cell.
        good: True for good cells, which should be accepted.

    Returns:
        The threshold of the first cost, the threshold of the second, and the balanced accuracy. If no pair beats
        chance, both thresholds are NaN, which accepts nothing, and the balanced accuracy is 0.5.

    Example:
        >>> best_pair([1.0, 3.0, 9.0], [1.0, 5.0, 1.0], [True, False, False])
        (2.0, 3.0, 1.0)
    """
    one, other, chosen = np.asarray(first), np.asarray(second), np.asarray(good, dtype=bool)
    number, others = int(chosen.sum()), int((~chosen).sum())
    values, candidates = np.unique(one), np.unique(other)
    best, limits = 0, (math.nan, math.nan)
    for index, value in enumerate(values):
        inside = one <= value
        position = np.searchsorted(candidates, other[inside])
        kinds = chosen[inside]
        accepted_good = np.cumsum(np.bincount(position[kinds], minlength=len(candidates)))
        accepted_bad = np.cumsum(np.bincount(position[~kinds], minlength=len(candidates)))
        gains = accepted_good * others - accepted_bad * number
        at = int(np.argmax(gains))
        if gains[at] > best:
            best, limits = int(gains[at]), (_go_half_way(values, index), _go_half_way(candidates, at))
    return *limits, 0.5 + best / (2 * number * others)


def _go_half_way(values: NDArray[np.float64], index: int) -> float:
    """Return the number halfway between two neighbouring values, or the lower value if no float lies between them."""
    low = float(values[index])
    if index + 1 == len(values):
        return low
    high = float(values[index + 1])
    middle = low + (high - low) / 2
    return middle if low < middle < high else low


def _hold_out(
    decide: Callable[[NDArray[np.bool_], list[bool]], NDArray[np.bool_]], good: Sequence[bool], shifts: Sequence[str]
) -> HeldOut | None:
    """Judge each shift by a rule learnt from all other shifts.

    `decide` gets a mask of the cells to learn from and whether each of these is good. It returns a mask of the accepted
    cells.
    """
    chosen, where = np.asarray(good, dtype=bool), np.asarray(shifts)
    decided = np.zeros(len(chosen), dtype=bool)
    accepted = np.zeros(len(chosen), dtype=bool)
    judged = 0
    for shift in sorted(set(shifts)):
        here = where == shift
        # Without both kinds there is nothing to find a threshold from.
        if chosen[~here].all() or not chosen[~here].any():
            continue
        accepted |= here & decide(~here, chosen[~here].tolist())
        decided |= here
        judged += 1
    if not (decided & chosen).any() or not (decided & ~chosen).any():
        return None
    bad_accepted = float(accepted[decided & ~chosen].mean())
    good_rejected = float((~accepted)[decided & chosen].mean())
    return HeldOut(1 - (bad_accepted + good_rejected) / 2, bad_accepted, good_rejected, judged)


def _select_judged(results: Iterable[Result]) -> dict[Cell, Result]:
    """Leave out methods that saw the labels and are scored on a part of the images."""
    return {cell: result for cell, result in index_by_place(results).items() if not sees_labels(cell.method)}
