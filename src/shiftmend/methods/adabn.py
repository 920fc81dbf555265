"""AdaBN: replace the statistics of BatchNorm by those of the target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shiftmend.engine.method import Method, Network, Stage, check_epochs
from shiftmend.profiles.profile import Profile


@dataclass(frozen=True, kw_only=True)
class AdaBN(Method):
    """Forget BatchNorm's running statistics, then average those of all target batches over `passes` passes.

    As in the reference implementation: batch variances are averaged as they are, so the variance between batch means is
    not counted. A model without BatchNorm stays as it is.
    """

    name: ClassVar[str] = "adabn"
    trains: ClassVar[bool] = False
    several_processes: ClassVar[bool] = True
    passes: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_epochs(self.passes, "passes")

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        has_statistics = any(_tracks(module) for module in network.model.modules())
        return [Stage("statistics", self.passes)] if has_statistics else []

    @contextmanager
    def prepared(self, model: nn.Module) -> Iterator[None]:
        tracking = [module for module in model.modules() if isinstance(module, _BatchNorm) and _tracks(module)]
        before = [module.momentum for module in tracking]
        try:
            for module in tracking:
                module.reset_running_stats()
                module.momentum = None  # a cumulative average instead of an exponential one
            yield
        finally:
            for module, momentum in zip(tracking, before, strict=True):
                module.momentum = momentum


def _tracks(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.running_mean is not None
