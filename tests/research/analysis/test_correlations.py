""""""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from shiftmend.errors import DataError
from shiftmend.research.analysis.correlations import (
    area,
    best_pair,
    best_threshold,
    correlate,
    find_helped,
    find_near_clean,
    judge,
    judge_together,
    judges,
    restoration_and_calibration,
    signals_and_accuracy,
)
from shiftmend.research.bench.benchmark import SIGNALS, Cell, Outcome, Result

PAPER = {  # EMNIST-DA: restoration distance, and ECE in per cent
    "source-only": (3.2, 30.8),
    "adabn": (3.1, 30.3),
    "marginal gaussian": (2.9, 26.7),
    "full gaussian": (2.0, 17.4),
    "pseudo-labels": (2.6, 49.9),
    "bnm-im": (2.5, 35.6),
    "shot-im": (2.9, 29.6),
    "fr": (1.8, 12.9),
    "bufr": (1.2, 4.7),
}


def result(
    method: str, shift: str = "sky", seed: int = 0, accuracy: float = 0.5, ece: float = 0.1, **facts: Any
) -> Result:
    cell = Cell("emnist-da", facts.pop("protocol", "offline"), method, shift, seed, f"of {method}")
    return Result(cell, "published", last=Outcome(9, accuracy, ece, 0.2, 0.7, 0.3), **facts)


def test_the_papers_table_gives_the_papers_figure() -> None:
    distances, errors = zip(*PAPER.values(), strict=True)
    assert correlate(distances, errors).value == pytest.approx(0.594, abs=5e-4)
    # Two shifts and two seeds whose means are the table's, so that nothing but the means can give the figure.
    results = [
        result(method, shift, seed, ece=(error + spread) / 100, restoration_distance=distance + spread / 10)
        for method, (distance, error) in PAPER.items()
        for shift, sign in (("sky", 1), ("fog", -1))
        for seed, spread in ((123, 0.5 * sign), (234, 1.5 * sign))
    ]
    found = restoration_and_calibration(results)
    assert (found.correlation.points, found.places) == (9, 4)
    for method, (distance, error) in PAPER.items():
        assert found.means[method] == pytest.approx((distance, error / 100))


def test_the_papers_figure_through_results() -> None:
    results = [result(method, ece=e, restoration_distance=d) for method, (d, e) in PAPER.items()]
    outlier = result("shot", ece=0.0, restoration_distance=100.0)
    assert restoration_and_calibration(results).correlation.value == pytest.approx(0.594, abs=5e-4)
    found = restoration_and_calibration([*results, outlier], exclude=("shot",))
    assert found.correlation.value == pytest.approx(0.594, abs=5e-4)
    assert "shot" not in found.means
    with_outlier = restoration_and_calibration([*results, outlier]).correlation
    assert with_outlier.points == 10
    assert with_outlier.value is not None
    assert with_outlier.value < 0.4


numbers = st.one_of(st.integers(-3, 3).map(float), st.floats(-1e6, 1e6))


@pytest.mark.slow
@given(st.lists(st.tuples(numbers, numbers), max_size=20))
def test_correlation_equals_scipys(pairs: list[tuple[float, float]]) -> None:
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    found = correlate(first, second)
    assert found.points == len(pairs)
    if len(pairs) < 3 or len(set(first)) == 1 or len(set(second)) == 1:
        assert found.value is None
        assert found.remark
    else:
        assert found.value == pytest.approx(stats.spearmanr(first, second).statistic, abs=1e-12)
        assert found.remark == ""


