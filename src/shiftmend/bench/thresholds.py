"""Can one tell a good adaptation from a bad one without labels? Signals as judges, and at which threshold.

Which side of a signal should be good is fixed beforehand, not fitted: an area under the curve below one half is a
signal that misleads. A threshold is found with labels, and so flatters itself on the cells it was found on; what counts
is how it does on shifts that had no part in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shiftmend.bench.cells import SIGNALS, Cell, Result
from shiftmend.bench.comparisons import by_place
from shiftmend.bench.correlations import ranks
from shiftmend.bench.grids import SUPERVISED

HIGH_IS_GOOD = ("confidence",)
"""Of the other signals a low value should be good."""
TOGETHER = ("slices", "marginals")
"""A method can fool either by aligning what it sees: marginals by scrambling features, slices by their covariance."""
MARGIN = 0.1
NOTHING_DONE = "source-only"


@dataclass(frozen=True)
class HeldOut:
    """Decisions on each shift by the threshold found on the others, put together."""

    balanced: float
    """Balanced accuracy: the mean of the shares of good ones accepted and of bad ones rejected."""
    bad_accepted: float
    """Share of the bad ones."""
    good_rejected: float
    """Share of the good ones."""
    shifts: int
    """Those that could be judged: the others have both good and bad cells."""


@dataclass(frozen=True)
class Judge:
    """How well a signal tells good cells from bad ones; what needs both is None where one kind is missing."""

    signal: str
    good: int
    bad: int
    area: float | None = None
    """Under the ROC curve: how often a good cell has the better signal than a bad one; ties count one half."""
    threshold: float | None = None
    """Of the signal, with the best balanced accuracy; the strictest of equals. NaN: to accept nothing."""
    balanced: float | None = None
    held_out: HeldOut | None = None
    second: tuple[str, float] | None = None
    """Another signal and its threshold, which must accept the cell as well."""


def near_clean(results: Iterable[Result], clean: Iterable[Result], margin: float = MARGIN) -> dict[Cell, bool]:
    """Good: accuracy at most `margin` below that of the same seed's source model on clean images."""
    at_home = {result.cell.seed: result.last.accuracy for result in clean if result.last is not None}
    return {
        cell: at_home[cell.seed] - result.last.accuracy <= margin + 1e-9  # as floats 0.8 - 0.7 is above 0.1
        for cell, result in _judged(results).items()
        if result.last is not None and cell.seed in at_home
    }


def helped(results: Iterable[Result]) -> dict[Cell, bool]:
    """Good: more accurate than the model that was not adapted, on the same shift and seed."""
    judged = _judged(results)
    found = {}
    for cell, result in judged.items():
        before = judged.get(replace(cell, method=NOTHING_DONE))
        if cell.method != NOTHING_DONE and before is not None and before.last is not None and result.last is not None:
            found[cell] = result.last.accuracy > before.last.accuracy
    return found


def judges(results: Iterable[Result], good: Mapping[Cell, bool]) -> dict[str, Judge]:
    """Each signal as a judge of the cells in `good`, and two `TOGETHER`, as far as they were measured on them."""
    judged = _judged(results)
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
    """One signal over cells. A value that is not a number is the worst there is: its run has diverged."""
    sign = -1.0 if signal in HIGH_IS_GOOD else 1.0
    costs = [math.inf if math.isnan(value) else sign * value for value in values]
    made = Judge(signal, sum(good), len(good) - sum(good))
    if not (made.good and made.bad):
        return made
    threshold, balanced = best_threshold(costs, good)
    known = np.asarray(costs)
    held_out = _held_out(lambda seen, kinds: known <= best_threshold(known[seen].tolist(), kinds)[0], good, shifts)
    return replace(made, area=area(costs, good), threshold=sign * threshold, balanced=balanced, held_out=held_out)


def judge_together(
    first: Sequence[float], second: Sequence[float], good: Sequence[bool], shifts: Sequence[str]
) -> Judge:
    """Both signals of `TOGETHER` over cells: accepted is what both accept."""
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
        held_out=_held_out(decide, good, shifts),
    )


def area(costs: Sequence[float], good: Sequence[bool]) -> float:
    """The probability that a good one costs less than a bad one, ties counting one half; from ranks."""
    chosen = np.asarray(good, dtype=bool)
    number, others = int(chosen.sum()), int((~chosen).sum())
    bad_ranks = float(ranks(np.asarray(costs, dtype=np.float64))[~chosen].sum())
    return (bad_ranks - others * (others + 1) / 2) / (number * others)


def best_threshold(costs: Sequence[float], good: Sequence[bool]) -> tuple[float, float]:
    """What to accept up to, and the balanced accuracy of that; both kinds must occur.

    Between two neighbouring costs it is their midpoint. Where nothing beats chance it is NaN, up to which nothing lies.
    """
    values, position = np.unique(np.asarray(costs, dtype=np.float64), return_inverse=True)
    chosen = np.asarray(good, dtype=bool)
    accepted_good = np.cumsum(np.bincount(position[chosen], minlength=len(values)))
    accepted_bad = np.cumsum(np.bincount(position[~chosen], minlength=len(values)))
    number, others = int(chosen.sum()), int((~chosen).sum())
    gains = accepted_good * others - accepted_bad * number  # whole numbers, so that equals are equal
    best = int(np.argmax(gains))
    if gains[best] <= 0:  # no better than to accept nothing, which is stricter
        return math.nan, 0.5
    return _above(values, best), 0.5 + float(gains[best]) / (2 * number * others)


def best_pair(first: Sequence[float], second: Sequence[float], good: Sequence[bool]) -> tuple[float, float, float]:
    """What to accept up to of two costs, and the balanced accuracy of accepting what is within both.

    Of equals the one that is stricter with the first. NaN for both where nothing beats chance.
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
            best, limits = int(gains[at]), (_above(values, index), _above(candidates, at))
    return *limits, 0.5 + best / (2 * number * others)


def _above(values: NDArray[np.float64], index: int) -> float:
    """Half way to the next of the sorted values; the value itself where there is no such number, or no next."""
    low = float(values[index])
    if index + 1 == len(values):
        return low
    high = float(values[index + 1])
    middle = low + (high - low) / 2
    return middle if low < middle < high else low


def _held_out(
    decide: Callable[[NDArray[np.bool_], list[bool]], NDArray[np.bool_]], good: Sequence[bool], shifts: Sequence[str]
) -> HeldOut | None:
    """`decide` gets which cells may be learnt from and their kinds, and says of all cells whether to accept them."""
    chosen, where = np.asarray(good, dtype=bool), np.asarray(shifts)
    decided = np.zeros(len(chosen), dtype=bool)
    accepted = np.zeros(len(chosen), dtype=bool)
    judged = 0
    for shift in sorted(set(shifts)):
        here = where == shift
        if chosen[~here].all() or not chosen[~here].any():  # nothing to find a threshold from
            continue
        accepted |= here & decide(~here, chosen[~here].tolist())
        decided |= here
        judged += 1
    if not (decided & chosen).any() or not (decided & ~chosen).any():
        return None
    bad_accepted = float(accepted[decided & ~chosen].mean())
    good_rejected = float((~accepted)[decided & chosen].mean())
    return HeldOut(1 - (bad_accepted + good_rejected) / 2, bad_accepted, good_rejected, judged)


def _judged(results: Iterable[Result]) -> dict[Cell, Result]:
    """Who saw the labels, or is scored on a part of them, is not judged."""
    return {cell: result for cell, result in by_place(results).items() if not cell.method.startswith(SUPERVISED)}
