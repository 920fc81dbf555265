"""BUFR, Bottom-Up Feature Restoration: FR that unfreezes one block after the other (paper, section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shiftmend.engine.method import AUTO, Epochs, Network, Stage, check_epochs, check_positive
from shiftmend.methods.fr import Alignment
from shiftmend.profiles.profile import Profile

AUTO_FACTOR = 2.0
"""Factor to the published learning rate with `epochs_per_block="auto"`. The published rate is meant for 30 epochs a
block, and too small for hard shifts of EMNIST-DA in a quarter of the steps."""
AUTO_DECAY = 2.5
"""Largest decay at each unfreezing with `epochs_per_block="auto"`. With 5, as published for ResNets, the upper blocks
hardly change in so few steps."""


@dataclass(frozen=True, kw_only=True)
class BUFR(Alignment):
    """Training of the first block, then of the first two, and so on, each time with a new optimiser.

    By default (`epochs_per_block="auto"`), the next block is unfrozen when the loss stops falling, but after at most
    the published 30 epochs. The learning rate is divided by `decay` at each unfreezing. Published values are rate 1.0
    and decay 1.5 for the CNN, where a block is one layer, and 0.1 and 5 for ResNets, where a block is a stage. A decay
    of None follows this rule. With more blocks than those networks have (four and five), the decay is smaller, so that
    the last block has the same fraction of the first rate as there. With `"auto"`, rate and decay are changed by
    `AUTO_FACTOR` and `AUTO_DECAY`.
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
        if self.epochs_per_block == AUTO:
            # With few steps, a larger rate gets further.
            decay = min(decay, AUTO_DECAY)
            if self.learning_rate is None and network.published(self.name) is not None:
                rate *= AUTO_FACTOR
        if len(network.blocks) > published:
            decay **= (published - 1) / (len(network.blocks) - 1)
        decay = self.decay or decay
        unfrozen: tuple[str, ...] = ()
        stages = []
        for index, block in enumerate(network.blocks):
            unfrozen += block.parameters
            own = rate / decay**index
            stages.append(self.make_stage(network, block.name, self.epochs_per_block, own, unfrozen))
        return stages
