"""Monitoring of the classes of a stream: does it have the classes of home, and do they stay the same?

BatchNorm and feature alignment assume that each batch is a sample of all classes. A stream that is sorted by class, or
has other classes than home, breaks this assumption: on digits sorted by class, a network with 96 % accuracy drops to 28
% while it adapts. The predictions of the untouched model show both cases, whatever method adapts.

Behind another device the untouched model errs, and its errors may crowd into few classes as well. A second opinion
tells both apart: the untouched model on inputs that are matched to home. A device changes the answers when its inputs
are matched, while true classes stay. Only the answers on which both agree count as evidence.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shiftmend.profiles.profile import Profile
from shiftmend.stats.answers import Answers
from shiftmend.verification.harm import OTHER_SHARES, find_answers, is_about_as_certain
from shiftmend.verification.predictions import as_class_logits, class_shares, confidence, skew_by_chance

CONFIRMED = (
    "answers fall into other classes than at home, with inputs as they are and matched to home, as where class shares "
    "differ behind another device"
)
SUSPECT = (
    "answers fall into other classes than at home, and nobody can tell whether the device or other class shares are "
    "the cause; if classes are others, learning does harm"
)
SORTED = "batches differ in their classes, as where samples come sorted by class"

MIN_SKEW = 0.2
"""Total variation of class shares, beyond sampling noise, above which updates pause. Smaller changes do little harm."""
MIN_CONFIRMED_SKEW = 0.3
"""Skew that both opinions confirm above which updates pause, however certain the model is. Behind a device, moderately
other shares do less harm than the device, which is why this limit is above `MIN_SKEW`."""
MIN_SUSPECT_SKEW = 0.1
"""Confirmed skew above which a stream is suspect: of digit streams that were not paused, two thirds of those that
learning harmed exceed it, a quarter of those that it helped, and a tenth of the mixed ones (seeds 0 to 3)."""
CONTRADICTED, CERTAIN_ENOUGH = 0.5, 0.05
"""Share of the skew below which a confirmation contradicts it, if confidence is at most this much lower there."""
DEVIATIONS = 5.0
"""Standard deviations of sampling noise that a change must exceed. A stream is tested thousands of times."""
MIN_RECENT_SAMPLES, RECENT_SAMPLES_PER_CLASS = 50, 5
"""Smallest numbers of latest samples to compare with home and with earlier ones. Fewer say too little about shares."""
MEMORY = 4
"""Number of windows of earlier batches to compare with, since one class may last longer than a window."""


@dataclass(frozen=True)
class Glimpse:
    """Predictions of the untouched model for a batch.

    Attributes:
        shares: Share of each class among the predictions, `[classes]`.
        confidence: Mean probability of the predicted class.
        outside: Share of the features beyond the range of home, minus that share at home.
        inputs: Number of inputs.
        agreed: Shares `[classes]` of the predictions that stay the same with matched inputs, among all predictions;
            None without a second opinion.
        certain: Mean probability of the predicted class with matched inputs; None without a second opinion, or if
            matching may itself move samples of few classes into others.
    """

    shares: Tensor
    confidence: float
    outside: float
    inputs: int
    agreed: Tensor | None = None
    certain: float | None = None

    @staticmethod
    def of(
        logits: Tensor, outside: float, inputs: int, matched: Tensor | None = None, may_contradict: bool = True
    ) -> Glimpse:
        """Summarise the predictions for a batch; all positions of an input count.

        Args:
            logits: Logits `[M, units]`.
            outside: Share of the features beyond the range of home, minus that share at home.
            inputs: Number of inputs.
            matched: Logits `[M, units]` with matched inputs, if there are any.
            may_contradict: Whether matched inputs keep their classes if there are few of them.
        """
        own = as_class_logits(logits)
        answers, agreed, certain = own.argmax(1), None, None
        if matched is not None:
            other = as_class_logits(matched)
            same = answers[answers == other.argmax(1)]
            agreed = class_shares(same, own.shape[1]) * (len(same) / max(1, len(answers)))
            certain = float(confidence(other).mean()) if may_contradict else None
        shares = class_shares(answers, own.shape[1])
        return Glimpse(shares, float(confidence(own).mean()), outside, inputs, agreed, certain)

    @staticmethod
    def join(parts: Sequence[Glimpse]) -> Glimpse:
        """Combine the summaries of several batches."""
        inputs = sum(part.inputs for part in parts)
        weights = [part.inputs / inputs for part in parts]

        def mean(name: str) -> Any:
            values = [getattr(part, name) for part in parts]
            if any(value is None for value in values):
                return None
            return sum(weight * value for weight, value in zip(weights, values, strict=True))

        return Glimpse(mean("shares"), mean("confidence"), mean("outside"), inputs, mean("agreed"), mean("certain"))


@dataclass(frozen=True)
class Doubt:
    """A reason not to use a batch for an update.

    Attributes:
        reason: The reason, as a sentence.
        learnt_from_few: Whether earlier batches had fewer classes, so that the updates so far must be undone.
    """

    reason: str
    learnt_from_few: bool = False


class ClassWatch:
    """A memory of the latest batches of a stream, which decides whether a batch may be used for an update.

    Args:
        profile: The source's profile. If it has no predictions of home, batches are compared with each other only.
        window: Number of batches in a window.
    """

    def __init__(self, profile: Profile, window: int) -> None:
        self._profile, self._home = profile, find_answers(profile)
        self._seen: deque[Glimpse] = deque()
        self._window, self._remembers_all = window, True

    def add(self, batch: Glimpse) -> None:
        """Add a batch to the memory."""
        self._seen.append(batch)
        recent = _count_recent(len(batch.shares))
        while len(self._seen) > MEMORY * self._window and self._samples - self._seen[0].inputs > MEMORY * recent:
            self._seen.popleft()
            self._remembers_all = False

    @property
    def _samples(self) -> int:
        return sum(one.inputs for one in self._seen)

    def judge(self, batch: Glimpse) -> Doubt | None:
        """Return the reason not to update the model on the next batch of a stream; None if the update may run.

        The class shares predicted by the untouched model are compared with those at home and in earlier batches. The
        memory does not change; `add` adds a batch to the memory.

        Args:
            batch: Predictions of the untouched model for the next batch.

        Returns:
            The reason as a `Doubt`, or None.
        """
        latest, earlier = self._split(batch)
        recent = Glimpse.join(latest)
        window = Glimpse.join([*list(self._seen)[1 - self._window :], batch]) if self._window > 1 else recent
        seems = [self._compare_with_home(part) for part in (recent, window)]
        reason = next((one for one in (OTHER_SHARES, CONFIRMED) if one in seems), None)
        before = Glimpse.join(earlier) if earlier else None
        if before is None or not _differ(recent, before):
            return None if reason is None else Doubt(reason)
        # A stream that has run longer than the memory is not reset for classes it may always have had.
        return Doubt(reason or SORTED, self._remembers_all and _has_fewer_classes(before, recent))

    def _split(self, batch: Glimpse) -> tuple[list[Glimpse], list[Glimpse]]:
        """Return the batch with as many earlier ones as class shares need, and the batches before those."""
        latest, earlier = [batch], list(self._seen)
        while earlier and sum(one.inputs for one in latest) < _count_recent(len(batch.shares)):
            latest.append(earlier.pop())
        return latest, earlier

    @property
    def is_suspect(self) -> bool:
        """True if the latest batches may have other classes than home, without enough evidence for a pause."""
        if not self._seen or self._home is None or len(self._home.shares) != len(self._seen[-1].shares):
            return False
        window = Glimpse.join(list(self._seen)[-self._window :])
        if window.agreed is None or window.inputs < MEMORY * _count_recent(len(window.shares)):
            return False
        skew = self._measure_skew(window, self._home)
        return skew.apart > skew.least and skew.confirmed > MIN_SUSPECT_SKEW

    def _compare_with_home(self, recent: Glimpse) -> str | None:
        """Return the reason why classes seem to be others than at home; None if the device may be the cause."""
        home = self._home
        if home is None or len(home.shares) != len(recent.shares):
            return None
        skew, contradicted = self._measure_skew(recent, home), False
        if recent.certain is not None and recent.certain >= recent.confidence - CERTAIN_ENOUGH:
            contradicted = skew.confirmed < CONTRADICTED * skew.apart
        others = skew.apart > skew.least and not contradicted
        if others and is_about_as_certain(recent.confidence, recent.outside, skew.apart, home):
            return OTHER_SHARES
        return CONFIRMED if skew.confirmed > max(MIN_CONFIRMED_SKEW, skew.least) else None

    def _measure_skew(self, recent: Glimpse, home: Answers) -> _Skew:
        at_home = Glimpse(home.shares.cpu().double(), float(home.confidence), 0.0, self._profile.inputs_seen)
        mean, least = _measure_noise(recent, at_home, at_home.shares)
        apart = float((recent.shares - at_home.shares).abs().sum() / 2) - mean
        if recent.agreed is None:
            return _Skew(apart, 0.0, least)
        # Even if all other answers were wrong, shares would differ from home by what agreed answers exceed it.
        return _Skew(apart, float((recent.agreed - at_home.shares).clamp_min(0).sum()) - mean, least)


@dataclass(frozen=True)
class _Skew:
    """Distance of class shares from home beyond sampling noise, the part that both opinions confirm, and a limit."""

    apart: float
    confirmed: float
    least: float


def _count_recent(classes: int) -> int:
    return max(MIN_RECENT_SAMPLES, RECENT_SAMPLES_PER_CLASS * classes)


def _differ(one: Glimpse, other: Glimpse) -> bool:
    """Return whether the class shares of two parts of a stream differ."""
    together = Glimpse.join([one, other]).shares
    return _measure_distance(one, other, together) > 0


def _has_fewer_classes(before: Glimpse, recent: Glimpse) -> bool:
    """Return whether earlier batches had fewer classes than both parts together, by the entropy of the shares."""
    alone, together = (
        float(-torch.special.xlogy(shares, shares).sum())
        for shares in (before.shares, (before.shares + recent.shares) / 2)
    )
    return alone < together


def _measure_distance(one: Glimpse, other: Glimpse, common: Tensor) -> float:
    """Return the total variation between class shares beyond sampling noise; 0 if it is small or may be noise.

    Args:
        one: Predictions on some samples.
        other: Predictions on other samples.
        common: Class shares of both parts if they do not differ.
    """
    mean, least = _measure_noise(one, other, common)
    apart = float((one.shares - other.shares).abs().sum() / 2) - mean
    return apart if apart > least else 0.0


def _measure_noise(one: Glimpse, other: Glimpse, common: Tensor) -> tuple[float, float]:
    """Return the mean distance that sampling noise explains, and the smallest distance beyond it that counts."""
    mean, deviation = skew_by_chance(common, one.inputs, other.inputs)
    # Shares add up to one, so those of two classes always deviate by the same amount.
    deviation *= math.sqrt(len(common) / (len(common) - 1))
    return mean, max(MIN_SKEW, DEVIATIONS * deviation)
