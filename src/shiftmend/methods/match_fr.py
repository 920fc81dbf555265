"""Match-FR: input matching first, then Feature Restoration from there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from shiftmend.engine.method import Network, Objective, Stage
from shiftmend.methods.fr import FR
from shiftmend.methods.match import MatchMoments
from shiftmend.profiles.profile import Profile
from shiftmend.utils.tensor_tree import Inputs

INPUTS = "inputs"
"""Name of the stage that matches the inputs."""


@dataclass(frozen=True, kw_only=True)
class MatchFR(FR):
    """Matching of mean and deviation of the inputs, then FR.

    Each sensor of a device has a gain and an offset of its own. Matching undoes them at once; FR, which would have to
    undo them by its weights, is left with what is not linear. Between five boards of gas sensors both together are
    better than either (`benchmarks/real_instruments.py`).
    """

    name: ClassVar[str] = "match-fr"
    online: ClassVar[bool] = False
    reads_inputs: ClassVar[bool] = True
    maps_inputs: ClassVar[bool] = True
    for_tables: ClassVar[bool] = True

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        return [Stage(INPUTS, 1), *super().stages(network, profile)]

    def objective_of(self, stage: Stage, profile: Profile | None, device: torch.device) -> Objective | None:
        return None if stage.name == INPUTS else super().objective_of(stage, profile, device)

    def begin(self, model: nn.Module, sample: Inputs, profile: Profile | None) -> None:
        """Attach an identity map, and raise if the inputs cannot be matched to the profile."""
        _MATCHING.begin(model, sample, profile)

    def adapt_to_inputs(self, model: nn.Module, batches: Iterable[Inputs], profile: Profile | None) -> None:
        """Compute the inputs' moments in one pass, and set the model's input map to match them to the source's."""
        _MATCHING.adapt_to_inputs(model, batches, profile)


class _Matching(MatchMoments):
    """Input matching whose errors name the method that the user has asked for."""

    name: ClassVar[str] = MatchFR.name


_MATCHING = _Matching()