@pytest.mark.parametrize(
    ("first", "second", "value", "remark"),
    [
        ([1, 2, 3], [2, 3, 4], 1.0, ""),
        ([1, 2, 3], [9, 3, -4], -1.0, ""),
        ([1, 2, math.inf], [1, 2, 3], 1.0, ""),
        ([1, 2, math.nan], [1, 2, 3], None, "a value is not a number"),
        ([1, 2], [1, 2], None, "too few points, expected at least 3"),
        ([1, 2, 3], [5, 5, 5], None, "all values of one side are the same"),
    ],
)
def test_signs_and_reasons(first: list[float], second: list[float], value: float | None, remark: str) -> None:
    found = correlate(first, second)
    assert found.value == pytest.approx(value)
    assert found.remark == remark


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(DataError, match="got 3 and 4"):
        correlate([1, 2, 3], [1, 2, 3, 4])


def test_means_are_over_what_all_methods_have_done() -> None:
    results = [result(method, ece=e / 10, restoration_distance=float(e)) for e, method in enumerate("abc")]
    results += [result("a", "fog", ece=0.9, restoration_distance=9.0), result("b", "sky", 1, restoration_distance=9.0)]
    results += [result("no distance"), replace(result("a", "fog", 7), last=None, error="failed")]
    found = restoration_and_calibration(results)
    assert found.means == {"a": (0.0, 0.0), "b": (1.0, 0.1), "c": (2.0, 0.2)}
    assert (found.correlation.value, found.places) == (pytest.approx(1.0), 1)


def test_nothing_shared_is_said() -> None:
    apart = [result(m, shift, restoration_distance=1.0) for m, shift in (("a", "sky"), ("b", "fog"), ("c", "ice"))]
    for results in (apart, [result("a")], []):
        found = restoration_and_calibration(results)
        assert (found.correlation.value, found.correlation.points, found.places) == (None, 0, 0)
        assert "no shift and seed" in found.correlation.remark


def test_variants_are_left_out_where_nothing_is_shared_with_them() -> None:
    results = [result(method, ece=e / 10, restoration_distance=float(e)) for e, method in enumerate("abc")]
    for shift, without, methods in (("sky", (), "abcx"), ("fog", ("x",), "abc")):
        variant = result("x", shift, restoration_distance=3.0)
        found = restoration_and_calibration([*results, variant], variants=("x", "not run"))
        assert (found.without, "".join(found.means), found.places) == (without, methods, 1)


def test_another_outcome_gives_another_ece() -> None:
    results = [
        result(method, ece=e / 10, restoration_distance=float(e), best=Outcome(1, 0.9, -e / 10, 0, 0, 0))
        for e, method in enumerate("abc")
    ]
    assert restoration_and_calibration(results).correlation.value == pytest.approx(1.0)
    assert restoration_and_calibration(results, which="best").correlation.value == pytest.approx(-1.0)
    assert restoration_and_calibration(results, which="selected").correlation.value is None
    with pytest.raises(DataError, match=r"last, best, selected.*'worst'"):
        restoration_and_calibration(results, which="worst")  # type: ignore[arg-type]


def test_signals_within_shifts_and_over_all() -> None:
    rng = np.random.default_rng(3)
    results, table = [], {}
    for shift in ("sky", "fog", "ice"):
        for method in "abcd":
            for seed in range(3):
                signals = {name: float(rng.uniform()) for name in SIGNALS}
                accuracy = round(float(np.clip(0.8 - 0.5 * signals["slices"] + rng.normal(0, 0.1), 0, 1)), 1)  # ties
                table[shift, method, seed] = (*signals.values(), accuracy)
                results.append(result(method, shift, seed, accuracy, signals=signals))
    results.append(replace(result("e", signals=dict.fromkeys(SIGNALS, 99.0)), last=None, error="failed"))
    found = signals_and_accuracy(rng.permutation(np.array(results, dtype=object)).tolist())
    assert tuple(found) == SIGNALS
    for column, name in enumerate(SIGNALS):
        within = []
        for shift in ("sky", "fog", "ice"):
            rows = np.array([row for key, row in table.items() if key[0] == shift])
            within.append(stats.spearmanr(rows[:, column], rows[:, -1]).statistic)
        everything = np.array([*table.values()])
        assert found[name].within_shifts == pytest.approx(np.mean(within))
        assert found[name].shifts == 3
        assert found[name].overall.value == pytest.approx(stats.spearmanr(everything[:, column], everything[:, -1])[0])
        assert (found[name].overall.points, found[name].overall.remark) == (36, "")
    assert found["slices"].within_shifts is not None
    assert found["slices"].within_shifts < -0.3  # the sign is as it is


