"""shiftmend: mend a model whose measuring device has changed.

At home: `profile = shiftmend.profile(model, source)`. At the new site: `shiftmend.adapt(model, target, profile)`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from shiftmend.__about__ import __version__

if TYPE_CHECKING:
    from shiftmend.adaptations import Adaptation
    from shiftmend.engine import adapt
    from shiftmend.errors import AdaptationError, DataError, ProfileError, ShiftmendError, TapError
    from shiftmend.evaluation import evaluate
    from shiftmend.histograms import Bins
    from shiftmend.loop import DivergedError
    from shiftmend.profiles import Profile
    from shiftmend.profiling import profile
    from shiftmend.scores import RegressionScores, Scores
    from shiftmend.stats_layer import StatsLayer
    from shiftmend.streams import Stream, stream
    from shiftmend.taps import Tap
    from shiftmend.verification import Verification, verify

__all__ = [
    "Adaptation",
    "AdaptationError",
    "Bins",
    "DataError",
    "DivergedError",
    "Profile",
    "ProfileError",
    "RegressionScores",
    "Scores",
    "ShiftmendError",
    "StatsLayer",
    "Stream",
    "Tap",
    "TapError",
    "Verification",
    "__version__",
    "adapt",
    "evaluate",
    "profile",
    "stream",
    "verify",
]

_MODULES = {
    "adaptations": ("Adaptation",),
    "engine": ("adapt",),
    "errors": ("AdaptationError", "DataError", "ProfileError", "ShiftmendError", "TapError"),
    "evaluation": ("evaluate",),
    "histograms": ("Bins",),
    "loop": ("DivergedError",),
    "profiles": ("Profile",),
    "profiling": ("profile",),
    "scores": ("RegressionScores", "Scores"),
    "stats_layer": ("StatsLayer",),
    "streams": ("Stream", "stream"),
    "taps": ("Tap",),
    "verification": ("Verification", "verify"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


if not TYPE_CHECKING:  # which would take every name for one that is there

    def __getattr__(name: str) -> Any:
        """What is exported is imported when it is first asked for: torch takes seconds, and `--help` needs none.

        So is a module of the package, as in `shiftmend.methods.BUFR`.
        """
        if name in _HOMES:
            value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
            return value
        if name.startswith("_") or find_spec(f"{__name__}.{name}") is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
