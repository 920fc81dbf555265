"""Input matching: match mean, mean and standard deviation, or quantiles of the inputs to the source."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from shiftmend.engine.method import Method, Network, Stage
from shiftmend.errors import AdaptationError
from shiftmend.introspection.input_map import (
    attach_input_curve,
    attach_input_map,
    set_input_curve,
    set_input_map,
)
from shiftmend.profiles.profile import Profile
from shiftmend.stats.moments import Moments, MomentTracker, find_scale, unit_shape
from shiftmend.stats.quantiles import LEVELS, MAX_UNITS, Quantiles, QuantileTracker
from shiftmend.utils.tensor_tree import Inputs, TensorTree

MIN_PER_SEGMENT = 8
"""Smallest mean number of target values between two knots of a curve. With fewer values, only every second, fourth or
eighth knot is used, with straight lines between them."""


@dataclass(frozen=True, kw_only=True)
class MatchMean(Method):
    """A constant offset of each channel or column of the inputs that makes their mean equal to the source's.

    Images and signals are matched per channel, tables and spectra per column, other inputs as a whole. The inputs are
    those that the model receives, after `preprocess`. The model gets two buffers (`introspection/input_map.py`); its
    weights do not change.
    """

    name: ClassVar[str] = "match-mean"
    trains: ClassVar[bool] = False
    needs_profile: ClassVar[bool] = True
    online: ClassVar[bool] = False
    several_processes: ClassVar[bool] = True
    reads_inputs: ClassVar[bool] = True
    maps_inputs: ClassVar[bool] = True
    scales: ClassVar[bool] = False
    """Whether standard deviations are matched as well."""

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        return [Stage("inputs", 1)]

    def begin(self, model: nn.Module, sample: Inputs, profile: Profile | None) -> None:
        """Attach an identity map, and raise if the inputs cannot be matched to the profile."""
        sample = _one_tensor(sample, self.name)
        shape = _check_units(sample, len(_find_moments(profile).mean), self.name)
        dtype = torch.promote_types(sample.dtype, torch.float32)
        ones = torch.ones(shape, dtype=dtype, device=sample.device)
        attach_input_map(model, ones, torch.zeros_like(ones))

    def adapt_to_inputs(self, model: nn.Module, batches: Iterable[Inputs], profile: Profile | None) -> None:
        """Compute the inputs' moments in one pass, and set the model's input map to match them to the source's.

        Args:
            model: The model to which `begin` has attached an identity map. Its input map is overwritten in place.
            batches: All inputs of the site, in batches.
            profile: Profile with the moments of the source's inputs.

        Raises:
            AdaptationError: If the profile lacks moments of the inputs, or the inputs are not finite or vary in shape.
        """
        tracker = MomentTracker()
        for batch in batches:
            tracker.update(_one_tensor(batch, self.name))
        found, home = tracker.reduce_over_processes().exact(), _find_moments(profile)
        if found is None:
            raise _not_finite(self.name)
        mean, variance = found
        home_mean, home_variance = home.mean.to(mean), home.variance.to(mean)
        # A unit that is constant on either side is only shifted.
        scale = find_scale(variance, home_variance) if self.scales else torch.ones_like(mean)
        set_input_map(model, scale, home_mean - scale * mean)


@dataclass(frozen=True, kw_only=True)
class MatchMoments(MatchMean):
    """A linear map of each channel or column of the inputs that matches mean and standard deviation to the source.

    Channels and columns that are constant at the source or at the target are only shifted.
    """

    name: ClassVar[str] = "match-moments"
    scales: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class MatchHistogram(Method):
    """A monotone curve for each channel or column of the inputs that matches their quantiles to the source.

    Curves are piecewise linear, with a knot at each quantile of the target, and fewer knots for fewer than 264 values
    per channel. Channels and columns that are constant at the source or at the target are only shifted. The model gets
    two buffers (`introspection/input_map.py`); its weights do not change.
    """

    name: ClassVar[str] = "match-histogram"
    trains: ClassVar[bool] = False
    needs_profile: ClassVar[bool] = True
    online: ClassVar[bool] = False
    several_processes: ClassVar[bool] = True
    reads_inputs: ClassVar[bool] = True
    maps_inputs: ClassVar[bool] = True

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        return [Stage("inputs", 1)]

    def begin(self, model: nn.Module, sample: Inputs, profile: Profile | None) -> None:
        """Attach identity curves, and raise if the inputs cannot be matched to the profile."""
        sample = _one_tensor(sample, self.name)
        home = _find_quantiles(profile, sample)
        _check_units(sample, len(home.values), self.name)
        dtype = torch.promote_types(sample.dtype, torch.float32)
        knots = home.values.to(dtype).to(sample.device)
        attach_input_curve(model, knots, torch.zeros_like(knots))

    def adapt_to_inputs(self, model: nn.Module, batches: Iterable[Inputs], profile: Profile | None) -> None:
        """Compute the inputs' quantiles in one pass, and set the model's input curves to match them to the source's."""
        tracker, sample = QuantileTracker(), torch.empty(0)
        for batch in batches:
            sample = _one_tensor(batch, self.name)
            tracker.update(sample)
        tracker = tracker.reduce_over_processes()
        found, home = tracker.exact(), _find_quantiles(profile, sample).values
        if found is None or len(found) != len(home):
            raise _not_finite(self.name)
        set_input_curve(model, *find_curves(found.cpu().double(), home.cpu().double(), tracker.samples))