def test_shifts_without_a_coefficient_do_not_count() -> None:
    results = [
        result(m, "sky", accuracy=a, signals={"entropy": -a}) for m, a in zip("abc", (0.1, 0.5, 0.3), strict=True)
    ]
    results += [
        result(m, "constant", accuracy=0.2, signals={"entropy": e}) for m, e in zip("abc", range(3), strict=True)
    ]
    results += [result(m, "few", accuracy=a, signals={"entropy": a}) for m, a in zip("ab", (0.7, 0.8), strict=True)]
    results += [result("d", "sky", accuracy=0.9, signals={"entropy": math.nan}), result("e", "sky", accuracy=1.0)]
    found = signals_and_accuracy(results)
    assert (found["entropy"].within_shifts, found["entropy"].shifts) == (pytest.approx(-1.0), 1)
    assert found["entropy"].overall.points == 8
    assert found["entropy"].overall.remark == "left out 1 whose signal or accuracy is not a number"
    assert found["slices"].within_shifts is None
    assert (found["slices"].shifts, found["slices"].overall.value, found["slices"].overall.points) == (0, None, 0)


def test_tables_are_not_mixed() -> None:
    results = [result("a"), result("a", protocol="online")]
    for function in (signals_and_accuracy, restoration_and_calibration):
        with pytest.raises(DataError, match=r"one table.*\(online\)"):
            function(results)


# ---- Signals as judges, against counting every pair and trying every threshold

costs = st.one_of(st.integers(-3, 3).map(float), st.floats(-1e6, 1e6), st.sampled_from([math.inf, -math.inf]))
examples = st.lists(st.tuples(costs, st.booleans()), min_size=2, max_size=25).filter(
    lambda pairs: len({good for _, good in pairs}) == 2
)


def balanced(accepted: list[bool], good: list[bool]) -> float:
    """Independent of the module: shares by counting."""
    right_good = sum(a and g for a, g in zip(accepted, good, strict=True)) / sum(good)
    right_bad = sum(not a and not g for a, g in zip(accepted, good, strict=True)) / (len(good) - sum(good))
    return (right_good + right_bad) / 2


@pytest.mark.slow
@given(examples)
def test_area_counts_pairs(pairs: list[tuple[float, bool]]) -> None:
    values, good = [cost for cost, _ in pairs], [kind for _, kind in pairs]
    won = [
        1.0 if a < b else 0.5 if a == b else 0.0
        for (a, first), (b, second) in product(pairs, pairs)
        if first and not second
    ]
    assert area(values, good) == pytest.approx(float(np.mean(np.asarray(won, dtype=np.float64))))
    flipped = area(values, [not kind for kind in good])
    assert area(values, good) + flipped == pytest.approx(1.0)


@pytest.mark.slow
@given(examples)
def test_no_other_threshold_is_better_and_no_stricter_one_as_good(pairs: list[tuple[float, bool]]) -> None:
    values, good = [cost for cost, _ in pairs], [kind for _, kind in pairs]
    threshold, share = best_threshold(values, good)
    assert share == pytest.approx(balanced([value <= threshold for value in values], good))
    decisions = [[False] * len(values), *([value <= limit for value in values] for limit in sorted(set(values)))]
    shares = [balanced(accepted, good) for accepted in decisions]
    assert share == pytest.approx(max(shares))
    strictest = next(accepted for accepted, tried in zip(decisions, shares, strict=True) if tried > max(shares) - 1e-9)
    assert [value <= threshold for value in values] == strictest


