"""Which epoch, and which of several runs, to keep: chosen without labels.

The loss that was optimised never judges. What judges is the divergence of the verification slices, which no method
minimises. Where several epochs are as good as the best one by that measure, the lower entropy of the predictions
decides, unless the method minimises entropy itself, which makes it say nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

TIE = 0.1
"""Slices that exceed the lowest by no more than this share of it count as equally good."""


class Choice:
    """Looks at one candidate after the other and remembers which to keep.

    One state is held, so what was passed over does not come back; what is kept never exceeds the lowest by more than
    the tie, however long the run.
    """

    def __init__(self, *, entropy_may_decide: bool) -> None:
        self.entropy_may_decide = entropy_may_decide
        self.kept: Epoch | None = None
        self._lowest = math.inf

    def consider(self, row: Epoch) -> bool:
        """Whether this candidate is now the one to keep. Without a profile there is no judge: the latest is kept."""
        better = self._better(row)
        if row.verification is not None and row.verification < self._lowest:
            self._lowest = row.verification
        if better:
            self.kept = row
        return better

    def _better(self, row: Epoch) -> bool:
        if self.kept is None or self.kept.verification is None:
            return True
        if row.verification is None or not math.isfinite(row.verification):
            return False
        if not math.isfinite(self.kept.verification):  # kept only because nothing better was there yet
            return True
        lowest = min(self._lowest, row.verification)
        within = lowest * (1 + TIE)
        if row.verification > within:
            return False
        if self.kept.verification > within:
            return True
        if self.entropy_may_decide and row.entropy is not None and self.kept.entropy is not None:
            if math.isnan(self.kept.entropy):  # below which nothing lies, though its predictions are no numbers
                return not math.isnan(row.entropy)
            return row.entropy < self.kept.entropy
        return row.verification < self.kept.verification


def choose(rows: Iterable[Epoch], *, entropy_may_decide: bool) -> int:
    """The position of the row to keep; rows are epochs of one run, or the kept epochs of several."""
    choice = Choice(entropy_may_decide=entropy_may_decide)
    kept = -1
    for position, row in enumerate(rows):
        if choice.consider(row):
            kept = position
    if kept < 0:
        raise ValueError("there is nothing to choose from")
    return kept


@dataclass(frozen=True)
class Epoch:
    """One row of the history; row 0 is the model before anything was done."""

    epoch: int
    block: str
    learning_rate: float
    losses: dict[str, float]
    """Mean over the epoch's batches of each term that was minimised, by tap."""
    verification: float | None
    """Mean divergence of the verification slices afterwards, in eval mode; no method minimises it."""
    seconds: float
    marginals: float | None = None
    """Divergence of features plus that of logits, unit by unit, in eval mode."""
    entropy: float | None = None
    """Mean entropy of the predictions, in nats."""
    confidence: float | None = None

    @property
    def loss(self) -> float | None:
        return sum(self.losses.values()) if self.losses else None