def find_curves(target: Tensor, home: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """Find the curves that map quantiles of the target to those of home.

    Args:
        target: Quantiles `[D, LEVELS]` of the target.
        home: Quantiles `[D, LEVELS]` of home.
        samples: Number of values per unit that the target's quantiles were computed from.

    Returns:
        Knots and shifts `[D, LEVELS]`, as `attach_input_curve` takes them.

    Example:
        >>> target = torch.linspace(0, 1, 33, dtype=torch.float64).view(1, 33)
        >>> knots, shifts = find_curves(target, 2 * target + 1, 1000)
        >>> torch.equal(knots + shifts, 2 * target + 1)
        True
    """
    step = next((step for step in (1, 2, 4, 8) if samples * step >= MIN_PER_SEGMENT * LEVELS), LEVELS // 2)
    knots, values = target[:, ::step].contiguous(), home[:, ::step].contiguous()
    # Inputs with the same value, such as a black background, get the middle of home's values at their levels.
    first, last = (torch.searchsorted(knots, knots, right=right) for right in (False, True))
    both = first + last - 1
    tied = (values.gather(1, both // 2) + values.gather(1, (both + 1) // 2)) / 2
    constant = home[:, :1] == home[:, -1:]
    middle = knots.shape[1] // 2
    shifts = torch.where(constant, values - knots[:, middle : middle + 1], tied - knots)
    share = (torch.arange(LEVELS, device="cpu", dtype=knots.dtype) / step).clamp_max(knots.shape[1] - 1)
    below = share.long().clamp_max(knots.shape[1] - 2)
    share = share - below
    filled = [torch.lerp(part[:, below], part[:, below + 1], share) for part in (knots, shifts)]
    return filled[0].cummax(1).values, filled[1]


def _one_tensor(inputs: Inputs, name: str) -> Tensor:
    if isinstance(inputs, TensorTree):
        raise AdaptationError(f"Expected inputs of one tensor for {name}, got {len(inputs.names)}. Try another method.")
    return inputs


def _check_units(sample: Tensor, units: int, name: str) -> tuple[int, ...]:
    """Return the shape with one number per channel or column; refuse inputs that cannot be matched."""
    if not sample.is_floating_point():
        kind = str(sample.dtype).removeprefix("torch.")
        raise AdaptationError(f"Expected floating-point inputs for {name}, got {kind}. Convert them in preprocess.")
    shape = unit_shape(sample)
    if shape[0] != units:
        raise AdaptationError(
            f"Expected inputs of {units} channels or columns for {name}, as at the source, got {shape[0]}. Check the "
            "shape of the inputs."
        )
    return shape


def _not_finite(name: str) -> AdaptationError:
    return AdaptationError(f"Expected finite inputs of one shape for {name}, got others. Check preprocess.")


def _find_quantiles(profile: Profile | None, sample: Tensor) -> Quantiles:
    """Return the quantiles of the source's inputs."""
    found = None if profile is None else profile.statistics.get("inputs.quantiles")
    if not isinstance(found, Quantiles):
        if sample.ndim > 1 and unit_shape(sample)[0] > MAX_UNITS:
            raise AdaptationError(
                f"Expected at most {MAX_UNITS:,} columns for match-histogram, got {unit_shape(sample)[0]:,}. Try "
                "match-moments."
            )
        raise AdaptationError(
            "Expected a profile with quantiles of the inputs, got one without. Profile the source again."
        )
    return found


def _find_moments(profile: Profile | None) -> Moments:
    """Return the moments of the source's inputs."""
    found = None if profile is None else profile.statistics.get("inputs")
    if not isinstance(found, Moments):
        raise AdaptationError(
            "Expected a profile with moments of the inputs, got one without. Profile the source again."
        )
    return found
