"""Paired tests of two methods over common seeds: is one better, or is the difference chance?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import get_args

import numpy as np

from shiftmend.errors import DataError
from shiftmend.research.bench.benchmark import Cell, Origin, Outcome, Result, Which
from shiftmend.research.bench.store import COMPACT_DIGITS
from shiftmend.utils.checks import require

METRICS = tuple(field.name for field in fields(Outcome) if field.name != "epoch")

HIGHER_IS_BETTER = ("accuracy",)


@dataclass(frozen=True)
class Comparison:
    """Two methods on one shift, or over all common shifts if `shift` is None."""

    benchmark: str
    protocol: str
    first: str
    second: str
    shift: str | None
    pairs: int
    """Number of seeds that both have run."""
    difference: float | None
    """Mean of first minus second over the pairs; None without pairs."""
    deviation: float | None
    """Sample standard deviation of the differences; None for fewer than two."""
    p: float | None
    """The p-value of a two-sided paired t-test, not corrected; None if `remark` says why."""
    corrected: float | None
    """`p` after Holm's correction for the number of shifts. Over all shifts, which is one test, `p` itself."""
    verdict: str
    """Either `NAME better`, `no difference shown` or `too few seeds`."""
    remark: str = ""
    shifts: int = 1
    """Number of shifts of the pairs; over all shifts it may be smaller than the benchmark's."""

    def over(self, known: int) -> str:
        """Name the row of a table; `known` is the number of the benchmark's shifts."""
        if self.shift is not None:
            return self.shift
        return "all shifts" if self.shifts in (0, known) else f"{self.shifts} of {known} shifts"


def compare(
    results: Iterable[Result],
    first: str,
    second: str,
    which: Which = "last",
    metric: str = "accuracy",
    *,
    level: float = 0.05,
) -> list[Comparison]:
    """Compare two methods within each benchmark and protocol: one entry per shift, then one over all shifts.

    The p-values of all shifts in a table are corrected by Holm's method. A difference is significant if its corrected
    p-value is below `level`. Over all shifts, a pair consists of the two means of one seed, over the shifts that both
    methods have finished.
    """
    if metric not in METRICS or which not in get_args(Which):
        raise DataError(
            f"Expected one of {', '.join(get_args(Which))} and one of {', '.join(METRICS)} to compare by, got {which} "
            f"{metric}."
        )
    if first == second:
        raise DataError(f"Expected two methods to compare, got {first} twice. Name another.")
    scores: dict[str, dict[Cell, float]] = {first: {}, second: {}}
    for cell, result in index_by_place(results).items():
        outcome: Outcome | None = getattr(result, which)
        if cell.method in scores and outcome is not None:
            scores[cell.method][replace(cell, method="")] = getattr(outcome, metric)
    lacking = [method for method, cells in scores.items() if not cells]
    if lacking:
        raise DataError(
            f"Expected finished results of {' and '.join(lacking)} with a {which} {metric}, got none. Run it first."
        )
    tables = sorted({(cell.benchmark, cell.protocol) for cells in scores.values() for cell in cells})
    return [
        comparison
        for table in tables
        for comparison in _compare_table(
            table,
            {
                method: {cell: score for cell, score in cells.items() if (cell.benchmark, cell.protocol) == table}
                for method, cells in scores.items()
            },
            metric,
            level,
        )
    ]


def leads(compared: Iterable[Comparison], metric: str) -> tuple[int, int]:
    """Count the comparisons in which the first and the second are better, significant or not."""
    sign = 1 if metric in HIGHER_IS_BETTER else -1
    ahead = [sign * one.difference for one in compared if one.difference is not None]
    return sum(lead > 0 for lead in ahead), sum(lead < 0 for lead in ahead)


