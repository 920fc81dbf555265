"""shiftmend: mend a model whose measuring device has changed.

At home: `profile = shiftmend.profile(model, source)`. At the new site: `shiftmend.adapt(model, target, profile)`.
"""

from shiftmend.__about__ import __version__
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
