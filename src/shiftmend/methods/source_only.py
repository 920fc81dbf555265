"""Source-only: the untouched model, as a baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shiftmend.engine.method import Method, Network, Stage
from shiftmend.profiles.profile import Profile


@dataclass(frozen=True, kw_only=True)
class SourceOnly(Method):
    """No adaptation."""

    name: ClassVar[str] = "source-only"
    adapts: ClassVar[bool] = False
    trains: ClassVar[bool] = False
    several_processes: ClassVar[bool] = True

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        return []
