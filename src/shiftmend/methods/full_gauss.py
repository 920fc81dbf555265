"""Full Gaussian: align mean and covariance of the features jointly ("Full Gauss." in the paper)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shiftmend.engine.method import Activations, Network, Objective, Stage, has_one_sample_per_input
from shiftmend.errors import AdaptationError
from shiftmend.methods.prediction import Prediction
from shiftmend.profiles.profile import Profile
from shiftmend.stats.gaussians import Comparison, FullGaussian
from shiftmend.utils.checks import is_real


@dataclass(frozen=True, kw_only=True)
class FullGauss(Prediction):
    """Alignment of a Gaussian with full covariance over all features by KL(batch || source).

    As in the reference implementation, a batch must have more samples than there are features. Otherwise, set
    `shrinkage` between 0 and 1, which shrinks the correlations of batch and source. The profile needs
    `gaussian="full"`. Learning rates above the published 0.001 diverge.
    """

    name: ClassVar[str] = "full-gauss"
    needs_profile: ClassVar[bool] = True
    needs_covariance: ClassVar[bool] = True
    shrinkage: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (is_real(self.shrinkage) and 0 <= self.shrinkage <= 1):
            raise AdaptationError(f"Expected the shrinkage to lie between 0 (none) and 1, got {self.shrinkage!r}.")

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        return [Stage("all blocks", self.epochs, self.rate(network), network.below_features)]

    def taps(self, profile: Profile | None) -> tuple[str, ...]:
        return ("features",)

    def smallest_batch(self, profile: Profile | None) -> int:
        """Return 2, since one sample has no covariance; the loss checks whether there are enough."""
        return 2 if has_one_sample_per_input(("features",), profile) else 1

    def objective(self, profile: Profile | None, device: torch.device) -> Objective:
        assert profile is not None
        if not isinstance(profile.gaussian, FullGaussian):
            raise AdaptationError(
                "Expected a profile with the covariance of the features, got one without. Make it with "
                "shiftmend.profile(..., gaussian='full')."
            )
        usable = (profile.taps["features"].usable & (profile.gaussian.variance > 0)).nonzero()[:, 0]
        compare = Comparison.to_source(profile.gaussian.of_units(usable).to(device), self.shrinkage)
        units = usable.to(device)

        def losses(activations: Activations) -> dict[str, Tensor]:
            return {"features": compare(activations["features"][:, units])}

        return losses
