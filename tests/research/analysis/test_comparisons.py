from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from shiftmend.errors import DataError
from shiftmend.research.analysis.comparisons import METRICS, compare, holm, index_by_place, leads
from shiftmend.research.bench.benchmark import Cell, Outcome, Result
from shiftmend.research.bench.store import from_compact, to_compact


def result(method: str, shift: str, seed: int, score: float, metric: str = "accuracy", **cell: str) -> Result:
    scores = dict.fromkeys(METRICS, 0.5) | {metric: score}
    names = {"benchmark": "emnist-da", "protocol": "offline", "recipe": f"of {method}"} | cell
    return Result(Cell(method=method, shift=shift, seed=seed, **names), "published", last=Outcome(9, **scores))


def grid(scores: dict[str, dict[str, Sequence[float]]], metric: str = "accuracy") -> list[Result]:
    return [
        result(method, shift, seed, score, metric)
        for method, shifts in scores.items()
        for shift, seeds in shifts.items()
        for seed, score in enumerate(seeds)
    ]


def p_by_density(differences: Sequence[float]) -> float:
    """Twice the area beyond t under Student's density, by quadrature."""
    n = len(differences)
    t = abs(np.mean(differences)) / math.sqrt(np.var(differences, ddof=1) / n)
    freedom = n - 1
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    return 2 * integrate.quad(lambda x: scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2), t, math.inf)[0]


def test_two_seeds_follow_the_arctangent_of_one_degree_of_freedom() -> None:
    found = compare(grid({"a": {"sky": [0.5, 0.7]}, "b": {"sky": [0.4, 0.3]}}), "a", "b")[0]
    t = 0.25 / (0.15 * math.sqrt(2) / math.sqrt(2))  # differences 0.1 and 0.4: deviation 0.3 / sqrt 2, over sqrt 2
    assert found.p == pytest.approx(1 - 2 * math.atan(t) / math.pi, rel=1e-9)
    assert found.difference == pytest.approx(0.25)
    assert found.deviation == pytest.approx(0.3 / math.sqrt(2))
    assert found.pairs == 2


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.floats(0, 1).map(lambda x: round(x, 4)), st.floats(0, 1).map(lambda x: round(x, 4))),
        min_size=2,
        max_size=8,
    )
)
def test_p_is_the_area_under_students_density(pairs: list[tuple[float, float]]) -> None:
    left, right = zip(*pairs, strict=True)
    found = compare(grid({"a": {"sky": left}, "b": {"sky": right}}), "a", "b")[0]
    differences = [a - b for a, b in pairs]
    assert found.difference == pytest.approx(np.mean(differences), abs=1e-12)
    assert found.deviation == pytest.approx(np.std(differences, ddof=1), abs=1e-12)
    if max(differences) - min(differences) < 1e-9:
        assert found.p is None
        assert "same for every seed" in found.remark
    else:
        assert found.p == pytest.approx(p_by_density(differences), rel=1e-5, abs=1e-9)
        assert found.p == pytest.approx(stats.ttest_rel(left, right).pvalue, rel=1e-7, abs=1e-12)
        assert found.remark == ""


@pytest.mark.slow
@given(st.lists(st.floats(0, 1), min_size=1, max_size=7))
def test_holm_is_the_closure_of_bonferroni(p_values: list[float]) -> None:
    """A hypothesis falls if Bonferroni rejects every set of hypotheses that contains it."""
    everything = range(len(p_values))
    sets = [s for size in everything for s in itertools.combinations(everything, size + 1)]
    expected = [
        max(min(1.0, len(s) * min(p_values[member] for member in s)) for s in sets if index in s)
        for index in everything
    ]
    assert holm(p_values) == pytest.approx(expected, abs=1e-15)


