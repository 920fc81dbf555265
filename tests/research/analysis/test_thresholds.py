"""Signals as judges, against counting every pair and trying every threshold."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftmend.research.analysis.correlations import (
    area,
    best_pair,
    best_threshold,
    helped,
    judge,
    judge_together,
    judges,
    near_clean,
)
from shiftmend.research.bench.benchmark import SIGNALS, Cell, Outcome, Result

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


def result(method: str, shift: str, seed: int, accuracy: float, **signals: float) -> Result:
    outcome = Outcome(1, accuracy, 0.1, 0.1, 0.1, 0.1)
    return Result(Cell("b", "offline", method, shift, seed, f"r-{method}"), "own", outcome, signals=signals)


def test_what_is_good() -> None:
    failed = Result(Cell("b", "offline", "source-only", "clean", 2, "r"), "own", error="x")
    clean = [result("source-only", "clean", 1, 0.9), failed]
    cells = [
        result("source-only", "fog", 1, 0.5, slices=1.0),
        result("fr", "fog", 1, 0.8, slices=0.1),
        result("pl", "fog", 1, 0.5, slices=0.6),
        result("bufr", "fog", 1, 0.79, slices=0.2),
        result("fr", "fog", 2, 0.9),
        result("target-supervised", "fog", 1, 0.95),
        Result(Cell("b", "offline", "shot", "fog", 1, "r"), "own", error="x"),
    ]
    near = {(cell.method, cell.seed): good for cell, good in near_clean(cells, clean, 0.1).items()}
    assert near == {("source-only", 1): False, ("fr", 1): True, ("pl", 1): False, ("bufr", 1): False}
    better = {(cell.method, cell.seed): good for cell, good in helped(cells).items()}
    assert better == {("fr", 1): True, ("pl", 1): False, ("bufr", 1): True}
    for accuracy, good in ((0.7, True), (0.69999, False)):  # exactly at the margin, though 0.8 - 0.1 is above 0.7
        cell = result("fr", "fog", 1, accuracy)
        assert near_clean([cell], [result("source-only", "clean", 1, 0.8)], 0.1) == {
            replace(cell.cell, recipe=""): good
        }
    found = judges(cells, helped(cells))
    assert list(found) == [*SIGNALS, "slices and marginals"]
    assert (found["slices"].good, found["slices"].bad, found["slices"].area) == (2, 1, 1.0)
    assert (found["entropy"].good, found["entropy"].bad) == (0, 0)
