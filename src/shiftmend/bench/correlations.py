"""What goes with what over a benchmark's results: rank correlations by Spearman, signs as they are."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from shiftmend.bench.cells import SIGNALS, Cell, Outcome, Result, Which
from shiftmend.bench.comparisons import by_place
from shiftmend.errors import DataError

FEWEST = 3
"""Two points always correlate by 1 or -1."""


@dataclass(frozen=True)
class Correlation:
    """Spearman's coefficient over some points; where it is None, `remark` says why."""

    value: float | None
    points: int
    remark: str = ""


@dataclass(frozen=True)
class RestorationAndCalibration:
    """Over methods: does who restores the source's features better (a smaller distance) also have a smaller ECE?"""

    correlation: Correlation
    means: Mapping[str, tuple[float, float]]
    """Of each method: restoration distance, and ECE as a fraction."""
    places: int
    """Shifts x seeds that every one of these methods has done, over which the means are."""
    without: tuple[str, ...] = ()
    """Variants that were left out for the sake of the others, which have nothing in common with all of them."""


@dataclass(frozen=True)
class SignalAndAccuracy:
    """How a label-free signal goes with accuracy: over the methods and seeds of a shift, and over everything.

    The two may well differ: a signal can tell easy shifts from hard ones without telling good methods from bad ones.
    """

    within_shifts: float | None
    """Mean of the shifts' coefficients; None if no shift has one."""
    shifts: int
    """How many have one."""
    overall: Correlation


def restoration_and_calibration(
    results: Iterable[Result], which: Which = "last", exclude: Collection[str] = (), variants: Collection[str] = ()
) -> RestorationAndCalibration:
    """Spearman's correlation over methods between mean restoration distance and mean ECE.

    Both are averaged over the shifts and seeds that all compared methods have done, so that none is favoured by the
    shifts it lacks. Methods without any restoration distance are not compared. `exclude` is for those that cannot be,
    such as SHOT, whose own source model has other features to restore. `variants` are compared as well, unless no shift
    and seed has them and all the rest. The distance is always that of the last epoch, also where `which` takes the ECE
    from another.
    """
    if which not in get_args(Which):
        raise DataError(f"there is no {which!r} outcome; expected one of {', '.join(get_args(Which))}")
    points: dict[str, dict[tuple[str, int], tuple[float, float]]] = {}
    for cell, result in _one_table(results).items():
        outcome: Outcome | None = getattr(result, which)
        if cell.method not in exclude and outcome is not None and result.restoration_distance is not None:
            points.setdefault(cell.method, {})[cell.shift, cell.seed] = result.restoration_distance, outcome.ece
    without: tuple[str, ...] = ()
    shared = _shared(points.values())
    if not shared:
        without = tuple(method for method in variants if method in points)
        points = {method: of for method, of in points.items() if method not in without}
        shared = _shared(points.values())
    if not shared:
        nothing = "there is no shift and seed for which all methods have a restoration distance"
        return RestorationAndCalibration(Correlation(None, 0, nothing), {}, 0)
    means = {
        method: (_mean([of[place][0] for place in shared]), _mean([of[place][1] for place in shared]))
        for method, of in sorted(points.items())
    }
    return RestorationAndCalibration(correlate(*zip(*means.values(), strict=True)), means, len(shared), without)


def signals_and_accuracy(results: Iterable[Result]) -> dict[str, SignalAndAccuracy]:
    """For each of `SIGNALS`, its Spearman correlation with the accuracy of the last epoch, to which it belongs.

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
    """Pearson's coefficient of the ranks, ties having their average rank. NaN has no rank; infinities do."""
    points = len(first)
    if points != len(second):
        raise DataError(f"cannot correlate {points} values with {len(second)}; expected as many")
    if points < FEWEST:
        return Correlation(None, points, f"too few points, expected at least {FEWEST}")
    values = np.asarray([first, second], dtype=np.float64)
    if np.isnan(values).any():
        return Correlation(None, points, "a value is not a number")
    if (values == values[:, :1]).all(axis=1).any():
        return Correlation(None, points, "all values of one side are the same")
    left, right = (ranks(row) - (points + 1) / 2 for row in values)
    return Correlation(float(left @ right / math.sqrt((left @ left) * (right @ right))), points)


def ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """From 1 for the smallest; equal values share the mean of the ranks that they take up."""
    _, position, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[position]


def _shared(points: Iterable[Mapping[tuple[str, int], object]]) -> list[tuple[str, int]]:
    """The shifts and seeds that all have."""
    places = [set(of) for of in points]
    return sorted(set.intersection(*places)) if places else []


def _correlate_pairs(pairs: Sequence[tuple[float, float]]) -> Correlation:
    return correlate([a for a, _ in pairs], [b for _, b in pairs])


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _one_table(results: Iterable[Result]) -> dict[Cell, Result]:
    """Finished results by their cells, all of one benchmark and protocol: others have other scales of everything."""
    table = by_place(results)
    names = sorted({f"{cell.benchmark} ({cell.protocol})" for cell in table})
    if len(names) > 1:
        raise DataError(f"the results are of several tables: {', '.join(names)}; choose those of one")
    return table