def test_shifts_are_corrected_together_and_judged_by_that() -> None:
    rng = np.random.default_rng(1)
    shifts = {f"shift {i}": rng.uniform(0.4, 0.6, 5) for i in range(4)}
    better = {
        shift: base + gain + rng.normal(0, 0.01, 5)
        for (shift, base), gain in zip(shifts.items(), (0.2, 0.016, 0.0, -0.1), strict=True)
    }
    *found, overall = compare(grid({"new": better, "old": shifts}), "new", "old")
    assert [entry.shift for entry in found] == [f"shift {i}" for i in range(4)]
    expected = [stats.ttest_rel(better[shift], shifts[shift]).pvalue for shift in shifts]
    assert [entry.p for entry in found] == pytest.approx(expected)
    assert [entry.corrected for entry in found] == pytest.approx(holm(expected))
    assert 0.05 / 2 < expected[1] < 0.05  # alone it would have passed
    assert [entry.verdict for entry in found] == [
        *("new better", "no difference shown", "no difference shown", "old better")
    ]
    means = [np.mean(list(side.values()), axis=0) for side in (better, shifts)]
    assert overall.shift is None
    assert overall.p == overall.corrected == pytest.approx(stats.ttest_rel(*means).pvalue)
    assert overall.difference == pytest.approx(np.mean(means[0] - means[1]))
    assert (overall.verdict, overall.pairs, overall.remark) == ("new better", 5, "")


@pytest.mark.parametrize("metric", METRICS)
def test_less_is_better_but_for_accuracy(metric: str) -> None:
    found = compare(
        grid({"a": {"sky": [0.5, 0.51, 0.52]}, "b": {"sky": [0.2, 0.22, 0.21]}}, metric), "a", "b", metric=metric
    )
    assert [entry.verdict for entry in found] == [f"{'a' if metric == 'accuracy' else 'b'} better"] * 2
    assert found[0].difference == pytest.approx(0.3)


def test_only_seeds_of_both_are_paired() -> None:
    results = grid(
        {"a": {"sky": [0.1, 0.5, 0.9], "fog": [0.3], "only a": [0.5]}, "b": {"sky": [0.2, 0.4], "fog": [0.1]}}
    )
    results.append(replace(result("b", "sky", 2, 0.0), last=None, error="out of memory"))
    by_shift = {entry.shift: entry for entry in compare(results, "a", "b")}
    assert {shift: entry.pairs for shift, entry in by_shift.items()} == {"fog": 1, "only a": 0, "sky": 2, None: 2}
    assert by_shift["sky"].difference == pytest.approx((-0.1 + 0.1) / 2, abs=1e-12)
    assert by_shift["sky"].verdict == "no difference shown"
    one, none = by_shift["fog"], by_shift["only a"]
    assert (one.p, one.corrected, one.deviation, one.verdict) == (None, None, None, "too few seeds")
    assert one.difference == pytest.approx(0.2)
    assert one.remark == "only one seed done by both"
    assert (none.p, none.difference, none.verdict) == (None, None, "too few seeds")
    assert none.remark == "no seed done by both"
    # Seed 0 has sky and fog, seed 1 only sky: (0.1 + 0.3 - 0.2 - 0.1) / 2 and 0.5 - 0.4.
    overall = by_shift[None]
    assert overall.difference == pytest.approx((0.05 + 0.1) / 2)
    assert (overall.shifts, overall.over(3), overall.over(2)) == (2, "2 of 3 shifts", "all shifts")
    assert [replace(overall, shifts=number).over(3) for number in (0, 1)] == ["all shifts", "1 of 3 shifts"]
    assert by_shift["sky"].over(3) == "sky"
    assert overall.remark == "not every seed has been run on the same shifts"
    # Untested shifts do not count for the correction.
    assert by_shift["sky"].corrected == by_shift["sky"].p


@pytest.mark.parametrize(("gain", "scale"), [(0.0, 1.0), (0.1, 1.0), (0.1, 1e5)])
def test_equal_differences_leave_nothing_to_test(gain: float, scale: float) -> None:
    base = [0.0, scale, 0.2, 0.3, 0.7]  # plus 0.1, whose differences differ in the last bit
    found = compare(grid({"a": {"sky": [x + gain for x in base]}, "b": {"sky": base}}), "a", "b")
    for entry in found:
        assert (entry.p, entry.corrected, entry.verdict) == (None, None, "no difference shown")
        assert "same for every seed" in entry.remark


def test_a_compact_export_gives_the_verdicts_of_its_store() -> None:
    right = {"dim": (801, 850, 777), "sky": (801, 851, 777)}  # of 897 images; three more each time on the first shift
    scores = {
        "a": {shift: [(number + 3) / 897 for number in numbers] for shift, numbers in right.items()},
        "b": {shift: [(number - (number == 851)) / 897 for number in numbers] for shift, numbers in right.items()},
    }
    stored = grid(scores)
    dim, sky, _ = (found.verdict for found in compare(stored, "a", "b"))
    assert (dim, sky) == ("no difference shown", "a better")
    for ours, theirs in zip(
        compare(stored, "a", "b"), compare(from_compact(to_compact(stored)), "a", "b"), strict=True
    ):
        assert (ours.verdict, ours.remark) == (theirs.verdict, theirs.remark)


