from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from shiftmend.errors import DataError
from shiftmend.research.analysis.correlations import correlate, restoration_and_calibration, signals_and_accuracy
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
    with pytest.raises(DataError, match="cannot correlate 3 values with 4"):
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
    with pytest.raises(DataError, match="no 'worst' outcome; expected one of last, best, selected"):
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
        with pytest.raises(DataError, match=r"several tables: emnist-da \(offline\), emnist-da \(online\)"):
            function(results)
