"""A watch over the classes of a stream: do its batches have the classes of home, and all of them the same?

BatchNorm and aligned features take a batch for a sample of all classes. A stream that comes sorted by class, or with
other classes than home's, breaks that: of digits sorted by class, a network that knows 96 % gets 28 % right while it
adapts. The untouched model's answers show both, whatever adapts.
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
"""Total variation of class shares, beyond chance, from which on learning pauses. Less does little harm."""
DEVIATIONS = 5.0
"""Deviations of chance that a skew must exceed. A stream asks the same question thousands of times."""
MIN_RECENT_SAMPLES, RECENT_SAMPLES_PER_CLASS = 50, 5
"""Latest samples that are compared with home and with earlier ones, at least. Fewer tell too little of their shares."""
MEMORY = 4
"""Windows of earlier batches that the latest are compared with, so that a class may last for longer than a window."""


@dataclass(frozen=True)
class Glimpse:
    """Answers of the untouched model to one batch: class shares `[classes]`, mean confidence, features out of range."""

    shares: Tensor
    confidence: float
    outside: float
    inputs: int

    @staticmethod
    def of(logits: Tensor, outside: float, inputs: int) -> Glimpse:
        """Look at logits `[M, units]` of a batch; where each input has many positions, all of them count."""
        own = as_class_logits(logits)
        return Glimpse(class_shares(own.argmax(1), own.shape[1]), float(confidence(own).mean()), outside, inputs)

    @staticmethod
    def join(parts: Sequence[Glimpse]) -> Glimpse:
        """Return the answers to several batches together."""
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
    """A reason not to learn from a batch, in words.

    Attributes:
        reason: The reason.
        learnt_from_few: Whether the batches before had fewer classes, so that what was learnt from them is no good.
    """

    reason: str
    learnt_from_few: bool = False


class ClassWatch:
    """A memory of the latest batches of a stream, which judges whether a batch has the classes to learn from.

    Args:
        profile: The source's profile. Without answers at home, batches are compared with each other alone.
        window: Batches of a window.
    """

    def __init__(self, profile: Profile, window: int) -> None:
        self._profile, self._home = profile, find_answers(profile)
        self._seen: deque[Glimpse] = deque()
        self._window, self._remembers_all = window, True

    def add(self, batch: Glimpse) -> None:
        """Remember a batch."""
        self._seen.append(batch)
        recent = _count_recent(len(batch.shares))
        while len(self._seen) > MEMORY * self._window and self._samples - self._seen[0].inputs > MEMORY * recent:
            self._seen.popleft()
            self._remembers_all = False

    @property
    def _samples(self) -> int:
        return sum(one.inputs for one in self._seen)

    def judge(self, batch: Glimpse) -> Doubt | None:
        """Return why a batch that comes next should not be learnt from; None if it may be."""
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
        # A stream that ran longer than the memory had its reasons for the classes that it had.
        return Doubt(SORTED, self._remembers_all and _has_fewer_classes(before, recent))

    def _split(self, batch: Glimpse) -> tuple[list[Glimpse], list[Glimpse]]:
        """Return the batch with as many before it as it takes to tell class shares, and those still earlier."""
        latest, earlier = [batch], list(self._seen)
        while earlier and sum(one.inputs for one in latest) < _count_recent(len(batch.shares)):
            latest.append(earlier.pop())
        return latest, earlier

    def _has_other_shares(self, recent: Glimpse) -> bool:
        """Return whether the untouched model is as certain as at home but answers other classes."""
        home = self._home
        if home is None or len(home.shares) != len(recent.shares):
            return False
        at_home = Glimpse(home.shares.cpu().double(), float(home.confidence), 0.0, self._profile.inputs_seen)
        apart = _measure_distance(recent, at_home, at_home.shares)
        return apart > 0 and is_about_as_certain(recent.confidence, recent.outside, apart, home)


def _count_recent(classes: int) -> int:
    return max(MIN_RECENT_SAMPLES, RECENT_SAMPLES_PER_CLASS * classes)


def _differ(one: Glimpse, other: Glimpse) -> bool:
    """Return whether the class shares of two stretches of a stream differ."""
    together = Glimpse.join([one, other]).shares
    return _measure_distance(one, other, together) > 0


def _has_fewer_classes(before: Glimpse, recent: Glimpse) -> bool:
    """Return whether earlier batches had fewer classes than both stretches together: the entropy of shares tells."""
    alone, together = (
        float(-torch.special.xlogy(shares, shares).sum())
        for shares in (before.shares, (before.shares + recent.shares) / 2)
    )
    return alone < together


def _measure_distance(one: Glimpse, other: Glimpse, common: Tensor) -> float:
    """Return the total variation between class shares without that of chance; 0 if it may be chance, or is small.

    Args:
        one: Answers to some samples.
        other: Answers to others.
        common: Class shares that both would have by chance.
    """
    mean, deviation = skew_by_chance(common, one.inputs, other.inputs)
    # Shares add up to one: those of two classes always deviate by the same.
    deviation *= math.sqrt(len(common) / (len(common) - 1))
    apart = float((one.shares - other.shares).abs().sum() / 2) - mean
    return apart if apart > max(MIN_SKEW, DEVIATIONS * deviation) else 0.0