def test_the_threshold_lies_between_the_two_kinds() -> None:
    assert best_threshold([1.0, 2.0, 4.0, 5.0], [True, True, False, False]) == (3.0, 1.0)
    assert best_threshold([1.0, math.inf], [True, False]) == (1.0, 1.0)
    assert best_threshold([-math.inf, 1.0], [True, False]) == (-math.inf, 1.0)
    neighbour = math.nextafter(1.0, 2.0)
    assert best_threshold([1.0, neighbour], [True, False]) == (1.0, 1.0)
    # of two that are as good, the stricter one
    assert best_threshold([1.0, 2.0, 3.0, 4.0], [True, False, True, False]) == (1.5, 0.75)
    # a signal that misleads accepts nothing
    threshold, share = best_threshold([1.0, 2.0], [False, True])
    assert math.isnan(threshold)
    assert share == 0.5


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans(), st.sampled_from("abc")), max_size=25),
    st.booleans(),
)
def test_held_out_shifts_are_judged_by_the_others(cells: list[tuple[int, int, bool, str]], together: bool) -> None:
    first, second = [float(cell[0]) for cell in cells], [float(cell[1]) for cell in cells]
    good, shifts = [cell[2] for cell in cells], [cell[3] for cell in cells]
    found = judge_together(first, second, good, shifts) if together else judge("slices", first, good, shifts)
    assert (found.good, found.bad) == (sum(good), len(good) - sum(good))
    if not (found.good and found.bad):
        assert (found.area, found.threshold, found.second, found.held_out) == (None, None, None, None)
        return
    accepted, kinds, judged = [], [], 0
    for shift in "abc":
        others = [cell for cell in cells if cell[3] != shift]
        here = [cell for cell in cells if cell[3] == shift]
        if not here or len({cell[2] for cell in others}) < 2:
            continue
        one, other, learnt = [cell[0] for cell in others], [cell[1] for cell in others], [cell[2] for cell in others]
        limit = best_pair(one, other, learnt)[:2] if together else (best_threshold(one, learnt)[0], math.inf)
        accepted += [cell[0] <= limit[0] and cell[1] <= limit[1] for cell in here]
        kinds += [cell[2] for cell in here]
        judged += 1
    if len(set(kinds)) < 2:
        assert found.held_out is None
        return
    assert found.held_out is not None
    assert found.held_out.shifts == judged
    assert found.held_out.balanced == pytest.approx(balanced(accepted, kinds))
    bad = [a for a, kind in zip(accepted, kinds, strict=True) if not kind]
    assert found.held_out.bad_accepted == pytest.approx(sum(bad) / len(bad))


two_costs = st.lists(st.tuples(costs, costs, st.booleans()), min_size=2, max_size=12).filter(
    lambda cells: len({good for *_, good in cells}) == 2
)


@pytest.mark.slow
@given(two_costs)
def test_no_other_pair_of_thresholds_is_better(cells: list[tuple[float, float, bool]]) -> None:
    one, other, good = ([cell[part] for cell in cells] for part in range(3))
    first, second, share = best_pair(one, other, good)  # type: ignore[arg-type]
    accepted = [a <= first and b <= second for a, b, _ in cells]
    assert share == pytest.approx(balanced(accepted, good))  # type: ignore[arg-type]
    tried = [
        balanced([a <= left and b <= right for a, b, _ in cells], good)  # type: ignore[arg-type]
        for left, right in product(one, other)
    ]
    assert share == pytest.approx(max(0.5, *tried))
    assert math.isnan(first) == math.isnan(second) == (max(tried) <= 0.5)