def index_by_place(results: Iterable[Result]) -> dict[Cell, Result]:
    """Return the results of all cells that did not fail, by cell.

    The recipe in each key is empty, because methods of one cell have different recipes.

    Two recipes for one place of the table are an error, since a mean over both would belong to neither; and so are two
    origins of one shift's images, since methods can only be compared on the same ones.
    """
    found: dict[Cell, Result] = {}
    origins: dict[tuple[str, str], Origin] = {}
    for result in results:
        if result.failed:
            continue
        place = replace(result.cell, recipe="")
        recipe = found.setdefault(place, result).cell.recipe
        if recipe != result.cell.recipe:
            raise DataError(
                f"Expected results of one recipe for {place}, got two: {recipe} and {result.cell.recipe}. Choose those "
                "of one."
            )
        origin = origins.setdefault((place.benchmark, place.shift), result.origin)
        if origin != result.origin:
            raise DataError(
                f"Expected images of {place.shift} of one origin, got {origin} and {result.origin}. Choose those of "
                "one."
            )
    return found


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values by Holm's step-down: the smallest of m times m, the next times m - 1; at most 1."""
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def _compare_table(
    table: tuple[str, str], scores: Mapping[str, Mapping[Cell, float]], metric: str, level: float
) -> list[Comparison]:
    (first, left), (second, right) = scores.items()
    paired: dict[str, dict[int, tuple[float, float]]] = {cell.shift: {} for cell in sorted({*left, *right})}
    for cell in sorted(set(left) & set(right)):
        paired[cell.shift][cell.seed] = left[cell], right[cell]
    comparisons = [_test(table, first, second, shift, list(pairs.values())) for shift, pairs in paired.items()]
    tested = {index: comparison.p for index, comparison in enumerate(comparisons) if comparison.p is not None}
    for index, corrected in zip(tested, holm([*tested.values()]), strict=True):
        comparisons[index] = replace(comparisons[index], corrected=corrected)
    comparisons.append(_over_all_shifts(table, first, second, paired))
    return [replace(comparison, verdict=_verdict(comparison, metric, level)) for comparison in comparisons]


def _over_all_shifts(
    table: tuple[str, str], first: str, second: str, paired: Mapping[str, Mapping[int, tuple[float, float]]]
) -> Comparison:
    seeds = sorted({seed for pairs in paired.values() for seed in pairs})
    by_seed = [[pairs[seed] for pairs in paired.values() if seed in pairs] for seed in seeds]
    means = [tuple(np.mean(pairs, axis=0)) for pairs in by_seed]
    comparison = replace(_test(table, first, second, None, means), shifts=sum(map(bool, paired.values())))
    # Each pair is of another mixture of shifts, which is worth knowing when a run is not finished yet.
    if len({tuple(seed in pairs for pairs in paired.values()) for seed in seeds}) > 1:
        remarks = (comparison.remark, "not every seed has been run on the same shifts")
        comparison = replace(comparison, remark="; ".join(filter(None, remarks)))
    return comparison


def _test(
    table: tuple[str, str], first: str, second: str, shift: str | None, pairs: Sequence[tuple[float, float]]
) -> Comparison:
    """Test two methods on paired scores. The caller adds the correction and the verdict."""
    values = np.asarray(pairs, dtype=np.float64).reshape(-1, 2)
    # Infinities have a remark of their own.
    with np.errstate(invalid="ignore"):
        differences = values[:, 0] - values[:, 1]
        difference = float(differences.mean()) if pairs else None
        deviation = float(differences.std(ddof=1)) if len(pairs) > 1 else None
    p, remark = None, ""
    if difference is None or deviation is None:
        remark = "no seed done by both" if not pairs else "only one seed done by both"
    elif not np.isfinite(values).all():
        remark = "a score is not finite"
    elif deviation <= _bound_rounding(float(np.abs(values).max())):
        remark = "the difference is the same for every seed, which leaves a t-test nothing to go by"
    else:
        t = difference / (deviation / math.sqrt(len(pairs)))
        p = float(2 * require("scipy.special", "research").stdtr(len(pairs) - 1, -abs(t)))
    return Comparison(*table, first, second, shift, len(pairs), difference, deviation, p, p, "", remark)


def _bound_rounding(largest: float) -> float:
    """Bound the deviation of differences that are equal except for rounded scores in a compact file.

    Each score is off by at most half a unit of its last digit, hence a difference by a unit, and the deviation of two
    differences is at most the square root of 2 times that.
    """
    return 1.5 * 10.0 ** (math.floor(math.log10(largest)) + 1 - COMPACT_DIGITS) if largest else 0.0


def _verdict(comparison: Comparison, metric: str, level: float) -> str:
    if comparison.pairs < 2:
        return "too few seeds"
    if comparison.corrected is None or comparison.difference is None or comparison.corrected >= level:
        return "no difference shown"
    better = comparison.first if leads([comparison], metric) == (1, 0) else comparison.second
    return f"{better} better"
