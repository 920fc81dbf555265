"""PL, pseudo-labelling (Lee, 2013): train on the model's own predictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from shiftmend.engine.method import Activations, Network, Objective, Stage
from shiftmend.methods.prediction import Prediction
from shiftmend.profiles.profile import Profile


@dataclass(frozen=True, kw_only=True)
class PL(Prediction):
    """Pseudo-labelling: cross-entropy with the argmax of the same batch's predictions, without a threshold.

    As in the reference implementation, all parameters are trained, including the classifier, unlike in other methods.
    """

    name: ClassVar[str] = "pl"
    minimises_entropy: ClassVar[bool] = True

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        return [Stage("all parameters", self.epochs, self.rate(network), network.all_parameters)]

    def objective(self, profile: Profile | None, device: torch.device) -> Objective:
        def losses(activations: Activations) -> dict[str, Tensor]:
            logits = self.logits(activations).float()
            return {"logits": functional.cross_entropy(logits, logits.detach().argmax(1))}

        return losses
