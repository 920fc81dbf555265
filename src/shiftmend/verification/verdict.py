"""The label-free judge: is the target distributed like the source where no method had a hand in it?

The loss that was optimised never judges. Marginals can be matched by scrambling the features: FR can reach a lower
alignment loss at 4 % accuracy than BUFR at 80 %. The profile's verification slices are aligned by no method and
see the joint distribution. Slices in turn can come home while the marginals do not, as with a method that aligns
covariances: what is restored has both at home. The thresholds are empirical; docs/methods.md says what was measured
with them. A sample tells the divergence of what it was drawn from within bounds only, and a verdict is what holds for
all between them; if nothing does, it is undecided.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from shiftmend.profiles.profile import Profile
from shiftmend.stats.divergences import sampling_floor

RESTORED = 0.005


FAILED = 0.01


_FEW = {1: (0.2, 2.25), 2: (0.3, 1.9)}


def chance_of(units: int | None) -> tuple[float, float]:
    """How many floors chance adds to the divergence of new samples, at least and at most, for so many features.

    A floor is a mean. The slices of one feature are all the same, and chance varies as in a single histogram, like a
    chi-square of few degrees of freedom; those of two are much the same. The mean over those of more varies less,
    unless they hang together so closely that they are as good as one, which a profile does not tell.
    """
    return _FEW.get(units or 0, (0.5, 1.5))


Verdict = Literal["restored", "partly restored", "not restored", "undecided"]


@dataclass(frozen=True)
class Verification:
    """Mean divergence of the verification slices, and what chance alone would give for so many samples."""

    divergence: float
    floor: float
    samples: int
    """Inputs that were looked at."""
    source_samples: int | None = None
    """Inputs that the profile was made from, where that is known."""
    adapted: bool = False
    """Whether the model was adapted to these very inputs."""
    marginals: float | None = None
    """Mean divergence of the features plus that of the logits, each unit by itself; None where it is not known."""
    units: int | None = None
    """Features that vary at the source, where that is known: of one or two, chance varies more."""

    @property
    def excess(self) -> float:
        """The divergence that sampling noise does not explain; infinite where features are NaN or infinite."""
        if not math.isfinite(self.divergence):
            return math.inf
        return max(0.0, self.divergence - self.floor)

    @property
    def bounds(self) -> tuple[float, float]:
        """Between which the divergence lies, about, that ever more samples would show.

        Chance adds half of the floor to one and a half, of one or two features less or more (`chance_of`): so much was
        seen as long as the divergence is small, and of features of many units less. A model fits what it is adapted to
        together with its chance, of which none or most may be left.
        """
        if not math.isfinite(self.divergence):
            return math.inf, math.inf
        least, most = self._chance
        return max(0.0, self.divergence - most), max(0.0, self.divergence - least)

    @property
    def limits(self) -> tuple[float, float]:
        """The divergence below which these samples count as restored, and from which on they count as not restored.

        So few that their floor alone would count as not restored never count as restored.
        """
        least, most = self._chance
        return RESTORED + least if self.floor <= FAILED else 0.0, FAILED + most

    @property
    def _chance(self) -> tuple[float, float]:
        """Of the divergence at least and at most."""
        least, most = chance_of(self.units)
        return (0.0, (most - least) * self.floor) if self.adapted else (least * self.floor, most * self.floor)

    @property
    def verdict(self) -> Verdict:
        low, high = self.bounds
        restored, failed = self.limits
        if not self.divergence < failed or self._no_numbers:
            return "not restored"
        if self.divergence < restored:
            return "partly restored" if self.strayed else "restored"
        return "partly restored" if low >= RESTORED or (low > 0 and high < FAILED) else "undecided"

    @property
    def _no_numbers(self) -> bool:
        """Whether the head makes NaN of features that may be at home: its weights are damaged, or too large."""
        return self.marginals is not None and math.isnan(self.marginals)

    @property
    def strayed(self) -> bool:
        """Whether the slices are at home and the marginals, of two taps, certainly not."""
        _, most = self._chance
        away = self.marginals is not None and not self.marginals < 2 * (RESTORED + most)
        return away and self.divergence < self.limits[0]

    def __str__(self) -> str:
        if not math.isfinite(self.divergence):
            return f"{self.verdict} (the features are NaN or infinite)"
        few = f", too few samples ({self._sizes}) to tell" if self.verdict == "undecided" else ""
        but = f", but marginals {self.marginals:.4f}" if self.strayed else ""
        but = ", but outputs are NaN" if self._no_numbers else but
        about = "at most" if self.adapted else "about"
        return f"{self.verdict} (slices {self.divergence:.4f}, by chance {about} {self.floor:.4f}{few}{but})"

    @property
    def _sizes(self) -> str:
        """Of both samples: chance comes from either."""
        own = f"{self.samples} {'adapted to' if self.adapted else 'of the target'}"
        return own if self.source_samples is None else f"{self.source_samples} in the profile, {own}"


def judged(slices: float, marginals: float | None, inputs: int, profile: Profile) -> Verification:
    """What divergences mean that were measured on so many inputs.

    Positions of one feature map are not independent: what counts against chance is the number of inputs.
    """
    floor = sampling_floor(profile.bins, profile.inputs_seen, inputs)
    units = profile.taps["features"].usable_count
    return Verification(slices, floor, inputs, profile.inputs_seen, marginals=marginals, units=units)
