"""Calibration transfer of spectroscopy, as a baseline: it needs samples that both devices have measured.

Direct standardisation (DS) and its piecewise form (PDS) map spectra of the site to those of home; Wang, Veltkamp and
Kowalski 1991. Slope and bias corrects the predictions instead, by samples with known truth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shiftmend.errors import DataError

Floats = NDArray[np.floating[Any]]

RELATIVE_RANK = 1e-10
"""Singular values below this fraction of the largest count as zero."""


@dataclass(frozen=True, eq=False)
class Transfer:
    """A linear map of spectra: `spectra @ matrix + offset`, with a matrix `[D, D]` and an offset `[D]`."""

    matrix: Floats
    offset: Floats

    def __call__(self, spectra: Floats) -> Floats:
        """Map spectra `[N, D]` of the site to those that home would have measured."""
        return spectra @ self.matrix + self.offset


def direct_standardisation(home: Floats, site: Floats, components: int) -> Transfer:
    """Fit a linear map from spectra of the site to spectra of home, by principal component regression.

    Each wavelength of home is regressed on all wavelengths of the site, over the transfer samples.

    Args:
        home: Spectra `[T, D]` of the transfer samples, measured at home.
        site: Spectra `[T, D]` of the same samples in the same order, measured at the site.
        components: Largest number of principal components of the centred spectra of the site.

    Returns:
        The map, to be called with spectra of the site.

    Raises:
        DataError: If the shapes differ, or there are fewer than two samples.

    Example:
        >>> home = np.array([[0.0, 1.0], [2.0, 0.0], [1.0, 3.0]])
        >>> site = 2 * home + 1
        >>> to_home = direct_standardisation(home, site, components=2)
        >>> np.allclose(to_home(site), home)
        True
    """
    home, site = _as_pairs(home, site)
    matrix = _regress(site - site.mean(0), home - home.mean(0), components)
    return Transfer(matrix, home.mean(0) - site.mean(0) @ matrix)


def piecewise_direct_standardisation(home: Floats, site: Floats, components: int, half_width: int) -> Transfer:
    """Fit a linear map from spectra of the site to spectra of home, window by window.

    Each wavelength of home is regressed on the principal components of the site's spectrum around that wavelength.

    Args:
        home: Spectra `[T, D]` of the transfer samples, measured at home.
        site: Spectra `[T, D]` of the same samples in the same order, measured at the site.
        components: Largest number of principal components of each centred window.
        half_width: Number of wavelengths of the window on either side; the window is cut at the ends of the spectrum.

    Returns:
        The affine map `site @ matrix + offset` to home, with a banded matrix.

    Raises:
        DataError: If the spectra are not pairs of at least two samples.

    Example:
        >>> home = np.array([[0.0, 1.0], [2.0, 0.0], [1.0, 3.0]])
        >>> piecewise_direct_standardisation(home, home / 2, components=1, half_width=0).matrix.round(6)
        array([[2., 0.],
               [0., 2.]])
    """
    home, site = _as_pairs(home, site)
    centred, wanted = site - site.mean(0), home - home.mean(0)
    matrix = np.zeros((site.shape[1], site.shape[1]))
    for place in range(site.shape[1]):
        window = slice(max(0, place - half_width), place + half_width + 1)
        matrix[window, place] = _regress(centred[:, window], wanted[:, place : place + 1], components)[:, 0]
    return Transfer(matrix, home.mean(0) - site.mean(0) @ matrix)


def slope_and_bias(told: Floats, truth: Floats) -> tuple[float, float]:
    """Return the slope and bias that bring predictions closest to the truth, by least squares.

    Args:
        told: Predictions `[T]` of a model at the site.
        truth: True values `[T]` of the same samples.

    Raises:
        DataError: If there are not at least two samples of each.

    Example:
        >>> slope_and_bias(np.array([1.0, 2.0, 3.0]), np.array([3.0, 5.0, 7.0]))
        (2.0, 1.0)
    """
    if told.shape != truth.shape or told.ndim != 1 or len(told) < 2:
        raise DataError(f"Expected answers and truth of 2 or more samples, got {told.shape} and {truth.shape}.")
    centred = told.astype(np.float64) - told.mean(dtype=np.float64)
    spread = float(centred @ centred)
    # Constant predictions have no slope.
    slope = float(centred @ truth) / spread if spread > 0 else 0.0
    return slope, float(truth.mean(dtype=np.float64)) - slope * float(told.mean(dtype=np.float64))


def _as_pairs(home: Floats, site: Floats) -> tuple[Floats, Floats]:
    if home.shape != site.shape or home.ndim != 2 or len(home) < 2:
        raise DataError(f"Expected spectra [T, D] of the same T >= 2 samples, got {home.shape} and {site.shape}.")
    return home.astype(np.float64), site.astype(np.float64)


def _regress(inputs: Floats, outputs: Floats, components: int) -> Floats:
    """Return the coefficients of a regression on the principal components of centred inputs."""
    left, values, right = np.linalg.svd(inputs, full_matrices=False)
    kept = (values > RELATIVE_RANK * values.max(initial=0.0)) & (np.arange(len(values)) < components)
    return np.asarray(right[kept].T @ ((left[:, kept].T @ outputs) / values[kept, None]))