def test_who_leads_is_counted_without_ties_and_without_what_has_no_pair() -> None:
    scores = {"up": [0.5, 0.6], "down": [0.1, 0.1], "even": [0.4, 0.6], "only a": [0.9]}
    base = {"up": [0.4, 0.4], "down": [0.2, 0.3], "even": [0.6, 0.4], "down too": [0.3]}
    *each, _ = compare(grid({"a": scores, "b": base}), "a", "b")
    assert {one.shift: one.difference for one in each}["even"] == 0
    assert leads(each, "accuracy") == (1, 1)
    assert leads(each[:1], "ece") == (1, 0)  # down: lower is better


def test_a_difference_is_shown_below_the_level_and_not_at_it() -> None:
    results = grid({"a": {"sky": [0.50, 0.52, 0.57]}, "b": {"sky": [0.4, 0.4, 0.4]}})
    found = compare(results, "a", "b")[0]
    assert found.p is not None
    assert 0.01 < found.p < 0.05
    for level, verdict in ((found.p, "no difference shown"), (math.nextafter(found.p, 1), "a better")):
        assert compare(results, "a", "b", level=level)[0].verdict == verdict
    weaker = compare(grid({"a": {"sky": [0.50, 0.52, 0.62]}, "b": {"sky": [0.4, 0.4, 0.4]}}), "a", "b")[0]
    assert weaker.p is not None
    assert 0.05 < weaker.p < 0.075
    assert weaker.verdict == "no difference shown"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_not_finite_is_neither_tested_nor_left_out(bad: float) -> None:
    results = grid({"a": {"sky": [0.1, 0.3, bad]}, "b": {"sky": [0.2, 0.5, 0.4]}}, "nll")
    found = compare(results, "a", "b", metric="nll")[0]
    assert (found.pairs, found.p, found.verdict, found.remark) == (
        3,
        None,
        "no difference shown",
        "a score is not finite",
    )


def test_tables_are_kept_apart() -> None:
    rng = np.random.default_rng(2)
    results = []
    for protocol, gain in (("offline", 0.1), ("online", -0.1)):
        for seed in range(4):
            results.append(result("a", "sky", seed, 0.5 + gain + rng.normal(0, 0.01), protocol=protocol))
            results.append(result("b", "sky", seed, 0.5, protocol=protocol))
    found = compare(results, "a", "b")
    assert [(entry.protocol, entry.shift, entry.verdict) for entry in found] == [
        ("offline", "sky", "a better"),
        ("offline", None, "a better"),
        ("online", "sky", "b better"),
        ("online", None, "b better"),
    ]


def test_which_outcome_is_compared() -> None:
    results = [
        replace(entry, best=replace(entry.last, accuracy=0.9 + 0.01 * entry.cell.seed))
        for entry in grid({"a": {"sky": [0.5, 0.6]}, "b": {"sky": [0.1, 0.3]}})
        if entry.last is not None
    ]
    assert compare(results, "a", "b")[0].difference == pytest.approx(0.35)
    assert compare(results, "a", "b", which="best")[0].difference == pytest.approx(0.0)
    with pytest.raises(DataError, match=r"a and b.*selected accuracy"):
        compare(results, "a", "b", which="selected")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"second": "a"}, "twice"),
        ({"second": "c"}, r"of c.*last accuracy"),
        ({"second": "b", "metric": "epoch"}, "got last epoch"),
        ({"second": "b", "which": "first"}, "got first accuracy"),
    ],
)
def test_what_cannot_be_compared_is_said(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        compare(grid({"a": {"sky": [0.5, 0.6]}, "b": {"sky": [0.1, 0.3]}}), "a", **arguments)


def test_recipes_and_origins_are_not_mixed() -> None:
    one = result("a", "sky", 0, 0.5)
    other = replace(one, cell=replace(one.cell, recipe="newer"))
    with pytest.raises(DataError, match=r"one recipe.*and newer"):
        index_by_place([one, other])
    assert list(index_by_place([one, replace(other, last=None, error="failed")]).values()) == [one]
    with pytest.raises(DataError, match=r"sky.*published.*rebuilt"):
        index_by_place([one, replace(result("b", "sky", 0, 0.5), origin="rebuilt")])