def test_each_signal_is_fooled_by_another_kind_and_both_together_by_none() -> None:
    """What either alone accepts by mistake: features scrambled into the right marginals, or of the right covariance."""
    slices = [0.001, 0.002, 0.04, 0.001]
    marginals = [0.001, 0.002, 0.001, 0.03]
    good, shifts = [True, True, False, False], ["a", "b", "a", "b"]
    for values in (slices, marginals):
        assert judge("slices", values, good, shifts).balanced == pytest.approx(0.75)
    both = judge_together(slices, marginals, good, shifts)
    assert both.balanced == 1.0
    assert both.threshold == pytest.approx(0.021)
    assert both.second == ("marginals", pytest.approx(0.016))
    diverged = judge_together([*slices, math.nan], [*marginals, math.nan], [*good, False], [*shifts, "a"])
    assert diverged.balanced == 1.0
    infinite = judge_together([*slices, math.inf], [*marginals, math.inf], [*good, False], [*shifts, "a"])
    assert (infinite.threshold, infinite.second, infinite.balanced) == (both.threshold, both.second, 1.0)
    alone = judge_together([0.1, math.inf], [0.2, math.inf], [True, False], ["a", "b"])
    assert (alone.threshold, alone.second) == (0.1, ("marginals", 0.2))  # not half way to the largest of all numbers
    nothing = judge_together(slices, marginals, [True] * 4, shifts)
    assert (nothing.threshold, nothing.second, nothing.held_out) == (None, None, None)


def test_sides_and_what_is_not_a_number() -> None:
    good = [True, True, False, False]
    shifts = ["a", "b", "a", "b"]
    low = judge("entropy", [0.1, 0.2, 0.4, math.nan], good, shifts)
    assert (low.area, low.balanced) == (1.0, 1.0)
    assert low.threshold == pytest.approx(0.3)
    high = judge("confidence", [0.9, 0.8, 0.4, math.nan], good, shifts)
    assert (high.area, high.balanced) == (1.0, 1.0)
    assert high.threshold == pytest.approx(0.6)
    assert judge("confidence", [0.1, 0.2, 0.8, 0.9], good, shifts).area == 0.0


def judged_result(method: str, shift: str, seed: int, accuracy: float, **signals: float) -> Result:
    outcome = Outcome(1, accuracy, 0.1, 0.1, 0.1, 0.1)
    return Result(Cell("b", "offline", method, shift, seed, f"r-{method}"), "own", outcome, signals=signals)


def test_what_is_good() -> None:
    failed = Result(Cell("b", "offline", "source-only", "clean", 2, "r"), "own", error="x")
    clean = [judged_result("source-only", "clean", 1, 0.9), failed]
    cells = [
        judged_result("source-only", "fog", 1, 0.5, slices=1.0),
        judged_result("fr", "fog", 1, 0.8, slices=0.1),
        judged_result("pl", "fog", 1, 0.5, slices=0.6),
        judged_result("bufr", "fog", 1, 0.79, slices=0.2),
        judged_result("fr", "fog", 2, 0.9),
        judged_result("target-supervised", "fog", 1, 0.95),
        Result(Cell("b", "offline", "shot", "fog", 1, "r"), "own", error="x"),
    ]
    near = {(cell.method, cell.seed): good for cell, good in find_near_clean(cells, clean, 0.1).items()}
    assert near == {("source-only", 1): False, ("fr", 1): True, ("pl", 1): False, ("bufr", 1): False}
    better = {(cell.method, cell.seed): good for cell, good in find_helped(cells).items()}
    assert better == {("fr", 1): True, ("pl", 1): False, ("bufr", 1): True}
    for accuracy, good in ((0.7, True), (0.69999, False)):  # exactly at the margin, though 0.8 - 0.1 is above 0.7
        cell = judged_result("fr", "fog", 1, accuracy)
        assert find_near_clean([cell], [judged_result("source-only", "clean", 1, 0.8)], 0.1) == {
            replace(cell.cell, recipe=""): good
        }
    found = judges(cells, find_helped(cells))
    assert list(found) == [*SIGNALS, "slices and marginals"]
    assert (found["slices"].good, found["slices"].bad, found["slices"].area) == (2, 1, 1.0)
    assert (found["entropy"].good, found["entropy"].bad) == (0, 0)
