"""Input matching: give the inputs of the target the mean, or mean and deviation, that inputs have at the source."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from shiftmend.engine.method import Method, Network, Stage
from shiftmend.errors import AdaptationError
from shiftmend.introspection.input_map import attach_input_map, set_input_map
from shiftmend.profiles.profile import Profile
from shiftmend.stats.moments import Moments, MomentTracker, unit_shape


@dataclass(frozen=True, kw_only=True)
class MatchMean(Method):
    """A constant added to each channel or column of the inputs, so that their mean is the source's.

    Images and signals are matched by channel, tables and spectra by column, anything else as a whole. The inputs are
    those that the model sees, behind `preprocess`. The model gets two buffers (`introspection/input_map.py`); its
    weights stay as they are.
    """

    name: ClassVar[str] = "match-mean"
    trains: ClassVar[bool] = False
    needs_profile: ClassVar[bool] = True
    online: ClassVar[bool] = False
    several_processes: ClassVar[bool] = True
    reads_inputs: ClassVar[bool] = True
    scales: ClassVar[bool] = False
    """Whether deviations are matched, too."""

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        return [Stage("inputs", 1)]

    def begin(self, model: nn.Module, sample: Tensor, profile: Profile | None) -> None:
        """Attach a map that changes nothing yet, after a look at whether inputs can be matched at all."""
        moments = _find_moments(profile)
        if not sample.is_floating_point():
            kind = str(sample.dtype).removeprefix("torch.")
            raise AdaptationError(
                f"{self.name} expected inputs that are floating-point numbers, got {kind}; convert them in preprocess"
            )
        shape = unit_shape(sample)
        if shape[0] != len(moments.mean):
            raise AdaptationError(
                f"{self.name} expected inputs of {len(moments.mean)} channels or columns as at the source, got "
                f"{shape[0]}; look at the shape of the inputs"
            )
        dtype = torch.promote_types(sample.dtype, torch.float32)
        ones = torch.ones(shape, dtype=dtype, device=sample.device)
        attach_input_map(model, ones, torch.zeros_like(ones))

    def adapt_to_inputs(self, model: nn.Module, batches: Iterable[Tensor], profile: Profile | None) -> None:
        """Read all inputs once and set the map."""
        tracker = MomentTracker()
        for batch in batches:
            tracker.update(batch)
        found, home = tracker.reduce_over_processes().exact(), _find_moments(profile)
        if found is None:
            raise AdaptationError(
                f"{self.name} expected finite inputs with one number of channels or columns; look at preprocess"
            )
        mean, variance = found
        home_mean, home_variance = home.mean.to(mean), home.variance.to(mean)
        scale = torch.ones_like(mean)
        if self.scales:
            # A unit that is constant on one side has no scale, and is only shifted.
            varies = (variance > 0) & (home_variance > 0)
            scale = torch.where(varies, (home_variance / variance.where(varies, scale)).sqrt(), scale)
        set_input_map(model, scale, home_mean - scale * mean)


@dataclass(frozen=True, kw_only=True)
class MatchMoments(MatchMean):
    """A linear map of each channel or column of the inputs, so that mean and deviation are the source's.

    Channels and columns that are constant at the source or at the target are only shifted.
    """

    name: ClassVar[str] = "match-moments"
    scales: ClassVar[bool] = True


def _find_moments(profile: Profile | None) -> Moments:
    """Return the moments of the source's inputs."""
    found = None if profile is None else profile.statistics.get("inputs")
    if not isinstance(found, Moments):
        raise AdaptationError(
            "expected a profile with moments of the inputs, got one without; profile the source again to match inputs"
        )
    return found
