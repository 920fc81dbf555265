"""The label-free verdict: are features at the target distributed as at the source?

The optimised loss never judges. Marginals can be matched by scrambling the features: FR can reach a lower alignment
loss at 4 % accuracy than BUFR at 80 %. No method aligns the verification slices of the profile, and they depend on the
joint distribution. A method that aligns covariances can restore the slices but not the marginals, so features count as
restored only if both are close to home. The thresholds are empirical; docs/methods.md shows the measurements.

A finite sample determines a divergence within bounds only. The verdict is the one that holds for all values between the
bounds. If there is none, the sample is too small and the verdict is undecided.

The same divergence goes with 24 % and with 100 % accuracy in different models, and AdaBN may be as good as BUFR with
ten times its divergence. So a rehearsed profile brings limits of its own for each method (`learn_limits`), which
replace the thresholds.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from shiftmend.profiles.profile import Profile
from shiftmend.profiles.rehearsal import Rehearsal
from shiftmend.stats.divergences import sampling_floor
from shiftmend.verification.estimate import Estimate, Limits, learn_limits

RESTORED = 0.005
"""Divergence of the slices, beyond sampling noise, below which features count as restored."""
FAILED = 0.01
"""Divergence of the slices, beyond sampling noise, above which features count as not restored."""

_CHANCE = {1: (0.2, 2.25), 2: (0.3, 1.9)}
Verdict = Literal["restored", "partly restored", "not restored", "undecided"]


def chance_of(units: int | None) -> tuple[float, float]:
    """Return the least and the most that sampling noise adds to the divergence of new samples, relative to the floor.

    The floor is an expected value. All slices of a single feature are equal, so their noise varies like a chi-square
    variable with few degrees of freedom. The mean over the slices of many features varies less, unless the features are
    strongly related, which a profile does not show.

    Args:
        units: Number of features that vary at the source, if known.
    """
    return _CHANCE.get(units or 0, (0.5, 1.5))


@dataclass(frozen=True)
class Verification:
    """Divergences of a model's features from home, and the verdict about them.

    Attributes:
        divergence: Mean divergence of the verification slices.
        floor: Expected divergence from sampling noise alone, for this number of samples.
        samples: Number of inputs that were measured.
        source_samples: Number of inputs of the profile, if known.
        adapted: Whether the model was adapted to the same inputs.
        marginals: Mean divergence of the single features plus that of the single logits; None if unknown.
        units: Number of features that vary at the source, if known; with one or two, sampling noise varies more.
        estimate: Estimated score of the model, from `verify` with a rehearsed profile.
        learnt: Limits of the verdict for the model's method, from a rehearsed profile; None for the fixed thresholds.

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
    learnt: Limits | None = None

    def to_json(self) -> dict[str, Any]:
        """Return divergences and verdict as JSON, with estimate and learnt limits if there are any."""
        facts = {name: value for name, value in vars(self).items() if name not in ("estimate", "learnt")}
        facts["verdict"] = self.verdict
        facts |= {} if self.learnt is None else {"limits": asdict(self.learnt)}
        return facts | ({} if self.estimate is None else {"estimate": self.estimate.to_json()})

    def judge_by(self, record: Rehearsal | None, candidate: str | None) -> Verification:
        """Return the verification with the limits that a rehearsal taught for a method; see `learn_limits`."""
        return replace(self, learnt=None if record is None else learn_limits(record, candidate, self.samples))

    @property
    def excess(self) -> float:
        """Divergence that sampling noise does not explain; infinite if features are NaN or infinite."""
        if not math.isfinite(self.divergence):
            return math.inf
        return max(0.0, self.divergence - self.floor)

    @property
    def bounds(self) -> tuple[float, float]:
        """Approximate interval of the divergence that unlimited samples would show.

        Sampling noise adds between 0.5 and 1.5 times the floor (`chance_of`). This was measured for small divergences;
        with many features, noise adds less. A model that was adapted to the same samples has also fitted their noise,
        so that between none and most of the noise may be left.
        """
        if not math.isfinite(self.divergence):
            return math.inf, math.inf
        least, most = self._chance
        return max(0.0, self.divergence - most), max(0.0, self.divergence - least)

    @property
    def limits(self) -> tuple[float, float]:
        """Divergence below which these samples count as restored, and that from which they count as not restored.

        If the sample is so small that its floor exceeds the upper threshold, it never counts as restored.
        """
        if self.learnt is not None:
            return self.learnt.restored, self.learnt.failed
        least, most = self._chance
        return RESTORED + least if self.floor <= FAILED else 0.0, FAILED + most

    @property
    def _chance(self) -> tuple[float, float]:
        """Least and most of the divergence that may be due to sampling noise."""
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
        if self.learnt is not None:
            return "partly restored"
        return "partly restored" if low >= RESTORED or (low > 0 and high < FAILED) else "undecided"

    @property
    def _no_numbers(self) -> bool:
        """True if outputs are NaN although features may be fine: the head's weights are damaged or too large."""
        return self.marginals is not None and math.isnan(self.marginals)

    @property
    def strayed(self) -> bool:
        """True if the slices are close to home but the marginals certainly are not."""
        _, most = self._chance
        limit = 2 * (RESTORED + most) if self.learnt is None else self.learnt.marginals
        away = self.marginals is not None and not self.marginals < limit
        return away and self.divergence < self.limits[0]

    def __str__(self) -> str:
        if not math.isfinite(self.divergence):
            return f"{self.verdict} (the features are NaN or infinite)"
        few = f", too few samples ({self._sizes}) to tell" if self.verdict == "undecided" else ""
        but = f", but marginals {self.marginals:.4f}" if self.strayed else ""
        but = ", but outputs are NaN" if self._no_numbers else but
        chance = f"by chance {'at most' if self.adapted else 'about'} {self.floor:.4f}"
        if self.learnt is not None:
            chance = f"in good rehearsals up to {self.learnt.restored:.4f}"
            chance = chance if self.learnt.restored > 0 else "in rehearsals, good and poor models had as much"
        return f"{self.verdict} (slices {self.divergence:.4f}, {chance}{few}{but})"

    @property
    def _sizes(self) -> str:
        """Both sample sizes in words, since sampling noise depends on both."""
        own = f"{self.samples} {'adapted to' if self.adapted else 'of the target'}"
        return own if self.source_samples is None else f"{self.source_samples} in the profile, {own}"


def judge(slices: float, marginals: float | None, inputs: int, profile: Profile) -> Verification:
    """Make the verification for divergences that were measured on a number of inputs.

    Positions of one feature map are not independent, so the number of inputs determines the sampling noise.
    """
    floor = sampling_floor(profile.bins, profile.effective_samples, inputs)
    units = profile.taps["features"].usable_count
    return Verification(slices, floor, inputs, profile.inputs_seen, marginals=marginals, units=units)
