"""BUFR, Bottom-Up Feature Restoration: FR that unfreezes one block after the other (paper, section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shiftmend.engine.method import AUTO, Epochs, Network, Stage, check_epochs, check_positive
from shiftmend.methods.fr import Alignment
from shiftmend.profiles.profile import Profile


@dataclass(frozen=True, kw_only=True)
class BUFR(Alignment):
    """Training of the first block, then of the first two, and so on, each with a fresh optimiser.

    By default, `epochs_per_block="auto"`, the next block is unfrozen when the loss no longer falls, at the latest after
    the published 30 epochs. The learning rate is divided by `decay` at each unfreezing. Published: rate 1.0 and decay
    1.5 for the CNN, where a block is one layer, 0.1 and 5 for ResNets, where it is a stage. None takes the decay by
    that rule; with more blocks than the four and five of those networks it is gentler, so that the last block has as
    large a share of the first one's rate as there, instead of next to nothing.
    """

    name: ClassVar[str] = "bufr"
    online: ClassVar[bool] = False
    bottom_up: ClassVar[bool] = True
    staged_rate: ClassVar[float] = 0.1
    unnormalised_rate: ClassVar[float] = 3e-3
    layerwise_rate: ClassVar[float] = 0.01
    published_epochs: ClassVar[int] = 30
    epochs_per_block: Epochs = AUTO
    decay: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_epochs(self.epochs_per_block, "epochs_per_block", may_settle=True)
        check_positive(self.decay, "the decay of the learning rate", optional=True)

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        rate = self.rate(network, profile)
        decay, published = (1.5, 4) if network.layerwise else (5.0, 5)
        if len(network.blocks) > published:
            decay **= (published - 1) / (len(network.blocks) - 1)
        decay = self.decay or decay
        unfrozen: tuple[str, ...] = ()
        stages = []
        for index, block in enumerate(network.blocks):
            unfrozen += block.parameters
            stages.append(self.make_stage(block.name, self.epochs_per_block, rate / decay**index, unfrozen))
        return stages
