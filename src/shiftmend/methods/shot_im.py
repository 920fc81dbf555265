"""SHOT-IM (Liang et al., 2020): information maximisation without SHOT's pseudo-labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shiftmend.engine.method import Activations, Network, Objective, Stage, has_one_sample_per_input
from shiftmend.methods.prediction import Prediction, information_maximisation
from shiftmend.profiles.profile import Profile


@dataclass(frozen=True, kw_only=True)
class SHOTIM(Prediction):
    """Information maximisation: confident predictions that use all classes, with a fixed classifier.

    As in the reference implementation: both terms with weight 1, a constant learning rate, no weight decay, and no
    label smoothing at the source.
    """

    name: ClassVar[str] = "shot-im"
    minimises_entropy: ClassVar[bool] = True

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        return [Stage("all blocks", self.epochs, self.rate(network), network.below_features)]

    def smallest_batch(self, profile: Profile | None) -> int:
        """Return 2, since for a single prediction both terms cancel."""
        return 2 if has_one_sample_per_input(("logits",), profile) else 1

    def objective(self, profile: Profile | None, device: torch.device) -> Objective:
        def losses(activations: Activations) -> dict[str, Tensor]:
            return {"logits": information_maximisation(self.logits(activations))}

        return losses
