"""BNM and BNM-IM (Ishii and Sugiyama, 2021): align the features' means and variances, without and with entropies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shiftmend.methods.base import Activations, Network, Objective, Stage, check_positive
from shiftmend.methods.entropies import Prediction, information_maximisation
from shiftmend.profiles import Profile


def gaussian_divergence(values: Tensor, mean: Tensor, variance: Tensor, usable: Tensor) -> Tensor:
    """Mean over usable units of KL(N_source || N_batch), from the batch's mean and unbiased variance.

    (1 / 2D) sum of ln(v_b / v_s) + (v_s + (m_s - m_b)^2) / v_b - 1. A variance is never taken as smaller than a
    millionth of the source's, so that a unit that is dead on the target gives a large loss instead of NaN.
    """
    values = values.float()[:, usable]
    mean, variance = mean[usable], variance[usable]
    batch_mean = values.mean(0)
    batch_variance = torch.maximum(values.var(0, unbiased=True), 1e-6 * variance)
    ratio = (variance + (mean - batch_mean).square()) / batch_variance
    return 0.5 * (torch.log(batch_variance / variance) + ratio - 1).mean()


@dataclass(frozen=True, kw_only=True)
class BNM(Prediction):
    """The paper's "Marg. Gauss.": each feature as a Gaussian, described by the profile's mean and deviation.

    The reference implementation takes the source's moments from the running statistics of the BatchNorm behind the
    features, which saw dropout; the profile's were measured in eval mode, and need no BatchNorm.
    """

    name: ClassVar[str] = "bnm"
    needs_profile: ClassVar[bool] = True

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        return [Stage("all blocks", self.epochs, self.rate(network), network.below_features)]

    def taps(self, profile: Profile | None) -> tuple[str, ...]:
        return ("features",)

    def objective(self, profile: Profile | None, device: torch.device) -> Objective:
        assert profile is not None
        mean, variance = profile.mean.to(device), profile.deviation.square().to(device)
        # positions instead of a mask: picking by a mask would wait for the device at each batch
        usable = profile.taps["features"].usable.nonzero()[:, 0].to(device)

        def losses(activations: Activations) -> dict[str, Tensor]:
            return {"features": gaussian_divergence(activations["features"], mean, variance, usable)}

        return losses


@dataclass(frozen=True, kw_only=True)
class BNMIM(BNM):
    """Information maximisation plus `weight` times BNM."""

    name: ClassVar[str] = "bnm-im"
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
