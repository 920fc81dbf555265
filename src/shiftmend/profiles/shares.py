"""Profiles for other class shares: the profile that home would have with other class frequencies.

A rehearsal with labels stores histograms of each class. If class k has the share w_k instead of s_k, its samples get
the weight w_k / s_k. So each bin of the profile is multiplied by the mean weight of the home samples in that bin. With
the shares of home, the profile does not change.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from shiftmend.errors import ProfileError
from shiftmend.profiles.profile import Profile
from shiftmend.profiles.rehearsal import Rehearsal
from shiftmend.stats.histograms import Histogram
from shiftmend.stats.slices import Slices

EMPTY = 1e-6
"""Share of home samples below which a bin has no information on classes and is not changed."""


def bin_weights(histograms: Tensor, home: Tensor, shares: Tensor) -> Tensor:
    """Return the mean weight of the home samples in each bin.

    Args:
        histograms: Histograms of each class `[classes, units, bins]`, whose rows add up to 1.
        home: Share of each class at home, `[classes]`.
        shares: Wanted share of each class, `[classes]`; differentiable.

    Returns:
        Weights `[units, bins]`; 1 for bins without home samples.

    Example:
        >>> of_class = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
        >>> bin_weights(of_class, torch.tensor([0.5, 0.5]), torch.tensor([0.8, 0.2]))
        tensor([[1.6000, 0.4000]])
    """
    wanted, there = (torch.einsum("k,kub->ub", one, histograms) for one in (shares, home))
    return torch.where(there > EMPTY, wanted / there.clamp_min(EMPTY), torch.ones_like(there))


def reweight(profile: Profile, shares: Tensor) -> Profile:
    """Return the profile that home would have with other class shares.

    The histograms of features, logits and slices are reweighted; other statistics stay as they are.

    Args:
        profile: A profile that was rehearsed with labels.
        shares: Share of each class, or of each cluster of a regression, `[classes]`; not negative, normalised to add up
            to 1.

    Returns:
        A new profile. Its rehearsal is unchanged and describes the former shares. To rule out estimates from this
        rehearsal, the caller sets `rehearsal` to None with `dataclasses.replace`.

    Raises:
        ProfileError: If the profile has no histograms of its classes, or the number of shares is wrong.
    """
    record = profile.rehearsal
    if record is None or not record.by_class:
        raise _refuse_without_classes()
    shares = torch.as_tensor(shares, dtype=torch.float64, device="cpu").flatten()
    classes = len(record.label_shares)
    if len(shares) != classes or not bool(((shares >= 0) & shares.isfinite()).all()) or float(shares.sum()) <= 0:
        raise ProfileError(f"Expected {classes} shares, none negative and one above 0. Try one number for each class.")
    shares = shares / shares.sum()
    statistics = dict(profile.statistics)
    for name in ("features", "logits"):
        statistics[f"tap.{name}"] = _reweight(profile.taps[name], record, name, shares)
    slices = profile.slices["verification"]
    histogram = _reweight(slices.histogram, record, "slices", shares)
    statistics["slices.verification"] = Slices(histogram, slices.seed, slices.projector)
    return replace(profile, statistics=statistics, shares=tuple(shares.tolist()))


def find_classes(profile: Profile) -> Rehearsal:
    """Return the rehearsal of a profile, with histograms of its classes.

    Raises:
        ProfileError: If there is none.
    """
    record = profile.rehearsal
    if record is None or not record.by_class or record.task != "classes":
        raise _refuse_without_classes()
    return record


def _refuse_without_classes() -> ProfileError:
    return ProfileError(
        "Expected a profile with histograms of its classes, got one without. Try shiftmend.rehearse with labels."
    )


def _reweight(histogram: Histogram, record: Rehearsal, name: str, shares: Tensor) -> Histogram:
    place = histogram.counts.device
    weights = bin_weights(record.class_histograms(name), record.label_shares, shares).to(torch.float32).to(place)
    counts = histogram.counts * weights
    counts = counts * (histogram.samples / counts.sum(1, keepdim=True).clamp_min(1e-30))
    return Histogram(counts, histogram.low, histogram.high, histogram.samples, histogram.bins)
