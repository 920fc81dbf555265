"""Monitoring of the classes of a stream: does it have the classes of home, and do they stay the same?

BatchNorm and feature alignment assume that each batch is a sample of all classes. A stream that is sorted by class, or
has other classes than home, breaks this assumption: on digits sorted by class, a network with 96 % accuracy drops to 28
% while it adapts. The predictions of the untouched model show both cases, whatever method adapts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shiftmend.profiles.profile import Profile
from shiftmend.verification.harm import OTHER_SHARES, find_answers, is_about_as_certain
from shiftmend.verification.predictions import as_class_logits, class_shares, confidence, skew_by_chance

SORTED = "batches differ in their classes, as where samples come sorted by class"

MIN_SKEW = 0.2
"""Total variation of class shares, beyond sampling noise, above which updates pause. Smaller changes do little harm."""
DEVIATIONS = 5.0
"""Standard deviations of sampling noise that a change must exceed. A stream is tested thousands of times."""
MIN_RECENT_SAMPLES, RECENT_SAMPLES_PER_CLASS = 50, 5
"""Smallest numbers of latest samples to compare with home and with earlier ones. Fewer say too little about shares."""
MEMORY = 4
"""Number of windows of earlier batches to compare with, since one class may last longer than a window."""


@dataclass(frozen=True)
class Glimpse:
    """Predictions of the untouched model for a batch: class shares `[classes]`, confidence, features out of range."""

    shares: Tensor
    confidence: float
    outside: float
    inputs: int

    @staticmethod
    def of(logits: Tensor, outside: float, inputs: int) -> Glimpse:
        """Summarise logits `[M, units]` of a batch; all positions of an input count."""
        own = as_class_logits(logits)
        return Glimpse(class_shares(own.argmax(1), own.shape[1]), float(confidence(own).mean()), outside, inputs)

    @staticmethod
    def join(parts: Sequence[Glimpse]) -> Glimpse:
        """Combine the summaries of several batches."""
        inputs = sum(part.inputs for part in parts)
        weights = [part.inputs / inputs for part in parts]
        shares = torch.stack([weight * part.shares for weight, part in zip(weights, parts, strict=True)]).sum(0)
        certain, outside = (
            sum(weight * getattr(part, name) for weight, part in zip(weights, parts, strict=True))
            for name in ("confidence", "outside")
        )
        return Glimpse(shares, certain, outside, inputs)


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
        if self._has_other_shares(recent) or self._has_other_shares(window):
            return Doubt(OTHER_SHARES)
        if not earlier:
            return None
        before = Glimpse.join(earlier)
        if not _differ(recent, before):
            return None
        # A stream that has run longer than the memory is not reset for classes it may always have had.
        return Doubt(SORTED, self._remembers_all and _has_fewer_classes(before, recent))

    def _split(self, batch: Glimpse) -> tuple[list[Glimpse], list[Glimpse]]:
        """Return the batch with as many earlier ones as class shares need, and the batches before those."""
        latest, earlier = [batch], list(self._seen)
        while earlier and sum(one.inputs for one in latest) < _count_recent(len(batch.shares)):
            latest.append(earlier.pop())
        return latest, earlier

    def _has_other_shares(self, recent: Glimpse) -> bool:
        """Return whether the untouched model is as confident as at home but predicts other classes."""
        home = self._home
        if home is None or len(home.shares) != len(recent.shares):
            return False
        at_home = Glimpse(home.shares.cpu().double(), float(home.confidence), 0.0, self._profile.inputs_seen)
        apart = _measure_distance(recent, at_home, at_home.shares)
        return apart > 0 and is_about_as_certain(recent.confidence, recent.outside, apart, home)


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
    mean, deviation = skew_by_chance(common, one.inputs, other.inputs)
    # Shares add up to one, so those of two classes always deviate by the same amount.
    deviation *= math.sqrt(len(common) / (len(common) - 1))
    apart = float((one.shares - other.shares).abs().sum() / 2) - mean
    return apart if apart > max(MIN_SKEW, DEVIATIONS * deviation) else 0.0
