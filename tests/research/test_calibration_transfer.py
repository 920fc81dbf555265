"""Calibration transfer against references that are written out here, by other formulas than the package uses."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shiftmend.errors import DataError
from shiftmend.research.calibration_transfer import (
    direct_standardisation,
    piecewise_direct_standardisation,
    slope_and_bias,
)

Floats = NDArray[np.floating[Any]]


def make_pairs(samples: int = 20, wavelengths: int = 30) -> tuple[Floats, Floats]:
    """Make smooth spectra at home, and what another device sees: other gains, a slope and a little noise."""
    rng = np.random.default_rng(0)
    places = np.linspace(0, 1, wavelengths)
    peaks = np.exp(-(((places - rng.random((4, 1))) / 0.15) ** 2))
    home = rng.random((samples, 4)) @ peaks
    site = home * (1 + 0.3 * np.sin(5 * places)) + 0.2 * places + 0.001 * rng.standard_normal(home.shape)
    return home, site


def regress_by_covariance(inputs: Floats, outputs: Floats, components: int, at: Floats) -> Floats:
    """Predict at some inputs by principal component regression, by eigenvectors of the covariance and least squares."""
    centre = inputs.mean(0)
    values, vectors = np.linalg.eigh(np.cov(inputs.T).reshape(inputs.shape[1], -1))
    basis = vectors[:, np.argsort(values)[::-1][:components]]
    scores = np.column_stack([(inputs - centre) @ basis, np.ones(len(inputs))])
    weights = np.linalg.lstsq(scores, outputs, rcond=None)[0]
    return np.asarray(np.column_stack([(at - centre) @ basis, np.ones(len(at))]) @ weights)


def test_direct_standardisation_is_a_principal_component_regression() -> None:
    home, site = make_pairs()
    told = direct_standardisation(home[:15], site[:15], 5)(site[15:])
    np.testing.assert_allclose(told, regress_by_covariance(site[:15], home[:15], 5, site[15:]), rtol=1e-6, atol=1e-8)


def test_the_piecewise_form_looks_at_a_window_that_is_cut_at_the_ends() -> None:
    home, site = make_pairs()
    told = piecewise_direct_standardisation(home[:15], site[:15], 2, 3)
    for place in range(home.shape[1]):
        columns = [column for column in range(home.shape[1]) if abs(column - place) <= 3]
        want = regress_by_covariance(site[:15][:, columns], home[:15, place], 2, site[15:][:, columns])
        np.testing.assert_allclose(told(site[15:])[:, place], want, rtol=1e-6, atol=1e-8)
    far = np.abs(np.subtract.outer(np.arange(30), np.arange(30))) > 3
    assert not told.matrix[far].any()


def test_transfer_undoes_most_of_what_the_device_does() -> None:
    home, site = make_pairs()
    before = np.abs(site[15:] - home[15:]).mean()
    for fit in (
        functools.partial(direct_standardisation, components=4),
        functools.partial(piecewise_direct_standardisation, components=2, half_width=2),
    ):
        assert np.abs(fit(home[:15], site[:15])(site[15:]) - home[15:]).mean() < 0.05 * before


def test_a_window_that_never_varies_gives_the_mean_of_home() -> None:
    home, site = make_pairs()
    site[:, :3] = 1.0
    told = piecewise_direct_standardisation(home, site, 2, 0)(site)
    np.testing.assert_allclose(told[:, :3], np.broadcast_to(home[:, :3].mean(0), (20, 3)))


def test_slope_and_bias_are_those_of_a_least_squares_line() -> None:
    rng = np.random.default_rng(1)
    told = rng.standard_normal(20)
    truth = 0.7 * told + 3 + 0.1 * rng.standard_normal(20)
    np.testing.assert_allclose(slope_and_bias(told, truth), np.polyfit(told, truth, 1))
    assert slope_and_bias(np.ones(5), np.arange(5.0)) == (0.0, 2.0)


def test_what_is_not_paired_is_refused() -> None:
    home, site = make_pairs()
    with pytest.raises(DataError, match="same"):
        direct_standardisation(home, site[:-1], 2)
    with pytest.raises(DataError, match="2 or more"):
        slope_and_bias(np.ones(1), np.ones(1))
