"""TENT (Wang et al., 2021): minimise the entropy of predictions through BatchNorm's scale and shift."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from shiftmend.engine.method import Activations, Network, Objective, Stage
from shiftmend.errors import AdaptationError
from shiftmend.methods.prediction import Prediction, entropy
from shiftmend.profiles.profile import Profile


@dataclass(frozen=True, kw_only=True)
class TENT(Prediction):
    """Minimisation of the mean entropy of predictions, by the affine parameters of BatchNorm only.

    Uses momentum SGD as in the reference implementation; the original offers Adam as well.
    """

    name: ClassVar[str] = "tent"
    minimises_entropy: ClassVar[bool] = True

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        norms = {name for name, module in network.model.named_modules() if isinstance(module, _BatchNorm)}
        affine = tuple(name for name, _ in network.model.named_parameters() if name.rpartition(".")[0] in norms)
        if not affine:
            raise AdaptationError(
                "Expected a model with scale and shift of BatchNorm for tent to train, got one without. Use fr or bufr."
            )
        return [Stage("batch norm", self.epochs, self.rate(network), affine)]

    def objective(self, profile: Profile | None, device: torch.device) -> Objective:
        def losses(activations: Activations) -> dict[str, Tensor]:
            return {"logits": entropy(torch.softmax(self.logits(activations).float(), dim=1)).mean()}

        return losses
