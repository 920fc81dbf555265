"""shiftmend: mend a model whose measuring device has changed.

At home: `profile = shiftmend.profile(model, source)`. At the new site: `shiftmend.adapt(model, target, profile)`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shiftmend.__about__ import __version__

if TYPE_CHECKING:
    from shiftmend import methods, report, shifts
    from shiftmend.adaptation.adapt import adapt
    from shiftmend.adaptation.result import Adaptation
    from shiftmend.adaptation.stream import Stream, stream
    from shiftmend.errors import AdaptationError, DataError, DivergedError, ProfileError, ShiftmendError, TapError
    from shiftmend.evaluation.classification import Scores
    from shiftmend.evaluation.evaluate import Evaluator, evaluate
    from shiftmend.evaluation.regression import RegressionScores
    from shiftmend.inputs.folders import image_folder
    from shiftmend.inputs.tables import read_table
    from shiftmend.introspection.taps import Tap
    from shiftmend.profiles.batchnorm import refresh_batchnorm
    from shiftmend.profiles.collect import profile
    from shiftmend.profiles.privacy import Privacy
    from shiftmend.profiles.profile import Profile
    from shiftmend.rehearsal.rehearse import rehearse
    from shiftmend.stats.histograms import Bins
    from shiftmend.stats.stats_layer import StatsLayer
    from shiftmend.verification.class_shares import Shares
    from shiftmend.verification.estimate import Estimate
    from shiftmend.verification.shares import shares
    from shiftmend.verification.verdict import Verification
    from shiftmend.verification.verify import verify

__all__ = [
    "Adaptation",
    "AdaptationError",
    "Bins",
    "DataError",
    "DivergedError",
    "Estimate",
    "Evaluator",
    "Privacy",
    "Profile",
    "ProfileError",
    "RegressionScores",
    "Scores",
    "Shares",
    "ShiftmendError",
    "StatsLayer",
    "Stream",
    "Tap",
    "TapError",
    "Verification",
    "__version__",
    "adapt",
    "evaluate",
    "image_folder",
    "methods",
    "profile",
    "read_table",
    "refresh_batchnorm",
    "rehearse",
    "report",
    "shares",
    "shifts",
    "stream",
    "verify",
]

_HOMES = {
    "Adaptation": "adaptation.result",
    "AdaptationError": "errors",
    "Bins": "stats.histograms",
    "DataError": "errors",
    "DivergedError": "errors",
    "Estimate": "verification.estimate",
    "Evaluator": "evaluation.evaluate",
    "Privacy": "profiles.privacy",
    "Profile": "profiles.profile",
    "ProfileError": "errors",
    "RegressionScores": "evaluation.regression",
    "Scores": "evaluation.classification",
    "Shares": "verification.class_shares",
    "ShiftmendError": "errors",
    "StatsLayer": "stats.stats_layer",
    "Stream": "adaptation.stream",
    "Tap": "introspection.taps",
    "TapError": "errors",
    "Verification": "verification.verdict",
    "adapt": "adaptation.adapt",
    "evaluate": "evaluation.evaluate",
    "image_folder": "inputs.folders",
    "profile": "profiles.collect",
    "read_table": "inputs.tables",
    "refresh_batchnorm": "profiles.batchnorm",
    "rehearse": "rehearsal.rehearse",
    "shares": "verification.shares",
    "stream": "adaptation.stream",
    "verify": "verification.verify",
}
_PACKAGES = ("methods", "report", "shifts")

if not TYPE_CHECKING:  # Type checkers would otherwise accept every attribute.

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used: torch takes seconds to import, and `--help` needs none of it."""
        if name in _PACKAGES:
            return import_module(f"{__name__}.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
