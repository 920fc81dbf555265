"""BNM and BNM-IM (Ishii and Sugiyama, 2021): align means and variances of features, optionally with entropies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shiftmend.engine.method import Activations, Network, Objective, Stage, check_positive, has_one_sample_per_input
from shiftmend.methods.prediction import Prediction, information_maximisation
from shiftmend.profiles.profile import Profile
from shiftmend.stats.gaussians import FullGaussian


@dataclass(frozen=True, kw_only=True)
class BNM(Prediction):
    """Matching of a Gaussian per feature by KL(source || batch): "Marg. Gauss." in the paper.

    The reference implementation takes the source's moments from the running statistics of the BatchNorm after the
    features, which were measured with dropout. The profile's moments were measured in eval mode, and need no BatchNorm.
    """

    name: ClassVar[str] = "bnm"
    needs_profile: ClassVar[bool] = True

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        return [Stage("all blocks", self.epochs, self.rate(network), network.below_features)]

    def taps(self, profile: Profile | None) -> tuple[str, ...]:
        return ("features",)

    def smallest_batch(self, profile: Profile | None) -> int:
        return 2 if has_one_sample_per_input(("features",), profile) else 1

    def objective(self, profile: Profile | None, device: torch.device) -> Objective:
        assert profile is not None
        stored = profile.gaussian.marginal() if isinstance(profile.gaussian, FullGaussian) else profile.gaussian
        # Indices replace a mask, because selecting by a mask would synchronise with the device in each batch.
        usable = (profile.taps["features"].usable & (stored.variance > 0)).nonzero()[:, 0]
        home, units = stored.of_units(usable).to(device), usable.to(device)

        def losses(activations: Activations) -> dict[str, Tensor]:
            return {"features": home.divergence(activations["features"][:, units])}

        return losses


@dataclass(frozen=True, kw_only=True)
class BNMIM(BNM):
    """Information maximisation plus `weight` times BNM."""

    name: ClassVar[str] = "bnm-im"
    minimises_entropy: ClassVar[bool] = True
    weight: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.weight, "the weight of the moments")

    def taps(self, profile: Profile | None) -> tuple[str, ...]:
        return ("features", "logits")

    def objective(self, profile: Profile | None, device: torch.device) -> Objective:
        moments = super().objective(profile, device)

        def losses(activations: Activations) -> dict[str, Tensor]:
            aligned = moments(activations)["features"]
            return {"features": self.weight * aligned, "logits": information_maximisation(self.logits(activations))}

        return losses
