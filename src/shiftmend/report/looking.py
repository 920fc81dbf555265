"""What one model does with the target: counts at every tap, slices, class predictions and, with labels, scores."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shiftmend.devices import in_parts, sum_dtype
from shiftmend.histograms import sampling_floor
from shiftmend.metrics import ClassificationMetrics, metrics_for
from shiftmend.profiles import Profile
from shiftmend.quantities import RegressionMetrics, in_one_shape
from shiftmend.report.contents import Guesses, Predictions, Seen, TapShift, Unit
from shiftmend.scores import RegressionScores, Scores
from shiftmend.signals import class_logits
from shiftmend.statistics import Histogram
from shiftmend.taps import Entry, pick
from shiftmend.verification import FAILED, Tally, Verification

WORST = 30
"""Units of a tap that are listed: so many of the worst before, and as many of the worst after."""
MOVES = 6
MOST_CLASSES = 2048
"""Above it, which class became which is not counted: the table would be larger than all else."""


class Look:
    """Gathers over batches. Both models see the same batch before `compare` is asked about it."""

    def __init__(self, profile: Profile, output: Entry, ignore_label: int | None = None) -> None:
        self.profile, self.output, self.ignore_label = profile, output, ignore_label
        self.tally = Tally(profile, profile.taps)
        self.beyond: dict[str, Tensor] = {}
        self.rows = dict.fromkeys(profile.taps, 0)
        self.axis = profile.specs["logits"].channel_axis
        self.chosen: Tensor | None = None
        self.counts: Tensor | None = None
        self.confidences: Tensor | None = None
        self.certainty: Tensor | None = None
        self.moves: Tensor | None = None
        self.changed: Tensor | None = None
        self.metrics: ClassificationMetrics | RegressionMetrics | None = None

    def update(self, returned: Any, values: dict[str, Tensor], inputs: int, labels: Tensor | None) -> None:
        self.tally.update(values, inputs)
        for name, home in self.profile.taps.items():
            self.beyond[name] = _added(self.beyond.get(name), _beyond(values[name], home))
            self.rows[name] += len(values[name])
        logits = class_logits(returned, self.output, self.axis, self.profile.taps["logits"].units)
        if labels is not None and labels.is_floating_point():
            logits = None  # several quantities, which look like the logits of as many classes
        self.chosen = None if logits is None else logits.argmax(1).flatten()
        if logits is not None and self.chosen is not None:
            confidence = logits.to(sum_dtype(logits.device)).softmax(1).amax(1).flatten()
            steps = (confidence.nan_to_num(0.0) * 10).long().clamp(0, 9)
            self.counts = _added(self.counts, torch.bincount(self.chosen, minlength=logits.shape[1]))
            self.confidences = _added(self.confidences, torch.bincount(steps, minlength=10))
            self.certainty = _added(self.certainty, confidence.sum())
        if labels is not None:
            self._score(returned, labels)

    def _score(self, returned: Any, labels: Tensor) -> None:
        result = pick(returned, self.output, "the model")
        if self.metrics is None:
            self.metrics = metrics_for(labels, ignore_label=self.ignore_label)
        if isinstance(self.metrics, RegressionMetrics):
            result, labels = in_one_shape(result, labels)
        elif result.ndim > 2:
            logits = class_logits(returned, self.output, self.axis, self.profile.taps["logits"].units)
            if logits is not None and labels.shape == logits.shape[:1] + logits.shape[2:]:
                result = logits
        self.metrics.update(result, labels)

    def compare(self, before: Look) -> None:
        """Count what became of the predictions of the other model on this batch."""
        if self.chosen is None or before.chosen is None or self.counts is None:
            return
        self.changed = _added(self.changed, (self.chosen != before.chosen).sum())
        classes = len(self.counts)
        if classes <= MOST_CLASSES:
            pairs = torch.bincount(before.chosen * classes + self.chosen, minlength=classes**2)
            self.moves = _added(self.moves, pairs)

    def verification(self) -> Verification:
        return self.tally.verification()

    def at(self, tap: str) -> _Here:
        counter = self.tally.taps[tap]
        return _Here((counter.counts / counter.samples).cpu(), (self.beyond[tap] / self.rows[tap]).cpu())

    def scores(self) -> Scores | RegressionScores | None:
        return None if self.metrics is None else self.metrics.compute()

    def guesses(self) -> Guesses | None:
        if self.counts is None or self.confidences is None or self.certainty is None:
            return None
        total = int(self.counts.sum())
        return Guesses(tuple(self.counts.tolist()), float(self.certainty) / total, tuple(self.confidences.tolist()))


class _Here(NamedTuple):
    """Of each unit of a tap: its shares of the bins, and that of its values beyond the range at home."""

    shares: Tensor
    beyond: Tensor


def _beyond(values: Tensor, home: Histogram) -> Tensor:
    """How many values of each unit are beyond its range at home, or NaN: outer bins have half of those on its edge."""
    counts = [(~((part >= home.low) & (part <= home.high))).sum(0) for part in in_parts(values)]
    return torch.stack(counts).sum(0)


def _added(sums: Tensor | None, more: Tensor) -> Tensor:
    return more if sums is None else sums + more


def guess(returned: Any, output: Entry, axis: int | None, count: int) -> list[tuple[int, float] | None]:
    """Class and probability of each of `count` samples; None where a sample has many predictions, or none.

    Classes are on this `axis` of an output; None where it holds quantities.
    """
    logits = None if axis is None else class_logits(returned, output, axis)
    if logits is None or logits.ndim != 2:
        return [None] * count
    confidence, chosen = logits.softmax(1).max(1)
    return list(zip(chosen.tolist(), confidence.tolist(), strict=True))


def predictions(before: Look, after: Look | None) -> Predictions | None:
    own = before.guesses()
    if own is None:
        return None
    if after is None:
        return Predictions(sum(own.counts), own, None, None, ())
    other = after.guesses()
    assert other is not None and after.changed is not None, "the adapted model has the head of the model"  # noqa: PT018
    return Predictions(sum(own.counts), own, other, int(after.changed), _moves(after.moves, len(own.counts)))


def _moves(table: Tensor | None, classes: int) -> tuple[tuple[int, int, int], ...]:
    if table is None:
        return ()
    pairs = table.clone().view(classes, classes)
    pairs.fill_diagonal_(0)
    # sorted by count, then by class: the order must not depend on the machine
    found = [(int(a), int(b), int(pairs[a, b])) for a, b in pairs.nonzero().tolist()]
    return tuple(sorted(found, key=lambda move: (-move[2], move[0], move[1]))[:MOVES])


def tap_shifts(before: Look, after: Look | None, profile: Profile, samples: int) -> tuple[TapShift, ...]:
    """How far each tap is from home, the features first."""
    # positions of one feature map are not independent: what counts against chance is the number of inputs
    floor = sampling_floor(profile.bins, profile.inputs_seen, samples)
    return tuple(
        _tap_shift(
            name,
            str(profile.specs[name]),
            profile.taps[name],
            floor,
            before.at(name),
            None if after is None else after.at(name),
        )
        for name in profile.taps
    )


def _tap_shift(name: str, where: str, home: Histogram, floor: float, before: _Here, after: _Here | None) -> TapShift:
    own = home.probabilities.double()
    usable = home.usable.nonzero().flatten().tolist()

    def distances(here: _Here) -> list[float]:
        return [float(value) for value in home.per_unit(here.shares.double())[usable]]

    def clear(values: list[float]) -> int:
        # a single unit varies more by chance than the mean of many slices
        return sum(not value < floor + max(FAILED, 3 * floor) for value in values)

    def seen(here: _Here, place: int) -> Seen:
        row, unit = here.shares[usable[place]].double(), own[usable[place]]
        middles = (torch.arange(-1, home.bins.inner + 1, dtype=torch.float64, device="cpu") + 0.5) / home.bins.inner
        steps = middles.clamp(0, 1)  # of the open bins their only end
        return Seen(
            divergence=(first if here is before else second)[place],
            outside=float(here.beyond[usable[place]]),
            moved=float(((row - unit) * steps).sum()),
            spread=_spread(row, steps) / max(_spread(unit, steps), 1e-12),
            shares=tuple(row.tolist()),
        )

    first = distances(before)
    second = [] if after is None else distances(after)
    places = dict.fromkeys(_worst(first) + _worst(second))
    worst = tuple(
        Unit(
            usable[place],
            float(home.low[usable[place]]),
            float(home.high[usable[place]]),
            tuple(own[usable[place]].tolist()),
            seen(before, place),
            None if after is None else seen(after, place),
        )
        for place in sorted(places, key=lambda place: (-_rank(first[place]), place))
    )
    return TapShift(
        name,
        where,
        home.units - len(usable),
        floor,
        tuple(first),
        None if after is None else tuple(second),
        clear(first),
        None if after is None else clear(second),
        worst,
    )


def _spread(shares: Tensor, steps: Tensor) -> float:
    mean = (shares * steps).sum()
    return float((shares * (steps - mean).square()).sum().clamp_min(0).sqrt())


def _rank(value: float) -> float:
    """NaN is as far from home as can be."""
    return value if value == value else float("inf")


def _worst(values: list[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda place: (-_rank(values[place]), place))[:WORST]
