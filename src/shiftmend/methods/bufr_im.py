"""BUFR-IM: restore the features by BUFR, then refine the predictions by a little information maximisation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from shiftmend.engine.method import Activations, Network, Objective, Stage, check_decay, check_epochs, check_positive
from shiftmend.methods.bufr import BUFR
from shiftmend.methods.shot_im import SHOTIM
from shiftmend.profiles.profile import Profile

REFINING = "all blocks, refined"
"""Name of the last stage, which no block has."""
MAX_REFINE_RATE = 0.01
"""Largest default learning rate of refining. On EMNIST-DA, the rate 0.1 that was published for SHOT-IM on the CNN
gained 0.03 points in ten epochs, and 0.01 gained 0.32 (`benchmarks/refining.py`)."""


@dataclass(frozen=True, kw_only=True)
class BUFRIM(BUFR):
    """BUFR with all its options, followed by at most `refine_epochs` epochs of SHOT-IM.

    With restored features, most predictions are correct, and information maximisation makes them more confident.
    Without, it would reinforce wrong predictions. The alignment loss is kept with the weight `hold`, so that the
    features do not drift away from home again; 0 drops it. A `refine_rate` of None takes the rate of SHOT-IM for the
    network, but at most `MAX_REFINE_RATE`. Predictions become overconfident, which a temperature corrects.
    """

    name: ClassVar[str] = "bufr-im"
    slow: ClassVar[bool] = True
    several_processes: ClassVar[bool] = False
    minimises_entropy: ClassVar[bool] = True
    refining: ClassVar[tuple[str, ...]] = (REFINING,)
    refine_epochs: int = 10
    refine_rate: float | None = None
    hold: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_epochs(self.refine_epochs, "refine_epochs")
        check_positive(self.refine_rate, "refine_rate", optional=True)
        check_decay(self.hold, "hold")

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        restoring = BUFR(**{entry.name: getattr(self, entry.name) for entry in fields(BUFR)})
        rate = self.refine_rate or min(MAX_REFINE_RATE, SHOTIM().rate(network))
        refined = Stage(REFINING, self.refine_epochs, rate, network.below_features)
        return [*restoring.stages(network, profile), refined]

    def taps(self, profile: Profile | None) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*super().taps(profile), "logits")))

    def smallest_batch(self, profile: Profile | None) -> int:
        return max(super().smallest_batch(profile), SHOTIM().smallest_batch(profile))

    def objective_of(self, stage: Stage, profile: Profile | None, device: torch.device) -> Objective:
        aligned = self.objective(profile, device)
        if stage.name != REFINING:
            return aligned
        sharpened = SHOTIM().objective(profile, device)

        def losses(activations: Activations) -> dict[str, Tensor]:
            terms = {"certainty": sharpened(activations)["logits"]}
            if self.hold:
                terms |= {name: self.hold * term for name, term in aligned(activations).items()}
            return terms

        return losses
