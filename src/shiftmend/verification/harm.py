"""Signs of harm: what the answers of a model tell, without labels, of an adaptation that should not have been.

Aligning features does harm where class shares differ from home's, since samples are pushed into wrong classes. It also
does harm where answers become uncertain or leave the classes of home. `auto` heeds these signs when it chooses. Named
methods and streams log them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shiftmend.profiles.profile import Profile
from shiftmend.profiles.rehearsal import format_score
from shiftmend.stats.answers import Answers
from shiftmend.verification.estimate import HOME_DEVIATIONS, MAX_OUTSIDE, Estimate, Estimator
from shiftmend.verification.predictions import class_shares, skew, skew_by_chance
from shiftmend.verification.reading import Reading
from shiftmend.verification.verdict import Verification

CERTAIN_ENOUGH = 0.1
"""Without a rehearsal: mean confidence below that of the profile up to which a model counts as certain as at home. A
profile is often of training data, on which a model is more certain than on others."""
LESS_CERTAIN_BY_SKEW = 0.4
"""Without a rehearsal: the same for each unit of skew. Few classes may be the hard ones, of which a model is less
certain. One or two digits cost up to 0.35 a unit, devices that the digits' network minds 0.5 or more (two seeds)."""

OTHER_SHARES = "answers are as certain as at home but fall into other classes, as where class shares differ"
ADVICE = 'compare with the model as it came; try method="auto" with a rehearsed profile (shiftmend.rehearse)'


def find_answers(profile: Profile) -> Answers | None:
    """Return the answers at home; None for quantities, a single output, and profiles of before they were stored."""
    found = profile.statistics.get("answers")
    return found if isinstance(found, Answers) else None


def measure_skew(answers: Tensor, samples: int, profile: Profile) -> tuple[float, float]:
    """Return how far answers are from the class shares of home, and how far chance brings them.

    Args:
        answers: Predicted classes `[M]`.
        samples: Inputs behind them.
        profile: A profile that holds the answers at home.
    """
    home = find_answers(profile)
    assert home is not None
    own = class_shares(answers, len(home.shares))
    deviation = skew_by_chance(home.shares, samples, profile.inputs_seen)[1]
    return skew(own, home.shares, samples, profile.inputs_seen), HOME_DEVIATIONS * deviation


def is_about_as_certain(confidence: float, outside: float, apart: float, home: Answers) -> bool:
    """Return whether a model is about as certain as at home, and its features lie in the range of home.

    Without a rehearsal nobody knows how far confidence falls behind a new device. In doubt a model counts as certain.

    Args:
        confidence: Mean probability of the predicted class.
        outside: Share of the slices beyond the range of home, less that at home.
        apart: Skew of the answers, which excuses less certainty.
        home: The answers at home.
    """
    tolerated = max(CERTAIN_ENOUGH, LESS_CERTAIN_BY_SKEW * apart)
    return outside <= MAX_OUTSIDE and confidence >= float(home.confidence) - tolerated


def answers_other_classes(untouched: Reading, profile: Profile) -> bool:
    """Return whether the untouched model is as certain as at home, but answers other classes.

    With a rehearsal the estimator decides, which knows how certain the model is at home.
    """
    if (record := profile.rehearsal) is not None:
        shares = class_shares(untouched.answers, len(record.shares)) if record.task == "classes" else None
        return Estimator(record).has_other_shares(untouched.signals, untouched.samples, shares)
    home = find_answers(profile)
    if home is None or "confidence" not in untouched.signals:
        return False
    apart, by_chance = measure_skew(untouched.answers, untouched.samples, profile)
    outside = untouched.signals.get("outside", 0.0)
    return apart > by_chance and is_about_as_certain(untouched.signals["confidence"], outside, apart, home)


def find_worse_answers(before: Reading, after: Reading, profile: Profile) -> list[str]:
    """List in words how answers became less like those of home: skewed where they were not, or less certain.

    Args:
        before: Reading of the untouched model.
        after: Reading of the adapted model on the same samples.
        profile: The source's profile. Without answers at home, nothing is found.
    """
    if find_answers(profile) is None or "confidence" not in before.signals:
        return []
    (was, _), (apart, by_chance) = (measure_skew(one.answers, one.samples, profile) for one in (before, after))
    found = []
    if apart > max(was, 0.0) + by_chance:
        found.append(f"answers left the classes of home (skew {max(was, 0.0):.2f} to {apart:.2f})")
    certain, now = before.signals["confidence"], after.signals.get("confidence", 0.0)
    if not now >= certain - CERTAIN_ENOUGH:
        found.append(f"answers became less certain (mean confidence {certain:.2f} to {now:.2f})")
    return found


def find_harm(
    profile: Profile,
    verifications: tuple[Verification | None, Verification | None],
    readings: tuple[Reading, Reading] | None = None,
    estimates: tuple[Estimate | None, Estimate | None] = (None, None),
) -> list[str]:
    """List the signs that an adaptation did harm, in words; none if nothing speaks of harm, or no answer changed.

    Args:
        profile: The source's profile.
        verifications: Verification of the untouched and of the adapted model.
        readings: Readings of both on the same samples, if there are some.
        estimates: Estimated scores of both, if the profile was rehearsed.
    """
    found = []
    if readings is not None:
        if torch.equal(readings[0].answers, readings[1].answers):
            return []
        # A method that leaves class shares free is not misled by them, and may rightly change the classes it answers.
        if readings[1].shares is None:
            if answers_other_classes(readings[0], profile):
                found.append(f"before, {OTHER_SHARES}, and aligning pushes samples into wrong classes then")
            found += find_worse_answers(*readings, profile)
    was, now = verifications
    if was is not None and now is not None and now.verdict != "restored" and now.excess > was.excess:
        found.append(f"verification got worse (slices {was.divergence:.4f} to {now.divergence:.4f})")
    if (worse := _describe_fall(*estimates)) is not None:
        found.append(worse)
    return found


def _describe_fall(before: Estimate | None, after: Estimate | None) -> str | None:
    """Return a sentence if the estimated score got worse."""
    if before is None or after is None or before.value is None or after.value is None:
        return None
    sign = 1.0 if before.task == "classes" else -1.0
    if sign * after.value >= sign * before.value:
        return None
    ends = [format_score(one, before.task) for one in (before.value, after.value)]
    return f"the estimated {before.metric} got worse ({ends[0]} to {ends[1]})"


def describe_harm(found: Sequence[str]) -> str:
    """Return one sentence about signs of harm, with what to do."""
    return f"this adaptation may have done harm: {'; '.join(found)}; {ADVICE}"
