"""Feature matching without gradients: match the mean, or mean and covariance, of the features to the source.

`neo` shifts the mean. `coral` whitens the features of the target and recolours them with the covariance of the source.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from shiftmend.engine.method import Method, Network, Stage
from shiftmend.errors import AdaptationError, TapError
from shiftmend.introspection.feature_map import attach_feature_map, find_features, offset_shape, set_feature_map
from shiftmend.introspection.taps import module_of
from shiftmend.passes.evaluation_pass import Observation, run_pass, without_labels
from shiftmend.profiles.profile import Profile
from shiftmend.stats.gaussians import CovarianceTracker, FullGaussian
from shiftmend.stats.histograms import RangeTracker
from shiftmend.utils.checks import is_real
from shiftmend.utils.devices import sum_dtype
from shiftmend.utils.tensor_tree import Inputs

RIDGE = 1e-6
"""Variance that is added to every unit on both sides, relative to the mean variance at home, so that constant units
stay constant."""


@dataclass(frozen=True, kw_only=True)
class NEO(Method):
    """A constant offset of each feature that makes the mean of the features equal to the source's.

    The model gets one buffer before its head (`introspection/feature_map.py`); its weights do not change.
    """

    name: ClassVar[str] = "neo"
    trains: ClassVar[bool] = False
    needs_profile: ClassVar[bool] = True
    online: ClassVar[bool] = False
    several_processes: ClassVar[bool] = True
    reads_inputs: ClassVar[bool] = True
    recolours: ClassVar[bool] = False
    """Whether covariances are matched as well."""

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        return [Stage("features", 1)]

    def begin(self, model: nn.Module, sample: Inputs, profile: Profile | None) -> None:
        """Attach an identity map."""
        assert profile is not None
        tap = profile.specs["features"]
        try:
            features = find_features(model, sample, tap)
        except TapError as error:
            raise AdaptationError(f"{self.name}: {error}") from error
        dtype = torch.promote_types(features.dtype, torch.float32)
        offset = torch.zeros(offset_shape(features, tap.channel_axis), dtype=dtype, device=features.device)
        matrix = torch.eye(len(offset), dtype=dtype, device=features.device) if self.recolours else None
        attach_feature_map(module_of(model, tap), tap.side, offset, matrix)

    def adapt_to_inputs(self, model: nn.Module, batches: Iterable[Inputs], profile: Profile | None) -> None:
        """Compute the features of all inputs once, and set the map."""
        assert profile is not None
        tap = profile.specs["features"]
        tracker: CovarianceTracker | RangeTracker = CovarianceTracker() if self.recolours else RangeTracker()
        inputs = 0

        def update(seen: Observation) -> None:
            nonlocal inputs
            tracker.update(seen.activations["features"])
            inputs += len(seen.inputs)

        run_pass(model, without_labels(batches), update, taps={"features": tap})
        found = tracker.reduce_over_processes()
        if not bool(torch.isfinite(found.mean).all()):
            raise AdaptationError(
                f"Expected finite features for {self.name}, got NaN or infinity. Check the inputs and preprocess."
            )
        # Positions of a feature map are not independent samples.
        samples = found.samples * inputs / tracker.samples
        offset, matrix = self.find_map(found, samples, profile)
        set_feature_map(module_of(model, tap), tap.side, offset, matrix)

    def find_map(
        self, found: CovarianceTracker | RangeTracker, samples: float, profile: Profile
    ) -> tuple[Tensor, Tensor | None]:
        """Return the offset to add to the features, and the matrix to multiply them with, or None."""
        return profile.gaussian.mean.to(found.mean) - found.mean, None


@dataclass(frozen=True, kw_only=True)
class CORAL(NEO):
    """A linear map of the features that makes their mean and covariance equal to the source's.

    With covariances C and means m, features x become (x - m_t) C_t^(-1/2) C_s^(1/2) + m_s. A covariance of few samples
    is noisy, so the target's is mixed with the source's: the latter has the weight `shrinkage`, by default D / (D + N -
    1) for D features and N samples. With a single sample, only the mean is shifted. The profile must have been made
    with `gaussian="full"`.
    """

    name: ClassVar[str] = "coral"
    needs_covariance: ClassVar[bool] = True
    recolours: ClassVar[bool] = True
    shrinkage: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shrinkage is not None and not (is_real(self.shrinkage) and 0 <= self.shrinkage <= 1):
            raise AdaptationError(f"Expected the shrinkage to lie between 0 (none) and 1, got {self.shrinkage!r}.")

    def begin(self, model: nn.Module, sample: Inputs, profile: Profile | None) -> None:
        """Attach an identity map; raise if the profile has no covariance."""
        if profile is None or not isinstance(profile.gaussian, FullGaussian):
            raise AdaptationError(
                "Expected a profile with the covariance of the features, got one without. Make it with "
                "shiftmend.profile(..., gaussian='full')."
            )
        super().begin(model, sample, profile)

    def find_map(
        self, found: CovarianceTracker | RangeTracker, samples: float, profile: Profile
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(found, CovarianceTracker)
        assert isinstance(profile.gaussian, FullGaussian)
        home, home_mean = (part.cpu().double() for part in (profile.gaussian.covariance, profile.gaussian.mean))
        away = (found.products / max(1, found.samples - 1)).cpu().double()
        mean, units = found.mean.cpu().double(), len(home)
        shrinkage = units / (units + max(0.0, samples - 1)) if self.shrinkage is None else self.shrinkage
        ridge = RIDGE * home.diagonal().mean() * torch.eye(units, dtype=home.dtype)
        away = (1 - shrinkage) * away + shrinkage * home
        matrix = _raise_to(away + ridge, -0.5) @ _raise_to(home + ridge, 0.5)
        place, dtype = found.mean.device, sum_dtype(found.mean.device)
        return (home_mean - mean @ matrix).to(dtype).to(place), matrix.to(dtype).to(place)


def _raise_to(covariance: Tensor, power: float) -> Tensor:
    """Compute a power of a positive definite matrix; eigenvalues that rounding made negative are clamped."""
    values, vectors = torch.linalg.eigh(covariance)
    least = values.amax() * torch.finfo(values.dtype).eps
    raised: Tensor = (vectors * values.clamp_min(least).pow(power)) @ vectors.T
    return raised
