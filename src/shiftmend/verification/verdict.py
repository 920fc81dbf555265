"""The label-free verdict: is the target distributed like the source where no method had a hand in it?

The loss that was optimised never judges. Marginals can be matched by scrambling the features: FR can reach a lower
alignment loss at 4 % accuracy than BUFR at 80 %. The verification slices of the profile are aligned by no method and
see the joint distribution. Slices can come home while the marginals do not, as with a method that aligns covariances,
so features count as restored only if both are at home. The limits are empirical; docs/methods.md says what was measured
with them.

A sample tells a divergence within bounds only. A verdict is what holds for every value between the bounds. If no
verdict does, the samples are too few and the verdict is undecided.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from shiftmend.profiles.profile import Profile
from shiftmend.stats.divergences import sampling_floor
from shiftmend.verification.estimate import Estimate

RESTORED = 0.005
"""Divergence of the slices, without chance, below which features count as restored."""
FAILED = 0.01
"""Divergence of the slices, without chance, from which on features count as not restored."""

_CHANCE = {1: (0.2, 2.25), 2: (0.3, 1.9)}
Verdict = Literal["restored", "partly restored", "not restored", "undecided"]


def chance_of(units: int | None) -> tuple[float, float]:
    """Return how much chance adds to the divergence of new samples, at least and at most, in floors.

    A floor is a mean. All slices of a single feature are the same, so that chance varies as in one histogram, like a
    chi-square of few degrees of freedom. The mean over the slices of many features varies less, unless the features
    are so closely related that they are as good as one, which a profile does not tell.

    Args:
        units: Features that vary at the source, if known.
    """
    return _CHANCE.get(units or 0, (0.5, 1.5))


@dataclass(frozen=True)
class Verification:
    """The divergences of a model's features from home, and the verdict that follows from them.

    Attributes:
        divergence: Mean divergence of the verification slices.
        floor: Divergence that chance alone gives on average for so many samples.
        samples: Inputs that were looked at.
        source_samples: Inputs that the profile was made from, if known.
        adapted: Whether the model was adapted to these very inputs.
        marginals: Mean divergence of the features plus that of the logits, unit by unit; None if not known.
        units: Features that vary at the source, if known: with one or two, chance varies more.
        estimate: Estimated score of the model, from `verify` with a rehearsed profile.

    Example:
        >>> from shiftmend import Verification
        >>> Verification(divergence=0.2, floor=0.003, samples=2000).verdict
        'not restored'
    """

    divergence: float
    floor: float
    samples: int
    source_samples: int | None = None
    adapted: bool = False
    marginals: float | None = None
    units: int | None = None
    estimate: Estimate | None = None

    def to_json(self) -> dict[str, Any]:
        """Return divergences, verdict and, if there is one, the estimate."""
        facts = {name: value for name, value in vars(self).items() if name != "estimate"} | {"verdict": self.verdict}
        return facts | ({} if self.estimate is None else {"estimate": self.estimate.to_json()})

    @property
    def excess(self) -> float:
        """Divergence that sampling noise does not explain; infinite if features are NaN or infinite."""
        if not math.isfinite(self.divergence):
            return math.inf
        return max(0.0, self.divergence - self.floor)

    @property
    def bounds(self) -> tuple[float, float]:
        """Approximate interval of the divergence that unlimited samples would show.

        Chance adds between half of the floor and one and a half of it (`chance_of`). That was measured for small
        divergences; with many features chance adds less. A model that was adapted to these samples has fitted their
        chance, too, so that none or most of it may be left.
        """
        if not math.isfinite(self.divergence):
            return math.inf, math.inf
        least, most = self._chance
        return max(0.0, self.divergence - most), max(0.0, self.divergence - least)

    @property
    def limits(self) -> tuple[float, float]:
        """Divergences below which these samples count as restored, and from which on they count as not restored.

        Samples so few that their floor alone would count as not restored never count as restored.
        """
        least, most = self._chance
        return RESTORED + least if self.floor <= FAILED else 0.0, FAILED + most

    @property
    def _chance(self) -> tuple[float, float]:
        """Share of the divergence that is due to chance, at least and at most."""
        least, most = chance_of(self.units)
        return (0.0, (most - least) * self.floor) if self.adapted else (least * self.floor, most * self.floor)

    @property
    def verdict(self) -> Verdict:
        """Verdict about the features: restored, partly restored, not restored or undecided."""
        low, high = self.bounds
        restored, failed = self.limits
        if not self.divergence < failed or self._no_numbers:
            return "not restored"
        if self.divergence < restored:
            return "partly restored" if self.strayed else "restored"
        return "partly restored" if low >= RESTORED or (low > 0 and high < FAILED) else "undecided"

    @property
    def _no_numbers(self) -> bool:
        """True if outputs are NaN although features may be at home: weights of the head are damaged or too large."""
        return self.marginals is not None and math.isnan(self.marginals)

    @property
    def strayed(self) -> bool:
        """True if the slices are at home and the marginals of the two taps certainly are not."""
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
        """Both sample sizes in words, since chance comes from either."""
        own = f"{self.samples} {'adapted to' if self.adapted else 'of the target'}"
        return own if self.source_samples is None else f"{self.source_samples} in the profile, {own}"


def judge(slices: float, marginals: float | None, inputs: int, profile: Profile) -> Verification:
    """Return the verification that follows from divergences measured on so many inputs.

    Positions of one feature map are not independent, so the number of inputs decides about chance.
    """
    floor = sampling_floor(profile.bins, profile.effective_samples, inputs)
    units = profile.taps["features"].usable_count
    return Verification(slices, floor, inputs, profile.inputs_seen, marginals=marginals, units=units)
