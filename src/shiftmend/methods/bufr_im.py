"""BUFR-IM: restore the features by BUFR, then refine the predictions by a little information maximisation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

import torch

from shiftmend.engine.method import Network, Objective, Stage, check_epochs, check_positive
from shiftmend.methods.bufr import BUFR
from shiftmend.methods.shot_im import SHOTIM
from shiftmend.profiles.profile import Profile

REFINING = "all blocks, refined"
"""Name of the last stage, which no block can have."""


@dataclass(frozen=True, kw_only=True)
class BUFRIM(BUFR):
    """BUFR with all its options, followed by at most `refine_epochs` epochs of SHOT-IM at a small rate.

    Restored features answer most inputs correctly, and information maximisation then sharpens these answers. Before
    features are restored, the same loss sharpens wrong ones. A refining rate of None takes a tenth of SHOT-IM's for the
    network. Predictions become more certain than they are right; a temperature repairs their calibration.
    """

    name: ClassVar[str] = "bufr-im"
    several_processes: ClassVar[bool] = False
    minimises_entropy: ClassVar[bool] = True
    refining: ClassVar[tuple[str, ...]] = (REFINING,)
    share_of_rate: ClassVar[float] = 0.1
    refine_epochs: int = 10
    refine_rate: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_epochs(self.refine_epochs, "refine_epochs")
        check_positive(self.refine_rate, "refine_rate", optional=True)

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        restoring = BUFR(**{entry.name: getattr(self, entry.name) for entry in fields(BUFR)})
        rate = self.refine_rate or self.share_of_rate * SHOTIM().rate(network)
        refined = Stage(REFINING, self.refine_epochs, rate, network.below_features)
        return [*restoring.stages(network, profile), refined]

    def taps(self, profile: Profile | None) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*super().taps(profile), "logits")))

    def smallest_batch(self, profile: Profile | None) -> int:
        return max(super().smallest_batch(profile), SHOTIM().smallest_batch(profile))

    def objective_of(self, stage: Stage, profile: Profile | None, device: torch.device) -> Objective | None:
        if stage.name == REFINING:
            return SHOTIM().objective(profile, device)
        return self.objective(profile, device)
