"""Signs of harm: label-free evidence that an adaptation made predictions worse.

Aligning features does harm if class shares differ from home, because samples are pushed into wrong classes. It also
does harm if predictions become less confident or leave the classes of home. `auto` uses these signs in its choice.
Single methods and streams log them as warnings.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shiftmend.profiles.profile import Profile
from shiftmend.profiles.rehearsal import Rehearsal, format_score
from shiftmend.stats.answers import Answers
from shiftmend.verification.estimate import HOME_DEVIATIONS, MAX_OUTSIDE, Estimate, Estimator
from shiftmend.verification.predictions import class_shares, skew, skew_by_chance
from shiftmend.verification.reading import Reading
from shiftmend.verification.verdict import Verification

CERTAIN_ENOUGH = 0.1
"""Without a rehearsal: largest drop of the mean confidence below the profile's at which a model still counts as
confident. A profile is often made from training data, on which a model is more confident than on others."""
LESS_CERTAIN_BY_SKEW = 0.4
"""Without a rehearsal: additional drop that is tolerated per unit of skew, since the frequent classes may be the hard
ones. One or two digits cost up to 0.35 a unit; devices that harm the digits' network cost 0.5 or more (two seeds)."""

OTHER_SHARES = "answers are as certain as at home but fall into other classes, as where class shares differ"
MAX_LEFT = 0.25
"""Share of the divergence beyond chance that a selection of home's samples may leave. Most devices leave more, unless
they move samples towards each other, as low gain and saturation do; see `benchmarks/selections.py`."""
MAX_LEFT_IN_DOUBT = 0.6
"""The same for a selection that was perhaps measured by another device."""
MOVED_OUTPUTS = 0.5
"""Offset of the mean output, in deviations at home, from which on a doubtful case counts as a selection. Aligning would
force the mean back to that of home, which does much harm if the samples differ."""
BOTH_POSSIBLE = "the device may have changed, and the samples may be a selection of those at home"
OTHER_SAMPLES = "the inputs look like a selection of the samples at home rather than another device"
ADVICE = 'compare with the model as it came; try method="auto" with a rehearsed profile (shiftmend.rehearse)'
ADVICE_IF_REHEARSED = 'label some samples to be sure; method="auto" would weigh these signs'


def find_answers(profile: Profile) -> Answers | None:
    """Return the predictions at home; None for regression, a single output, and profiles without them."""
    found = profile.statistics.get("answers")
    return found if isinstance(found, Answers) else None


def measure_skew(answers: Tensor, samples: int, profile: Profile) -> tuple[float, float]:
    """Return the distance of predictions from the class shares of home, and the distance that sampling noise explains.

    Args:
        answers: Predicted classes `[M]`.
        samples: Number of inputs that were predicted.
        profile: A profile with the predictions at home.
    """
    home = find_answers(profile)
    assert home is not None
    own = class_shares(answers, len(home.shares))
    deviation = skew_by_chance(home.shares, samples, profile.inputs_seen)[1]
    return skew(own, home.shares, samples, profile.inputs_seen), HOME_DEVIATIONS * deviation


def is_about_as_certain(confidence: float, outside: float, apart: float, home: Answers) -> bool:
    """Return whether a model is about as confident as at home, with features in the range of home.

    Without a rehearsal, it is unknown how far confidence falls on a new device. In doubt, a model counts as confident.

    Args:
        confidence: Mean probability of the predicted class.
        outside: Share of the slice values beyond the range of home, minus that share at home.
        apart: Skew of the predictions, which explains some loss of confidence.
        home: The predictions at home.
    """
    tolerated = max(CERTAIN_ENOUGH, LESS_CERTAIN_BY_SKEW * apart)
    return outside <= MAX_OUTSIDE and confidence >= float(home.confidence) - tolerated


def answers_other_classes(untouched: Reading, profile: Profile) -> bool:
    """Return whether the untouched model is as confident as at home but predicts other classes.

    With a rehearsal, the estimator decides, because it knows the confidence at home.
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


def looks_like_selection(untouched: Reading, record: Rehearsal) -> bool:
    """Return whether the target of a regression could be a selection of home's samples, measured by the same device.

    Examples are samples of one product, or with high answers only. Matching their features with those of home would
    make the answers wrong. A device that moves samples towards each other may look the same.

    Args:
        untouched: Reading of the untouched model.
        record: The rehearsal in the profile.
    """
    left = untouched.left_by_selection
    if left is None:
        return False
    estimator, signals = Estimator(record), untouched.signals
    if left <= MAX_LEFT:
        return estimator.lies_in_range(signals, untouched.samples)
    has_moved = signals.get("offset", 0.0) >= MOVED_OUTPUTS
    return left <= MAX_LEFT_IN_DOUBT and has_moved and estimator.lies_in_range(signals, untouched.samples, margin=0.0)


def find_worse_answers(before: Reading, after: Reading, profile: Profile) -> list[str]:
    """Describe how predictions moved away from those of home: newly skewed, or less confident.

    Args:
        before: Reading of the untouched model.
        after: Reading of the adapted model on the same samples.
        profile: The source's profile. Without predictions at home, nothing is found.
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
    """List the signs that an adaptation did harm; empty if there are none, or if no prediction changed.

    Args:
        profile: The source's profile.
        verifications: Verification of the untouched and of the adapted model.
        readings: Signals of both models on the same samples, if known.
        estimates: Estimated scores of both, if the profile was rehearsed.
    """
    found = []
    if readings is not None:
        if torch.equal(readings[0].answers, readings[1].answers):
            return []
        # A method that estimates class shares is not misled by them, and may rightly predict other classes.
        if profile.rehearsal is not None and looks_like_selection(readings[0], profile.rehearsal):
            found.append(f"{OTHER_SAMPLES}, and aligning would make the answers resemble those of all samples at home")
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


def describe_harm(found: Sequence[str], *, is_rehearsed: bool = False) -> str:
    """Combine signs of harm into one sentence with advice."""
    advice = ADVICE_IF_REHEARSED if is_rehearsed else ADVICE
    return f"this adaptation may have done harm: {'; '.join(found)}; {advice}"
