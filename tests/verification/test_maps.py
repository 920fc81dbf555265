"""Maps from one signal to a score, against scikit-learn and scipy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.isotonic import IsotonicRegression

from shiftmend.verification.maps import FITS, fit_line, fit_monotone


def draw_cells(seed: int, cells: int = 14, sign: float = 1.0, noise: float = 0.08) -> tuple[Any, Any]:
    """Signals of cells, and scores that go with them."""
    rng = np.random.default_rng(seed)
    signals = rng.uniform(0, 2, cells)
    return signals, 0.5 + sign * 0.2 * (signals - 1) + rng.normal(0, noise, cells)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("seed", range(8))
def test_levels_are_those_of_isotonic_regression(seed: int, sign: float) -> None:
    signals, scores = draw_cells(seed, sign=sign)
    fitted = fit_monotone(signals, scores)
    reference = IsotonicRegression(increasing=sign > 0).fit(signals, scores)
    levels = np.unique(reference.predict(signals).round(12))
    np.testing.assert_allclose(np.sort(fitted.levels), levels, atol=1e-9)
    for level in levels:
        (centre,) = fitted.knots[np.abs(fitted.levels - level) < 1e-9]
        own = np.abs(reference.predict(signals) - level) < 1e-9
        assert centre == pytest.approx(signals[own].mean())


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(0, 1)), min_size=2, max_size=12),
    st.floats(-4, 4),
    st.floats(-4, 4),
)
def test_a_monotone_map_never_turns_and_never_leaves_the_scores(
    cells: list[tuple[float, float]], one: float, other: float
) -> None:
    signals, scores = (np.array(values, dtype=float) for values in zip(*cells, strict=True))
    fitted = fit_monotone(signals, scores)
    steps = np.diff(fitted.levels)
    assert (steps >= 0).all() or (steps <= 0).all()
    rising = fitted.levels[-1] >= fitted.levels[0]
    low, high = fitted(min(one, other)), fitted(max(one, other))
    assert (low <= high + 1e-12) if rising else (low >= high - 1e-12)
    assert scores.min() - 1e-12 <= low <= scores.max() + 1e-12


def test_between_levels_a_monotone_map_interpolates_and_beyond_it_is_constant() -> None:
    fitted = fit_monotone(np.array([0.0, 1.0, 3.0]), np.array([0.9, 0.5, 0.1]))
    assert [fitted(signal) for signal in (-5, 0, 0.5, 2, 9)] == pytest.approx([0.9, 0.9, 0.7, 0.3, 0.1])


def test_equal_signals_share_one_level_whatever_their_order() -> None:
    signals, scores = np.array([1.0, 0.5, 1.0, 1.0, 0.0]), np.array([0.9, 0.5, 0.6, 0.9, 0.1])
    expected = IsotonicRegression().fit(signals, scores).predict(signals)
    for order in (np.arange(5), np.arange(5)[::-1], np.array([2, 0, 3, 1, 4])):
        fitted = fit_monotone(signals[order], scores[order])
        np.testing.assert_allclose([fitted(signal) for signal in signals], expected)


def test_a_signal_that_never_varied_maps_to_the_mean() -> None:
    fitted = fit_monotone(np.full(4, 0.3), np.array([0.1, 0.9, 0.4, 0.6]))
    assert fitted(0.3) == pytest.approx(0.5)
    assert fit_line(np.full(4, 0.3), np.array([0.1, 0.9, 0.4, 0.6]))(0.3) == pytest.approx(0.5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("seed", range(8))
def test_the_slope_is_that_of_theil_and_sen(seed: int, sign: float) -> None:
    signals, scores = draw_cells(seed, sign=sign)
    fitted = fit_line(signals, scores)
    expected = stats.theilslopes(scores, signals, method="joint")
    assert fitted.slope == pytest.approx(expected.slope)
    assert fitted.intercept == pytest.approx(expected.intercept)


def test_a_line_stays_within_the_scores_and_heeds_no_outlier() -> None:
    signals = np.arange(9.0)
    scores = 0.1 * signals
    fitted = fit_line(signals, scores)
    assert (fitted(-1), fitted(4.5), fitted(20)) == pytest.approx((0, 0.45, 0.8))
    scores[7] = 0.0
    assert fit_line(signals, scores)(4.5) == pytest.approx(0.45, abs=0.02)


@pytest.mark.parametrize("kind", FITS)
def test_noiseless_cells_are_mapped_to_their_scores(kind: str) -> None:
    signals = np.linspace(0, 1, 12)
    scores = 0.2 + 0.7 * signals
    fitted = FITS[kind](signals, scores)
    np.testing.assert_allclose([fitted(signal) for signal in signals], scores, atol=1e-12)
