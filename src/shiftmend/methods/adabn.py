"""AdaBN: replace the running statistics of BatchNorm by those of the target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shiftmend.engine.method import Method, Network, Stage, check_epochs
from shiftmend.profiles.batchnorm import average_from_scratch, find_tracking
from shiftmend.profiles.profile import Profile


@dataclass(frozen=True, kw_only=True)
class AdaBN(Method):
    """BatchNorm statistics of the target, averaged from scratch over `passes` passes through all batches.

    As in the reference implementation, batch variances are averaged, so the variance between batch means is not
    included. A model without BatchNorm is not changed.
    """

    name: ClassVar[str] = "adabn"
    trains: ClassVar[bool] = False
    layers: ClassVar[tuple[type[nn.Module], ...]] = (_BatchNorm,)
    several_processes: ClassVar[bool] = True
    passes: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_epochs(self.passes, "passes")

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        return [Stage("statistics", self.passes)] if find_tracking(network.model) else []

    @contextmanager
    def prepared(self, model: nn.Module) -> Iterator[None]:
        with average_from_scratch(model):
            yield
