"""What can be wrong with the numbers of a profile, wherever it comes from."""

from __future__ import annotations

import torch

from shiftmend.gaussians import FullGaussian
from shiftmend.presets import PRESETS
from shiftmend.profiles import Profile
from shiftmend.statistics import Histogram

_ROW_TOLERANCE = 1e-3  # float32 counts of millions of samples


def problems(profile: Profile) -> list[str]:
    """Everything that is wrong with a profile, in words; empty if nothing is."""
    found = []
    if profile.preset not in PRESETS:
        found.append(f"its preset {profile.preset!r} is unknown (known: {', '.join(PRESETS)})")
    elif sorted(profile.slices) != sorted(_slices_of(profile.preset)):
        expected = " and ".join(_slices_of(profile.preset))
        found.append(f"its slices are {sorted(profile.slices)}, expected those for {expected}")
    if not bool(torch.isfinite(profile.mean).all() & torch.isfinite(profile.deviation).all()):
        found.append("the features' mean or deviation is not finite")
    elif bool((profile.deviation < 0).any()):
        found.append("the features' deviation is negative")
    elif bool((profile.deviation == 0)[profile.taps["features"].usable].any()):
        found.append("the features' deviation is zero in a unit that varied")
    found += _gaussian_problems(profile)
    samples = profile.taps["features"].samples
    if any(part.histogram.samples != samples for part in profile.slices.values()):
        found.append(f"its slices are not of the {samples} samples of the features")
    if any(tap.samples < profile.inputs_seen for tap in profile.taps.values()):
        found.append(f"a tap has fewer samples than the {profile.inputs_seen} inputs")
    if profile.taps["features"].usable_count == 0:
        found.append("every one of its features was constant")
    parts = dict(profile.taps) | {f"{name} slices": part.histogram for name, part in profile.slices.items()}
    for name, histogram in parts.items():
        found += [f"{name}: {problem}" for problem in _histogram_problems(histogram)]
    return found


def _gaussian_problems(profile: Profile) -> list[str]:
    gaussian, features = profile.gaussian, profile.taps["features"]
    spread = gaussian.covariance if isinstance(gaussian, FullGaussian) else gaussian.variance
    if not bool(torch.isfinite(gaussian.mean).all() & torch.isfinite(spread).all()):
        return ["the Gaussian's mean or variance is not finite"]
    if bool((gaussian.variance < 0).any()):  # zero is in order: a unit can be silent for one class, and vary for others
        return ["the Gaussian's variance is negative"]
    if isinstance(gaussian, FullGaussian):
        variance = gaussian.variance.double()
        if bool((gaussian.covariance.double().square() > 1.001 * torch.outer(variance, variance)).any()):
            return ["the Gaussian's covariance of two units is larger than their variances allow"]
    if gaussian.samples != features.samples:
        return [f"its Gaussian is not of the {features.samples} samples of the features"]
    return []


def _slices_of(preset: str) -> tuple[str, ...]:
    return ("verification", "alignment") if PRESETS[preset].aligned_slices else ("verification",)


def _histogram_problems(histogram: Histogram) -> list[str]:
    counts, low, high = histogram.counts, histogram.low, histogram.high
    if counts.shape != (low.shape[0], histogram.bins.total) or low.shape != high.shape or low.shape[0] == 0:
        return [f"counts {list(counts.shape)} and ranges {list(low.shape)} do not fit {histogram.bins.total} bins"]
    if not all(bool(torch.isfinite(part).all()) for part in (counts, low, high)):
        return ["counts or ranges are not finite"]
    if bool((counts < 0).any()):
        return ["counts are negative"]
    if bool((low > high).any()):
        return ["the lowest value of a unit lies above its highest"]
    off = (counts.double().sum(1) - histogram.samples).abs().max().item()
    if off > _ROW_TOLERANCE * histogram.samples:
        return [f"the counts of a unit do not add up to the {histogram.samples} samples"]
    return []
