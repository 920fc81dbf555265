"""The estimates of a report: those of the adaptation if they belong to these inputs, else new ones."""

from __future__ import annotations

import hashlib

from torch import nn

from shiftmend.adaptation.result import Adaptation, Estimates
from shiftmend.inputs.feed import Feed
from shiftmend.profiles import fingerprints
from shiftmend.profiles.profile import Profile
from shiftmend.profiles.rehearsal import UNTOUCHED, Rehearsal
from shiftmend.report.saved import read_temperature
from shiftmend.verification.estimate import OTHER_WEIGHTS, Estimate, Estimator
from shiftmend.verification.harm import OTHER_SAMPLES, looks_like_selection
from shiftmend.verification.reading import add_agreements, read

OTHER_START = "the model was mended from other weights than those of the model called “before” here"


def find_estimates(
    model: nn.Module, feed: Feed, profile: Profile, result: Adaptation | None, same_data: bool | None
) -> Estimates | None:
    """Return the estimates before and after on the inputs of the report; None if nothing was rehearsed.

    Args:
        model: The untouched model.
        feed: The inputs of the report.
        profile: The source's profile.
        result: The adaptation, if there is one.
        same_data: True if the adaptation was made with these inputs; None if unknown.
    """
    record, stored = profile.rehearsal, None if result is None else result.estimate
    fresh = same_data is not True or (record is not None and not is_made_with(result, profile))
    if stored is None or fresh:
        if record is None:
            return None
        stored = _estimate(model, feed, profile, record, result)
    reason = _find_mismatch(model, profile, result)
    if reason is None:
        return stored
    both = (None if one is None else Estimate(None, None, None, one.metric, (reason,)) for one in _pair(stored))
    return Estimates(*both)


def is_made_with(result: Adaptation | None, profile: Profile) -> bool:
    """Return whether an adaptation was made with this profile, according to its manifest."""
    made_with = None if result is None else result.manifest.get("profile_sha256")
    return made_with is None or made_with == hashlib.sha256(profile.to_bytes()).hexdigest()


def _pair(estimates: Estimates) -> tuple[Estimate | None, Estimate | None]:
    return estimates.before, estimates.after


def _find_mismatch(model: nn.Module, profile: Profile, result: Adaptation | None) -> str | None:
    """Return the reason why no estimate can be made for these models; None if it can."""
    weights = fingerprints.weights(model)
    if weights != profile.weights:
        return OTHER_WEIGHTS
    if result is not None and result.manifest.get("source_weights") not in (None, weights):
        return OTHER_START
    return None


def _estimate(
    model: nn.Module, feed: Feed, profile: Profile, record: Rehearsal, result: Adaptation | None
) -> Estimates:
    """Estimate the scores of both models, from one pass over the inputs each."""
    estimator = Estimator(record)
    readings = {UNTOUCHED: read(model, feed, profile, record)}
    manifest = {} if result is None else result.manifest
    name = UNTOUCHED if result is None else str(manifest["method"]["name"])
    if result is not None and name != UNTOUCHED:
        free = bool(manifest.get("free_shares"))
        readings[name] = read(result.model, feed, profile, record, read_temperature(manifest), free_shares=free)
    in_order = feed.resident or feed.keeps_order
    signals = add_agreements(readings, record) if in_order else {key: one.signals for key, one in readings.items()}
    if readings.get(name, readings[UNTOUCHED]).shares is not None:
        # Agreement with others says nothing about a model that was adapted to other class shares.
        signals[name] = readings[name].signals
    samples = readings[UNTOUCHED].samples
    doubts = [OTHER_SAMPLES] if looks_like_selection(readings[UNTOUCHED], record) else []
    before = estimator.estimate(UNTOUCHED, signals[UNTOUCHED], samples, reasons=doubts)
    if result is None:
        return Estimates(before, None)
    if name == UNTOUCHED:
        return Estimates(before, before)
    reasons = [*doubts, *record.find_differences(manifest["method"])]
    apart = readings[name].measure_distance(record)
    after = estimator.estimate(
        name, signals[name], samples, chosen="chosen" in manifest, reasons=reasons, distance=apart
    )
    before = estimator.estimate_before(before, after, name, signals[UNTOUCHED], samples, distance=apart)
    return Estimates(before, after)
